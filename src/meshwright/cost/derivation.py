"""Seconds of the steps of a forward and a backward pass, each and together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from meshwright.cost.reshard_seconds import step_price
from meshwright.cost.strategy import Strategy
from meshwright.hardware.topology import Hardware
from meshwright.notation.algorithm import GIVEN, Algorithm, Local, Step, StepTiming
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import CONTRACTION, VIEWS, Chain, ChainLine
from meshwright.notation.derive import derive_placed
from meshwright.notation.mesh import Mesh
from meshwright.notation.operation import Operation


@dataclass(frozen=True)
class PricedLine:
    """A step with its seconds; num_bytes: V of a collective, the HBM traffic of a local operation."""

    step: Step
    num_bytes: int
    flops: float
    seconds: float

    def to_dict(self) -> dict:
        """The keys of `forward[]` and `backward[]` in `mw shard --backward`."""
        action = self.step.action
        local = isinstance(action, Local)
        return {
            "op": ("multiply" if action.function == CONTRACTION else action.function) if local else action.op,
            "axes": [] if local else list(action.axes),
            "operands": [str(array) for array in (action.operands if local else (action.operand,))],
            "result": str(action.result),
            "accumulates": self.step.accumulates,
            "timing": None if local else self.step.timing,
            "repeats": self.step.repeats,
            "bytes": self.num_bytes,
            "flops": self.flops,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class PricedSteps:
    """The steps of a pass in order.

    seconds             sum of all, one after another
    seconds_overlapped  max(local, ahead + deferred) + critical: steps that need not wait overlap fully
    """

    lines: tuple[PricedLine, ...]

    @property
    def seconds_compute(self) -> float:
        return sum(line.seconds for line in self.lines if isinstance(line.step.action, Local))

    def seconds_comms(self, *timings: StepTiming) -> float:
        """Seconds of the collectives whose timing is in `timings`; of all if it is empty."""
        return sum(
            line.seconds
            for line in self.lines
            if not isinstance(line.step.action, Local) and (not timings or line.step.timing in timings)
        )

    @property
    def seconds(self) -> float:
        return self.seconds_compute + self.seconds_comms()

    @property
    def seconds_overlapped(self) -> float:
        overlapping = self.seconds_comms("ahead", "deferred")
        return max(self.seconds_compute, overlapping) + self.seconds_comms("critical")

    def to_dict(self) -> dict:
        return {
            "steps": [line.to_dict() for line in self.lines],
            "seconds_compute": self.seconds_compute,
            "seconds_critical": self.seconds_comms("critical"),
            "seconds_ahead": self.seconds_comms("ahead"),
            "seconds_deferred": self.seconds_comms("deferred"),
            "seconds": self.seconds,
            "seconds_overlapped": self.seconds_overlapped,
        }


def priced_steps(
    steps: Iterable[Step], mesh: Mesh, sizes: Mapping[str, int], dtype: str, hardware: Hardware
) -> PricedSteps:
    """`steps` priced on `hardware`.

        contraction         t = max(FLOPs / peak, HBM bytes / bandwidth)
        any other function  t = HBM bytes / bandwidth: operands read and the result written, nothing fused
        split, merge, rename, a slice    0

    Raises NotationError if a dimension has no size or does not divide, or if an axis is unknown.
    """
    price, chip = step_price(hardware.place(mesh)), hardware.chip
    lines = []
    for step in steps:
        action = step.action
        arrays = (
            (*action.operands, action.result)
            if isinstance(action, Local)
            else (action.operand, action.result)
        )
        blocks = [array.bytes_per_device(mesh, sizes, dtype) for array in arrays]
        if not isinstance(action, Local):
            moved = 0 if action.op == "slice" else action.gathered_bytes(mesh, sizes, dtype)
            lines.append(PricedLine(step, moved, 0.0, price(action.op, action.axes, moved)))
        elif action.function == GIVEN or action.function in VIEWS:
            lines.append(PricedLine(step, 0, 0.0, 0.0))
        else:
            flops = _flops(arrays, mesh, sizes) if action.function == CONTRACTION else 0.0
            seconds = sum(blocks) / chip.memory_bytes_per_second(dtype)
            seconds = max(seconds, flops / chip.matmul_flops_per_second(dtype))
            lines.append(PricedLine(step, sum(blocks), flops, seconds))
    return PricedSteps(tuple(lines))


def _flops(arrays: Iterable[ShardedArray], mesh: Mesh, sizes: Mapping[str, int]) -> float:
    """A multiply and an add for every point of a device's part of the index space."""
    split = {dim: axes for array in arrays for dim, axes in zip(array.dims, array.axes, strict=True)}
    return 2.0 * prod(sizes[dim] // mesh.size(axes) for dim, axes in split.items())


def algorithm_of(strategy: Strategy) -> Algorithm:
    """Both passes of a strategy, with its collectives.

    A window is one whole step.
    """
    plan = strategy.contraction
    rhs = plan.rhs if plan.rhs.name != plan.lhs.name else plan.rhs.replace(name=f"{plan.rhs.name}2")
    bare = [_bare(array) for array in (plan.lhs, rhs, plan.out)]
    chain = Chain((ChainLine(CONTRACTION, "", (bare[0], bare[1]), bare[2]),))
    chosen = plan.lhs_chosen, plan.rhs_chosen, plan.out_chosen
    return derive_placed(chain, [Operation((plan.lhs, rhs), plan.out, plan.roles, chosen=chosen)])


def _bare(array: ShardedArray) -> ShardedArray:
    return array.replace(axes=dict.fromkeys(array.dims, ()), unreduced=())
