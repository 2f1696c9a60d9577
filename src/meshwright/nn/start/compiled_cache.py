"""The cache of compiled programs on disk, and a check that a process compiles no more."""

import hashlib
import hmac
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.files import cache_folder

_DIGEST_BYTES = 32
_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compiled() -> None:
    """Make JAX keep compiled programs in `cache_folder() / "xla"` for other processes.

    JAX's key has the program, the devices, the compiler's version and its flags. A file that cannot be read
    or written costs a warning and a compilation, no more. Entries are pickled, so the folder must be this
    user's; others get no access to it. An entry ends with a hash of its name and content, without which it is
    not unpickled.
    """
    folder = cache_folder() / "xla"
    if fault := _fault(folder):
        warnings.warn(f"{fault}; compiled programs are not kept", stacklevel=2)
        return
    _check_entries()
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


def _check_entries() -> None:
    """Make JAX's caches of this process check the hashes of entries."""
    from jax._src import compilation_cache  # JAX has no public way to replace the store (0.10.2)

    make = compilation_cache.get_file_cache
    if isinstance(make, _MakesChecked):
        return
    compilation_cache.get_file_cache = _MakesChecked(make)


class _MakesChecked:
    """JAX's function that makes the cache of a folder, now with checked entries."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __call__(self, path: str) -> Any:
        made = self._make(path)
        return made and (CheckedEntries(made[0], Path(path)), *made[1:])


class CheckedEntries:
    """A cache of JAX whose entries end with a hash of their name and content.

    cache: JAX's own. folder: of its files.
    """

    def __init__(self, cache: Any, folder: Path) -> None:
        self._cache, self._folder = cache, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get(self, key: str) -> bytes | None:
        entry = self._cache.get(key)
        if entry is None:
            return None
        content, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
        if hmac.compare_digest(digest, _digest(key, content)):
            return content
        # Cut short, changed, or written without a hash. JAX replaces no entry that is there.
        for path in self._folder.glob(f"{key}*"):
            path.unlink(missing_ok=True)
        return None

    def put(self, key: str, content: bytes) -> None:
        self._cache.put(key, content + _digest(key, content))


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


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
