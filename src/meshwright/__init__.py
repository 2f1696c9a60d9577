"""meshwright: draw the mesh, know the cost, run it, prove it.

    import meshwright as mw

    plans = mw.plan("llama-3-70b", "v5p:16x16x16", mw.Train(batch_tokens="4M", seq_len="8k"))

`model`, `hardware`, `Train`, `Serve`, `plan`, `price`, `smallest` and `audit` are the library: see
`meshwright.api`.
Each is imported when it is first asked for, and planning imports no JAX.
"""

import sys
from importlib import import_module
from types import ModuleType
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

# Functions of the library that have the name of a package: the package can be called.
_PACKAGES = ("audit", "hardware", "plan")


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("meshwright.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Library(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a package here once it is imported, by whomever."""
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Library


def __getattr__(name: str) -> Any:
    """What the library offers, imported when it is first asked for."""
    if name in _PACKAGES:
        return import_module(f"meshwright.{name}")
    if name in __all__:
        return getattr(import_module("meshwright.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
