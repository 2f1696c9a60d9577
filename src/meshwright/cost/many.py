"""Price and memory of many layouts at once, for a search.

Layouts that differ only in sizes have the same operations and collectives, so one recording serves all of
them. A number in one layout's graph is an array here, with one number for each layout. The formulas are in
memory.py, passes.py and step_seconds.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.arrays import largest, weighted
from meshwright.cost.graph import Graph, Transfer
from meshwright.cost.passes import Dtypes, SegmentPass
from meshwright.cost.pipeline import PassSeconds, Times, least_makespan, makespan
from meshwright.cost.pipeline.stages import alive_microbatches, depth_counts, different_stages, joins_passes
from meshwright.cost.record import record_training
from meshwright.cost.recorder import MeshSizes, PassShape
from meshwright.cost.state import StageState
from meshwright.cost.step_memory import stage_phases, stage_state_bytes
from meshwright.cost.step_seconds import SegmentSeconds, StagePasses, Update, hop_transfer
from meshwright.cost.timed_passes import TimedPass, sent_together, timed_passes
from meshwright.cost.transfer_prices import TransferPrices, at_step_rates
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import lacks_flash
from meshwright.layout.axes import AXES, RANKS, TENSOR
from meshwright.layout.pipelines import SCHEDULES, StageRoute
from meshwright.layout.pipelines.depths import stage_routes
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.layout.rules import Rules, is_matrix
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import parameters
from meshwright.notation.mesh import Mesh
from meshwright.units import Numeric


class Member(NamedTuple):
    """A mesh with the microbatches of a step, and the step's number of sequences."""

    mesh: Layout
    microbatches: int
    num_sequences: int


def pattern(mesh: Layout, config: ModelConfig, hardware: Hardware) -> Layout:
    """The recorded layout for `mesh`, with additional axes that do not change the price of `mesh`.

    Over an axis of one device nothing moves and nothing is split. But a host that launches operations one by
    one also launches collectives that move nothing, and a head by chunks has another form over several
    devices.
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
    """Which values are saved for the backward pass. offload: they are kept in the host's memory."""

    remat: str = "none"
    offload: bool = False


