"""A step of a pipeline with programs of stages, compiled and not run: each program, and memory by stage."""

import weakref
from collections import Counter
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


class Array(jax.ShapeDtypeStruct):
    """The type of an array that is on devices until `end`, or for as long as something refers to it."""

    end: weakref.finalize


class Compiling:
    """An executor that compiles every program once and follows which arrays each stage has.

    compiled: by stage, program and the types of its arguments. alive: bytes on a device of each stage, by the
    number of its first; peak: the most, with what a program has beside its inputs.
    """

    def __init__(self) -> None:
        self.compiled: dict[tuple[int, Any, str], Any] = {}
        self.alive: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()

    def run(self, mesh: Mesh, program: Any, *arguments: Any) -> Any:
        stage = _stage(mesh)
        key = stage, program, str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), arguments))
        if key not in self.compiled:
            with jax.set_mesh(mesh):
                self.compiled[key] = program.lower(*arguments).compile()
        compiled = self.compiled[key]
        figures = compiled.memory_analysis()
        made = figures.output_size_in_bytes - figures.alias_size_in_bytes
        self.peak[stage] = max(self.peak[stage], self.alive[stage] + made + figures.temp_size_in_bytes)
        for given, info in zip(
            jax.tree.leaves(arguments), jax.tree.leaves(compiled.args_info[0]), strict=True
        ):
            if info.donated:
                given.end()
        where = compiled.output_shardings
        return jax.tree.map(lambda info, sharding: self.array(info, sharding), compiled.out_info, where)

    def send(self, tree: Any, mesh: Mesh) -> Any:
        def one(x: Array) -> Array:
            there = NamedSharding(mesh, x.sharding.spec)
            return x if there == x.sharding else self.array(x, there)

        return jax.tree.map(one, tree)

    def array(self, like: Any, sharding: Any) -> Array:
        """An array, which is alive from now on."""
        made = Array(like.shape, like.dtype, sharding=sharding)
        size = prod(sharding.shard_shape(like.shape)) * like.dtype.itemsize
        stage = _stage(sharding.mesh)
        self.alive[stage] += size
        self.peak[stage] = max(self.peak[stage], self.alive[stage])
        made.end = weakref.finalize(made, self._gone, stage, size)
        return made

    def _gone(self, stage: int, size: int) -> None:
        self.alive[stage] -= size


def _stage(mesh: Mesh) -> int:
    return mesh.devices.flat[0].id
