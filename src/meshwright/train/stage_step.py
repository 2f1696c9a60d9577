"""The training step of a pipeline whose stages run programs of their own (nn/pipeline/stage_programs.py).

The parameters and the optimizer's state of a depth are on the devices of its stage. Some weights are also
read by other stages: a tied table by the head, and with DualPipe the weights by the other direction. These
are sent there at the beginning of a step, and their gradients are sent back at its end. So each parameter has
one state, for any number of stages that read it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits, check_stacks
from meshwright.layout.pipelines import pass_table
from meshwright.layout.pipelines.pass_table import Place
from meshwright.layout.rules import STAGES
from meshwright.layout.workload import Workload
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import parameters
from meshwright.nn.files.checkpoint import by_name, like
from meshwright.nn.files.weights import load_hf
from meshwright.nn.gradients import added, summed
from meshwright.nn.params import abstract_params, flatten, init_params, merged_params, trained
from meshwright.nn.pipeline.controller import Dispatch, Executor, OnDevices, with_name
from meshwright.nn.pipeline.stage_programs import LOSS, ROUTERS, Chunk, ChunkPrograms, is_stacked, stacks_of
from meshwright.nn.start.compiler_options import Options
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.optimizers import OPTIMIZERS
from meshwright.train.optimizers import OptimizerConfig, gradient_norm
from meshwright.train.profiling import ProgramTexts
from meshwright.train.step import CompiledStep, TrainState

# By depth.
_State = tuple[TrainState, ...]


def training_step(config: ModelConfig, layout: Layout, *arguments: Any, **options: Any) -> Any:
    """The step for `train.loop.train` under this layout, with the arguments of CompiledStep."""
    kind = StagedStep if layout.stage_programs else CompiledStep
    return kind(config, layout, *arguments, **options)


class StagedStep:
    """The step for `train.loop.train` if every stage of the pipeline has its own programs.

    Arguments as for CompiledStep. The state has a part for each depth. It is saved as a state of the
    whole model, in the host's memory, so that a run may continue under another layout. Raises LayoutError for
    several processes, since a process cannot dispatch programs of other processes' devices.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        workload: Workload,
        optimizer: OptimizerConfig,
        *,
        mesh: jax.sharding.Mesh | None = None,
        options: Options | None = None,
        **others: Any,
    ) -> None:
        schedule = layout.schedule
        if jax.process_count() > 1:
            raise LayoutError(
                f"layout {layout}: one process dispatches the stages of schedule = {schedule.pipeline}, and "
                f"there are {jax.process_count()}; fits: one process, or schedule = lanes"
            )
        check_fits(layout, config, workload.num_sequences, workload.seq_len)
        check_stacks(layout, config)
        self.config, self.layout, self.workload = config, layout, workload
        self.mesh = device_mesh(layout) if mesh is None else mesh
        self.stages = [
            CompiledStep(
                config, layout.of_stage, workload, optimizer, mesh=stage_mesh, options=options, **others
            )
            for stage_mesh in stage_meshes(self.mesh)
        ]
        self.chunks = Chunk.of_depths(config, layout)
        self.table = pass_table(
            schedule.pipeline, layout.pipe, layout.schedule.microbatches, schedule.interleave
        )
        self.first = self.stages[0]
        self.owners = self.table.routes[0]
        programs = {
            Place(*place): self._programs(depth, place[0]) for place, depth in self.table.depths.items()
        }
        self.dispatch = Dispatch(self.table, [own.mesh for own in self.stages], programs, options or {})
        depths = range(len(self.chunks))
        self._norm = jax.jit(gradient_norm)
        self._norms = [jax.jit(with_name(gradient_norm, f"depth{depth}_norm")) for depth in depths]
        self._sum = jax.jit(with_name(lambda parts: sum(parts[1:], parts[0]), "sum"))
        self._plus = jax.jit(added, donate_argnums=0)
        self._metrics = jax.jit(self.first.metrics)
        self._summed = {
            (stage, home): jax.jit(with_name(self._reduced, f"stage{stage}_depth{home}_gradients"))
            for stage in range(len(self.stages))
            for home in depths
        }
        self._updated = self._update_programs()
        self._sizes = [
            jax.jit(with_name(partial(self._mean_squares, self._owner(depth)), f"depth{depth}_sizes"))
            for depth in depths
        ]
        self._of_stacks = jax.jit(self._over_depths)

    def _reduced(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """The gradients of a chunk, by path, with the shardings of the moments."""
        return flatten(summed(self.config, self.first.layout, merged_params(self.config, gradients)))

    def _update_programs(self) -> list[Any]:
        """Each depth's update: (its state, gradients, norm, mean squares of stacks) -> its next state."""

        def program(depth: int, where: Any) -> Any:
            owner = self._owner(depth)

            def run(
                state: TrainState, grads: Mapping[str, Any], norm: Array, of_stacks: dict[str, Array] | None
            ) -> TrainState:
                given = {} if of_stacks is None else {"whole": partial(_with_stacks, of_stacks)}
                return owner.updated(state, grads, norm, **given)

            return jax.jit(with_name(run, f"depth{depth}_update"), donate_argnums=0, out_shardings=where)

        places: list[Any] = [None] * len(self.chunks)
        if self.layout.schedule.offload_optimizer:
            # Given, since XLA otherwise does not use donated memory of the host.
            places = [jax.tree.map(lambda leaf: leaf.sharding, state) for state in self.abstract_depths()]
        return [program(depth, where) for depth, where in enumerate(places)]

    def _mean_squares(
        self, stage: CompiledStep, state: TrainState, grads: Mapping[str, Any], norm: Array
    ) -> dict[str, Array]:
        """The mean squares [n, 2] of the n weights of every stack with rows in the state."""
        squares = stage.mean_squares(state, grads, norm)
        return {stack: jnp.stack(jax.tree.leaves(squares[stack])) for stack in stacks_of(squares)}

    def _over_depths(self, parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
        """The mean squares of whole stacks, from the mean squares of each depth's rows."""
        totals: dict[str, Any] = {}
        for chunk, part in zip(self.chunks, parts, strict=True):
            for stack, of_rows in part.items():
                share = chunk.num_rows(stack) / sum(other.num_rows(stack) for other in self.chunks)
                totals[stack] = totals.get(stack, 0) + of_rows * share
        return totals

    def _programs(self, depth: int, stage: int) -> ChunkPrograms:
        step = self.stages[stage]

        def batch(rows: Array | None, index: Array) -> tuple[Array, Array, Places]:
            if rows is None:  # only the shape of rows is read
                like = step.abstract_tokens()
                rows = jnp.zeros(like.shape, like.dtype, out_sharding=step.batch_sharding)
            return step.dealt(step.microbatches(rows)[:, index])

        return ChunkPrograms(
            self.config, step.layout, step.ops, self.chunks[depth], batch, step.share, step.router_weights
        )

    # For the loop

    @property
    def batch_sequences(self) -> int:
        return self.workload.num_sequences

    @property
    def own_rows(self) -> Sequence[int]:
        return range(self.workload.num_sequences)

    @property
    def seq_len(self) -> int:
        return self.workload.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.workload.num_tokens

    @property
    def flops_per_step(self) -> float:
        return self.first.flops_per_step

    @property
    def peak_flops_per_second(self) -> float:
        return self.first.peak_flops_per_second * self.layout.pipe

    # State

    def init(self, seed: int) -> _State:
        """The first state, with fresh parameters or the weights of `start_from`, read on the host."""
        loaded, start_from = {}, self.first.start_from
        if start_from is not None:
            alone = Layout.of(weights_dtype=self.layout.precision.weights_dtype)
            loaded = load_hf(start_from, self.config.base, alone, device_mesh(alone, _host().device_set))
        return tuple(self._first_state(depth, seed, loaded) for depth in range(len(self.chunks)))

    def _first_state(self, depth: int, seed: int, loaded: Any) -> TrainState:
        owner, chunk = self._owner(depth), self.chunks[depth]
        weights = flatten(loaded)
        paths = [path for path in parameters(self.config) if chunk.has(path)]
        only = [path for path in paths if path not in weights]
        fresh = init_params(self.config, owner.layout, owner.mesh, seed, only=only, part=chunk.part)
        abstract = flatten(self._abstract_params(depth))
        read = {path: _put(chunk, path, weights[path], abstract[path]) for path in paths if path in weights}
        params = merged_params(self.config, fresh, read)
        with jax.set_mesh(owner.mesh):
            return jax.jit(owner.first_state)(params)

    def _owner(self, depth: int) -> CompiledStep:
        return self.stages[self.owners[depth].stage]

    def abstract_state(self) -> TrainState:
        """The state of the whole model, as it is saved: in the host's memory."""
        return jax.tree.map(_on_the_host, self.first.abstract_state())

    def saved(self, state: _State) -> TrainState:
        """The state of the whole model, in the host's memory."""
        abstract = self.abstract_state()
        whole = _whole(by_name(abstract), [by_name(part) for part in state])
        return like(abstract, {name: jax.device_put(array, _host()) for name, array in whole.items()})

    def placed(self, saved: TrainState) -> _State:
        """The state of every depth, from a state of `saved`."""
        depths = zip(self.chunks, self.abstract_depths(), strict=True)
        return tuple(_placed(chunk, saved, abstract) for chunk, abstract in depths)

    def abstract_depths(self) -> _State:
        """The state of every depth as ShapeDtypeStructs."""
        depths = range(len(self.chunks))
        return tuple(self._owner(depth).abstract_state(self._abstract_params(depth)) for depth in depths)

    def _abstract_params(self, depth: int) -> Any:
        owner, chunk = self._owner(depth), self.chunks[depth]
        params = flatten(abstract_params(self.config, owner.layout, owner.mesh))

        def part(path: str) -> jax.ShapeDtypeStruct:
            shape = jax.eval_shape(partial(chunk.part, path), params[path]).shape
            return jax.ShapeDtypeStruct(shape, params[path].dtype, sharding=params[path].sharding)

        return merged_params(self.config, {path: part(path) for path in params if chunk.has(path)})

    # The step

    def step(self, state: _State, tokens: np.ndarray) -> tuple[_State, dict[str, Array]]:
        """(next state, metrics) as by CompiledStep, with metrics on the first stage; donates the state."""
        return self.step_on(OnDevices(), state, self._rows(tokens))

    def evaluate(self, state: _State, tokens: np.ndarray) -> Array:
        """Mean nats per token of tokens[B, T+1]."""
        on = OnDevices()
        losses = self.dispatch.loss(self._read(on, _params(state)), self._rows(tokens), on)
        return on.run(self._owner(-1).mesh, self._sum, losses)

    def of_readers(self, made: Callable[[CompiledStep], Any]) -> list[Any]:
        """`made` of each stage that reads rows of the batch, and None for other stages.

        The first chunk reads tokens and the last reads targets. Layers read the beginnings of documents, if
        rows have them, and tokens if they look up experts by token.
        """
        reads = [False] * len(self.stages)
        for (stage, _), depth in self.table.depths.items():
            chunk = self.chunks[depth]
            reads[stage] |= chunk.is_first or chunk.is_last or (self.first.masked and bool(chunk.layers))
            reads[stage] |= chunk.reads_tokens(self.config)
        return [made(stage) if needed else None for stage, needed in zip(self.stages, reads, strict=True)]

    def _rows(self, tokens: np.ndarray) -> list[Array | None]:
        return self.of_readers(lambda stage: stage.put(tokens))

    def step_on(
        self, on: Executor, state: _State, rows: Sequence[Array | None]
    ) -> tuple[_State, dict[str, Array]]:
        """A step by an executor. rows: the batch's rows, on each stage that reads them."""
        losses, gradients = self.losses_and_gradients(on, _params(state), rows)
        first = self.first.mesh
        norms = [
            on.run(self._owner(depth).mesh, self._norms[depth], of_depth)
            for depth, of_depth in enumerate(gradients)
            if of_depth
        ]
        norm = on.run(first, self._norm, [on.send(part, first, "sums") for part in norms])
        figures = losses[LOSS], losses.get(ROUTERS), norm, state[0].num_updates
        metrics = on.run(first, self._metrics, *figures)
        return self._after(on, state, gradients, norm), metrics

    def _after(self, on: Executor, state: _State, gradients: Sequence[Any], norm: Array) -> _State:
        """The state after an update. norm: of all gradients, on the first stage."""
        first = self.first.mesh
        meshes = [self._owner(depth).mesh for depth in range(len(state))]
        known = [
            (part, gradients[depth], on.send(norm, meshes[depth], "sums")) for depth, part in enumerate(state)
        ]
        of_stacks = None
        if OPTIMIZERS[self.layout.precision.optimizer].by_whole_sizes:
            parts = [
                on.send(on.run(mesh, self._sizes[depth], *known[depth]), first, "sums")
                for depth, mesh in enumerate(meshes)
            ]
            of_stacks = on.run(first, self._of_stacks, parts)
        return tuple(
            on.run(mesh, self._updated[depth], *known[depth], on.send(of_stacks, mesh, "sums"))
            for depth, mesh in enumerate(meshes)
        )

    def whole_gradients(
        self, params: Mapping[str, Any], tokens: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """(loss, gradients by path) for a whole model's parameters, all in the host's memory."""
        depths = range(len(self.chunks))
        placed = [_placed(self.chunks[depth], params, self._abstract_params(depth)) for depth in depths]
        losses, gradients = self.losses_and_gradients(OnDevices(), placed, self._rows(tokens))
        shapes = flatten(abstract_params(self.config, self.first.layout, self.first.mesh))
        trains = {path: shapes[path] for path in shapes if path in trained(self.config)}
        return float(losses[LOSS]), _whole(trains, [flatten(of_depth) for of_depth in gradients])

    def losses_and_gradients(
        self, on: Executor, params: Sequence[Any], rows: Sequence[Array | None]
    ) -> tuple[dict[str, Array], list[Any]]:
        """(losses on the first stage, gradients by depth, sharded as the moments). params: by depth."""
        totals = self.dispatch.totals(self._read(on, params), rows, on)
        losses: dict[str, list[Array]] = {}
        gradients: list[dict[str, Array]] = [{} for _ in self.chunks]
        for number, of_stage in enumerate(totals):
            stage = self.stages[number]
            by_depth: dict[int, dict[str, Array]] = {}
            for depth, path in list(of_stage):
                total = of_stage.pop((depth, path))
                if path in (LOSS, ROUTERS):
                    losses.setdefault(path, []).append(on.send(total, self.first.mesh, "sums"))
                else:
                    by_depth.setdefault(depth, {})[path] = total
                del total
            for depth in list(by_depth):
                reduced = on.run(stage.mesh, self._summed[number, depth], by_depth.pop(depth))
                for path, gradient in reduced.items():
                    self._add(on, gradients[depth], path, gradient, self._owner(depth).mesh)
        sums = {name: on.run(self.first.mesh, self._sum, parts) for name, parts in losses.items()}
        return sums, [merged_params(self.config, flat) for flat in gradients]

    def _add(self, on: Executor, total: dict[str, Array], path: str, more: Array, mesh: Any) -> None:
        sent = on.send(more, mesh, "gradients")
        if path in total:
            sent = on.run(mesh, self._plus, {path: total.pop(path)}, {path: sent})[path]
        total[path] = sent

    def _read(self, on: Executor, params: Sequence[Any]) -> dict[Place, Any]:
        """The parameters that each chunk reads, on its stage: its own, and for the head a tied table.

        The table is sent once to a stage with both the first and the last chunk.
        """
        tied = ("embed",) if self.config.tied_embeddings else ()
        tables: dict[int, dict[str, Array]] = {}
        read = {}
        for (stage, number), depth in self.table.depths.items():
            mesh, chunk = self.stages[stage].mesh, self.chunks[depth]
            weights = {name: part for name, part in params[depth].items() if name not in tied}
            read[Place(stage, number)] = on.send(weights, mesh, "weights")
            if chunk.is_first or chunk.is_last:
                table = {name: params[0][name] for name in tied}
                tables[stage] = tables.get(stage) or on.send(table, mesh, "weights")
                read[Place(stage, number)] |= tables[stage]
        return read

    def program_texts(self) -> dict[str, str]:
        """The optimized HLO of all programs of a step, by name; compiles them again."""
        on = ProgramTexts()
        rows = self.of_readers(lambda stage: stage.abstract_tokens())
        self.step_on(on, self.abstract_depths(), rows)
        return on.texts

    @property
    def num_compiled(self) -> int:
        """The number of compiled versions of a program: 1, unless the types of its arguments changed."""
        return self.dispatch.num_compiled


def _whole(abstract: Mapping[str, Any], depths: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Whole arrays with the names of `abstract`, in the host's memory, from the arrays of all depths."""

    def joined_parts(name: str, whole: Any) -> np.ndarray:
        parts = [np.asarray(arrays[name]) for arrays in depths if name in arrays]
        stacked = is_stacked(name) and parts[0].shape != whole.shape
        return np.concatenate(parts) if stacked else parts[0]

    return {name: joined_parts(name, whole) for name, whole in abstract.items()}


def _with_stacks(of_stacks: dict[str, Array], squares: Any) -> Any:
    """Mean squares by weight, with the stacks' replaced by the rows of [n, 2] of each stack."""
    stacks = {
        stack: jax.tree.unflatten(jax.tree.structure(squares[stack]), list(rows))
        for stack, rows in of_stacks.items()
        if stack in squares
    }
    return squares | stacks


def _placed(chunk: Chunk, whole: object, abstract: object) -> Any:
    """The chunk's part of a whole pytree, with the names and shardings of `abstract`."""
    arrays = by_name(whole)
    parts = {name: _put(chunk, name, arrays[name], leaf) for name, leaf in by_name(abstract).items()}
    return like(abstract, parts)


def _put(chunk: Chunk, name: str, whole: object, abstract: jax.ShapeDtypeStruct) -> Array:
    """The chunk's part of a whole array with this name, with the sharding of `abstract`."""
    return jax.device_put(np.asarray(chunk.part(name, whole)), abstract.sharding)


def _params(state: _State) -> list[Any]:
    return [of_depth.params for of_depth in state]


def stage_meshes(mesh: jax.sharding.Mesh) -> list[jax.sharding.Mesh]:
    """The mesh of every stage of a mesh with the axis `pipe`."""
    axis = mesh.axis_names.index(STAGES)
    names, types = (
        tuple(entry for number, entry in enumerate(of_axes) if number != axis)
        for of_axes in (mesh.axis_names, mesh.axis_types)
    )
    stages = np.moveaxis(mesh.devices, axis, 0)
    return [jax.sharding.Mesh(devices, names, axis_types=types) for devices in stages]


def _host() -> Any:
    return SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


def _on_the_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_host())
