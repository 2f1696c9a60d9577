"""A strategy of a contraction: what it costs, and its collectives in the notation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from meshwright.cost.resharding import step_price
from meshwright.cost.routing import cheapest_path
from meshwright.hardware.topology import Hardware, Placement
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import Contraction, Einsum, Route, Way, contraction, cotangent
from meshwright.notation.mesh import Mesh

Objective = Literal["latency", "throughput"]
Operand = Literal["lhs", "rhs", "out"]


@dataclass(frozen=True, eq=False)
class Question:
    """A contraction whose strategy is asked for. out: the wanted sharding, None for any.

    dtype: of the operands, the product and every transfer.
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


@dataclass(frozen=True)
class PricedStep:
    """A collective with V in bytes and its seconds; a slice takes none. windowed: under the product."""

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
    """One way to compute a contraction. A tuple, since thousands are made in a second.

    out: the sharding it ends in. via: one that the sum passes through, scattered before gathered.
    searched: whether the left operand, the right one and the product move by a search or by the rules.
    window: the array whose transfer runs under the product. seconds: of one run on its own.
    bytes_per_device: most memory at any time; the operands as given stay. bytes_moved_per_device:
    sent by one device.
    """

    question: Question
    roles: tuple[tuple[str, str | None], ...]
    out: ShardedArray
    via: ShardedArray | None
    searched: tuple[bool, bool, bool]
    window: Operand | None
    flops_per_device: float
    seconds_compute: float
    seconds_comms: float
    seconds: float
    bytes_moved_per_device: int
    bytes_per_device: int

    @property
    def seconds_pipelined(self) -> float:
        """Seconds of one of many independent runs: one's collectives hide under another's product."""
        return max(self.seconds_compute, self.seconds_comms)

    def objective_seconds(self, objective: Objective) -> float:
        return self.seconds if objective == "latency" else self.seconds_pipelined

    def fits(self, memory_limit_bytes: float | None) -> bool:
        return memory_limit_bytes is None or self.bytes_per_device <= memory_limit_bytes

    @property
    def leaves_partial_sum(self) -> bool:
        """Whether it defers a reduction that was not asked to be deferred."""
        return self.question.out is None and bool(self.out.unreduced)

    @property
    def contraction(self) -> Contraction:
        """The contraction with the steps that each array takes, and its cotangent backward."""
        q = self.question
        plan = contraction(str(q.einsum), q.lhs, q.rhs, self.out, dict(self.roles))
        lhs, rhs, out = (
            self._way(route, searched)
            for route, searched in zip(
                (plan.lhs_route, plan.rhs_route, plan.out_route), self.searched, strict=True
            )
        )
        if self.via is not None:
            halves = (*reshard(plan.product, self.via), *reshard(self.via, self.out))
            out = out._replace(forward=halves)
        return replace(plan, lhs_way=lhs, rhs_way=rhs, out_way=out)

    def _way(self, route: Route, searched: bool) -> Way:
        q = self.question
        place = q.mesh, q.sizes, q.dtype, q.placement
        backward = cheapest_path(route.yielded, cotangent(route.given), *place)
        return Way(cheapest_path(route.given, route.used, *place) if searched else None, backward)

    @property
    def steps(self) -> list[PricedStep]:
        """Every collective, in order, with its price."""
        plan = self.contraction
        sides: dict[Operand, list[Collective]] = {
            "lhs": plan.lhs_steps,
            "rhs": plan.rhs_steps,
            "out": plan.out_steps,
        }
        windowed = self.window and sides[self.window][0 if self.window == "out" else -1]
        return [self._priced(step, step is windowed) for side in sides.values() for step in side]

    def _priced(self, step: Collective, windowed: bool) -> PricedStep:
        q = self.question
        return priced_step(step, q.mesh, q.sizes, q.dtype, q.placement, windowed=windowed)

    @property
    def name(self) -> str:
        """What moves, in a few words: `gather A over X`, `contract over X, ReduceScatter into K`."""
        partial = self.contraction.product.unreduced
        words = [f"split {letter} over {axis}" for axis, letter in self._spread()]
        words += [_words(s.collective, s.windowed, self.out.name) for s in self.steps if s.seconds]
        if partial:
            at = next((i for i, word in enumerate(words) if word.startswith(_ENDS)), len(words))
            words.insert(at, f"contract over {'·'.join(partial)}")
        if self.leaves_partial_sum:
            words.append("leave the sum partial")
        return ", ".join(words) or "multiply in place"

    def _spread(self) -> list[tuple[str, str]]:
        """Axes that split neither operand as given, and the letter of the output that they split."""
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


_ENDS = ("ReduceScatter", "AllReduce")


def _words(step: Collective, windowed: bool, out: str) -> str:
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
