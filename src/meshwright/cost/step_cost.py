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

The bubble and the exposed hops are simulated from the schedule's table (cost/pipeline). Prefill and
generate are the same sum over forward passes, without work once per step. Within a pass, gathers of weights
over the same axes are one message, and so are sums of gradients, as in compilers and frameworks: they share
the latency of a message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.collectives import CollectivePrice
from meshwright.cost.graph import Direction, Graph, Transfer
from meshwright.cost.passes import Dtypes, SegmentPass
from meshwright.cost.pipeline import Hops, Times, hops
from meshwright.cost.pipeline.stages import idle_runs, joins_passes, mean_runs
from meshwright.cost.priced import PricedCollective
from meshwright.cost.state import StageState
from meshwright.cost.step_memory import flushes
from meshwright.cost.step_seconds import (
    WITH_TRANSFERS_ONCE,
    Cut,
    SegmentSeconds,
    StagePasses,
    Update,
    hop_transfer,
)
from meshwright.cost.timed_passes import TimedPass, sent_together, timed_passes
from meshwright.cost.transfer_prices import TransferPrices, at_step_rates
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.units import format_seconds

# The bound of transfers between chip and host.
HOST = "host_link"


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
        self.graph, self.layout, self.dtypes = graph, layout, Dtypes.of(layout)
        self.chip, self.software = hardware.chip, hardware.software
        self.placement = placement or at_step_rates(hardware).place(layout.mesh)
        self._prices = TransferPrices(layout, self.chip, self.placement)
        schedule = layout.schedule
        self._cut: Cut = schedule.pipeline, layout.pipe, schedule.interleave

    def cost(self, stage: int | None = None) -> StepCost:
        """The parts of one step: every microbatch in the graph's directions; in training also the update.

        stage: the stage of the pipeline whose work, FLOPs and collectives are returned; by default the
        busiest's, with the FLOPs of the mean chip. The step's seconds are the same.
        """
        microbatches = self.layout.schedule.microbatches
        number = self._stages.busiest if stage is None else stage
        counts = self._stages.counts[number]
        sums = _Sums(self._prices.price, self.chip.step.slowdown if self.graph.trains else 1.0)
        for segment, (count, directions) in enumerate(zip(counts, self._timed, strict=True)):
            for timed_pass in directions:
                idle = idle_runs(self.graph, self.layout, segment)
                sums.add_pass(timed_pass, count * microbatches, idle)
        executed = mean_runs(self.graph, self.layout, stage)
        flops = sum(
            count * timed_pass.work.flops
            for count, directions in zip(executed, self._timed, strict=True)
            for timed_pass in directions
        )
        if self.layout.pipe > 1:
            self._add_pipeline(sums, stage)
        if self.graph.trains:
            self._add_once(sums, number)
            self._add_update(sums, stage or 0)
        elif launch := self.chip.step.launch_seconds:
            sums.add("launch", launch, "launch")
        runs = tuple(count * microbatches for count in counts)
        return StepCost(tuple(sums.terms()), tuple(sums.collectives), flops, runs)

    @cached_property
    def _timed(self) -> list[list[TimedPass]]:
        """The passes of every segment."""
        joined = joins_passes(*self._cut)

        def timed(work: SegmentPass) -> TimedPass:
            sent = sent_together(work.transfers, self._prices.seconds)
            return TimedPass(work, sent, self.chip, self._prices.lost_by_hosts, joined=joined)

        return timed_passes(self.graph, self.layout, self.dtypes, self.chip, timed)

    @cached_property
    def _stages(self) -> StagePasses:
        return StagePasses(self.graph, self._cut, SegmentSeconds.of(self._timed), self.chip.step)

    def _add_once(self, sums: "_Sums", stage: int) -> None:
        """Adds transfers once per step of a stage."""
        cargo: tuple[Direction, Direction] = "update", "backward"
        parts = zip(WITH_TRANSFERS_ONCE, cargo, self._stages.updates[stage], strict=True)
        for (direction, named, times), (_, exposed) in zip(
            parts, self._stages.once_per_step(stage), strict=True
        ):
            for count, passes in zip(times, self._timed, strict=True):
                once = [pair for one in passes if one.work.direction == direction for pair in one.once]
                for transfer, seconds in once:
                    sums.add_transfer(transfer, named, count, exposed, seconds)

    def _add_pipeline(self, sums: "_Sums", stage: int | None) -> None:
        """Adds a stage's waits for other stages' passes (the bubble) and for hops.

        stage: the sender of the hops; None for the stage with most. Waits that are only for hops of other
        stages, beyond all of its own, count as bubble.
        """
        sent_hops, microbatches = self.hops(stage), self.layout.schedule.microbatches
        number = self._stages.busiest if stage is None else stage
        passes = self._stages.segments.run(self._stages.counts[number])
        waited = max(0.0, sent_hops.makespan_seconds - microbatches * passes.total)
        exposed = min(sent_hops.exposed_seconds, waited, sent_hops.count * sent_hops.seconds)
        sums.add("pipeline bubble", waited - exposed, "bubble")
        sent = hop_transfer(self.graph, self.layout.pipe)
        share = exposed / (sent_hops.count * sent_hops.seconds) if exposed else 0.0
        sums.add_transfer(sent, "forward", sent_hops.forward, share)
        sums.add_transfer(sent, "backward", sent_hops.backward, share)

    def hops(self, stage: int | None = None) -> Hops:
        """The hops between stages in a step: number, seconds of each, exposed time.

        stage: the sender; None for the stage with most.
        """
        schedule, pipe, interleave = self._cut
        microbatches = self.layout.schedule.microbatches
        return hops(schedule, pipe, microbatches, interleave, self.pipeline_times(), stage)

    def pipeline_times(self) -> Times:
        """Seconds of one microbatch's passes at every depth of a pipeline, and of its hops."""
        by_depth = self._stages.by_depth
        seconds = {counts: self._stages.segments.run(counts) for counts in set(by_depth)}
        hop = self._prices.seconds(hop_transfer(self.graph, self.layout.pipe))
        return Times([seconds[counts] for counts in by_depth], hop)

    def _add_update(self, sums: "_Sums", stage: int) -> None:
        """Adds the optimizer, its transfers, and launches."""
        microbatches, launch = self.layout.schedule.microbatches, self.chip.step.launch_seconds
        state = StageState(self.graph, self.layout, stage)
        update = Update.of(state, microbatches, self.dtypes, self.chip)
        sums.add("optimizer", update.work.seconds, update.work.bound)
        sums.add("optimizer state from and to the host", update.host_seconds, HOST)
        for transfer, count in update.transfers:
            is_gradient = transfer.what == "gradients"
            sums.add_transfer(transfer, "backward" if is_gradient else "update", count, 1.0)
        if launch:
            sums.add("launch", launch * microbatches, "launch")
        if flush_seconds := self.chip.step.host_flush_seconds:
            num_flushes = flushes(self.graph, self.layout, self.software, self.chip.program_bytes)
            sums.add("allocator", flush_seconds * num_flushes, "launch")


