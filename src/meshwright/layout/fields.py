"""The fields of a Layout: what each may be, and how they are written."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.errors import LayoutError, nearest
from meshwright.layout.pipeline import SCHEDULES

if TYPE_CHECKING:
    from meshwright.layout.layout import Layout

# The axes that every mesh has, outermost first, and those that only some layouts use.
AXES = ("data", "fsdp", "context", "tensor")
DEGREES = ("pipe", "data", "fsdp", "expert", "context", "tensor2", "tensor")
REMATS = ("none", "attention", "matmuls", "alternate", "full")
CONTEXT_METHODS = ("allgather", "ring")
DTYPES = ("f32", "bf16")
MATMUL_DTYPES = ("f32", "bf16", "f16", "fp8", "int8", "fp4")
# How a flag may be written; True and 1 are the same key.
_FLAGS: dict[object, bool] = {True: True, "true": True, "on": True, False: False, "false": False}
FLAG_FIELDS = ("zero_context", "sequence_parallel", "offload", "master_weights")


_CHOICES = {"remat": REMATS, "schedule": SCHEDULES, "context_method": CONTEXT_METHODS}
_DTYPE_FIELDS = {
    "weights_dtype": DTYPES,
    "compute_dtype": DTYPES,
    "matmul_dtype": MATMUL_DTYPES,
    "gradients_dtype": DTYPES,
    "optimizer_dtype": (*DTYPES, "fp8", "int8"),
}


def check_values(layout: "Layout") -> None:
    """Raises LayoutError where a field has a value that it cannot have."""
    for name in (*DEGREES, "microbatches", "interleave"):
        value = getattr(layout, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutError(f"layout: {name} = {value!r}; it must be a positive integer")
    for name, known in _CHOICES.items():
        if getattr(layout, name) not in known:
            raise LayoutError(
                f"layout: {name} = {getattr(layout, name)!r}; {nearest(getattr(layout, name), list(known))}"
            )
    for name, fits in _DTYPE_FIELDS.items():
        value = getattr(layout, name)
        if value not in fits and not (value is None and name in ("matmul_dtype", "gradients_dtype")):
            raise LayoutError(f"layout: {name} = {value!r}; fits: {', '.join(fits)}")
    _check_together(layout)


def _check_together(layout: "Layout") -> None:
    """Raises LayoutError where two fields clash."""
    if layout.zero not in (None, 0, 1, 2, 3) or isinstance(layout.zero, bool):
        raise LayoutError(f"layout: zero = {layout.zero!r}; fits: 0, 1, 2, 3")
    if layout.zero == 3 and layout.fsdp == 1 and layout.data > 1:
        raise LayoutError(
            f"layout: zero = 3 shards the weights; write fsdp={layout.data} for data={layout.data}"
        )
    if layout.zero == 0 and layout.fsdp > 1:
        raise LayoutError(f"layout: zero = 0 shards nothing; write data={layout.fsdp} for fsdp={layout.fsdp}")
    if layout.interleave > 1 and layout.pipe == 1:
        raise LayoutError(
            f"layout: interleave = {layout.interleave} chunks a stage with pipe = 1; fits: pipe above 1"
        )


def read_fields(text: str) -> dict[str, object]:
    """KEY=VALUE, ... as a dictionary; whole numbers as such."""
    values: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise LayoutError(f"layout: {item!r} is not KEY=VALUE; write data=2,fsdp=4")
        values[key.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return values


def clean_fields(values: Mapping[str, object], known: list[str]) -> dict[str, object]:
    """`values` with flags as booleans; unknown fields are refused with the nearest known."""
    clean = dict(values)
    for key in values:
        if key not in known:
            raise LayoutError(f"layout: {key!r} is not supported; {nearest(key, known)}")
    for name in FLAG_FIELDS:
        flag = clean.get(name, False)
        if flag not in _FLAGS:
            raise LayoutError(f"layout: {name} = {flag!r}; fits: true, false")
        clean[name] = _FLAGS[flag]
    return clean
