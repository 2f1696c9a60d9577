"""A step of a pipeline whose stages run programs of their own, compiled and not run.

The loop of nn/pipeline/controller.py drives an executor that compiles each program once, and follows
which arrays every stage has, what made them, and how often each program runs.
"""

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr

from meshwright.audit.hlo.link import Sent, StageCall, is_given, result_name
from meshwright.platforms import platform_of

# Bytes of a program on a device, by cause, as `memory_by_cause` returns them.
_Memory = Callable[[Any], Mapping[str, int] | None]


class Array(jax.ShapeDtypeStruct):
    """The type of an array that is on devices until `end`, or until nothing refers to it.

    source: its name among the arguments and results of programs (audit/hlo/link.py).
    """

    end: weakref.finalize
    source: str


class Compiling:
    """An executor that compiles every program once.

    compiled: by stage, program and the types of its arguments. calls: the number of runs of each, and the
    arguments of its first run. alive: current bytes on a device of each stage. peak: their maximum, with
    outputs and temporaries of programs. given: bytes of the arrays that exist when the step begins, and of
    their copies. sent: how often an array goes from one stage to another.
    """

    def __init__(
        self,
        meshes: list[Mesh],
        compile_program: Callable[[Any], Any],
        memory: _Memory,
        code_bytes: Callable[[Any], int | None],
    ) -> None:
        self._stages = {mesh: stage for stage, mesh in enumerate(meshes)}
        self._compile, self._memory, self._code_bytes = compile_program, memory, code_bytes
        self.compiled: dict[tuple[int, Any, str], Any] = {}
        self.calls: dict[tuple[int, Any, str], StageCall] = {}
        self.alive: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.given: Counter[int] = Counter()
        self.sent: Counter[Sent] = Counter()

    def run(self, mesh: Mesh, program: Any, *arguments: Any) -> Any:
        stage = self._stages[mesh]
        key = stage, program, str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), arguments))
        if key not in self.compiled:
            with jax.set_mesh(mesh):
                self.compiled[key] = self._compile(program.trace(*arguments))
            number = len(self.calls)
            self.calls[key] = StageCall(f"call.{number}", number, stage, 0, dict(_named(program, arguments)))
        compiled, call = self.compiled[key], self.calls[key]
        self.calls[key] = call._replace(runs=call.runs + 1)
        if figures := self._memory(compiled):
            added = figures["outputs"] + figures["temporaries"]
            self.peak[stage] = max(self.peak[stage], self.alive[stage] + added)
        for given, info in zip(
            jax.tree.leaves(arguments), jax.tree.leaves(compiled.args_info[0]), strict=True
        ):
            if info.donated:
                given.end()
        infos, structure = jax.tree.flatten(compiled.out_info)
        where = jax.tree.leaves(compiled.output_shardings)
        made = [
            self.array(info, sharding, result_name(call.name, place))
            for place, (info, sharding) in enumerate(zip(infos, where, strict=True))
        ]
        return jax.tree.unflatten(structure, made)

    def send(self, tree: object, mesh: Mesh, what: str) -> Any:
        def abstract(x: Array) -> Array:
            destination = NamedSharding(mesh, x.sharding.spec)
            if destination == x.sharding:
                return x
            stages = self._stage(x.sharding), self._stages[mesh]
            self.sent[Sent(*stages, what, _bytes(x, destination))] += 1
            copy = self.array(x, destination, x.source)
            self.given[stages[1]] += _device_bytes(x, destination) if is_given(x.source) else 0
            return copy

        return jax.tree.map(abstract, tree)

    def step(self, step: Any) -> tuple[tuple[str, ...], ...]:
        """Run a StagedStep on the meshes. Returns the sources of the new state, by stage."""
        state = tuple(self.givens("state", own) for own in step.abstract_depths())
        rows = step.of_readers(lambda stage: self.givens("rows", stage.abstract_tokens()))
        after, _ = step.step_on(self, state, rows)
        sources: list[list[str]] = [[] for _ in self._stages]
        for place, state in zip(step.owners, after, strict=True):
            sources[place.stage] += [leaf.source for leaf in jax.tree.leaves(state)]
        return tuple(map(tuple, sources))

    def memory_bytes(self, stage: int) -> dict[str, int]:
        """Bytes of a device of a stage at the peak, by cause as in `memory_by_cause`."""
        total, given = self.peak[stage], self.given[stage]
        return {"arguments": given, "outputs": 0, "temporaries": total - given, "total": total}

    def program_bytes(self, stage: int) -> int:
        """Bytes of the code of all programs of a stage."""
        calls = zip(self.calls.values(), self.compiled.values(), strict=True)
        return sum(self._code_bytes(compiled) or 0 for call, compiled in calls if call.stage == stage)

    def givens(self, name: str, tree: Any) -> Any:
        """The arrays that exist when the step begins, by JAX's names."""

        def abstract(path: Any, x: Any) -> Array:
            self.given[self._stage(x.sharding)] += _device_bytes(x, x.sharding)
            return self.array(x, x.sharding, f"{name}{keystr(path)}")

        return jax.tree.map_with_path(abstract, tree)

    def array(self, like: Any, sharding: Any, source: str) -> Array:
        """A new array on the devices of `sharding`."""
        made = Array(like.shape, like.dtype, sharding=sharding)
        made.source = source
        stage, size = self._stage(sharding), _device_bytes(like, sharding)
        self.alive[stage] += size
        self.peak[stage] = max(self.peak[stage], self.alive[stage])
        made.end = weakref.finalize(made, self._gone, stage, size)
        return made

    def _stage(self, sharding: Any) -> int:
        return self._stages[sharding.mesh]

    def _gone(self, stage: int, size: int) -> None:
        self.alive[stage] -= size


def _named(program: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """Names of arguments: JAX's name in the program, and the source of the array; numbers have one name."""
    for parameter, argument in zip(inspect.signature(program).parameters, arguments, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            name = f"{parameter}{keystr(path)}"
            yield name, leaf.source if isinstance(leaf, Array) else name


def _bytes(like: Any, sharding: Any) -> int:
    return prod(sharding.shard_shape(like.shape)) * like.dtype.itemsize


def _device_bytes(like: Any, sharding: Any) -> int:
    """Bytes of a device's memory, which may be the host's."""
    on_host = sharding.memory_kind == "pinned_host" and not platform_of(sharding.mesh).host_memory
    return 0 if on_host else _bytes(like, sharding)
