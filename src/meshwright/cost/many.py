"""The price of a step of many layouts at once, and what it holds, for a search.

Layouts that differ in sizes alone have the same operations and collectives. So one recording serves all of
them: where the graph of one layout has a number, theirs has an array, of one number for each. The formulas
are those of memory.py, passes.py and step.py.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.collectives import seconds_of_many
from meshwright.cost.figures import largest
from meshwright.cost.graph import Transfer
from meshwright.cost.memory import HeldBytes, held_bytes, peak, state_bytes, update_work
from meshwright.cost.ops import record_loss
from meshwright.cost.passes import Dtypes, SegmentPass, seconds_of
from meshwright.cost.pipeline import PassSeconds, Times, makespan
from meshwright.cost.recorder import MeshSizes, Shape
from meshwright.cost.stages import (
    Counts,
    alive_microbatches,
    chunk_counts,
    num_chunks,
    stage_counts,
    stage_ends,
)
from meshwright.cost.step import (
    TimedPass,
    at_step_rates,
    done_once,
    exposed_share,
    hop_share,
    hop_transfer,
    norm_transfer,
    stage_times,
    timed_passes,
)
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.pipeline import routes
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig


class Member(NamedTuple):
    """A mesh and the microbatches of a step on it."""

    mesh: Layout
    microbatches: int


class Family:
    """Members with one pattern, all of one microbatch or all of several, recorded at once."""

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        members: Sequence[Member],
        workload: Workload,
        *,
        flash_attention: bool,
    ) -> None:
        self.chip, self.members = hardware.chip, members
        self.microbatches = np.array([member.microbatches for member in members])
        self.layout = layout = members[0].mesh.replace(microbatches=members[0].microbatches)
        shape = Shape(workload.num_sequences / self.microbatches, workload.seq_len, workload.seq_len)
        mesh = _Meshes([member.mesh for member in members])
        sizes = MeshSizes(mesh, self.microbatches)
        self.graph = record_loss(config, layout, shape, flash_attention=flash_attention, many=sizes)
        self.dtypes, machine = Dtypes.of(layout), at_step_rates(hardware)
        self.placements = [machine.place(member.mesh.mesh) for member in members]
        self._prices: dict[tuple, Any] = {}
        self._timed: dict[SegmentPass, TimedPass] = {}
        self._stages: dict[tuple[int, int, str], Stages] = {}
        self._states: dict[tuple, _States] = {}
        self._norms: dict[int, Any] = {}

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """The places of the members of each number of stages."""
        found: dict[int, list[int]] = {}
        for row, member in enumerate(self.members):
            found.setdefault(member.mesh.pipe, []).append(row)
        return found

    def stages(self, pipe: int, interleave: int, remat: str) -> "Stages":
        """What the members with `pipe` stages take and hold, in the order of `rows`."""
        key = (pipe, interleave, remat)
        if key not in self._stages:
            self._stages[key] = Stages(self, *key)
        return self._stages[key]

    def states(self, pipe: int, interleave: int, schedule: str) -> "_States":
        """Of the members with `pipe` stages, on which most schedules put the ends of the model alike."""
        key = (pipe, interleave, stage_ends(schedule, pipe, 0), len(routes(schedule, pipe)))
        if key not in self._states:
            layout = self.layout.replace(pipe=pipe, interleave=interleave, schedule=schedule)
            update = seconds_of(update_work(self.graph, layout), "update", self.dtypes, self.chip)
            stages = {stage: state_bytes(self.graph, layout, stage) for stage in {0, pipe - 1}}
            self._states[key] = _States(layout, stages, update)
        return self._states[key]

    def norm_seconds(self, pipe: int) -> Any:
        """Of the all-reduce of the norm of the gradients, of the members with `pipe` stages."""
        if pipe not in self._norms:
            norm = norm_transfer(self.layout.replace(pipe=pipe).weight_axes)
            placements = [self.placements[row] for row in self.rows[pipe]]
            self._norms[pipe] = seconds_of_many(norm.op, norm.axes, placements)(norm.gathered_bytes)
        return self._norms[pipe]

    def timed(self, remat: str) -> list[list[TimedPass]]:
        """The passes of every segment."""
        return timed_passes(self.graph, remat, self.dtypes, self.chip, self._timed_pass)

    def _timed_pass(self, one: SegmentPass) -> TimedPass:
        if one not in self._timed:
            self._timed[one] = TimedPass(one, self._seconds, self.chip)
        return self._timed[one]

    def _seconds(self, transfer: Transfer) -> Any:
        key = (transfer.op, transfer.axes, transfer.copies)
        if key not in self._prices:
            op, axes, copies = key
            self._prices[key] = seconds_of_many(op, axes, self.placements, copies=copies)
        return self._prices[key](transfer.gathered_bytes)


class _States(NamedTuple):
    """Of the members with some stages and chunks; layout: of one of them.

    stages: bytes of (weights, gradients, optimizer), of the first stage and the last. update_seconds: of the
    optimizer.
    """

    layout: Layout
    stages: dict[int, tuple[Any, Any, Any]]
    update_seconds: Any


class Stages:
    """The members with one number of stages, under one number of chunks a stage and one remat policy.

    rows: their places in the family. place: of one of them, in rows and in every array here.
    """

    def __init__(self, family: Family, pipe: int, interleave: int, remat: str) -> None:
        self.family, self.pipe, self.interleave, self.remat = family, pipe, interleave, remat
        self.rows = np.array(family.rows[pipe])
        self._timed = family.timed(remat)
        self._counts = [stage_counts(family.graph, pipe, interleave, stage) for stage in range(pipe)]
        different = list(dict.fromkeys(self._counts))
        totals = np.array([self._all(sum(stage_times(self._timed, counts))) for counts in different])
        microbatches = family.microbatches[self.rows]
        self._busy = totals.max(axis=0) * microbatches
        once = np.choose(totals.argmax(axis=0), [self._once(counts) for counts in different])
        self._besides = once + family.chip.step.launch_seconds * microbatches
        self._times: dict[int, list[Times]] = {}

    def needed_bytes(self, places: Sequence[int], schedule: str) -> Any:
        """At the peak of some members, on one chip of the stage that needs most."""
        family, pipe, interleave = self.family, self.pipe, self.interleave
        rows, states = self.rows[places], family.states(pipe, interleave, schedule)
        microbatches, totals = family.microbatches[rows], []
        for stage, parts in states.stages.items():
            weights, gradients, optimizer = (_at(rows, part) for part in parts)
            ends = stage_ends(schedule, pipe, stage)
            held = held_bytes(family.graph, pipe, interleave, stage, ends, self.remat)
            held = HeldBytes(*[_at(rows, figure) for figure in held])
            alive = [alive_microbatches(schedule, pipe, m, interleave, stage) for m in microbatches.tolist()]
            memory = peak((weights, gradients, optimizer), held, np.array(alive), microbatches, states.layout)
            totals.append(memory.total)
        return largest(totals)

    def least_seconds(self, places: Sequence[int], schedule: str) -> Any:
        """Of a step of some members: as long as the stage that takes longest works."""
        return self._busy[places] + self._once_seconds(schedule)[places]

    def step_seconds(self, place: int, schedule: str) -> float:
        """The step of one member, but for a factor of all times."""
        busy, once = float(self._busy[place]), float(self._once_seconds(schedule)[place])
        if self.pipe == 1:
            return busy + once
        microbatches = self.family.members[self.rows[place]].microbatches
        times = self._chunk_times(num_chunks(schedule, self.interleave))[place]
        whole = makespan(schedule, self.pipe, microbatches, self.interleave, times)
        return max(busy, whole) + once

    def _once_seconds(self, schedule: str) -> Any:
        """Of what a step does once, and of launches."""
        states = self.family.states(self.pipe, self.interleave, schedule)
        return self._besides + self._all(states.update_seconds) + self.family.norm_seconds(self.pipe)

    def _chunk_times(self, chunks: int) -> list[Times]:
        if chunks not in self._times:
            body, special = chunk_counts(self.family.graph, self._counts, chunks)
            placements = [self.family.placements[row] for row in self.rows]
            hop = hop_transfer(self.family.graph, self.pipe)
            hops = seconds_of_many(hop.op, hop.axes, placements)
            hop_seconds = hops(self._all(hop.gathered_bytes))
            hop_seconds = hop_share(self.family.chip, self.interleave) * hop_seconds
            found = zip(
                self._passes(body), *map(self._passes, special.values()), hop_seconds.tolist(), strict=True
            )
            self._times[chunks] = [
                Times(one, dict(zip(special, ends, strict=True)), hop) for one, *ends, hop in found
            ]
        return self._times[chunks]

    def _passes(self, counts: Counts) -> list[PassSeconds]:
        columns = [self._all(seconds).tolist() for seconds in stage_times(self._timed, counts)]
        return [PassSeconds(*seconds) for seconds in zip(*columns, strict=True)]

    def _once(self, counts: Counts) -> Any:
        """Seconds that do not hide of what is done once on a stage."""
        exposed = 0.0
        for direction in ("forward", "backward"):
            waiting, room = done_once(self._timed, counts, direction)
            exposed = exposed + waiting * exposed_share(waiting, room, self.family.chip.step.overlap)
        return self._all(exposed)

    def _all(self, figure: Any) -> Any:
        """An array with an entry for each of these members."""
        return _at(self.rows, figure)


def _at(rows: Any, figure: Any) -> Any:
    """An array with the entries in `rows` of an array for all members, or of what all have."""
    return figure[rows] if isinstance(figure, np.ndarray) else np.full(len(rows), figure)


class _Meshes:
    """The sizes of the axes of many meshes; one where a mesh does not have the axis."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        sizes = [layout.mesh.sizes for layout in layouts]
        axes = dict.fromkeys(axis for one in sizes for axis in one)
        self._sizes = {axis: np.array([float(one.get(axis, 1)) for one in sizes]) for axis in axes}
        self._products: dict[tuple[str, ...], Any] = {}

    def size(self, axes: str | tuple[str, ...]) -> Any:
        """Devices along `axes` of each mesh."""
        names = (axes,) if isinstance(axes, str) else axes
        if names not in self._products:
            self._products[names] = prod(self._sizes[name] for name in names)
        return self._products[names]
