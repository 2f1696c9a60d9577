"""What the compiler makes of a program, beside what was planned.

The package can be called: `meshwright.audit(jitted, *args, hardware="v5p:4x4x4")`; see `audit.jitted`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        from meshwright.audit.jitted import audit

        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
