"""The time of one training step: a sum over segments of compute, waiting and what could not hide.

    pass   = work + waiting . critical transfers + other transfers - overlap . min(other transfers, work)
    stage  = its layers' passes, with the embedding on the first and the head on the last
    step   = microbatches . busiest stage + bubble + what is done once: sums of gradients that do not
             hide under the last backward pass, the update, weights gathered after it

Critical transfers (a partial sum that the next operation reads) stop a pass, for the share `waiting` of
their time. The others (weights gathered ahead, gradients reduced behind) hide under the work of the same
pass. `overlap` is the share of what hides that costs nothing: a transfer takes memory bandwidth, power
and, on GPUs, processors from the work beside it. The bubble is that of the schedule's table
(cost/pipeline).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from meshwright.cost.collectives import OUTER_LINKS, CollectivePrice, collective_seconds
from meshwright.cost.figures import largest, smaller
from meshwright.cost.graph import Direction, Graph, Transfer, Work
from meshwright.cost.passes import Dtypes, Pass, passes, work_seconds
from meshwright.cost.pipeline import PassSeconds, Times, makespan
from meshwright.cost.stages import Counts, chunk_counts, num_chunks, stage_counts
from meshwright.hardware.chip import Chip, Switch, Torus
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.notation.array import Axes

# Shorter than anything that is priced, and no zero to divide by.
_AN_INSTANT = 1e-30


@dataclass(frozen=True)
class PlannedTransfer:
    """A transfer with the pass it belongs to and how often a step runs it.

    seconds: of one run. bound: "ici" inside a slice or NVLink domain, "dcn" between them.
    exposed: the share of the seconds that does not hide under compute.
    """

    transfer: Transfer
    direction: Direction
    count: float
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
    """A share of the step. bound: what would have to be faster: compute, hbm, ici, dcn, bubble or launch."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True)
class StepCost:
    """The parts of one step on the busiest chip.

    executed_flops: of matmuls and attention, recomputation included, on the mean chip.
    runs: how often the busiest chip runs each segment of the graph.
    """

    terms: tuple[Term, ...]
    transfers: tuple[PlannedTransfer, ...]
    executed_flops: float
    runs: tuple[float, ...] = ()

    @cached_property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    def scaled(self, factor: float) -> "StepCost":
        """All times `factor` times as long."""
        if factor == 1:
            return self
        return replace(
            self,
            terms=tuple(replace(term, seconds=term.seconds * factor) for term in self.terms),
            transfers=tuple(replace(one, seconds=one.seconds * factor) for one in self.transfers),
        )

    @cached_property
    def bound(self) -> str:
        """The resource that takes the largest share of the step."""
        totals: dict[str, float] = {}
        for term in self.terms:
            totals[term.bound] = totals.get(term.bound, 0.0) + term.seconds
        return max(totals, key=totals.__getitem__)


class StepPricer:
    """Prices one recorded microbatch on one machine; the remat policies share the prices of transfers.

    placement: one of `at_step_rates(hardware).placements(layout.mesh)`; innermost axes first by default.
    """

    def __init__(
        self, graph: Graph, layout: Layout, hardware: Hardware, placement: Placement | None = None
    ) -> None:
        self.graph, self.layout, self.chip = graph, layout, hardware.chip
        self.dtypes = Dtypes.of(layout)
        self.placement = placement or at_step_rates(hardware).place(layout.mesh)
        self._prices: dict[tuple, tuple[float, str]] = {}

    def cost(self, remat: str, update: Work, norm_axes: Axes) -> StepCost:
        """The cost of a step under one remat policy.

        update: the optimizer's work. norm_axes: the mesh axes over which the gradient norm is summed.
        """
        priced = [self._price_segment(passes(s, remat, self.dtypes, self.chip)) for s in self.graph.segments]
        stages = self._stages()
        busiest = max(stages, key=lambda counts: sum(stage_times(priced, counts)))
        sums = _Sums()
        for count, directions in zip(busiest, priced, strict=True):
            for one in directions:
                sums.add_pass(one, count * self.layout.microbatches)
        sums.flops = sum(
            segment.count * one.work.flops
            for segment, directions in zip(self.graph.segments, priced, strict=True)
            for one in directions
        ) * (self.layout.microbatches / self.layout.pipe)
        self._add_once(sums, priced, busiest)
        if self.layout.pipe > 1:
            sums.add("pipeline bubble", self._bubble(priced, stages), "bubble")
        self._add_update(sums, update, norm_axes)
        runs = tuple(count * self.layout.microbatches for count in busiest)
        cost = StepCost(tuple(sums.terms()), tuple(sums.transfers), sums.flops, runs)
        return cost.scaled(self.chip.step.slowdown)

    def _stages(self) -> list[Counts]:
        """What every stage runs."""
        pipe, interleave = self.layout.pipe, self.layout.interleave
        return [stage_counts(self.graph, pipe, interleave, stage) for stage in range(pipe)]

    def _price(self, transfer: Transfer) -> "Priced":
        key = (transfer.op, transfer.gathered_bytes, transfer.axes, transfer.copies)
        if key not in self._prices:
            price = transfer_price(transfer, self.placement)
            self._prices[key] = price.seconds, "dcn" if price.link in OUTER_LINKS else "ici"
        seconds, bound = self._prices[key]
        return Priced(transfer, seconds * transfer.repeat, bound)

    def _price_segment(self, directions: Iterable[Pass]) -> "list[PricedPass]":
        return [
            PricedPass(
                one,
                [self._price(t) for t in one.transfers if not t.once],
                [self._price(t) for t in one.transfers if t.once],
                self.chip.step.overlap,
                self.chip.step.waiting,
            )
            for one in directions
        ]

    def _add_once(self, sums: "_Sums", priced: "list[list[PricedPass]]", counts: Counts) -> None:
        """What a step does once hides under what one microbatch's passes leave.

        Gradients are summed behind the last backward pass, updated weights gathered ahead of the first
        forward one.
        """
        hiding: tuple[tuple[Direction, Direction], ...] = (("forward", "update"), ("backward", "backward"))
        for direction, named in hiding:
            waiting, room = done_once(priced, counts, direction)
            exposed = exposed_share(waiting, room, self.chip.step.overlap) if waiting else 0.0
            for count, one in _in_direction(priced, counts, direction):
                for item in one.once:
                    sums.add_transfer(item, named, count, exposed)

    def _bubble(self, priced: "list[list[PricedPass]]", stages: list[Counts]) -> float:
        """Seconds that the busiest stage waits: the schedule's makespan less all its passes."""
        layout, times = self.layout, self._pipeline_times(priced, stages)
        whole = makespan(layout.schedule.pipeline, layout.pipe, layout.microbatches, layout.interleave, times)
        busy = layout.microbatches * max(sum(stage_times(priced, counts)) for counts in stages)
        return max(0.0, whole - busy)

    def pipeline_times(self, remat: str) -> Times:
        """Seconds of the passes of one microbatch through the chunks of a pipeline, and of its hops."""
        priced = [self._price_segment(passes(s, remat, self.dtypes, self.chip)) for s in self.graph.segments]
        return self._pipeline_times(priced, self._stages())

    def _pipeline_times(self, priced: "list[list[PricedPass]]", stages: list[Counts]) -> Times:
        layout, sent = self.layout, sent_bytes(self.graph, self.layout.pipe)
        hop = collective_seconds("permute", sent, ("pipe",), self.placement).seconds
        body, special = chunk_counts(
            self.graph, stages, num_chunks(layout.schedule.pipeline, layout.interleave)
        )
        return Times(
            body=PassSeconds(*stage_times(priced, body)),
            special={depth: PassSeconds(*stage_times(priced, counts)) for depth, counts in special.items()},
            hop_seconds=hop_share(self.chip, layout.interleave) * hop,
        )

    def _add_update(self, sums: "_Sums", update: Work, norm_axes: Axes) -> None:
        sums.add("optimizer", *work_seconds(update, "update", self.dtypes, self.chip))
        if norm_axes:
            sums.add_transfer(self._price(norm_transfer(norm_axes)), "update", 1, 1.0)
        if self.chip.step.launch_seconds:
            sums.add("launch", self.chip.step.launch_seconds * self.layout.microbatches, "launch")


def norm_transfer(axes: Axes) -> Transfer:
    """The sum of the squares of the gradients, over the axes that split them."""
    return Transfer("all_reduce", axes, "grad_norm", 4, "f32", critical=True)


def exposed_share(waiting: Any, room: Any, overlap: float) -> Any:
    """Of the seconds `waiting` of what a step does once, the share that does not hide in `room`."""
    return 1 - overlap * (room / largest((room, waiting, _AN_INSTANT)))


def transfer_price(transfer: Transfer, placement: Placement) -> CollectivePrice:
    """The price of one run of a transfer."""
    return collective_seconds(
        transfer.op, transfer.gathered_bytes, transfer.axes, placement, copies=transfer.copies
    )


@lru_cache(maxsize=256)
def at_step_rates(hardware: Hardware) -> Hardware:
    """`hardware` whose links have the bandwidth that a step's collectives reach of it."""
    network, shares = hardware.chip.network, hardware.chip.step.links
    if isinstance(network, Torus):
        network = replace(
            network,
            one_way_bytes_per_second=network.one_way_bytes_per_second * shares.get("ici", 1.0),
            dcn_bytes_per_second=network.dcn_bytes_per_second * shares.get("dcn", 1.0),
        )
    elif isinstance(network, Switch):
        network = replace(
            network,
            nvlink_bytes_per_second=network.nvlink_bytes_per_second * shares.get("nvlink", 1.0),
            nic_bytes_per_second=network.nic_bytes_per_second * shares.get("network", 1.0),
        )
    return replace(hardware, chip=replace(hardware.chip, network=network))


@dataclass(frozen=True)
class Priced:
    """A transfer with the seconds of its runs in a row; bound: as of PlannedTransfer."""

    transfer: Transfer
    seconds: Any
    bound: str


class PricedPass:
    """One pass with its transfers priced: those of every microbatch, and those of a step.

    exposed: the share of its hideable transfers that does not hide, waiting: of those that compute needs at
    once. room: seconds that could hide more. Seconds are arrays in a price of many layouts.
    """

    def __init__(
        self, work: Pass, each: list[Priced], once: list[Priced], overlap: float, waiting: float
    ) -> None:
        self.work, self.each, self.once, self.waiting = work, each, once, waiting
        self._behind = sum(item.seconds for item in each if not item.transfer.critical)
        needed = sum(item.seconds for item in each if item.transfer.critical)
        covered = smaller(work.seconds, self._behind)
        self._hidden = overlap * covered
        self.room = work.seconds - covered
        self.seconds = work.seconds + waiting * needed + self._behind - self._hidden

    @property
    def exposed(self) -> float:
        return 1 - self._hidden / self._behind if self._behind else 0.0


def stage_times(priced: list[list[PricedPass]], counts: Counts) -> tuple[Any, Any, Any]:
    """(forward, backward but for what may be put off, that) of one microbatch on a stage, in seconds."""
    forward = backward = put_off = 0.0
    for count, directions in zip(counts, priced, strict=True):
        for one in directions:
            if one.work.direction == "forward":
                forward += count * one.seconds
            else:
                backward += count * (one.seconds - one.work.put_off)
                put_off += count * one.work.put_off
    return forward, backward, put_off


def done_once(priced: list[list[PricedPass]], counts: Counts, direction: Direction) -> tuple[Any, Any]:
    """Seconds of what a step does once on a stage, and what of one microbatch's passes could hide it."""
    chosen = _in_direction(priced, counts, direction)
    waiting = sum(count * item.seconds for count, one in chosen for item in one.once)
    return waiting, sum(count * one.room for count, one in chosen)


def _in_direction(
    priced: list[list[PricedPass]], counts: Counts, direction: Direction
) -> list[tuple[float, PricedPass]]:
    return [
        (count, one)
        for count, directions in zip(counts, priced, strict=True)
        for one in directions
        if one.work.direction == direction
    ]


def sent_bytes(graph: Graph, pipe: int) -> Any:
    """V of the hop from stage to stage."""
    source = next(segment.source for segment in graph.segments if segment.source)
    return source.bytes_per_device * pipe


def hop_share(chip: Chip, interleave: int) -> float:
    """Of a hop, what is waited for: with several chunks a stage has another one's pass to run meanwhile."""
    return 1 - chip.step.overlap if interleave > 1 else 1.0


class _Sums:
    """Adds passes up into terms and transfers."""

    def __init__(self) -> None:
        self.transfers: list[PlannedTransfer] = []
        self.flops = 0.0
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, name: str, seconds: float, bound: str) -> None:
        self._seconds[name, bound] = self._seconds.get((name, bound), 0.0) + seconds

    def terms(self) -> list[Term]:
        found = [Term(name, seconds, bound) for (name, bound), seconds in self._seconds.items() if seconds]
        return sorted(found, key=lambda term: -term.seconds)

    def add_pass(self, one: PricedPass, times: float) -> None:
        """One direction of a segment, run `times` times; what hides under its work is not added."""
        for name, bound, seconds in one.work.terms:
            self.add(name, seconds * times, bound)
        for item in one.each:
            share = one.waiting if item.transfer.critical else one.exposed
            self.add_transfer(item, one.work.direction, times, share)

    def add_transfer(self, item: Priced, direction: Direction, times: float, exposed: float) -> None:
        if not times:
            return
        self.transfers.append(
            PlannedTransfer(item.transfer, direction, times, item.seconds, item.bound, exposed)
        )
        self.add(_transfer_name(item.transfer), item.seconds * times * exposed, item.bound)


def _transfer_name(transfer: Transfer) -> str:
    kind = "activations" if transfer.critical or transfer.repeat > 1 else "weights and gradients"
    return f"{kind} over {'·'.join(transfer.axes)}"
