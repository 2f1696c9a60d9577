"""Price and memory of many layouts at once, for a search.

Layouts that differ only in sizes have the same operations and collectives, so one recording serves all of
them. A number in one layout's graph is an array here, with one number for each layout. The formulas are those
of memory.py, passes.py and step.py.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.arrays import largest
from meshwright.cost.collectives import seconds_of_many
from meshwright.cost.eager import eager_phases, whole_microbatches
from meshwright.cost.graph import Transfer
from meshwright.cost.memory import HeldBytes, held_bytes, peak
from meshwright.cost.passes import Dtypes, SegmentPass, seconds_of
from meshwright.cost.pipeline import PassSeconds, Times, least_makespan, makespan
from meshwright.cost.pipeline.stages import (
    SegmentRuns,
    alive_microbatches,
    depth_counts,
    different_stages,
    joins_passes,
    stage_counts,
    stage_updates,
)
from meshwright.cost.record import record_training
from meshwright.cost.recorder import MeshSizes, Shape
from meshwright.cost.state import StageState
from meshwright.cost.step import (
    TimedPass,
    as_sent,
    at_step_rates,
    done_once,
    exposed_share,
    hop_transfer,
    host_update_seconds,
    lost_at_nodes,
    lost_between_stages,
    sent_together,
    stage_times,
    timed_passes,
)
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.layout.attention import lacks_flash
from meshwright.layout.axes import AXES, TENSOR
from meshwright.layout.pipelines import SCHEDULES, StageRoute
from meshwright.layout.pipelines.depths import stage_routes
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.layout.rules import is_matrix
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import parameters


class Member(NamedTuple):
    """A mesh with the microbatches of a step, and the step's number of sequences."""

    mesh: Layout
    microbatches: int
    num_sequences: int


def pattern(mesh: Layout, config: ModelConfig, hardware: Hardware) -> Layout:
    """The recorded layout for `mesh`, with additional axes that do not change the price of `mesh`.

    Over an axis of one device nothing moves and nothing is split. But a host that launches operations one by
    one also launches those that move nothing, and a head by chunks has another form over several devices.
    """
    if mesh.form is None or hardware.software.eager or hardware.chip.platform.head_tokens:
        return mesh
    form = mesh.form
    for axis in reversed(AXES):  # experts before the data ranks that they divide
        words = axis.free_words(form, config, mesh.schedule)
        wider = {**form, **words}
        if axis is not TENSOR or not words or _sums_no_matrix_as_vectors(mesh.with_form(wider), config):
            form = wider
    return mesh.with_form(form)


def _sums_no_matrix_as_vectors(wide: Layout, config: ModelConfig) -> bool:
    """Whether `tensor` and data ranks split every matrix, so that none is summed as vectors are.

    Otherwise some gradients are summed together without `tensor`, and separately with it.
    """
    split = (
        wide.rules.updated.weight(path.rpartition("/")[2], param.letters).sharded_axes
        for path, param in parameters(config).items()
        if is_matrix(param.letters)
    )
    return all(TENSOR.name in axes and not set(axes).isdisjoint(wide.batch_axes) for axes in split)


class Saving(NamedTuple):
    """Values that a step saves for its backward pass. offload: in the host's memory."""

    remat: str = "none"
    offload: bool = False


