"""Number types, one record a file, which all other packages read."""

from meshwright.dtypes.all_types import (
    COMPUTED,
    KNOWN,
    NUMBER_TYPES,
    dtype_bytes,
    named,
    number_type,
    of_hlo,
    types_for,
    unknown_dtype,
)
from meshwright.dtypes.number_type import EMULATED, TILE, NumberType, Phase, Scales, Use

__all__ = [
    "COMPUTED",
    "EMULATED",
    "KNOWN",
    "NUMBER_TYPES",
    "TILE",
    "NumberType",
    "Phase",
    "Scales",
    "Use",
    "dtype_bytes",
    "named",
    "number_type",
    "of_hlo",
    "types_for",
    "unknown_dtype",
]
