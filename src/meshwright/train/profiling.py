"""A trace of some steps by JAX's profiler, and the compiled programs for reading it.

run/profile/NAME.hlo   the compiled step, with the names of the operations in the trace: step.hlo, or in a
                       pipeline each program of a stage
run/profile/plugins/profile/<time>/*.xplane.pb   the trace, also for XProf and TensorBoard
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.files import write_whole

FOLDER, HLO = "profile", "*.hlo"


class Profiler:
    """A profiler of some steps, from the first to the last; of none if `steps` is None."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = folder, steps
        self._running = False

    def before(self, step: int, state: object) -> None:
        if self._steps is None or self._running or not self._steps[0] <= step <= self._steps[1]:
            return
        jax.block_until_ready(state)
        shutil.rmtree(self._folder, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python has too many events in comparison with the device
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._running = True

    def after(self, step: int, state: object) -> None:
        if not self._running:
            return
        if self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        if self._running:
            self._running, self._steps = False, None
            jax.profiler.stop_trace()


def save_hlo(texts: Mapping[str, str], folder: Path) -> None:
    """Write the programs of a step to the folder of its trace, by name."""
    for name, text in texts.items():
        write_whole(folder / HLO.replace("*", name), text)


class ProgramTexts:
    """An executor that compiles each program once and runs none.

    texts: HLO by the program's name and a number, since a program may have several types of arguments.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._made: dict[tuple[Any, str], Any] = {}

    def run(self, mesh: jax.sharding.Mesh, program: Any, *arguments: Any) -> Any:
        types = jax.tree.map(lambda x: (x.shape, str(x.dtype), getattr(x, "sharding", None)), arguments)
        key = program, f"{mesh.devices.tolist()}{types}"
        if key not in self._made:
            with jax.set_mesh(mesh):
                compiled = program.lower(*arguments).compile()
            self.texts[f"{program.__name__}.{len(self.texts)}"] = compiled.as_text()
            self._made[key] = jax.tree.map(
                lambda info, to: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=to),
                compiled.out_info,
                compiled.output_shardings,
            )
        return self._made[key]

    def send(self, tree: object, mesh: jax.sharding.Mesh, what: str) -> Any:
        def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))

        return jax.tree.map(on_mesh, tree)