class Family:
    """Members with one pattern, all with one microbatch or all with several, recorded at once.

    Attention has a kernel in all or in none.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        members: Sequence[Member],
        seq_len: int,
    ) -> None:
        self.chip, self.members, self.software = hardware.chip, members, hardware.software
        self.microbatches = np.array([member.microbatches for member in members])
        recorded = pattern(members[0].mesh, config, hardware)
        self.layout = layout = recorded.replace(microbatches=members[0].microbatches)
        sequences = np.array([member.num_sequences for member in members])
        shape = Shape(sequences / self.microbatches, seq_len, seq_len)
        mesh = _Meshes([member.mesh for member in members], layout.mesh)
        sizes = MeshSizes(mesh, self.microbatches)
        has_kernel = lacks_flash(config, hardware, members[0].mesh, seq_len) is None
        self.graph = record_training(config, hardware, layout, shape, sizes, has_kernel=has_kernel)
        self.dtypes, machine = Dtypes.of(layout), at_step_rates(hardware)
        self.placements = [machine.place(member.mesh.mesh) for member in members]
        self._prices: dict[tuple, Any] = {}
        self._sent: dict[SegmentPass, list[tuple[Transfer, Any]]] = {}
        self._timed: dict[tuple[SegmentPass, bool], TimedPass] = {}
        self._segments: dict[tuple[Saving, bool], _SegmentSeconds] = {}
        self._stages: dict[tuple[tuple[StageRoute, ...], Saving], Stages] = {}
        self._states: dict[tuple, _States] = {}

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """The rows of the members by number of stages."""
        by_stages: dict[int, list[int]] = {}
        for row, member in enumerate(self.members):
            by_stages.setdefault(member.mesh.pipe, []).append(row)
        return by_stages

    def stages(self, schedule: str, pipe: int, interleave: int, saving: Saving) -> "Stages":
        """Seconds and bytes of the members with `pipe` stages, in the order of `rows`.

        Schedules with the layers on the same stages share it.
        """
        key = (stage_routes(schedule, pipe, interleave), saving)
        if key not in self._stages:
            self._stages[key] = Stages(self, schedule, pipe, interleave, saving)
        return self._stages[key]

    def least_seconds(self, pipe: int) -> Any:
        """Lower bound of the step of members with `pipe` stages, for any schedule and policy.

        It is the time of all microbatches' passes, divided evenly over the stages, and of launches.
        """
        [whole] = depth_counts(self.graph, "1f1b", 1, 1)
        rows = self.rows[pipe]
        passes = [self.segments(Saving(), joined).passes[..., rows].sum(axis=1) for joined in (False, True)]
        passes = np.minimum(*passes)
        microbatch = np.tensordot(np.array(whole), passes, 1) / pipe + self.chip.step.launch_seconds
        return microbatch * self.microbatches[rows]

    def states(self, schedule: str, pipe: int, interleave: int) -> "_States":
        """The states of the members with `pipe` stages, with a schedule's placement of layers."""
        key = stage_routes(schedule, pipe, interleave), SCHEDULES[schedule].splits_backward
        if key not in self._states:
            layout = self.layout.replace(pipe=pipe, interleave=interleave, schedule=schedule)
            different = different_stages(self.graph, schedule, pipe, interleave)
            states = {stage: StageState(self.graph, layout, stage) for stage in different}
            update = seconds_of(states[0].update_work(), "update", self.dtypes, self.chip)
            update = update + host_update_seconds(states[0], self.chip)
            at_once = layout.schedule.microbatches == 1 and not self.software.eager
            stages = {
                stage: (state.device_bytes(reduced_at_once=at_once), state.host_bytes)
                for stage, state in states.items()
            }
            self._states[key] = _States(layout, stages, update, self._sent_by_update(states[0], pipe))
        return self._states[key]

    def _sent_by_update(self, state: StageState, pipe: int) -> Any:
        """Seconds of the optimizer's transfers, for the members with `pipe` stages."""
        rows = self.rows[pipe]
        placements = [self.placements[row] for row in rows]
        return sum(
            count
            * (
                seconds_of_many(transfer.op, transfer.axes, placements)(_at(rows, transfer.gathered_bytes))
                + self._lost_at_nodes(transfer, placements)
            )
            for transfer, count in state.update_transfers(self.microbatches[rows])
        )

    def segments(self, saving: Saving, joined: bool) -> "_SegmentSeconds":
        """Seconds of one run of every segment, for all members; joined: see `TimedPass`."""
        if joined and not self._exchanges:
            return self.segments(saving, False)
        if (saving, joined) not in self._segments:

            def timed_pass(work: SegmentPass) -> TimedPass:
                return self._timed_pass(work, joined)

            layout = self.layout.replace(**saving._asdict())
            timed = timed_passes(self.graph, layout, self.dtypes, self.chip, timed_pass)
            alone: list[SegmentRuns] = [tuple(row) for row in np.eye(len(timed)).tolist()]
            once = [
                [done_once(timed, one, one, direction) for one in alone]
                for direction in ("forward", "backward")
            ]
            self._segments[saving, joined] = _SegmentSeconds(
                np.array([[self._all(seconds) for seconds in stage_times(timed, one)] for one in alone]),
                np.array([[[self._all(seconds) for seconds in pair] for pair in pairs] for pairs in once]),
            )
        return self._segments[saving, joined]

    def _all(self, figure: Any) -> Any:
        return _at(np.arange(len(self.members)), figure)

    @cached_property
    def _exchanges(self) -> bool:
        """Whether tokens go to experts on other devices."""
        return any(node.kind == "exchange" for _, node in self.graph.nodes())

    def _timed_pass(self, work: SegmentPass, joined: bool) -> TimedPass:
        if (work, joined) not in self._timed:
            if work not in self._sent:
                self._sent[work] = sent_together(work.transfers, self._seconds)
            sent = self._sent[work]
            self._timed[work, joined] = TimedPass(
                work, sent, self.chip, self._lost_between_stages, joined=joined
            )
        return self._timed[work, joined]

    def _seconds(self, transfer: Transfer) -> Any:
        transfer = as_sent(transfer, self.layout, self.chip)
        key = (transfer.op, transfer.axes, transfer.copies)
        if key not in self._prices:
            op, axes, copies = key
            self._prices[key] = seconds_of_many(op, axes, self.placements, copies=copies)
        return self._prices[key](transfer.gathered_bytes) + self._lost_at_nodes(transfer, self.placements)

    def _lost_at_nodes(self, transfer: Transfer, placements: Sequence[Placement]) -> Any:
        if not self.chip.step.host_node_seconds:
            return 0.0
        return np.array([lost_at_nodes(transfer, at, self.chip) for at in placements])

    def _lost_between_stages(self, transfer: Transfer) -> Any:
        if not self.chip.step.host_stage_seconds:
            return 0.0
        return np.array([lost_between_stages(transfer, at, self.chip) for at in self.placements])


