"""Records in folders of TOML files; each states what differs from its parent, with sources."""

from collections.abc import Callable, Mapping
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
    also: names without a record, which get this one. sources: the source of each stated value, by key.
    """

    name: str
    about: str
    parent: str | None = None
    also: tuple[str, ...] = ()
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
    def _folder(self) -> Any:
        return resources.files(f"meshwright.{self.package}")

    def __contains__(self, name: str) -> bool:
        return name in self.names or any(name in self[known].also for known in self.names)

    def __getitem__(self, name: str) -> _Record:
        """The record of a name. Raises HardwareError with the nearest known name."""
        if name not in self._read:
            self._read[name] = self._of_file(name) if name in self.names else self._of_parent(name)
        return self._read[name]

    def _of_file(self, name: str) -> _Record:
        text = (self._folder / f"{name}.toml").read_text(encoding="utf-8")
        return self.read(text, f"{self.package.replace('.', '/')}/{name}.toml")

    def _of_parent(self, name: str) -> _Record:
        for parent in map(self.__getitem__, self.names):
            if name in parent.also:
                about = f"no record of its own, so as {parent.name}: {parent.about}"
                return replace(parent, name=name, about=about, parent=parent.name, also=())
        raise HardwareError(f"{self.what} {name!r} is unknown; {nearest(name, list(self.names))}")

    def read(self, text: str, origin: str) -> _Record:
        """The record of a TOML text. Raises HardwareError with the file, line and key of a fault."""
        file = CheckedToml(origin, text)
        data = file.parse()
        hints, known = get_type_hints(self.kind), {one.name: one.metadata for one in fields(self.kind)}
        file.refuse_unknown(data, tuple(known))
        for key in ("name", "about"):
            file.string(data, key)
        stated = {key: _value(file, data, key, hints[key], known[key]) for key in data}
        if "parent" not in stated:
            return self.kind(**stated)
        parent = self[stated["parent"]]
        merged = {
            key: {**vars(parent)[key], **value} for key, value in stated.items() if isinstance(value, dict)
        }
        return replace(parent, **{"also": (), **stated, **merged})


def _value(file: CheckedToml, data: Mapping[str, Any], key: str, hint: Any, known: Mapping[str, Any]) -> Any:
    """The value at `key`, checked by the type of its field.

    known: the field's metadata: `keys` of a table, `words` of a text or list, the `most` of a figure.
    """
    readers: dict[Any, Callable[..., Any]] = {int: file.count, Mapping[str, str]: file.strings}
    if hint in readers:
        return readers[hint](data, key)
    if hint in (float, float | None):
        return file.figure(data, key, most=known.get("most", inf))
    if hint is bool:
        if not isinstance(data[key], bool):
            raise file.error(key, f"is {data[key]!r}, not true or false")
        return data[key]
    if hint == tuple[str, ...]:
        words = data[key]
        fits = known.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise file.error(key, f"is {words!r}, not a list of words")
        if fits and not set(words) <= set(fits):
            raise file.error(key, f"is {words!r}; fits: a list of {', '.join(fits)}")
        return tuple(words)
    if hint in (Mapping[str, float], Curves):
        table = file.table(data, key)
        if keys := known.get("keys"):
            file.refuse_unknown(table, keys, f"{key}.")
        read = file.points if hint == Curves else file.figure
        return {name: read(table, name, f"{key}.") for name in table}
    text, fits = file.string(data, key), known.get("words")
    if fits and text not in fits:
        raise file.error(key, f"is {text!r}; fits: {', '.join(fits)}")
    return text
