"""meshwright: draw the mesh, know the cost, run it, prove it.

The planning half (`notation`, `hardware`, `models`, `layout`, `cost`, `plan`) imports no JAX.

`meshwright.audit(jitted, *args, hardware="v5p:4x4x4")` audits a program of your own.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The package `audit`, which can be called; imported when it is first asked for."""
    if name == "audit":
        return import_module("meshwright.audit")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
