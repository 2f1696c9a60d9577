"""The loop over a pipeline's table: one process dispatches the programs of all stages.

A program waits only for its inputs, and the devices of a stage run programs in order of dispatch. So stages
follow the table while the loop runs ahead of them. Two passes that the table joins are one program.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from meshwright.layout.pipelines.pass_table import PassTable, Place, TablePass
from meshwright.nn.pipeline.stage_programs import TOKEN, ChunkPrograms, Rows, StageTotals
from meshwright.nn.start.compiler_options import compiler_options
from meshwright.platforms import platform_of
from meshwright.platforms.platform import Options


class Executor(Protocol):
    """Runs programs on devices, or traces them by their types only.

    send: the arrays on another stage. what: "activations", "cotangents", "weights", "gradients" or "sums".
    """

    def run(self, mesh: jax.sharding.Mesh, program: Any, *arguments: Any) -> Any: ...
    def send(self, tree: object, mesh: jax.sharding.Mesh, what: str) -> Any: ...


class OnDevices:
    """Runs programs on real devices, one after another if the platform wants that (`Platform.in_turn`)."""

    def run(self, mesh: jax.sharding.Mesh, program: Any, *arguments: Any) -> Any:
        with jax.set_mesh(mesh):
            results = program(*arguments)
        return jax.block_until_ready(results) if platform_of(mesh).in_turn else results

    def send(self, tree: object, mesh: jax.sharding.Mesh, what: str) -> Any:
        """The arrays on another stage with the same sharding; arrays already on it are not copied."""
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), tree)


class _Pass(NamedTuple):
    """A pass of the table ready to run: its program, and its arguments other than totals."""

    timed: TablePass
    place: Place
    program: str
    arguments: tuple[Any, ...]


class Dispatch:
    """The steps of a pipeline. meshes: of the stages. chunks: by place. options: XLA's.

    programs: jitted, by the place and name of each pass in the program.
    """

    def __init__(
        self,
        table: PassTable,
        meshes: Sequence[jax.sharding.Mesh],
        chunks: Mapping[Place, ChunkPrograms],
        options: Options,
    ) -> None:
        self.table, self.meshes, self.chunks = table, meshes, chunks
        self.token = TOKEN if any(table.split) else None
        self._options = [compiler_options(mesh, options) for mesh in meshes]
        self.programs: dict[tuple[tuple[Place, str], ...], Any] = {}

    def totals(self, weights: Mapping[Place, Any], rows: Sequence[Rows], on: Executor) -> list[StageTotals]:
        """The sums of losses and gradients of a step, by stage. weights: by place; rows: by stage."""
        totals: list[StageTotals] = [{} for _ in self.meshes]
        for place, weights_there in weights.items():
            zeros = self.chunks[place].by_home(self._run(on, place, "nothing_yet", weights_there))
            totals[place.stage] = zeros | totals[place.stage]
        step = _Step(self, weights, rows, on)
        for stage, passes in self.table.in_order():
            made = [step.begun(Place(stage, one.chunk), one) for one in passes]
            keys = [key for p in made for key in self.chunks[p.place].adds_to(p.program)]
            mine = {key: totals[stage].pop(key) for key in dict.fromkeys(keys)}
            program = self._together(tuple((p.place, p.program) for p in made))
            sums, results = on.run(self.meshes[stage], program, mine, [p.arguments for p in made])
            totals[stage] |= sums
            for p, others in zip(made, results, strict=True):
                step.end(p, others)
        return totals

    def loss(self, weights: Mapping[Place, Any], rows: Sequence[Rows], on: Executor) -> list[Array]:
        """The microbatches' shares of the loss, as in validation."""
        losses: list[Array] = []
        for number in range(self.table.num_microbatches):
            x: Any = None
            for place in self.table.routes[0]:
                x = on.send(x, self.meshes[place.stage], "activations")
                x = self._run(on, place, "loss", weights[place], x, rows[place.stage], np.int32(number))
            losses.append(x)
        return losses

    @property
    def num_compiled(self) -> int:
        """Most versions of a program that JAX compiled."""
        return max(program._cache_size() for program in self.programs.values())

    def _run(self, on: Executor, place: Place, name: str, *arguments: object) -> Any:
        key = ((place, name),)
        if key not in self.programs:
            method = with_name(getattr(self.chunks[place], name), _name(key))
            self.programs[key] = jax.jit(method, compiler_options=self._options[place.stage])
        return on.run(self.meshes[place.stage], self.programs[key], *arguments)

    def _together(self, passes: tuple[tuple[Place, str], ...]) -> Any:
        """The program of one or several passes: (totals, arguments of each) -> (totals, results of each)."""
        if passes not in self.programs:

            def run(totals: StageTotals, arguments: Sequence[Any]) -> tuple[StageTotals, list[Any]]:
                results = []
                for (place, name), given in zip(passes, arguments, strict=True):
                    chunk = self.chunks[place]
                    adds_to = {path: totals[home, path] for home, path in chunk.adds_to(name)}
                    first, *others = getattr(chunk, name)(adds_to, *given)
                    totals = totals | chunk.by_home(first)
                    results.append(others)
                return totals, results

            options = self._options[passes[0][0].stage]
            program = with_name(run, _name(passes))
            self.programs[passes] = jax.jit(program, donate_argnums=0, compiler_options=options)
        return self.programs[passes]


