"""The cache of compiled programs on disk, and a check that a process compiles no more."""

import os
import warnings
from pathlib import Path

import jax

from meshwright.files import cache_folder

_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compiled() -> None:
    """Make JAX keep compiled programs in `cache_folder() / "xla"` for other processes.

    JAX's key has the program, the devices, the compiler's version and its flags. A file that cannot be read
    or written costs a warning and a compilation, no more. Entries are pickled, so the folder must be this
    user's; others get no access to it.
    """
    folder = cache_folder() / "xla"
    if fault := _fault(folder):
        warnings.warn(f"{fault}; compiled programs are not kept", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _fault(folder: Path) -> str | None:
    """Why entries of the folder cannot be trusted; None if they can. Creates the folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            info = each.stat()
            if hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0):
                return f"{each} belongs to another user"
            closed = info.st_mode & (~0o077 if each == folder else ~0o022)
            if info.st_mode != closed:
                each.chmod(closed)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    return None


class NothingCompiled:
    """A check that this process neither compiles nor loads a program after the first check."""

    def __init__(self) -> None:
        self._count: int | None = None  # None before the first check

    def check(self) -> None:
        """Raises RuntimeError if a program was compiled since the first call."""
        if self._count is None:
            self._count = 0
            jax.monitoring.register_event_duration_secs_listener(self._listen)
        elif self._count:
            jax.monitoring.unregister_event_duration_listener(self._listen)
            raise RuntimeError("a program was compiled after the warm-up, which strict serving forbids")

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._count = (self._count or 0) + (event == _COMPILED)
