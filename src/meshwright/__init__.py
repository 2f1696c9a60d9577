"""meshwright: draw the mesh, know the cost, run it, prove it.

    import meshwright as mw

    plans = mw.plan("llama-3-70b", "v5p:16x16x16", mw.Train(batch_tokens="4M", seq_len="8k"))

`model`, `hardware`, `Train`, `Serve`, `plan`, `price`, `smallest` and `audit` are the library: see
`meshwright.api`. Each is imported when it is first used, and planning imports no JAX. Modules of the packages
`plan`, `hardware` and `audit` are imported by name: `from meshwright.plan.train import search`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import Serve as Serve
    from meshwright.api import Train as Train
    from meshwright.api import audit as audit
    from meshwright.api import hardware as hardware
    from meshwright.api import model as model
    from meshwright.api import plan as plan
    from meshwright.api import price as price
    from meshwright.api import smallest as smallest

__version__ = "0.2.0"
__all__ = ["Serve", "Train", "audit", "hardware", "model", "plan", "price", "smallest"]

# Three functions of the library have the name of a package. Python binds a package's name here when it first
# loads the package, and never again: the packages, which are only docstrings, are loaded now and their names
# unbound, so that these names go through `__getattr__` to the functions.
for _name in ("audit", "hardware", "plan"):
    import_module(f"{__name__}.{_name}")
    del globals()[_name]


def __getattr__(name: str) -> Any:
    """A function or class of the library, imported on first use."""
    if name in __all__:
        return getattr(import_module("meshwright.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