class _Sums:
    """Adds passes up into terms and collectives, all times multiplied by `slowdown`."""

    def __init__(self, price: Callable[[Transfer], CollectivePrice], slowdown: float) -> None:
        self.collectives: list[PricedCollective] = []
        self._price, self._slowdown = price, slowdown
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, name: str, seconds: float, bound: str) -> None:
        self._seconds[name, bound] = self._seconds.get((name, bound), 0.0) + seconds * self._slowdown

    def terms(self) -> list[Term]:
        terms = [Term(name, seconds, bound) for (name, bound), seconds in self._seconds.items() if seconds]
        return sorted(terms, key=lambda term: -term.seconds)

    def add_pass(self, timed: TimedPass, times: float, idle: float) -> None:
        """One direction of a segment, run `times` times; hidden transfers are not added.

        idle: idle runs of its collectives for each run; they take no time here.
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
        if not runs:
            return
        one_run = price.seconds if seconds is None else seconds / transfer.repeat
        priced = PricedCollective(
            transfer.what,
            direction,
            transfer.op,
            transfer.axes,
            transfer.tensor,
            transfer.gathered_bytes,
            transfer.dtype,
            runs,
            one_run * self._slowdown,
            one_run * runs * exposed * self._slowdown,
            price.resource,
        )
        self.collectives.append(priced)
        self.add(priced.name, one_run * runs * exposed, priced.bound)