def with_name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function renamed, so that a trace tells its program from others."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        return function(*arguments)

    run.__name__ = run.__qualname__ = name
    return run


def _name(passes: Sequence[tuple[Place, str]]) -> str:
    """The name of a program: stage0_chunk0_forward, or stage0_chunk0_forward_chunk1_backward."""
    chunks = "_".join(f"chunk{place.chunk}_{name}" for place, name in passes)
    return f"stage{passes[0][0].stage}_{chunks}"


class _Step:
    """A step while it is dispatched.

    inputs: of later passes, by kind, microbatch and place. held: residuals that a microbatch's passes leave
    for later passes at the same place.
    """

    def __init__(
        self, dispatch: Dispatch, weights: Mapping[Place, Any], rows: Sequence[Rows], on: Executor
    ) -> None:
        self.dispatch, self.weights, self.rows, self.on = dispatch, weights, rows, on
        self.inputs: dict[tuple[str, int, Place], Any] = {}
        self.held: dict[tuple[int, Place], Any] = {}

    def begun(self, place: Place, timed: TablePass) -> _Pass:
        """A pass with its inputs, which are removed from `inputs` or `held`."""
        key = timed.microbatch, place
        batch = self.rows[place.stage], np.int32(timed.microbatch), self.dispatch.token
        if timed.kind == "W":
            return _Pass(timed, place, "weight_gradient", (self.held.pop(key),))
        x = self.inputs.pop((timed.kind, *key), None)
        if timed.kind == "F":
            return _Pass(timed, place, "forward", (self.weights[place], x, *batch))
        is_parted = (timed.microbatch, timed.chunk) in self.dispatch.table.split[place.stage]
        name = "input_gradient" if is_parted else "backward"
        saved = self.held[key] if is_parted else self.held.pop(key)
        return _Pass(timed, place, name, (self.weights[place], saved, x, *batch))

    def end(self, made: _Pass, results: Sequence[Any]) -> None:
        """Keeps a pass's residuals, and sends its result to the stage that waits for it."""
        timed, place, key = made.timed, made.place, (made.timed.microbatch, made.place)
        before, after = self.dispatch.table.neighbours(place)
        if timed.kind == "F":
            y, self.held[key] = results
            kind, next_place = ("F", after) if after else ("B", place)
            self.inputs[kind, timed.microbatch, next_place] = self._sent(y, next_place, "activations")
        elif timed.kind == "B":
            if before:
                self.inputs["B", timed.microbatch, before] = self._sent(results[0], before, "cotangents")
            if made.program == "input_gradient":
                self.held[key] = self.dispatch.chunks[place].for_later(self.held[key], results[1])

    def _sent(self, x: Any, place: Place, what: str) -> Any:
        return self.on.send(x, self.dispatch.meshes[place.stage], what)
