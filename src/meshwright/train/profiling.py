"""A trace of some steps by JAX's profiler, and what is needed to read it.

run/profile/step.hlo                          the compiled step, which names the operations of the trace
run/profile/plugins/profile/<time>/*.xplane.pb   the trace, for XProf and TensorBoard too
"""

import shutil
from pathlib import Path
from typing import Any

import jax

from meshwright.files import write_whole

FOLDER, HLO = "profile", "step.hlo"


class Profiler:
    """Traces the steps from `first` to `last` into the folder; nothing where they are None.

    num_traced: how many steps were; fewer where the run began later or ended before.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = folder, steps
        self._running, self.num_traced = False, 0

    def before(self, step: int, state: Any) -> None:
        if self._steps is None or self._running or not self._steps[0] <= step <= self._steps[1]:
            return
        jax.block_until_ready(state)
        shutil.rmtree(self._folder, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # events of Python drown those of the device
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._running = True

    def after(self, step: int, state: Any) -> None:
        if not self._running:
            return
        self.num_traced += 1
        if self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        if self._running:
            self._running, self._steps = False, None
            jax.profiler.stop_trace()


def save_hlo(step: Any, folder: Path) -> None:
    """Writes the compiled step of a CompiledStep beside its trace; it is compiled for this once more."""
    with jax.set_mesh(step.mesh):
        compiled = step.jitted.lower(step.abstract_state(), step.abstract_tokens()).compile()
    write_whole(folder / HLO, compiled.as_text())