class LayoutFamily:
    """Layouts that share one recorded graph, and differ in the sizes of mesh axes.

    All have one microbatch or all have several, and attention has a kernel in all or in none. The graph is
    recorded when a figure first needs it.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        members: Sequence[Member],
        seq_len: int,
        document_len: int | None = None,
    ) -> None:
        self._config, self._hardware = config, hardware
        self._lengths = seq_len, seq_len, document_len
        self.chip, self.members, self.software = hardware.chip, members, hardware.software
        self.microbatches = np.array([member.microbatches for member in members])
        self._prices_of_some: dict[int, TransferPrices] = {}
        self._sent: dict[SegmentPass, list[tuple[Transfer, Any]]] = {}
        self._timed: dict[tuple[SegmentPass, bool], TimedPass] = {}
        self._segments: dict[tuple[Saving, bool], SegmentSeconds] = {}
        self._stages: dict[tuple[tuple[StageRoute, ...], Saving], Stages] = {}
        self._states: dict[tuple, _States] = {}

    @cached_property
    def layout(self) -> Layout:
        """The recorded layout."""
        first = self.members[0]
        recorded = pattern(first.mesh, self._config, self._hardware)
        return recorded.replace(microbatches=first.microbatches)

    @cached_property
    def graph(self) -> Graph:
        return self._recorded([member.mesh.mesh.sizes for member in self.members])

    def _recorded(self, sizes: Sequence[Mapping[str, int]]) -> Graph:
        """The graph of `layout` with the axes' `sizes`, a mapping for each member."""
        sequences = np.array([member.num_sequences for member in self.members])
        shape = PassShape(sequences / self.microbatches, *self._lengths)
        first = self.members[0].mesh
        has_kernel = lacks_flash(self._config, self._hardware, first, shape.query_len) is None
        many = MeshSizes(_Meshes(sizes, self.layout.mesh), self.microbatches)
        return record_training(self._config, self._hardware, self.layout, shape, many, has_kernel=has_kernel)

    @cached_property
    def dtypes(self) -> Dtypes:
        return Dtypes.of(self.layout)

    @cached_property
    def placements(self) -> list[Placement]:
        machine = at_step_rates(self._hardware)
        return [machine.place(member.mesh.mesh) for member in self.members]

    @cached_property
    def _prices(self) -> TransferPrices:
        return TransferPrices(self.layout, self.chip, self.placements)

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

    @cached_property
    def least_seconds(self) -> Any:
        """Lower bound of the step of every member, for any schedule and policy.

        It is the time of all microbatches' passes, divided evenly over the stages, and of launches.
        """
        [whole] = depth_counts(self.graph, "1f1b", 1, 1)
        each = [self.segments(Saving(), joined) for joined in (False, True)]
        passes = np.minimum(*(one.forward + one.backward + one.put_off for one in each))
        pipe = np.array([member.mesh.pipe for member in self.members])
        return (weighted(whole, passes) / pipe + self.chip.step.launch_seconds) * self.microbatches

    def states(self, schedule: str, pipe: int, interleave: int) -> "_States":
        """The states of the members with `pipe` stages, with a schedule's placement of layers."""
        key = stage_routes(schedule, pipe, interleave), SCHEDULES[schedule].splits_backward
        if key not in self._states:
            self._states[key] = _States(self, schedule, pipe, interleave)
        return self._states[key]

    def segments(self, saving: Saving, joined: bool) -> SegmentSeconds:
        """Seconds of one run of every segment, for all members; joined: see `TimedPass`."""
        if joined and not self._exchanges:
            return self.segments(saving, False)
        if (saving, joined) not in self._segments:

            def timed_pass(work: SegmentPass) -> TimedPass:
                return self._timed_pass(work, joined)

            layout = self.layout.replace(**saving._asdict())
            timed = timed_passes(self.graph, layout, self.dtypes, self.chip, timed_pass)
            seconds = SegmentSeconds.of(timed)
            self._segments[saving, joined] = SegmentSeconds(*map(self._all, seconds))
        return self._segments[saving, joined]

    def _all(self, figures: Numeric) -> Any:
        """An array of figures, or of lists of figures; its last dimension is the members."""
        if isinstance(figures, list):
            return np.array([self._all(figure) for figure in figures])
        return _at(np.arange(len(self.members)), figures)

    @cached_property
    def _exchanges(self) -> bool:
        """Whether tokens go to experts on other devices."""
        return any(node.kind == "exchange" for _, node in self.graph.nodes())

    def _timed_pass(self, work: SegmentPass, joined: bool) -> TimedPass:
        if (work, joined) not in self._timed:
            if work not in self._sent:
                self._sent[work] = sent_together(self._priced(work.transfers), self._prices.seconds)
            sent = self._sent[work]
            self._timed[work, joined] = TimedPass(
                work, sent, self.chip, self._prices.lost_by_hosts, joined=joined
            )
        return self._timed[work, joined]

    def _priced(self, transfers: Iterable[Transfer]) -> Iterable[Transfer]:
        """The transfers that take time."""
        return transfers

    def prices_of_some(self, pipe: int) -> Callable[[Transfer], Any]:
        """Seconds of a run of a transfer, for the members with `pipe` stages."""
        rows = self.rows[pipe]
        if pipe not in self._prices_of_some:
            placements = [self.placements[row] for row in rows]
            self._prices_of_some[pipe] = TransferPrices(self.layout, self.chip, placements)
        prices = self._prices_of_some[pipe]
        return lambda sent: prices.seconds(replace(sent, gathered_bytes=_at(rows, sent.gathered_bytes)))


