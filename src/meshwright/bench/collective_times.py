"""Collectives over the axes of a mesh, measured at several sizes.

Each point runs in a loop within one program, as in a step's scan over layers, and on all devices: all groups
of devices communicate at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from jax import Array, lax

from meshwright.bench.all_devices import Bench, Operand
from meshwright.bench.timing import Listener, Prepared, TimedCall, Timing, tell
from meshwright.hardware.chip import COLLECTIVES
from meshwright.nn.start.device_mesh import default_platform
from meshwright.notation.array import Axes
from meshwright.notation.mesh import Mesh

_LOOP_BYTES = 33_554_432  # a loop moves about this much, so that it takes longer than its launch
_LOOPS = (2, 32)  # minimum and maximum; several, so that allocations of a program hardly count
_WORD = 4  # float32


@dataclass(frozen=True)
class CollectivePoint:
    """One collective of V = gathered_bytes over `axes` of `mesh`."""

    op: str
    mesh: Mesh
    axes: Axes
    gathered_bytes: int

    @property
    def num_devices(self) -> int:
        return self.mesh.size(self.axes)

    @property
    def priced_bytes(self) -> int:
        """The bytes of hardware.chip.LinearCost: V, or V / n for all_to_all and permute."""
        return self.gathered_bytes // (self.num_devices if self.op in ("all_to_all", "permute") else 1)

    @property
    def loop_length(self) -> int:
        least, most = _LOOPS
        return max(least, min(most, _LOOP_BYTES // self.priced_bytes))


@dataclass(frozen=True)
class MeasuredCollective:
    """A point and the time of one run of it."""

    point: CollectivePoint
    timing: Timing


def combinations_of(mesh: Mesh) -> Iterator[Axes]:
    """All choices of axes with several devices: X, Y, XY."""
    axes = [axis for axis in mesh if mesh.sizes[axis] > 1]
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


def prepare(mesh: Mesh, progress: Listener, sizes: Sequence[int]) -> Prepared[MeasuredCollective]:
    """All collectives over all choices of axes, at the sizes V in bytes that divide evenly."""
    bench = Bench(mesh)
    points = [
        CollectivePoint(op, mesh, axes, size)
        for size in sizes
        for op in COLLECTIVES
        for axes in combinations_of(mesh)
        if size % (_WORD * mesh.size(axes)) == 0 and size >= _WORD * mesh.size(axes) ** 2
    ]
    programs: list[TimedCall] = []
    for point in points:
        tell(progress, f"compiling {point.op} over {''.join(point.axes)} of {mesh.num_devices} devices")
        programs.append(bench.program(runs_in_sequence(point), [operand(point)]))
    return Prepared(
        programs,
        lambda timings: [
            MeasuredCollective(p, t.per(p.loop_length)) for p, t in zip(points, timings, strict=True)
        ],
    )


def operand(point: CollectivePoint) -> Operand:
    """A device's operand: all of V for sums, otherwise its block."""
    whole = point.op in ("reduce_scatter", "all_reduce")
    return Operand((point.gathered_bytes // _WORD // (1 if whole else point.num_devices),), "f32")


def runs_in_sequence(point: CollectivePoint) -> Callable[[Array], Array]:
    """Several runs in sequence, each with an element of the previous result in its operand."""
    collective = _COLLECTIVES[point.op]

    def run(_: Array, x: Array) -> Array:
        result = collective(x, point.axes, point.num_devices)
        return lax.dynamic_update_slice(x, result[:1], (0,))

    return lambda x: lax.fori_loop(0, point.loop_length, run, x)


def _all_gather(x: Array, axes: Axes, n: int) -> Array:
    return lax.all_gather(x, axes, tiled=True)


def _all_reduce(x: Array, axes: Axes, n: int) -> Array:
    return lax.psum(x, axes)


def _reduce_scatter(x: Array, axes: Axes, n: int) -> Array:
    # Programs reduce-scatter by an all-reduce and a slice if the compiler has no other way.
    if default_platform().compiler.reduce_scatter:
        return lax.psum_scatter(x, axes, tiled=True)
    size = len(x) // n
    return lax.dynamic_slice(lax.psum(x, axes), (lax.axis_index(axes) * size,), (size,))


def _all_to_all(x: Array, axes: Axes, n: int) -> Array:
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def _permute(x: Array, axes: Axes, n: int) -> Array:
    return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


_COLLECTIVES: dict[str, Callable[[Array, Axes, int], Array]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
