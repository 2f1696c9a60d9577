"""The seconds of one step by part, as numbers for one layout or as arrays for many.

    step = microbatches . busiest stage, or the makespan of the pipeline
           + transfers once per step . exposed share
           + update + microbatches . launch

step.py itemises these parts for one layout; many.py prices a search with them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshwright.cost.arrays import chosen, largest, place_of_largest, weighted
from meshwright.cost.graph import Direction, Graph, Transfer
from meshwright.cost.passes import Dtypes, WorkSeconds, work_seconds
from meshwright.cost.pipeline import PassSeconds
from meshwright.cost.pipeline.stages import SegmentRuns, depth_counts, stage_counts, stage_updates
from meshwright.cost.state import StageState
from meshwright.cost.timed_passes import TimedPass, host_seconds
from meshwright.hardware.chip import Chip
from meshwright.layout.rules import STAGES
from meshwright.programs.efficiency import StepEfficiency
from meshwright.units import Numeric

# (schedule, stages, chunks of a stage): how layers are cut into stages.
Cut = tuple[str, int, int]
# Passes with transfers once per step: gathers of updated weights, and sums of gradients.
WITH_TRANSFERS_ONCE: tuple[Direction, Direction] = ("forward", "backward")
# Shorter than all prices, to avoid a division by zero.
_AN_INSTANT = 1e-30


class SegmentSeconds(NamedTuple):
    """Seconds of one run of each segment, in the graph's order: sequences, or arrays with the segments first.

    forward: its forward pass. backward: its other passes, without deferrable work. put_off: deferrable work.
    waiting: of its transfers once per step, in each of WITH_TRANSFERS_ONCE. room: of its passes that can hide
    them.
    """

    forward: Any
    backward: Any
    put_off: Any
    waiting: Any
    room: Any

    @classmethod
    def of(cls, timed: Sequence[Sequence[TimedPass]]) -> "SegmentSeconds":
        """The seconds of passes as from `timed_passes`."""
        directions = [[one for one in passes if one.work.direction != "forward"] for passes in timed]
        once = [
            [[one for one in passes if one.work.direction == direction] for passes in timed]
            for direction in WITH_TRANSFERS_ONCE
        ]
        return cls(
            [sum(one.seconds for one in passes) for passes in once[0]],
            [sum(one.seconds - one.work.put_off for one in passes) for passes in directions],
            [sum(one.work.put_off for one in passes) for passes in directions],
            [[sum(each for one in of_segment for _, each in one.once) for of_segment in of] for of in once],
            [[sum(one.room for one in of_segment) for of_segment in of] for of in once],
        )

    def run(self, counts: SegmentRuns) -> PassSeconds:
        """Seconds of `counts` runs of the segments."""
        forward, backward, put_off = self[:3]
        return PassSeconds(*(weighted(counts, seconds) for seconds in (forward, backward, put_off)))


class StagePasses:
    """Passes of a step on the stages of one cut.

    counts: runs of each segment per microbatch, on every stage. updates: runs of their transfers once per
    step.
    """

    def __init__(self, graph: Graph, cut: Cut, segments: SegmentSeconds, step: StepEfficiency) -> None:
        self.counts, self.updates = stage_counts(graph, *cut), stage_updates(graph, *cut)
        self.by_depth = depth_counts(graph, *cut)
        self.segments, self._overlap = segments, step.overlap
        schedule, pipe, chunks = cut
        by_chunks = step.sends_by_chunks and schedule == "interleaved"
        # Microbatches whose passes hide transfers once per step.
        self._hiding = max(1.0, pipe * (1 - 1 / chunks)) if by_chunks else 1.0
        # The first stage of each kind.
        self._kinds = [self.counts.index(kind) for kind in dict.fromkeys(self.counts)]
        seconds = [segments.run(self.counts[stage]).total for stage in self._kinds]
        self._busiest = place_of_largest(seconds)
        self.microbatch_seconds = largest(seconds)

    @property
    def busiest(self) -> int:
        """The stage with the longest passes, of one layout."""
        return self._kinds[self._busiest]

    @property
    def exposed_seconds(self) -> Any:
        """Seconds of the busiest stage's transfers once per step, beyond the passes that hide them."""
        of_kinds = [
            sum(waiting * exposed for waiting, exposed in self.once_per_step(stage)) for stage in self._kinds
        ]
        return chosen(self._busiest, of_kinds)

    def once_per_step(self, stage: int) -> list[tuple[Any, Any]]:
        """(seconds, exposed share) of a stage's transfers once per step, in each of WITH_TRANSFERS_ONCE.

        Gradients are summed during the last backward pass, updated weights gathered during the first forward
        pass: one microbatch's passes hide them. If chunks are sent one by one, as many microbatches as there
        are stages pass through a chunk in turn, and their passes through the other chunks hide its transfers:
        those of pipe (1 - 1 / chunks) microbatches.
        """
        pairs = []
        each = zip(self.updates[stage], self.segments.waiting, self.segments.room, strict=True)
        for updates, waiting, room in each:
            seconds, free = weighted(updates, waiting), self._hiding * weighted(self.counts[stage], room)
            pairs.append((seconds, 1 - self._overlap * (free / largest((free, seconds, _AN_INSTANT)))))
        return pairs


class Update(NamedTuple):
    """The optimizer's update of a stage's weights.

    work: on the chip. host_seconds: of its state from and to the host. transfers: each with its runs in a
    step.
    """

    work: WorkSeconds
    host_seconds: Any
    transfers: Sequence[tuple[Transfer, Any]]

    @classmethod
    def of(cls, state: StageState, microbatches: Numeric, dtypes: Dtypes, chip: Chip) -> "Update":
        return cls(
            work_seconds(state.update_work(), "update", dtypes, chip),
            2 * host_seconds(state.host_bytes, chip),
            [*state.update_transfers(microbatches), *(state.broadcasts() if chip.step.broadcasts else ())],
        )

    @property
    def chip_seconds(self) -> Any:
        """Seconds of its parts on the chip and its host."""
        return self.work.seconds + self.host_seconds

    def sent_seconds(self, of_transfer: Callable[[Transfer], Any]) -> Any:
        """Seconds of its transfers. of_transfer: seconds of one run."""
        return sum(runs * of_transfer(transfer) for transfer, runs in self.transfers)


def hop_transfer(graph: Graph, pipe: int) -> Transfer:
    """A hop between stages: a layer's input, or its cotangent."""
    source = next(segment.source for segment in graph.segments if segment.source)
    sent = source.bytes_per_device * pipe
    name, what = source.array.name, "activations between stages"
    return Transfer(what, "permute", (STAGES,), name, sent, source.dtype, critical=True)