class Unsharded(LayoutFamily):
    """Members of several families, with whole weights and no transfers between data ranks.

    Members with one microbatch and with several may be together: only those transfers depend on it.
    `least_seconds` is a lower bound of the same figure of the members' own families, since the products are
    the same and there are fewer transfers. So a search records only the families whose bound here is near
    the fastest step.
    """

    @cached_property
    def layout(self) -> Layout:
        recorded = super().layout
        sizes = {axis: size for axis, size in recorded.mesh.sizes.items() if axis not in RANKS}
        mesh = Mesh({**sizes, _ALL_RANKS: recorded.num_batch_shards})
        return replace(recorded, mesh=mesh, rules=unsharded(recorded.rules))

    @cached_property
    def graph(self) -> Graph:
        sizes = [
            {**mesh.sizes, _ALL_RANKS: mesh.size(tuple(axis for axis in RANKS if axis in mesh))}
            for mesh in (member.mesh.mesh for member in self.members)
        ]
        graph = self._recorded(sizes)
        # A gather casts a shard. In this mesh the shard is the whole weight, and its cast would take longer.
        segments = [
            replace(segment, nodes=tuple(node for node in segment.nodes if node.kind != "gather"))
            for segment in graph.segments
        ]
        return replace(graph, segments=tuple(segments))

    def _priced(self, transfers: Iterable[Transfer]) -> Iterable[Transfer]:
        return (transfer for transfer in transfers if _ALL_RANKS not in transfer.axes)


# One axis in place of all data axes.
_ALL_RANKS = RANKS[0]


@lru_cache(maxsize=4096)
def unsharded(rules: Rules) -> Rules:
    """The rules of `Unsharded`: weights stored as products use them, and one axis for all data axes."""
    whole, activations = (table.with_one_axis(RANKS, _ALL_RANKS) for table in (rules.used, rules.activations))
    return Rules(whole, whole, whole, whole, activations)


class _States:
    """States of the members with one placement of layers on stages.

    layout: of the first member. least_bytes: on one chip of the stage with the most, without activations, of
    each member.
    """

    def __init__(self, family: LayoutFamily, schedule: str, pipe: int, interleave: int) -> None:
        self.layout = family.layout.replace(pipe=pipe, interleave=interleave, schedule=schedule)
        self._family, self._rows = family, family.rows[pipe]
        self._stages = different_stages(family.graph, schedule, pipe, interleave)
        totals = [sum(parts) for parts, _ in self._bytes_of_stages().values()]
        self.least_bytes = _at(self._rows, largest(totals))

    @cached_property
    def stages(self) -> dict[int, tuple[tuple[Any, Any, Any], Any]]:
        """Bytes of (weights, gradients, optimizer) and of the host's memory, for a stage of each kind.

        Most members never fit and are not asked for them, so they are not kept from the start.
        """
        return self._bytes_of_stages()

    def _bytes_of_stages(self) -> dict[int, tuple[tuple[Any, Any, Any], Any]]:
        microbatches, software = self.layout.schedule.microbatches, self._family.software
        states = {stage: StageState(self._family.graph, self.layout, stage) for stage in self._stages}
        return {
            stage: (stage_state_bytes(state, microbatches, software), state.host_bytes)
            for stage, state in states.items()
        }

    @cached_property
    def update_seconds(self) -> Any:
        """Seconds of the optimizer and its transfers, of each member."""
        family, rows = self._family, self._rows
        first = StageState(family.graph, self.layout)
        update = Update.of(first, family.microbatches[rows], family.dtypes, family.chip)
        sent = update.sent_seconds(family.prices_of_some(self.layout.pipe))
        return _at(rows, update.chip_seconds) + sent


