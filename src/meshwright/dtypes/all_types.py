"""The number types of this folder, by name: a type is a file here that has a `TYPE`."""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from meshwright.dtypes.number_type import NumberType, Phase, Use
from meshwright.errors import MeshwrightError


def _order(record: NumberType) -> tuple[bool, int, bool, str]:
    return record.uses <= {"indices"}, -record.bits, record.is_integer, record.name


def _discovered() -> list[NumberType]:
    files = iter_modules([str(Path(__file__).parent)])
    modules = (import_module(f"meshwright.dtypes.{file.name}") for file in files)
    return sorted((module.TYPE for module in modules if hasattr(module, "TYPE")), key=_order)


# The widest first, and floating point before integers. Types that hold no values of a model are last.
NUMBER_TYPES = {record.name: record for record in _discovered()}
# Types of a model's arrays. Records without uses occur only in files, such as e8m0, a type of scales.
KNOWN = tuple(record.name for record in NUMBER_TYPES.values() if record.uses)
_NAMED = {alias: record.name for record in NUMBER_TYPES.values() for alias in record.aliases}
_BYTES = {record.name: record.bytes for record in NUMBER_TYPES.values()}
# Two records may list the same HLO name; it belongs to the record that lists it first.
_OF_HLO = {name: record.name for record in NUMBER_TYPES.values() for name in record.hlo}
_OF_HLO |= {record.hlo[0]: record.name for record in NUMBER_TYPES.values() if record.hlo}


def number_type(name: str) -> NumberType:
    """The record of a type by its name; MeshwrightError lists the known ones."""
    if name not in NUMBER_TYPES:
        raise unknown_dtype(name)
    return NUMBER_TYPES[name]


def unknown_dtype(text: str) -> MeshwrightError:
    """The error for a name that is no type of a model's arrays.

    It suggests the type with this alias, then types of the same number of bits, then all types.
    """
    bits = re.search(r"\d+", text)
    nearest = [name for name in KNOWN if bits and NUMBER_TYPES[name].bits == int(bits[0])]
    nearest = [named(text)] if named(text) in KNOWN else nearest
    hint = f"write {' or '.join(nearest)}" if nearest else f"known: {', '.join(KNOWN)}"
    return MeshwrightError(f"dtype {text!r} is unknown; {hint}")


def named(text: str) -> str:
    """The name of the type that `text` names, perhaps by an alias; `text` itself if no type has it.

    >>> named("float16"), named("bf16")
    ('f16', 'bf16')
    """
    return _NAMED.get(text, text)


def dtype_bytes(name: str) -> float:
    """Bytes of one element of a type, without scales."""
    return _BYTES[name] if name in _BYTES else number_type(name).bytes


def types_for(use: Use, phase: Phase | None = None) -> tuple[str, ...]:
    """Names of the types for a use: in programs of a phase, or in plans.

    >>> types_for("saved activations"), types_for("cache", "serve")
    (('fp8',), ('fp8', 'int8'))
    """
    return tuple(record.name for record in NUMBER_TYPES.values() if use in record.uses_in(phase))


def of_hlo(name: str) -> str:
    """Our name of an HLO element type; the HLO name itself for a type without a record.

    >>> of_hlo("s8"), of_hlo("f8e4m3fn"), of_hlo("pred")
    ('int8', 'fp8', 'pred')
    """
    return _OF_HLO.get(name, name)


# Types of activations and of weights that are trained.
COMPUTED = types_for("activations")
