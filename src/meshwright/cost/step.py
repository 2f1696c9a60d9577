"""The time of one training step: a sum over segments of compute, waiting and what could not hide.

    segment = work + critical transfers + max(0, other transfers - overlap . work)

Work is max(FLOPs / peak, bytes / HBM bandwidth) of each node. Critical transfers (a partial sum
that the next operation reads) stop it. The others (weights gathered ahead, gradients reduced
behind) hide under the work of the same pass as far as the hardware overlaps them. A backward pass
is its recomputation and its own nodes. A step is `microbatches` passes and one optimizer update.
"""

from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.graph import Direction, Graph, Node, Transfer, Work, recomputed_nodes
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.notation.array import Axes

# Links between slices or NVLink domains; the others are inside one.
OUTER_LINKS = ("dcn", "network")


@dataclass(frozen=True)
class PlannedTransfer:
    """A transfer with the pass it belongs to and how often a step runs it.

    seconds: of one run. bound: "ici" inside a slice or NVLink domain, "dcn" between them.
    exposed: the share of the seconds that does not hide under compute.
    """

    transfer: Transfer
    direction: Direction
    count: int
    seconds: float
    bound: str
    exposed: float

    def to_dict(self) -> dict:
        """The keys of `mw audit`: bytes are those of one run."""
        t = self.transfer
        return {
            "op": t.op,
            "axes": list(t.axes),
            "tensor": t.tensor,
            "direction": self.direction,
            "bytes": t.gathered_bytes,
            "count": self.count,
            "seconds": self.seconds,
            "exposed": self.exposed,
        }


@dataclass(frozen=True)
class Term:
    """A share of the step. bound: what would have to be faster: compute, hbm, ici, dcn or launch."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True)
class StepCost:
    """The parts of one step on one chip."""

    terms: tuple[Term, ...]
    transfers: tuple[PlannedTransfer, ...]
    executed_flops: float  # of matmuls and attention, recomputation included

    @cached_property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @cached_property
    def bound(self) -> str:
        """The resource that takes the largest share of the step."""
        totals: dict[str, float] = {}
        for term in self.terms:
            totals[term.bound] = totals.get(term.bound, 0.0) + term.seconds
        return max(totals, key=totals.__getitem__)


class StepPricer:
    """Prices one recorded microbatch on one machine; the remat policies share the prices of its nodes."""

    def __init__(self, graph: Graph, layout: Layout, hardware: Hardware) -> None:
        chip = hardware.chip
        self.graph, self.layout, self.chip = graph, layout, chip
        self.flops_per_second = chip.flops(layout.compute_dtype) * chip.matmul_efficiency
        self.memory_bytes_per_second = chip.memory_bytes_per_second(layout.compute_dtype)
        self.placement = hardware.place(layout.mesh)
        self._forward = [[self._price(node, back=False) for node in s.nodes] for s in graph.segments]
        self._backward = [[self._price(node, back=True) for node in s.nodes] for s in graph.segments]

    def _price(self, node: Node, *, back: bool) -> "_PricedNode":
        work = node.backward if back else node.forward
        compute, hbm = self._work_seconds(work)
        transfers = node.backward_transfers if back else node.forward_transfers
        priced = tuple((transfer, *self._transfer_price(transfer)) for transfer in transfers)
        return _PricedNode(
            node, work.flops, max(compute, hbm), "compute" if compute >= hbm else "hbm", priced
        )

    def _work_seconds(self, work: Work) -> tuple[float, float]:
        return work.flops / self.flops_per_second, work.hbm_bytes / self.memory_bytes_per_second

    def _transfer_price(self, transfer: Transfer) -> tuple[float, str]:
        price = collective_seconds(transfer.op, transfer.gathered_bytes, transfer.axes, self.placement)
        return price.seconds, "dcn" if price.link in OUTER_LINKS else "ici"

    def cost(self, remat: str, update: Work, norm_axes: Axes) -> StepCost:
        """The cost of a step under one remat policy.

        update: the optimizer's work. norm_axes: the mesh axes over which the gradient norm is summed.
        """
        sums = _Sums(self.chip.overlap)
        for segment, forward, backward in zip(
            self.graph.segments, self._forward, self._backward, strict=True
        ):
            times = segment.count * self.layout.microbatches
            again = set(recomputed_nodes(segment, remat))
            sums.add_pass("forward", forward, times)
            sums.add_pass("recompute", [priced for priced in forward if priced.node in again], times)
            sums.add_pass("backward", backward, times)
        compute, hbm = self._work_seconds(update)
        sums.add("optimizer", max(compute, hbm), "compute" if compute >= hbm else "hbm")
        if norm_axes:
            norm = Transfer("all_reduce", norm_axes, "grad_norm", 4, "f32", critical=True)
            sums.add_transfer(norm, *self._transfer_price(norm), "update", 1)
        if self.chip.launch_seconds:
            sums.add("launch", self.chip.launch_seconds * self.layout.microbatches, "launch")
        return StepCost(tuple(sums.terms()), tuple(sums.transfers), sums.flops)


@dataclass(frozen=True)
class _PricedNode:
    """One node in one direction; transfers with their seconds and bound."""

    node: Node
    flops: float
    seconds: float
    bound: str
    transfers: tuple[tuple[Transfer, float, str], ...]


class _Sums:
    """Adds passes up into terms and transfers."""

    def __init__(self, overlap: float) -> None:
        self.overlap = overlap
        self.transfers: list[PlannedTransfer] = []
        self.flops = 0.0
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, name: str, seconds: float, bound: str) -> None:
        self._seconds[name, bound] = self._seconds.get((name, bound), 0.0) + seconds

    def terms(self) -> list[Term]:
        found = [Term(name, seconds, bound) for (name, bound), seconds in self._seconds.items() if seconds]
        return sorted(found, key=lambda term: -term.seconds)

    def add_pass(self, direction: Direction, nodes: list[_PricedNode], times: int) -> None:
        """One direction of a segment, run `times` times; what hides under its work is not added."""
        work = sum(priced.seconds for priced in nodes)
        waiting = sum(seconds for p in nodes for t, seconds, _ in p.transfers if not t.critical)
        exposed = 1 - min(1.0, self.overlap * work / waiting) if waiting else 0.0
        for priced in nodes:
            self.flops += priced.flops * times
            self.add(f"{priced.node.kind} ({direction})", priced.seconds * times, priced.bound)
            for transfer, seconds, bound in priced.transfers:
                share = 1.0 if transfer.critical else exposed
                self.add_transfer(transfer, seconds, bound, direction, times, share)

    def add_transfer(
        self,
        transfer: Transfer,
        seconds: float,
        bound: str,
        direction: Direction,
        times: int,
        exposed: float = 1.0,
    ) -> None:
        self.transfers.append(PlannedTransfer(transfer, direction, times, seconds, bound, exposed))
        self.add(_transfer_name(transfer), seconds * times * exposed, bound)


def _transfer_name(transfer: Transfer) -> str:
    kind = "activations" if transfer.critical else "weights and gradients"
    return f"{kind} over {'·'.join(transfer.axes)}"
