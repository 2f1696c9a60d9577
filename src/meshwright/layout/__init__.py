"""Layout: mesh, rules, schedule and precision of a step."""

from meshwright.layout.axes import DEGREES, MULTIPLIED
from meshwright.layout.layout import Layout
from meshwright.layout.precision import Precision
from meshwright.layout.rules import AxisTable, Rules
from meshwright.layout.schedule import REMATS, Schedule
from meshwright.layout.short import COMPANY

__all__ = [
    "COMPANY",
    "DEGREES",
    "MULTIPLIED",
    "REMATS",
    "AxisTable",
    "Layout",
    "Precision",
    "Rules",
    "Schedule",
]
