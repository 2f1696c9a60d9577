"""The time of one training step: a sum over segments of compute, waiting and what could not hide.

    segment = work + critical transfers + max(0, other transfers - overlap . work)

Work is max(FLOPs / peak, bytes / HBM bandwidth) of each node. Critical transfers (a partial sum
that the next operation reads) stop it. The others (weights gathered ahead, gradients reduced
behind) hide under the work of the same pass as far as the hardware overlaps them. A backward pass
is its recomputation and its own nodes. A step is `microbatches` passes and one optimizer update.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.graph import Direction, Graph, Node, Segment, Transfer, Work, recomputed_nodes
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout

FAST_LINKS = ("ici", "nvlink", "host")


@dataclass(frozen=True)
class PlannedTransfer:
    """A transfer with the pass it belongs to, its price, and how often a step runs it."""

    transfer: Transfer
    direction: Direction
    count: int
    seconds: float
    link: str

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
            "critical": t.critical,
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
    executed_flops: float

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


@dataclass(frozen=True)
class _Machine:
    """What one layout's work is priced on."""

    flops_per_second: float
    hbm_bytes_per_second: float
    overlap: float
    placement: Placement

    def compute_seconds(self, work: Work) -> float:
        return work.flops / self.flops_per_second

    def hbm_seconds(self, work: Work) -> float:
        return work.hbm_bytes / self.hbm_bytes_per_second

    def seconds(self, work: Work) -> float:
        return max(self.compute_seconds(work), self.hbm_seconds(work))

    def bound(self, work: Work) -> str:
        return "compute" if self.compute_seconds(work) >= self.hbm_seconds(work) else "hbm"


def train_step_cost(
    graph: Graph, layout: Layout, hardware: Hardware, update: Work, norm_axes: tuple[str, ...]
) -> StepCost:
    """The cost of one step whose microbatch is `graph`.

    update: the optimizer's work. norm_axes: the mesh axes over which the gradient norm is summed.
    """
    chip = hardware.chip
    machine = _Machine(
        chip.flops(layout.compute_dtype) * chip.matmul_efficiency,
        chip.hbm_bytes_per_second,
        chip.overlap,
        hardware.place(layout.mesh),
    )
    sums = _Sums(machine)
    for segment in graph.segments:
        times = segment.count * layout.microbatches
        for direction, nodes, back in _passes(segment, layout.remat):
            sums.add_pass(direction, nodes, times, back=back)
    sums.add_update(update, norm_axes)
    if chip.launch_seconds:
        sums.add("launch", chip.launch_seconds * layout.microbatches, "launch")
    return StepCost(tuple(sums.terms()), tuple(sums.transfers), sums.flops)


def _passes(segment: Segment, remat: str) -> Iterable[tuple[Direction, list[Node], bool]]:
    yield "forward", list(segment.nodes), False
    yield "recompute", recomputed_nodes(segment, remat), False
    yield "backward", list(segment.nodes), True


class _Sums:
    """Adds passes up into terms and transfers."""

    def __init__(self, machine: _Machine) -> None:
        self.machine = machine
        self.transfers: list[PlannedTransfer] = []
        self.flops = 0.0
        self._seconds: dict[tuple[str, str], float] = {}
        self._hidden_work = 0.0
        self._hideable: list[PlannedTransfer] = []

    def add(self, name: str, seconds: float, bound: str) -> None:
        if seconds:
            self._seconds[name, bound] = self._seconds.get((name, bound), 0.0) + seconds

    def terms(self) -> list[Term]:
        found = [Term(name, seconds, bound) for (name, bound), seconds in self._seconds.items()]
        return sorted(found, key=lambda term: -term.seconds)

    def add_pass(self, direction: Direction, nodes: list[Node], times: int, *, back: bool) -> None:
        work_seconds, hideable = 0.0, []
        for node in nodes:
            work = node.backward if back else node.forward
            seconds = self.machine.seconds(work)
            work_seconds += seconds
            self.flops += work.flops * times
            self.add(_work_name(node, direction), seconds * times, self.machine.bound(work))
            for transfer in node.backward_transfers if back else node.forward_transfers:
                planned = self._price(transfer, direction, times)
                if transfer.critical:
                    self.add(_transfer_name(transfer), planned.seconds * times, _link_bound(planned.link))
                else:
                    hideable.append(planned)
        self._expose(hideable, work_seconds, times)

    def _expose(self, hideable: list[PlannedTransfer], work_seconds: float, times: int) -> None:
        total = sum(planned.seconds for planned in hideable)
        exposed = total - min(total, self.machine.overlap * work_seconds)
        for planned in hideable:
            share = planned.seconds / total * exposed if total else 0.0
            self.add(_transfer_name(planned.transfer), share * times, _link_bound(planned.link))

    def _price(self, transfer: Transfer, direction: Direction, times: int) -> PlannedTransfer:
        price = collective_seconds(
            transfer.op, transfer.gathered_bytes, transfer.axes, self.machine.placement
        )  # pyright: ignore[reportArgumentType]
        planned = PlannedTransfer(transfer, direction, times, price.seconds, price.link or "ici")
        self.transfers.append(planned)
        return planned

    def add_update(self, update: Work, norm_axes: tuple[str, ...]) -> None:
        self.flops += update.flops
        self.add("optimizer", self.machine.seconds(update), self.machine.bound(update))
        if norm_axes:
            norm = self._price(Transfer("all_reduce", norm_axes, "grad_norm", 4, True), "update", 1)
            self.add("gradient norm", norm.seconds, _link_bound(norm.link))


def _work_name(node: Node, direction: Direction) -> str:
    return f"{node.kind} ({direction})"


def _transfer_name(transfer: Transfer) -> str:
    kind = "activations" if transfer.critical else "weights and gradients"
    return f"{kind} over {'·'.join(transfer.axes)}"


def _link_bound(link: str) -> str:
    return "ici" if link in FAST_LINKS else "dcn"
