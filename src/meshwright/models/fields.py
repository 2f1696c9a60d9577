"""Checks of the fields of model descriptions: types, positive numbers, sizes below a limit."""

from dataclasses import fields, is_dataclass
from reprlib import repr as brief
from typing import Any, Literal, get_args, get_origin

from meshwright.errors import ModelError

# Far above any model: layers are looped over, and products of sizes must fit 64 bits.
_MOST_LAYERS, _MOST_SIZE, _MOST_PARAMS = 10_000, 2**31, 2**40
_MAY_BE_ZERO = (
    "global_every",
    "nope_every",
    "position_offset",
    "mtp_layers",
    "num_shared_experts",
    "rope_dim",
    "local_blocks",
    "num_dense_layers",
    "num_kv_shared",
    "tower_params",
)


def check_fields(config: Any, where: str) -> None:
    """ModelError at the first field whose value is not of its type, or is not a positive number."""
    for each in fields(config):
        check_field(each.type, each.name, getattr(config, each.name), where)


def check_field(annotation: object, name: str, value: object, where: str) -> None:
    """ModelError if a field of this type cannot have this value."""
    if get_origin(annotation) is tuple and is_dataclass(get_args(annotation)[0]):
        if not isinstance(value, tuple) or not all(isinstance(one, get_args(annotation)[0]) for one in value):
            raise ModelError(f"{where}: {name} = {brief(value)} must be a list of tables")
        return
    if get_origin(annotation) is tuple and get_args(annotation)[0] is float:
        if not isinstance(value, tuple) or not all(is_number(factor) for factor in value):
            raise ModelError(f"{where}: {name} = {brief(value)} must be a list of numbers")
        return
    if get_origin(annotation) is tuple:
        if not isinstance(value, tuple) or not all(isinstance(n, int) and n >= 0 for n in value):
            raise ModelError(
                f"{where}: {name} = {brief(value)} must be a list of whole numbers of at least 0"
            )
        return
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    if value is None and type(None) in kinds:
        return
    kind = next((k for k in kinds if k is not type(None)), annotation)
    most = _MOST_LAYERS if name == "num_layers" else _MOST_PARAMS if name == "tower_params" else _MOST_SIZE
    if fault := _fault(kind, value, 0 if name in _MAY_BE_ZERO else 1, most):
        raise ModelError(f"{where}: {name} = {brief(value)} {fault}")


def _fault(kind: Any, value: Any, least: int, most: int) -> str | None:
    """The fault of a value of this type; None if there is none."""
    if kind is int and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        return "must be a whole number of at least 0" if least == 0 else "must be a positive whole number"
    if kind is int and value > most:
        return f"must be at most {most:,}"
    if kind is float and (not is_number(value) or value <= 0):
        return "must be a number above 0"
    if kind is bool and not isinstance(value, bool):
        return "is not true or false"
    if get_origin(kind) is Literal and value not in get_args(kind):
        return f"is not supported; fits: {', '.join(get_args(kind))}"
    if kind is str and not isinstance(value, str):
        return "is not a string"
    if isinstance(kind, type) and is_dataclass(kind) and not isinstance(value, kind):
        return "must be a table"
    return None


def is_number(value: object) -> bool:
    """Whether it is a finite number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= abs(value) < float("inf")
