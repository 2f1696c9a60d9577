"""Compiled programs kept on disk, and a process that is to compile no more."""

import jax

from meshwright.files import cache_folder

_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compiled() -> None:
    """Makes JAX keep what it compiles in `cache_folder() / "xla"`, for the next process that needs it.

    JAX's key has the program, the devices, the compiler's version and its flags. A file that cannot be read
    or written costs a warning and a compilation, no more.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Compilations:
    """Counts what this process compiles, or reads from disk in place of it, from `start` to `stop`."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def stop(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILED
