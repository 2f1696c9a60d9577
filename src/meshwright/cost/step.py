"""The time of one step of a recorded graph: passes with compute, waiting and exposed transfers.

    pass   = work + waiting . critical transfers + other transfers - overlap . min(other transfers, work)
    stage  = its layers' passes, with the embedding on the first and the head on the last
    step   = microbatches . busiest stage + bubble + hops + work once per step: sums of gradients that do not
             hide under the last backward pass, the update, gathers of updated weights
    pass   = at least the host's time to launch its operations and collectives

Critical transfers (a partial sum that the next operation reads) stop a pass for the share `waiting` of their
time. Exchanges of tokens between experts stop it for the share `exchanging`, but hide if the schedule joins
the passes of two microbatches. In the meantime, and at the start and end of kernels, weights of the next
products are read, for the share `prefetch` of memory-bound time. Other transfers (weights gathered ahead,
gradients reduced later) hide under the work of the same pass. `overlap` is the share of hidden time that
costs nothing: a transfer takes memory bandwidth, power and, on GPUs, processors from concurrent work.

The bubble and the exposed hops are those of a simulation of the schedule's table (cost/pipeline). Prefill and
generate are the same sum over forward passes, without work once per step. Within a pass, gathers of weights
over the same axes are one message, and so are sums of gradients, as in compilers and frameworks: they share
the latency of a message.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from meshwright.cost.arrays import larger, largest, smaller
from meshwright.cost.collectives import CollectivePrice, collective_seconds
from meshwright.cost.eager import flushes
from meshwright.cost.graph import Direction, Graph, Transfer
from meshwright.cost.memory import saved_bytes
from meshwright.cost.passes import Dtypes, SegmentPass, passes, work_seconds
from meshwright.cost.pipeline import Hops, PassSeconds, Times, hops
from meshwright.cost.pipeline.stages import (
    PerStep,
    SegmentRuns,
    depth_counts,
    idle_runs,
    joins_passes,
    mean_runs,
    stage_counts,
    stage_updates,
)
from meshwright.cost.priced import PricedCollective
from meshwright.cost.state import StageState
from meshwright.hardware.chip import Chip, Switch, Torus
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.layout.rules import STAGES
from meshwright.units import format_seconds

# The bound of transfers between chip and host.
HOST = "host_link"
# Shorter than all prices, to avoid a division by zero.
_AN_INSTANT = 1e-30


@dataclass(frozen=True)
class Term:
    """A share of the step.

    bound: its limit: compute, hbm, ici, dcn, host_link, bubble or launch.
    """

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True)
class StepCost:
    """The parts of one step on the busiest chip.

    executed_flops: of matmuls and attention, recomputation and idle runs included, on the mean chip. runs: of
    each segment of the graph on the busiest chip.
    """

    terms: tuple[Term, ...]
    collectives: tuple[PricedCollective, ...]
    executed_flops: float
    runs: tuple[float, ...] = ()

    def __repr__(self) -> str:
        collectives = f"{len(self.collectives)} collectives"
        return f"StepCost({format_seconds(self.seconds)} bound by {self.bound}, {collectives})"

    @cached_property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    def scaled(self, factor: float) -> "StepCost":
        """All times multiplied by `factor`."""
        if factor == 1:
            return self
        return replace(
            self,
            terms=tuple(replace(term, seconds=term.seconds * factor) for term in self.terms),
            collectives=tuple(
                replace(
                    priced, seconds=priced.seconds * factor, exposed_seconds=priced.exposed_seconds * factor
                )
                for priced in self.collectives
            ),
        )

    @cached_property
    def bound(self) -> str:
        """The resource that takes the largest share of the step."""
        totals: dict[str, float] = {}
        for term in self.terms:
            totals[term.bound] = totals.get(term.bound, 0.0) + term.seconds
        return max(totals, key=totals.__getitem__)


class StepPricer:
    """Prices one recorded microbatch on one machine, itemised.

    placement: one of `at_step_rates(hardware).placements(layout.mesh)`; innermost axes first by default.
    """

    def __init__(
        self, graph: Graph, layout: Layout, hardware: Hardware, placement: Placement | None = None
    ) -> None:
        self.graph, self.layout, self.chip = graph, layout, hardware.chip
        self.dtypes, self.software = Dtypes.of(layout), hardware.software
        self.placement = placement or at_step_rates(hardware).place(layout.mesh)
        self._prices: dict[tuple, CollectivePrice] = {}

    def cost(self, stage: int | None = None) -> StepCost:
        """The parts of one step: every microbatch in the graph's directions; in training also the update.

        stage: the stage of the pipeline whose work, FLOPs and collectives are returned; by default the
        busiest's, with the FLOPs of the mean chip. The step's seconds are the same.
        """
        timed, microbatches = self._timed(), self.layout.schedule.microbatches
        stages = self._stages()
        number = self._busiest(timed) if stage is None else stage
        busiest = stages[number]
        sums = _Sums(self._price)
        idle = [idle_runs(self.graph, self.layout, number) for number in range(len(timed))]
        for count, directions, runs in zip(busiest, timed, idle, strict=True):
            for timed_pass in directions:
                sums.add_pass(timed_pass, count * microbatches, runs)
        executed = mean_runs(self.graph, self.layout, stage)
        flops = sum(
            count * timed_pass.work.flops
            for count, directions in zip(executed, timed, strict=True)
            for timed_pass in directions
        )
        if self.layout.pipe > 1:
            self._add_pipeline(sums, timed, sum(stage_times(timed, busiest)), stage)
        slowdown = 1.0
        if self.graph.trains:
            self._add_once(sums, timed, number)
            self._add_update(sums, stage or 0)
            slowdown = self.chip.step.slowdown
        elif launch := self.chip.step.launch_seconds:
            sums.add("launch", launch, "launch")
        runs = tuple(count * microbatches for count in busiest)
        return StepCost(tuple(sums.terms()), tuple(sums.collectives), flops, runs).scaled(slowdown)

    def _stages(self) -> tuple[SegmentRuns, ...]:
        layout = self.layout
        return stage_counts(self.graph, layout.schedule.pipeline, layout.pipe, layout.schedule.interleave)

    def _per_step(self, stage: int) -> PerStep:
        schedule, pipe = self.layout.schedule, self.layout.pipe
        return stage_updates(self.graph, schedule.pipeline, pipe, schedule.interleave)[stage]

    def _busiest(self, timed: "list[list[TimedPass]]") -> int:
        """The stage with the longest passes."""
        seconds = [sum(stage_times(timed, counts)) for counts in self._stages()]
        return seconds.index(max(seconds))

    def _price(self, transfer: Transfer) -> CollectivePrice:
        """The price of one run of a transfer."""
        transfer = as_sent(transfer, self.layout, self.chip)
        key = (transfer.op, transfer.gathered_bytes, transfer.axes, transfer.copies, transfer.critical)
        if key not in self._prices:
            price = collective_seconds(
                transfer.op, transfer.gathered_bytes, transfer.axes, self.placement, copies=transfer.copies
            )
            more = self.chip.step.collective_seconds if price.link else 0.0
            more += lost_at_nodes(transfer, self.placement, self.chip)
            self._prices[key] = price._replace(seconds=price.seconds + more)
        return self._prices[key]

    def _timed(self) -> "list[list[TimedPass]]":
        """The passes of every segment."""
        schedule = self.layout.schedule
        joined = joins_passes(schedule.pipeline, self.layout.pipe, schedule.interleave)

        def seconds_of(transfer: Transfer) -> float:
            return self._price(transfer).seconds

        def lost(transfer: Transfer) -> float:
            return lost_between_stages(transfer, self.placement, self.chip)

        def timed(work: SegmentPass) -> TimedPass:
            return TimedPass(work, sent_together(work.transfers, seconds_of), self.chip, lost, joined=joined)

        return timed_passes(self.graph, self.layout, self.dtypes, self.chip, timed)

    def _add_once(self, sums: "_Sums", timed: "list[list[TimedPass]]", stage: int) -> None:
        """Adds transfers once per step, hidden under the free time of one microbatch's passes.

        Gradients are summed during the last backward pass, updated weights gathered during the first forward
        pass.
        """
        counts = self._stages()[stage]
        hiding: tuple[tuple[Direction, Direction], ...] = (("forward", "update"), ("backward", "backward"))
        for (direction, named), times in zip(hiding, self._per_step(stage), strict=True):
            waiting, room = done_once(timed, counts, times, direction)
            exposed = exposed_share(waiting, room, self.chip.step.overlap) if waiting else 0.0
            for count, timed_pass in _in_direction(timed, times, direction):
                for transfer, seconds in timed_pass.once:
                    sums.add_transfer(transfer, named, count, exposed, seconds)

    def _add_pipeline(
        self,
        sums: "_Sums",
        timed: "list[list[TimedPass]]",
        microbatch_seconds: float,
        stage: int | None,
    ) -> None:
        """Adds a stage's waits for other stages' passes (the bubble) and for hops.

        microbatch_seconds: of the stage's passes. stage: the sender of the hops; None for the stage with
        most. Waits that are only for hops of other stages, beyond all of its own, count as bubble.
        """
        layout, sent_hops = self.layout, self._hops(self._pipeline_times(timed), stage)
        waited = max(0.0, sent_hops.makespan_seconds - layout.schedule.microbatches * microbatch_seconds)
        exposed = min(sent_hops.exposed_seconds, waited, sent_hops.count * sent_hops.seconds)
        sums.add("pipeline bubble", waited - exposed, "bubble")
        sent = hop_transfer(self.graph, layout.pipe)
        share = exposed / (sent_hops.count * sent_hops.seconds) if exposed else 0.0
        sums.add_transfer(sent, "forward", sent_hops.forward, share)
        sums.add_transfer(sent, "backward", sent_hops.backward, share)

    def hops(self) -> Hops:
        """The hops between stages in a step: number, seconds of each, exposed time."""
        return self._hops(self.pipeline_times())

    def _hops(self, times: Times, stage: int | None = None) -> Hops:
        layout = self.layout
        numbers = layout.pipe, layout.schedule.microbatches, layout.schedule.interleave
        return hops(layout.schedule.pipeline, *numbers, times, stage)

    def pipeline_times(self) -> Times:
        """Seconds of one microbatch's passes at every depth of a pipeline, and of its hops."""
        return self._pipeline_times(self._timed())

    def _pipeline_times(self, timed: "list[list[TimedPass]]") -> Times:
        layout = self.layout
        by_depth = depth_counts(self.graph, layout.schedule.pipeline, layout.pipe, layout.schedule.interleave)
        seconds = {counts: PassSeconds(*stage_times(timed, counts)) for counts in set(by_depth)}
        hop = self._price(hop_transfer(self.graph, layout.pipe)).seconds
        return Times([seconds[counts] for counts in by_depth], hop)

    def _add_update(self, sums: "_Sums", stage: int) -> None:
        """Adds the optimizer, its transfers, and launches."""
        state, launch = StageState(self.graph, self.layout, stage), self.chip.step.launch_seconds
        sums.add("optimizer", *work_seconds(state.update_work(), "update", self.dtypes, self.chip))
        sums.add("optimizer state from and to the host", host_update_seconds(state, self.chip), HOST)
        for transfer, count in state.update_transfers(self.layout.schedule.microbatches):
            is_gradient = transfer.what == "gradients"
            sums.add_transfer(transfer, "backward" if is_gradient else "update", count, 1.0)
        if launch:
            sums.add("launch", launch * self.layout.schedule.microbatches, "launch")
        sums.add("allocator", self._flush_seconds(), "launch")

    def _flush_seconds(self) -> float:
        """Seconds of an allocator's flushes (`StepEfficiency`)."""
        each = self.chip.step.host_flush_seconds
        room = self.chip.program_bytes
        return each * flushes(self.graph, self.layout, self.software, room) if each else 0.0


def host_update_seconds(state: StageState, chip: Chip) -> Any:
    """Seconds of the optimizer's state from the host before an update, and back after it."""
    return 2 * host_seconds(state.host_bytes, chip)


def host_seconds(num_bytes: Any, chip: Chip) -> Any:
    """Seconds of a transfer between chip and host, one way."""
    return 0.0 * num_bytes if chip.platform.host_memory else num_bytes / chip.host_link_bytes_per_second


def as_sent(transfer: Transfer, layout: Layout, chip: Chip) -> Transfer:
    """`transfer` in the software's form: some sum whole gradients under ZeRO 1 (`whole_sums`)."""
    scattered = transfer.what == "gradients" and transfer.op == "reduce_scatter"
    if chip.step.whole_sums and scattered and layout.rules.zero_stage == 1:
        return replace(transfer, op="all_reduce")
    return transfer


def lost_at_nodes(transfer: Transfer, placement: Placement, chip: Chip) -> float:
    """Seconds that a collective waits for hosts of other domains (`StepEfficiency.host_node_seconds`)."""
    if not transfer.critical or transfer.op == "permute":
        return 0.0
    links = placement.stretches(transfer.axes)
    domains = prod(link.size for link in links if link.is_outer)
    return chip.step.host_node_seconds * (domains - 1)


def lost_between_stages(transfer: Transfer, placement: Placement, chip: Chip) -> float:
    """Additional seconds of hosts to launch a collective (`StepEfficiency.host_stage_seconds`)."""
    if not chip.step.host_stage_seconds or not transfer.critical or transfer.op == "permute":
        return 0.0
    stages = placement.stretches((STAGES,)) if placement.sizes.get(STAGES, 1) > 1 else ()
    if not any(link.is_outer for link in stages):
        return 0.0
    return chip.step.host_stage_seconds * prod(link.size for link in placement.stretches(transfer.axes))


def exposed_share(waiting: Any, room: Any, overlap: float) -> Any:
    """The share of `waiting` seconds of a transfer that does not hide in `room` seconds."""
    return 1 - overlap * (room / largest((room, waiting, _AN_INSTANT)))


@lru_cache(maxsize=256)
def at_step_rates(hardware: Hardware) -> Hardware:
    """`hardware` with the bandwidth and the collectives of its links in a step."""
    network, shares = hardware.chip.network, hardware.chip.step.links
    if isinstance(network, Torus):
        network = replace(
            network,
            one_way_bytes_per_second=network.one_way_bytes_per_second * shares.get("ici", 1.0),
            dcn_bytes_per_second=network.dcn_bytes_per_second * shares.get("dcn", 1.0),
            scatter_passes=hardware.chip.step.scatter_passes,
        )
    elif isinstance(network, Switch):
        network = replace(
            network,
            nvlink_bytes_per_second=network.nvlink_bytes_per_second * shares.get("nvlink", 1.0),
            nic_bytes_per_second=network.nic_bytes_per_second * shares.get("network", 1.0),
            nic_hop_seconds=network.nic_hop_seconds * hardware.chip.step.network_latency,
            falloff=hardware.chip.step.network_falloff,
        )
    return replace(hardware, chip=replace(hardware.chip, network=network))


class TimedPass:
    """One pass with the seconds of its transfers, per microbatch and per step.

    sent: its transfers, as from `sent_together`; arrays of seconds for many layouts. joined: whether another
    microbatch's pass overlaps it and hides its exchanges of tokens. lost_by_hosts: seconds of hosts to launch
    a transfer, in addition to `host_collective_seconds`. each, once: a transfer with the seconds of its runs
    in a row. prefetched: seconds of reading weights ahead. room: seconds that could hide more. held_up:
    seconds that the chip waits for the host to launch the pass. for_host: seconds that it waits for
    activations between chip and host.
    """

    def __init__(
        self,
        work: SegmentPass,
        sent: Sequence[tuple[Transfer, Any]],
        chip: Chip,
        lost_by_hosts: Callable[[Transfer], Any] = lambda _: 0.0,
        *,
        joined: bool = False,
    ) -> None:
        self.work, self._step, self._joined = work, chip.step, joined
        self.each = [pair for pair in sent if not pair[0].once]
        self.once = [pair for pair in sent if pair[0].once]
        self._behind = sum(seconds for transfer, seconds in self.each if not self._is_awaited(transfer))
        waited = sum(self._share(one) * seconds for one, seconds in self.each if self._is_awaited(one))
        covered = smaller(work.seconds, self._behind)
        self._hidden = chip.step.overlap * covered
        gaps = work.idle + waited
        self.prefetched = chip.step.prefetch * smaller(work.streamed, gaps) if chip.step.prefetch else 0.0
        busy = work.seconds + waited + self._behind - self._hidden - self.prefetched
        collectives = sum(
            transfer.repeat * (chip.step.host_collective_seconds + lost_by_hosts(transfer))
            for transfer, _ in self.each
        )
        launches = chip.step.host_seconds * work.launches + collectives
        self.seconds = larger(busy, launches)
        self.held_up = self.seconds - busy
        self.room = work.seconds - covered + self.held_up
        if chip.step.gathers_first and work.direction == "forward":  # which hides only updated weights
            self.room = 0.0 * self.room
        self.for_host: Any = 0.0

    def _is_awaited(self, transfer: Transfer) -> bool:
        return transfer.critical and not (self._joined and transfer.what == "tokens")

    def _share(self, transfer: Transfer) -> float:
        return self._step.exchanging if transfer.what == "tokens" else self._step.waiting

    def exposed(self, transfer: Transfer) -> float:
        """The share of a transfer's time for which compute waits."""
        if self._is_awaited(transfer):
            return self._share(transfer)
        return 1 - self._hidden / self._behind if self._behind else 0.0

    def beside(self, transfer_seconds: Any) -> "TimedPass":
        """This pass during a transfer between chip and host, which takes at least as long."""
        extended = copy(self)
        extended.seconds = larger(self.seconds, transfer_seconds)
        extended.for_host = extended.seconds - self.seconds
        return extended


_SENT_TOGETHER = ("weights", "gradients", "updated weights")


def sent_together(
    transfers: Iterable[Transfer], seconds_of: Callable[[Transfer], Any]
) -> list[tuple[Transfer, Any]]:
    """Each transfer with the seconds of its runs in a row. seconds_of: of one run.

    Weights and gradients that compute does not wait for are one message with others over the same axes, and
    have a share of its time by bytes.
    """
    groups: dict[tuple, list[Transfer]] = {}
    for place, transfer in enumerate(transfers):
        kind = (transfer.what, transfer.op, transfer.axes, transfer.once)
        together = transfer.what in _SENT_TOGETHER and not transfer.critical
        groups.setdefault(kind if together else (place,), []).append(transfer)
    pairs = []
    for group in groups.values():
        total = sum(one.gathered_bytes for one in group)
        seconds = seconds_of(replace(group[0], gathered_bytes=total)) * group[0].repeat
        pairs += [
            (each, seconds * (each.gathered_bytes / total) if len(group) > 1 else seconds) for each in group
        ]
    return pairs


def timed_passes(
    graph: Graph,
    layout: Layout,
    dtypes: Dtypes,
    chip: Chip,
    timed: Callable[[SegmentPass], TimedPass],
) -> list[list[TimedPass]]:
    """The passes of each segment, in each of the graph's directions under the layout's remat policy.

    If activations are offloaded, those of a layer are sent during the next layer's forward pass, and return
    before its backward pass: each of the two passes takes at least as long as that transfer.
    """
    by_segment = []
    for segment in graph.segments:
        of_segment = list(map(timed, passes(segment, graph.directions, layout.schedule.remat, dtypes, chip)))
        if layout.schedule.offload and segment.source:
            sent = host_seconds(saved_bytes(segment, layout.schedule.remat), chip)
            of_segment = [
                each if each.work.direction == "recompute" else each.beside(sent) for each in of_segment
            ]
        by_segment.append(of_segment)
    return by_segment


def stage_times(timed: list[list[TimedPass]], counts: SegmentRuns) -> tuple[Any, Any, Any]:
    """(forward, backward without deferrable work, deferrable work) of a microbatch on a stage."""
    forward = backward = put_off = 0.0
    for count, directions in zip(counts, timed, strict=True):
        for timed_pass in directions:
            if timed_pass.work.direction == "forward":
                forward += count * timed_pass.seconds
            else:
                backward += count * (timed_pass.seconds - timed_pass.work.put_off)
                put_off += count * timed_pass.work.put_off
    return forward, backward, put_off


def done_once(
    timed: list[list[TimedPass]], counts: SegmentRuns, times: SegmentRuns, direction: Direction
) -> tuple[Any, Any]:
    """(waiting, room) of a stage's transfers once per step, in seconds.

    waiting: the transfers' time. room: time of one microbatch's passes that can hide them. counts: runs of
    each segment per microbatch. times: runs of its transfers per step.
    """
    waiting = sum(
        count * seconds
        for count, timed_pass in _in_direction(timed, times, direction)
        for _, seconds in timed_pass.once
    )
    return waiting, sum(count * one.room for count, one in _in_direction(timed, counts, direction))


def _in_direction(
    timed: list[list[TimedPass]], counts: SegmentRuns, direction: Direction
) -> list[tuple[float, TimedPass]]:
    return [
        (count, timed_pass)
        for count, directions in zip(counts, timed, strict=True)
        for timed_pass in directions
        if timed_pass.work.direction == direction
    ]


def hop_transfer(graph: Graph, pipe: int) -> Transfer:
    """A hop between stages: a layer's input, or its cotangent."""
    source = next(segment.source for segment in graph.segments if segment.source)
    sent = source.bytes_per_device * pipe
    name, what = source.array.name, "activations between stages"
    return Transfer(what, "permute", (STAGES,), name, sent, source.dtype, critical=True)


class _Sums:
    """Adds passes up into terms and collectives."""

    def __init__(self, price: Callable[[Transfer], CollectivePrice]) -> None:
        self.collectives: list[PricedCollective] = []
        self._price = price
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, name: str, seconds: float, bound: str) -> None:
        self._seconds[name, bound] = self._seconds.get((name, bound), 0.0) + seconds

    def terms(self) -> list[Term]:
        terms = [Term(name, seconds, bound) for (name, bound), seconds in self._seconds.items() if seconds]
        return sorted(terms, key=lambda term: -term.seconds)

    def add_pass(self, timed: TimedPass, times: float, idle: float) -> None:
        """One direction of a segment, run `times` times; hidden transfers are not added.

        idle: runs of its collectives for each of these; idle runs take no time here.
        """
        for name, bound, seconds in timed.work.terms:
            self.add(name, seconds * times, bound)
        self.add(f"matmul ({timed.work.direction})", -timed.prefetched * times, "hbm")
        for transfer, seconds in timed.each:
            share = timed.exposed(transfer) / idle
            self.add_transfer(transfer, timed.work.direction, times * idle, share, seconds)
        self.add("host launches", timed.held_up * times, "launch")
        self.add("activations to and from the host", timed.for_host * times, HOST)

    def add_transfer(
        self,
        transfer: Transfer,
        direction: Direction,
        times: float,
        exposed: float,
        seconds: float | None = None,
    ) -> None:
        """A transfer of a pass that runs `times` times; exposed: the share of its time that is not hidden.

        seconds: of its runs in a row; None if it is sent by itself.
        """
        price, runs = self._price(transfer), times * transfer.repeat
        one_run = price.seconds if seconds is None else seconds / transfer.repeat
        self.add_collective(
            PricedCollective(
                transfer.what,
                direction,
                transfer.op,
                transfer.axes,
                transfer.tensor,
                transfer.gathered_bytes,
                transfer.dtype,
                runs,
                one_run,
                one_run * runs * exposed,
                price.resource,
            )
        )

    def add_collective(self, priced: PricedCollective) -> None:
        if priced.count:
            self.collectives.append(priced)
            self.add(priced.name, priced.exposed_seconds, priced.bound)
