"""Records in folders of TOML files; each states what differs from its parent, with sources."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import resources
from math import inf
from typing import Any, Generic, TypeVar, get_type_hints

from meshwright.checked_toml import CheckedToml
from meshwright.errors import HardwareError, nearest
from meshwright.points import Points

_Record = TypeVar("_Record", bound="Record")
Curves = Mapping[str, Points]


@dataclass(frozen=True)
class Record:
    """A file of a folder of records.

    about: a clause that says which thing it is. parent: the record that gives every value not stated here.
    also: names without a record, which get this one. tables: words of the source of published results that
    were measured with this thing. sources: the source of each stated value, by key.
    """

    name: str
    about: str
    parent: str | None = None
    also: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


class Folder(Generic[_Record]):
    """The records of a package's folder by name.

    what: the noun of messages. package: dotted, relative to meshwright.

    >>> from meshwright.programs.program import PROGRAMS
    >>> PROGRAMS["megatron"].parent
    'megatron-lm'
    """

    def __init__(self, kind: type[_Record], package: str, what: str) -> None:
        self.kind, self.package, self.what = kind, package, what
        self._read: dict[str, _Record] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all files, sorted."""
        files = (path.name for path in self._folder.iterdir() if path.name.endswith(".toml"))
        return tuple(sorted(name.removesuffix(".toml") for name in files))

    @property
    def records(self) -> Iterator[_Record]:
        """The records of all files, by name."""
        return map(self.__getitem__, self.names)

    @property
    def _folder(self) -> Any:
        return resources.files("meshwright").joinpath(*self.package.split("."))

    def __contains__(self, name: str) -> bool:
        return name in self.names or any(name in record.also for record in self.records)

    def __getitem__(self, name: str) -> _Record:
        """The record of a name. Raises HardwareError with the nearest known name."""
        if name not in self._read:
            if name in self.names:
                text = (self._folder / f"{name}.toml").read_text(encoding="utf-8")
                self._read[name] = self.read(text, f"{self.package.replace('.', '/')}/{name}.toml")
            else:
                self._read[name] = self._of_parent(name)
        return self._read[name]

    def of_table(self, source: str) -> _Record | None:
        """The record that the source of published results names, or None."""
        named = (record for record in self.records if record.tables)
        return next((r for r in named if any(words in source for words in r.tables)), None)

    def root(self, name: str) -> str:
        """The generic record above a name: itself if it has no parent."""
        while (parent := self[name].parent) is not None:
            name = parent
        return name

    def _of_parent(self, name: str) -> _Record:
        for parent in self.records:
            if name in parent.also:
                about = f"no record of its own, so as {parent.name}: {parent.about}"
                return replace(parent, name=name, about=about, parent=parent.name, also=(), tables=())
        raise HardwareError(f"{self.what} {name!r} is unknown; {nearest(name, list(self.names))}")

    def read(self, text: str, origin: str) -> _Record:
        """The record of a TOML text. Raises HardwareError with the file, line and key of a fault."""
        file = CheckedToml(origin, text)
        data = file.parse()
        for key in ("name", "about"):
            file.string(data, key)
        stated = read_fields(self.kind, file, data)
        if "parent" not in stated:
            return self.kind(**stated)
        parent = self[stated["parent"]]
        merged = {
            key: {**vars(parent)[key], **value} for key, value in stated.items() if isinstance(value, dict)
        }
        return replace(parent, **{"also": (), "tables": (), **stated, **merged})


def read_fields(
    kind: type, file: CheckedToml, table: Mapping[str, Any], prefix: str = "", **keys: Collection[str]
) -> dict[str, Any]:
    """The values of a table, each checked by the type of its field in a dataclass.

    A field's metadata may give the `keys` of its table, the `words` of its text or list, the `most` that its
    figures may be, and `unread` for a field that no file states. keys: the keys of some tables, by field.
    """
    hints = get_type_hints(kind)
    known = {one.name: dict(one.metadata) for one in fields(kind) if not one.metadata.get("unread")}
    file.refuse_unknown(table, tuple(known), prefix)
    for name, allowed in keys.items():
        known[name]["keys"] = allowed
    return {key: _value(file, table, key, prefix, hints[key], **known[key]) for key in table}


def _value(
    file: CheckedToml,
    data: Mapping[str, Any],
    key: str,
    prefix: str,
    hint: object,
    *,
    keys: Collection[str] = (),
    words: Collection[str] = (),
    most: float = inf,
) -> Any:
    if hint is int:
        return file.count(data, key, prefix)
    if hint in (float, float | None):
        return file.figure(data, key, prefix, most)
    if hint is bool:
        if not isinstance(data[key], bool):
            raise file.error(prefix + key, f"is {data[key]!r}, not true or false")
        return data[key]
    if hint == Mapping[str, str]:
        return file.strings(data, key, prefix)
    if hint in (Mapping[str, float], Curves):
        table, inner = file.table(data, key, prefix), f"{prefix}{key}."
        if keys:
            file.refuse_unknown(table, tuple(keys), inner)
        if hint == Curves:
            return {name: file.points(table, name, inner) for name in table}
        return {name: file.figure(table, name, inner, most) for name in table}
    listed = data[key] if hint == tuple[str, ...] else [file.string(data, key, prefix)]
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise file.error(prefix + key, f"is {listed!r}, not a list of words")
    if words and not set(listed) <= set(words):
        raise file.error(prefix + key, f"is {data[key]!r}; fits: {', '.join(words)}")
    return tuple(listed) if hint == tuple[str, ...] else listed[0]
