"""A strategy of a contraction: its price, and its collectives in the notation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

from meshwright.cost.reshard_seconds import PricedReshard, priced_reshard, step_price
from meshwright.hardware.topology import Hardware, Placement
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import (
    ChosenSteps,
    Contraction,
    Einsum,
    EinsumSide,
    Reshard,
    contraction,
    cotangent,
)
from meshwright.notation.mesh import Mesh
from meshwright.notation.resharding import cheapest_reshard

Objective = Literal["latency", "throughput"]


@dataclass(frozen=True, eq=False)
class ContractionQuestion:
    """A contraction to find strategies for.

    out: the wanted sharding; None for any. dtype: of the operands, the product and every transfer.
    """

    einsum: Einsum
    lhs: ShardedArray
    rhs: ShardedArray
    out: ShardedArray | None
    mesh: Mesh
    sizes: Mapping[str, int]
    hardware: Hardware
    dtype: str

    @cached_property
    def placement(self) -> Placement:
        return self.hardware.place(self.mesh)

    @property
    def has_single_axes(self) -> bool:
        """Whether an array names an axis of one device, which a search leaves out."""
        arrays = [array for array in (self.lhs, self.rhs, self.out) if array is not None]
        used = {axis for array in arrays for axis in (*array.sharded_axes, *array.unreduced)}
        return any(self.mesh.size(axis) == 1 for axis in used)


@dataclass(frozen=True)
class PricedStep:
    """A collective with V in bytes and its seconds; 0 for a slice.

    windowed: it runs under the product.
    """

    collective: Collective
    num_bytes: int
    seconds: float
    windowed: bool

    def to_dict(self) -> dict:
        """The keys of `steps[]` in `mw shard`."""
        c = self.collective
        return {
            "op": c.op,
            "axes": list(c.axes),
            "operand": str(c.operand),
            "result": str(c.result),
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "windowed": self.windowed,
        }


def priced_step(
    step: Collective,
    mesh: Mesh,
    sizes: Mapping[str, int],
    dtype: str,
    placement: Placement,
    *,
    windowed: bool = False,
) -> PricedStep:
    """`step` with its price on the links of `placement`."""
    num_bytes = step.gathered_bytes(mesh, sizes, dtype)
    return PricedStep(step, num_bytes, step_price(placement)(step.op, step.axes, num_bytes), windowed)


class Strategy(NamedTuple):
    """One way to compute a contraction.

    out: the sharding of the result. via: an intermediate sharding of the sum, scattered before it is
    gathered; None for none. reshards: of the left operand, the right operand and the product. window: the
    array whose transfer runs under the product. seconds: of one run by itself. bytes_per_device: most memory
    at any time, the given operands included.
    """

    question: ContractionQuestion
    roles: tuple[tuple[str, str | None], ...]
    out: ShardedArray
    via: ShardedArray | None
    reshards: tuple[PricedReshard, PricedReshard, PricedReshard]
    window: EinsumSide | None
    flops_per_device: float
    seconds_compute: float
    seconds_comms: float
    seconds: float
    bytes_per_device: int

    @property
    def seconds_pipelined(self) -> float:
        """Seconds per run of many independent runs, which overlap collectives and products."""
        return max(self.seconds_compute, self.seconds_comms)

    def objective_seconds(self, objective: Objective) -> float:
        return self.seconds if objective == "latency" else self.seconds_pipelined

    def fits(self, memory_limit_bytes: float | None) -> bool:
        return memory_limit_bytes is None or self.bytes_per_device <= memory_limit_bytes

    @property
    def leaves_partial_sum(self) -> bool:
        """Whether it leaves a reduction undone that the question does not leave open."""
        return self.question.out is None and bool(self.out.unreduced)

    @property
    def bytes_moved_per_device(self) -> int:
        """Bytes that one device sends."""
        return ceil(sum(reshard.sent_bytes for reshard in self.reshards))

    @property
    def contraction(self) -> Contraction:
        """The contraction with the steps of each array and of its cotangent."""
        q = self.question
        plan = contraction(str(q.einsum), q.lhs, q.rhs, self.out, dict(self.roles))
        lhs, rhs, out = (
            ChosenSteps(priced.steps, _backward_steps(reshard, q))
            for reshard, priced in zip(
                (plan.lhs_reshard, plan.rhs_reshard, plan.out_reshard), self.reshards, strict=True
            )
        )
        return replace(plan, lhs_chosen=lhs, rhs_chosen=rhs, out_chosen=out)

    @property
    def steps(self) -> list[PricedStep]:
        """Every collective, in order, with its price."""
        plan = self.contraction
        sides: dict[EinsumSide, list[Collective]] = {
            "lhs": plan.lhs_steps,
            "rhs": plan.rhs_steps,
            "out": plan.out_steps,
        }
        windowed = self.window and sides[self.window][0 if self.window == "out" else -1]
        q = self.question
        return [
            priced_step(step, q.mesh, q.sizes, q.dtype, q.placement, windowed=step is windowed)
            for side in sides.values()
            for step in side
        ]

    @property
    def name(self) -> str:
        """A summary of its steps: `gather A over X`, `contract over X, ReduceScatter into K`."""
        plan = self.contraction
        partial, moved = plan.product.unreduced, len(plan.lhs_steps) + len(plan.rhs_steps)
        words = [f"split {letter} over {axis}" for axis, letter in self._spread()]
        steps = [_words(s.collective, s.windowed, self.out.name) for s in self.steps]
        words += steps[:moved] + ([f"contract over {'·'.join(partial)}"] if partial else []) + steps[moved:]
        if self.leaves_partial_sum:
            words.append("leave the sum partial")
        return ", ".join(word for word in words if word) or "multiply in place"

    def _spread(self) -> list[tuple[str, str]]:
        """(axis, letter) of axes that split the output but no given operand."""
        q = self.question
        busy = (*q.lhs.sharded_axes, *q.rhs.sharded_axes)
        return [(axis, x) for axis, x in self.roles if x and axis not in busy and x in q.einsum.out]

    def to_dict(self) -> dict:
        """The keys of `strategies[]` in `mw shard`."""
        return {
            "name": self.name,
            "out": str(self.out),
            "steps": [step.to_dict() for step in self.steps],
            "flops_per_device": self.flops_per_device,
            "seconds_compute": self.seconds_compute,
            "seconds_comms": self.seconds_comms,
            "seconds": self.seconds,
            "seconds_pipelined": self.seconds_pipelined,
            "bytes_per_device": self.bytes_per_device,
            "bytes_moved_per_device": self.bytes_moved_per_device,
        }


def _backward_steps(reshard: Reshard, q: ContractionQuestion) -> tuple[Collective, ...] | None:
    """The cheapest steps of the cotangent; None if the steps by the rules are as fast."""
    target = cotangent(reshard.given)
    block = reshard.yielded.bytes_per_device(q.mesh, q.sizes, q.dtype)
    by_rules = priced_reshard(reshard.backward, block, q.placement)
    if not by_rules.seconds or q.has_single_axes:
        return None
    steps = cheapest_reshard(reshard.yielded, target, q.mesh, q.sizes, step_price(q.placement), q.dtype)
    return tuple(steps) if priced_reshard(steps, block, q.placement).seconds < by_rules.seconds else None


def _words(step: Collective, windowed: bool, out: str) -> str:
    """A step in words; "" for a slice."""
    if step.op == "slice":
        return ""
    over, name = "·".join(step.axes), step.operand.name
    gained = [d for d in step.result.dims if set(step.result.axes_of(d)) > set(step.operand.axes_of(d))]
    whose = "" if name == out else f" {name}"
    words = {
        "all_gather": f"gather {name} over {over}",
        "reduce_scatter": f"ReduceScatter{whose} into {gained[0] if gained else ''}",
        "all_reduce": f"AllReduce{whose}",
        "all_to_all": f"AllToAll {name} into {gained[0] if gained else ''} over {over}",
        "permute": f"permute {name} over {over}",
    }[step.op]
    return f"{words} (windowed)" if windowed else words
