"""Layout: which mesh axes split what, and the schedule of a step."""

from meshwright.layout.fields import (
    AXES,
    CONTEXT_METHODS,
    DEGREES,
    DTYPES,
    MATMUL_DTYPES,
    REMATS,
    SCHEDULES,
)
from meshwright.layout.layout import Layout

__all__ = [
    "AXES",
    "CONTEXT_METHODS",
    "DEGREES",
    "DTYPES",
    "MATMUL_DTYPES",
    "REMATS",
    "SCHEDULES",
    "Layout",
]
