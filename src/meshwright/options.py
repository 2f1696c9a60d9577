"""Options, each declared once, as a field of the dataclass that uses it.

    @dataclass(frozen=True)
    class Settings:
        steps: int | None = option(None, parser=parse_count, help="Train up to this step.", unset="one epoch")
        keep: int = option(2, least=1, help="Keep the last N checkpoints.")

The command line makes its parameters from such fields (`cli/command_options.py`). `check_options` checks
values that come from Python or from a file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from math import inf
from reprlib import repr as brief
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from meshwright.dtypes import KNOWN, named, unknown_dtype
from meshwright.errors import MeshwrightError
from meshwright.units import (
    parse_count,
    parse_days,
    parse_length,
    parse_rate,
    parse_seconds,
    parse_seconds_per_token,
    parse_seconds_to_first_token,
)

_T = TypeVar("_T")
# The default of an option that must be given.
REQUIRED = cast(Any, MISSING)


def parse_dtype(text: str) -> str:
    """The name of the number type with a name or alias. Raises MeshwrightError if there is none."""
    name = named(text)
    if name not in KNOWN:
        raise unknown_dtype(text)
    return name


_METAVARS = {
    parse_count: "N",
    parse_length: "T",
    parse_dtype: "DTYPE",
    parse_rate: "RATE",
    parse_days: "DAYS",
    parse_seconds: "TIME",
    parse_seconds_per_token: "TIME",
    parse_seconds_to_first_token: "TIME",
    int: "N",
    float: "X",
}


@dataclass(frozen=True)
class Option:
    """One option of the command line.

    flag: `--name`, `--yes/--no` or `-s --long`. parser: reads the text of a value. least, most: bounds, both
    allowed; above: a lower bound that is not allowed. unset: the default in words, for the help. env: an
    environment variable that sets it too. after: the option that it follows in the help, if not the one
    before it in its class. names: the allowed values, if its type does not list them. name, kind, default:
    the field's; kind is its type without None.
    """

    help: str
    flag: str = ""
    metavar: str = ""
    parser: Callable[[str], object] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    unset: str = ""
    env: str | None = None
    after: str = ""
    names: tuple[str, ...] = ()
    name: str = ""
    kind: Any = str
    default: object = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enumeration; () for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else self.names

    @property
    def is_bounded(self) -> bool:
        return (self.least, self.most, self.above) != (None, None, None)

    def parse(self, text: str) -> object:
        """The value of a text. Raises MeshwrightError if it has none or is out of bounds."""
        if self.parser is not None:
            return self.parser(text)
        number, form, kind = (int, "d", "") if self.kind is int else (float, "g", "a finite number, ")
        try:
            value = number(_bare(text) if number is float else text)
        except ValueError:
            if re.fullmatch(r"[\d.]+(,\s*[\d.]+)+", text):
                raise MeshwrightError(f"{brief(text)} is several; run it once for each number") from None
            begins = re.match(r"\W*(\d+(\.\d+)?)", text)
            example = self.default if isinstance(self.default, int | float) else self.least or 1
            example = number(float(begins[1])) if begins else example
            raise MeshwrightError(
                f"{brief(text)} is not a {'whole ' * (number is int)}number; write {example:{form}}"
            ) from None
        least = self.above if self.least is None else self.least
        if not ((least is None or least <= value < inf) and (self.most is None or value <= self.most)):
            bounds = (
                f"at least {least:{form}}"
                if self.most is None
                else f"from {least:{form}} to {self.most:{form}}"
            )
            raise MeshwrightError(f"{value:{form}} is out of range; it must be {kind}{bounds}")
        return value

    def check(self, value: object) -> None:
        """Raise MeshwrightError for a value that is not among the choices, or out of bounds."""
        if self.choices and value is not None and value not in self.choices:
            raise MeshwrightError(f"{self.flag} {value!r} is unknown; known: {', '.join(self.choices)}")
        if not isinstance(value, int | float):
            return
        if self.above is not None and not self.above < value < inf:
            finite = " and finite" if value > self.above else ""
            raise MeshwrightError(f"{self.flag} {value:g} is not above {self.above:g}{finite}")
        if self.least is not None and not self.least <= value < inf:
            fault = f"below {self.least}" if self.kind is int else f"not a number from {self.least:g} up"
            raise MeshwrightError(f"{self.flag} {value:g} is {fault}")
        if self.most is not None and value > self.most:
            raise MeshwrightError(f"{self.flag} {value:g} is above {self.most:g}")


def _bare(text: str) -> str:
    """The number of a text with a sign of dollars or percent.

    >>> _bare("$50"), _bare("50%"), _bare("0.5")
    ('50', '0.5', '0.5')
    """
    plain = str(text).strip().removeprefix("$")  # defaults are numbers
    if re.fullmatch(r"[0-9.]+ ?%", plain):
        return str(float(plain.removesuffix("%")) / 100)
    return plain


def option(
    default: _T,
    *,
    help: str,
    flag: str = "",
    metavar: str = "",
    parser: Callable[[str], object] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    unset: str = "",
    env: str | None = None,
    after: str = "",
    names: tuple[str, ...] = (),
    repr: bool = True,
) -> _T:
    """A field of a dataclass that is an option of the command line; it takes the arguments of `Option`.

    It may also be the default of a parameter of a command's function.
    """
    declared = Option(help, flag, metavar, parser, least, most, above, unset, env, after, names)
    return cast(_T, field(default=default, repr=repr, metadata={"option": declared}))


def as_option(declared: object, name: str, kind: object) -> Option | None:
    """The option that a field declares, with its name and type; None for other fields and values."""
    if not (isinstance(declared, Field) and "option" in declared.metadata):
        return None
    inner = [part for part in get_args(kind) if part is not NoneType]
    kind = inner[0] if NoneType in get_args(kind) and len(inner) == 1 else kind
    option: Option = declared.metadata["option"]
    metavar = option.metavar or _METAVARS.get(option.parser or kind, "")
    flag = option.flag or flag_of(name)
    return replace(option, name=name, kind=kind, default=declared.default, flag=flag, metavar=metavar)


@cache
def options_of(owner: type) -> dict[str, Option]:
    """The options of a dataclass, by the names of their fields."""
    kinds = get_type_hints(owner)
    declared = {each.name: as_option(each, each.name, kinds[each.name]) for each in fields(owner)}
    return {name: each for name, each in declared.items() if each is not None}


def check_options(settings: object) -> None:
    """Raise MeshwrightError for a value of a dataclass that its option does not take."""
    for name, declared in options_of(type(settings)).items():
        declared.check(getattr(settings, name))


def changed_options(owner: type, values: Mapping[str, object]) -> dict[str, object]:
    """The values that are not the default, by the flag that the command line sets them with."""
    changed: dict[str, object] = {}
    for name, each in options_of(owner).items():
        if name in values and values[name] != each.default:
            flag = f"--no-{each.flag.removeprefix('--')}" if each.default is True else each.flag
            changed[flag] = True if each.kind is bool else values[name]
    return changed


def flag_of(name: str) -> str:
    """The command line's name of a field: `--checkpoint-every`, `--from` for `from_`."""
    return "--" + name.rstrip("_").replace("_", "-")