class _SegmentSeconds(NamedTuple):
    """Seconds of one run of every segment; the last dimension of both arrays is the members.

    passes: by segment, (forward, backward without deferrable work, deferrable work), as from `stage_times`.
    once: by direction and segment, (waiting, room), as from `done_once`.
    """

    passes: Any
    once: Any


class _States(NamedTuple):
    """States of the members with some stages and chunks; layout: of one of them.

    stages: bytes of (weights, gradients, optimizer) and of the host's memory, for the first stage of each
    kind. update_seconds: of the optimizer. sent_by_update: seconds of its transfers, only for these members.
    """

    layout: Layout
    stages: dict[int, tuple[tuple[Any, Any, Any], Any]]
    update_seconds: Any
    sent_by_update: Any


class Stages:
    """Members with one number of stages, one placement of layers and one remat policy.

    rows: their rows in the family. place: index of a member in rows and in every array here.
    """

    def __init__(self, family: Family, schedule: str, pipe: int, interleave: int, saving: Saving) -> None:
        self.family, self.pipe, self.interleave, self.saving = family, pipe, interleave, saving
        self.rows = np.array(family.rows[pipe])
        self._counts = stage_counts(family.graph, schedule, pipe, interleave)
        by_depth = depth_counts(family.graph, schedule, pipe, interleave)
        chunks = list(dict.fromkeys(by_depth))
        self._chunk_at = [chunks.index(counts) for counts in by_depth]
        joined = joins_passes(schedule, pipe, interleave)
        passes, once = (seconds[..., self.rows] for seconds in family.segments(saving, joined))
        self._microbatches = family.microbatches[self.rows]
        # Seconds by kind of pass and kind of chunk.
        self._chunk_seconds = np.tensordot(np.array(chunks), passes, 1).swapaxes(0, 1)
        different = list(dict.fromkeys(self._counts))
        totals = np.tensordot(np.array(different), passes.sum(axis=1), 1)
        self._busy = totals.max(axis=0) * self._microbatches
        updates = stage_updates(family.graph, schedule, pipe, interleave)
        of_kinds = np.array([updates[self._counts.index(one)] for one in different])
        busiest = totals.argmax(axis=0)
        waiting = np.einsum("mds,dsm->dm", of_kinds[busiest], once[:, :, 0])
        room = np.einsum("ms,dsm->dm", np.array(different)[busiest], once[:, :, 1])
        exposed = waiting * exposed_share(waiting, room, family.chip.step.overlap)
        self._besides = exposed.sum(axis=0) + family.chip.step.launch_seconds * self._microbatches

    def needed_bytes(self, places: Sequence[int], schedule: str) -> tuple[Any, Any]:
        """Bytes of some members at the peak, on one chip of the stage with the most.

        The second array is their bytes in the host's memory for a chip.
        """
        family, pipe, interleave = self.family, self.pipe, self.interleave
        rows, states = self.rows[places], family.states(schedule, pipe, interleave)
        microbatches, totals, hosts = family.microbatches[rows], [], []
        layout = states.layout.replace(**self.saving._asdict())
        numbers, which = np.unique(microbatches, return_inverse=True)
        for stage, (parts, host) in states.stages.items():
            each = [alive_microbatches(schedule, pipe, m, interleave, stage) for m in numbers.tolist()]
            most = max(map(len, each))
            padded = np.array([[*found, *found[:1] * (most - len(found))] for found in each])[which]
            alive = [Alive(*padded[:, one].T) for one in range(most)]
            if family.software.eager:
                of_all = np.zeros(len(family.members))
                of_all[rows] = whole_microbatches(alive)
                counts, software = self._counts[stage], family.software
                phases = eager_phases(family.graph, counts, parts, of_all, layout, software)
                totals += [_at(rows, np.asarray(phase.total)) for phase in phases]
                hosts += [_at(rows, phase.host) for phase in phases]
            else:
                weights, gradients, optimizer = (_at(rows, part) for part in parts)
                held = held_bytes(family.graph, self._counts[stage], self.saving.remat)
                held = HeldBytes(*[_at(rows, figure) for figure in held])
                memory = peak((weights, gradients, optimizer), held, alive, microbatches, layout)
                totals.append(memory.total)
                hosts.append(memory.host)
            hosts[-1] = hosts[-1] + _at(rows, host)
        return largest(totals), largest(hosts)

    def least_seconds(self, places: Sequence[int], schedule: str) -> Any:
        """Lower bound of the step of some members, as in cost/pipeline/bound.py."""
        once = self._once_seconds(schedule)[places]
        if self.pipe == 1:
            return self._busy[places] + once
        depths = self._depth_seconds(places)
        microbatches, hops = self._microbatches[places], self._hop_seconds[places]
        least = least_makespan(schedule, self.pipe, microbatches, self.interleave, depths, hops)
        return np.maximum(self._busy[places], least) + once

    def step_seconds(self, place: int, schedule: str) -> float:
        """Seconds of one member's step without the slowdown factor; its pipeline is simulated."""
        busy, once = float(self._busy[place]), float(self._once_seconds(schedule)[place])
        if self.pipe == 1:
            return busy + once
        columns = (seconds.tolist() for seconds in self._depth_seconds(place))
        depths = [PassSeconds(*one) for one in zip(*columns, strict=True)]
        times = Times(depths, float(self._hop_seconds[place]))
        microbatches = int(self._microbatches[place])
        return makespan(schedule, self.pipe, microbatches, self.interleave, times) + once

    def _once_seconds(self, schedule: str) -> Any:
        """Seconds of launches and of work once per step."""
        states = self.family.states(schedule, self.pipe, self.interleave)
        return self._besides + self._all(states.update_seconds) + states.sent_by_update

    def _depth_seconds(self, places: Any) -> tuple[Any, Any, Any]:
        """(forward, backward, weight) of one microbatch's passes by depth, for some members."""
        forward, backward, weight = self._chunk_seconds[..., places][:, self._chunk_at]
        return forward, backward, weight

    @cached_property
    def _hop_seconds(self) -> Any:
        placements = [self.family.placements[row] for row in self.rows]
        hop = hop_transfer(self.family.graph, self.pipe)
        return seconds_of_many(hop.op, hop.axes, placements)(self._all(hop.gathered_bytes))

    def _all(self, figure: Any) -> Any:
        """An array with an entry for each of these members."""
        return _at(self.rows, figure)


def _at(rows: Any, figure: Any) -> Any:
    """The entries in `rows` of an array for all members, or of a figure that all share."""
    return figure[rows] if isinstance(figure, np.ndarray) else np.full(len(rows), figure)


class _Meshes:
    """The sizes of `axes` in many meshes; 1 if a mesh does not have the axis."""

    def __init__(self, layouts: Iterable[Layout], axes: Iterable[str]) -> None:
        sizes = [layout.mesh.sizes for layout in layouts]
        self._sizes = {axis: np.array([float(one.get(axis, 1)) for one in sizes]) for axis in axes}
        self._products: dict[tuple[str, ...], Any] = {}

    def size(self, axes: str | tuple[str, ...]) -> Any:
        """Devices along `axes` of each mesh."""
        names = (axes,) if isinstance(axes, str) else axes
        if names not in self._products:
            self._products[names] = prod(self._sizes[name] for name in names)
        return self._products[names]