class Stages:
    """Members with one number of stages, one placement of layers and one remat policy.

    rows: their rows in the family. place: index of a member in rows and in every array here.
    """

    def __init__(
        self, family: LayoutFamily, schedule: str, pipe: int, interleave: int, saving: Saving
    ) -> None:
        self.family, self.pipe, self.interleave, self.saving = family, pipe, interleave, saving
        self.rows = np.array(family.rows[pipe])
        cut = schedule, pipe, interleave
        of_all = family.segments(saving, joins_passes(*cut))
        segments = SegmentSeconds(*(seconds[..., self.rows] for seconds in of_all))
        self._passes = StagePasses(family.graph, cut, segments, family.chip.step)
        self._microbatches = family.microbatches[self.rows]
        self._busy = self._passes.microbatch_seconds * self._microbatches
        launches = family.chip.step.launch_seconds * self._microbatches
        self._outside_update = self._passes.exposed_seconds + launches
        # Seconds by kind of pass, depth and member; equal depths share theirs.
        chunks = list(dict.fromkeys(self._passes.by_depth))
        self._chunk_at = [chunks.index(counts) for counts in self._passes.by_depth]
        runs = [[np.broadcast_to(one, len(self.rows)) for one in segments.run(counts)] for counts in chunks]
        self._chunk_seconds = np.array(runs).swapaxes(0, 1)

    def needed_bytes(self, places: Sequence[int], schedule: str) -> tuple[Any, Any]:
        """Bytes of some members at the peak, on one chip of the stage with the most.

        The second array is their bytes in the host's memory for a chip.
        """
        family, pipe, interleave = self.family, self.pipe, self.interleave
        rows, states = self.rows[places], family.states(schedule, pipe, interleave)
        totals, hosts = [], []
        layout = states.layout.replace(**self.saving._asdict())
        numbers, which = np.unique(family.microbatches[rows], return_inverse=True)
        for stage, (parts, host) in states.stages.items():
            each = [alive_microbatches(schedule, pipe, m, interleave, stage) for m in numbers.tolist()]
            most = max(map(len, each))
            padded = np.array([[*peaks, *peaks[:1] * (most - len(peaks))] for peaks in each])[which]
            of_all = np.zeros((most, padded.shape[-1], len(family.members)))
            of_all[..., rows] = np.moveaxis(padded, 0, -1)
            alive = [Alive(*figures) for figures in of_all]
            counts = self._passes.counts[stage]
            phases = stage_phases(
                family.graph, counts, parts, alive, family.microbatches, layout, family.software
            )
            totals += [_at(rows, phase.total) for phase in phases]
            hosts += [_at(rows, phase.host + host) for phase in phases]
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
        return self._outside_update + states.update_seconds

    def _depth_seconds(self, places: Any) -> tuple[Any, Any, Any]:
        """(forward, backward, weight) of one microbatch's passes by depth, for some members."""
        forward, backward, weight = self._chunk_seconds[..., places][:, self._chunk_at]
        return forward, backward, weight

    @cached_property
    def _hop_seconds(self) -> Any:
        return self.family.prices_of_some(self.pipe)(hop_transfer(self.family.graph, self.pipe))


def _at(rows: Any, figure: Any) -> Any:
    """The entries in `rows` of an array for all members, or of a figure that all share."""
    return figure[rows] if isinstance(figure, np.ndarray) else np.full(len(rows), figure)


class _Meshes:
    """The sizes of `axes` in many meshes; 1 if a mesh does not have the axis."""

    def __init__(self, sizes: Sequence[Mapping[str, int]], axes: Iterable[str]) -> None:
        self._sizes = {axis: np.array([float(one.get(axis, 1)) for one in sizes]) for axis in axes}
        self._products: dict[tuple[str, ...], Any] = {}

    def size(self, axes: str | tuple[str, ...]) -> Any:
        """Devices along `axes` of each mesh."""
        names = (axes,) if isinstance(axes, str) else axes
        if names not in self._products:
            self._products[names] = prod(self._sizes[name] for name in names)
        return self._products[names]
