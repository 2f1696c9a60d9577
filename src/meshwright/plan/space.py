"""The layouts that a search considers, each with its memory and its time.

A layout is a mesh (how many chips each axis takes), a microbatch, a schedule and a remat policy.
Meshes that do not divide the model, the sequence or the batch are left out. Meshes with the same operations
and collectives are recorded and priced together (cost/many.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import ceil, floor, prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.many import LayoutFamily, Member, Saving, Stages, Unsharded, pattern, unsharded
from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import lacks_flash
from meshwright.layout.axes import DEGREES, OPTIONS, PIPE, RANKS, Ask, ShortForm, chosen_forms
from meshwright.layout.layout_checks import remats_of
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.depths import cuts_groups
from meshwright.layout.pipelines.pipeline import PipelineSchedule
from meshwright.layout.rules import Rules
from meshwright.layout.runnable import has_static_rows
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.batch_size import nearest_multiple
from meshwright.plan.given import Condition
from meshwright.programs.launcher import Launcher
from meshwright.units import Numeric, divisors

# Enough tokens to fill a chip's matrix units: a larger pass saves little time and needs more memory.
_MAX_PASS_TOKENS = 131_072
# The remat policies that a search tries, what recomputes least first. "alternate", which PyTorch's programs
# have, is priced where it is asked for.
SEARCHED_REMATS = ("none", "attention", "matmuls", "latents", "full")
# Fields of a layout that are not of its mesh.
_OF_SCHEDULE = ("microbatches", "schedule", "interleave", "remat", "offload")


class Considered(NamedTuple):
    """One layout for a batch that it divides, whose price is not itemised yet.

    bytes_per_chip: peak memory. host_bytes: host memory per chip. stages: prices of its group of layouts.
    place: its index in `stages`.
    """

    bytes_per_chip: float
    host_bytes: float
    mesh: Layout
    microbatches: int
    num_sequences: int
    schedule: str
    interleave: int
    remat: str
    offload: bool
    stages: Stages
    place: int

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the pipeline simulated."""
        return self._slowdown * self.stages.step_seconds(self.place, self.schedule)

    @property
    def least_seconds(self) -> float:
        """Lower bound on the seconds of a step."""
        return self._slowdown * float(self.stages.least_seconds([self.place], self.schedule)[0])

    @property
    def _slowdown(self) -> float:
        return self.stages.family.chip.step.slowdown

    @property
    def layout(self) -> Layout:
        return self.mesh.replace(
            microbatches=self.microbatches,
            schedule=self.schedule,
            interleave=self.interleave,
            remat=self.remat,
            offload=self.offload,
        )

    @property
    def lacking_bytes(self) -> float:
        """Bytes by which it exceeds a chip's memory or its share of the host's; 0 if it fits."""
        return self.stages.family.chip.lacking_bytes(self.bytes_per_chip, self.host_bytes)


class Space:
    """The layouts of one model and machine with `base`'s dtypes, each for a batch that it divides.

    batch_within: the share by which the batch may differ from the workload's.
    given: conditions on every layout. launcher: the program that runs them, if not `mw train`.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        workload: Workload,
        base: Layout,
        *,
        batch_within: float = 0.0,
        given: Sequence[Condition] = (),
        launcher: Launcher | None = None,
    ) -> None:
        self._launcher = launcher
        self.config, self.hardware, self.workload, self.base = config, hardware, workload, base
        asked = workload.num_sequences
        self._batches = range(ceil(asked * (1 - batch_within)), floor(asked * (1 + batch_within)) + 1)
        self._of_mesh = [condition for condition in given if condition.field not in _OF_SCHEDULE]
        self._of_schedule = [condition for condition in given if condition.field in _OF_SCHEDULE]
        self._given_schedule = {condition.field for condition in self._of_schedule}
        torus = isinstance(hardware.chip.network, Torus)
        names_nodes = base.schedule.dispatch == "once" and hardware.software.is_ours
        node = hardware.chips_per_node if names_nodes else 0
        largest = Workload(self._batches[-1], workload.seq_len)
        conditions = frozenset(one.field for one in self._of_mesh)
        self._ask = Ask(config, largest, hardware.num_chips, torus, conditions, node)
        self._bases_by_stages: dict[tuple[int, bool], list[Layout]] = {}
        self._schedules: dict[tuple[bool, int, int], list[tuple[str, int]]] = {}
        self._sizes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        # Stages that run one program split arrays that others do not: a base with each set of rules.
        first = next(record.name for record in SCHEDULES.values() if record.spmd)
        self._bases = {False: base, True: base.replace(schedule=first, microbatches=2)}

    # Meshes

    def meshes(self, *, running: bool = False) -> Iterator[Layout]:
        """Every division of the chips among the axes that divides the model, the batch and the sequence.

        running: without schedules that do not run.
        """
        start = {**dict.fromkeys(DEGREES, 1), "zero": None, "grouped": self.base.schedule.grouped}
        start |= {name: self.base.word(name) for name in OPTIONS}
        for words in chosen_forms(self._ask, start, holds=self._holds):
            form = {name: value for name, value in words.items() if name != "grouped"}
            for base in self._bases_of(words[PIPE.name], running):
                if not words["grouped"]:
                    mesh = base.with_form(form)
                elif base.schedule.capacity is not None or base.schedule.dispatch == "once":
                    continue
                else:
                    mesh = self._grouped_bases[base.schedule.is_spmd].with_form(form)
                if self._is_given(mesh):
                    yield mesh

    @cached_property
    def _grouped_bases(self) -> Mapping[bool, Layout]:
        """The bases with grouped products of experts."""
        return {is_spmd: base.replace(grouped=True) for is_spmd, base in self._bases.items()}

    def _bases_of(self, pipe: int, running: bool) -> list[Layout]:
        """The base under each kind of schedule (SPMD or not) that a search tries at `pipe` stages."""
        key = pipe, running
        if key not in self._bases_by_stages:
            self._bases_by_stages[key] = [
                base
                for is_spmd, base in self._bases.items()
                if any(self._searches(record, pipe, running) for record in _schedules_of(is_spmd, pipe))
            ]
        return self._bases_by_stages[key]

    def _searches(self, record: PipelineSchedule, pipe: int, running: bool) -> bool:
        if pipe > 1 and running and not self._runs(record):
            return False
        named = self._given_schedule | self._ask.conditions
        if record.only_if_run and not running and named.isdisjoint((PIPE.name, "schedule")):
            return False
        return bool(self._chunks(record, pipe))

    def _runs(self, record: PipelineSchedule) -> bool:
        if self._launcher is not None:
            return record.name in self._launcher.schedules
        return record.runs_on(self.hardware.num_hosts)

    def _chunks(self, record: PipelineSchedule, pipe: int) -> list[int]:
        """Numbers of chunks to search at `pipe` stages, as far as conditions allow."""
        if not self._meets("schedule", record.name):
            return []
        chunks = record.searched(pipe, self.config.num_layers, every="interleave" in self._given_schedule)
        return [count for count in chunks if self._meets("interleave", count)]

    def _holds(self, form: ShortForm, chosen: Mapping[str, Any]) -> bool:
        """Whether layouts with the chosen words can meet the conditions and divide the batch.

        Data ranks of the axes so far divide the ranks of all: if they divide no batch, no more are chosen.
        """
        if not self._divides(prod(form[name] for name in RANKS)):
            return False
        return all(one.holds(chosen[one.field]) for one in self._of_mesh if one.field in chosen)

    def _divides(self, shards: int) -> bool:
        """Whether `shards` data ranks divide one of the batches."""
        return self._batches[-1] // shards * shards >= self._batches[0]

    def _is_given(self, mesh: Layout) -> bool:
        stage = {"zero": mesh.rules.zero_stage}
        return all(one.holds(stage.get(one.field, mesh.word(one.field))) for one in self._of_mesh)

    # Schedules

    def choices(self, meshes: Iterable[Layout]) -> Iterator[Considered]:
        """Microbatches by schedules of meshes, each with the remat policy that recomputes least to fit.

        Policies that do not fit are tried with offloaded activations, too.
        """
        for group in self.groups(meshes):
            for (schedule, interleave), places in group.schedules.items():
                waiting = [(saving, places) for saving in self.first_savings(group.pipe)]
                while waiting:
                    saving, some = waiting.pop()
                    layouts = group.choices(schedule, interleave, saving, some)
                    yield from layouts
                    if more := [choice.place for choice in layouts if self.tries_next(choice)]:
                        waiting += [(other, more) for other in self.next_savings(saving, group.pipe)]

    def groups(self, meshes: Iterable[Layout]) -> Iterator["StageGroup"]:
        """Meshes grouped for pricing together, with equal microbatches and numbers of stages."""
        families: dict[tuple, list[Member]] = {}
        patterns: dict[tuple[Rules, bool, bool, bool], Rules] = {}
        seq_len = self.workload.seq_len
        for mesh in meshes:
            is_static = self.config.moe is not None and has_static_rows(self.hardware, mesh)
            is_flash = lacks_flash(self.config, self.hardware, mesh, seq_len) is None
            program = mesh.rules, mesh.schedule.grouped, is_static, is_flash
            if program not in patterns:
                patterns[program] = pattern(mesh, self.config, self.hardware).rules
            for microbatches, num_sequences in self.microbatches(mesh):
                key = (patterns[program], *program[1:], microbatches == 1)
                families.setdefault(key, []).append(Member(mesh, microbatches, num_sequences))
        # Families that one graph of `Unsharded` bounds.
        bounded_together: dict[tuple, list[list[Member]]] = {}
        for (rules, *program, _), members in families.items():
            bounded_together.setdefault((unsharded(rules), *program), []).append(members)
        lengths = seq_len, self.workload.document_tokens
        for several in bounded_together.values():
            least = Unsharded(self.config, self.hardware, [*chain(*several)], *lengths).least_seconds
            for members in several:
                of_family, least = least[: len(members)], least[len(members) :]
                family = LayoutFamily(self.config, self.hardware, members, *lengths)
                for pipe, rows in family.rows.items():
                    yield StageGroup(self, family, pipe, of_family[rows])

    def microbatches(self, mesh: Layout) -> list[tuple[int, int]]:
        """(microbatches, sequences) of steps with equal microbatches of whole sequences on each data rank.

        Interleaved schedules take microbatches in rounds of `pipe`.
        """
        key = mesh.num_batch_shards, mesh.pipe, mesh.context
        if key not in self._sizes:
            self._sizes[key] = list(self._microbatches(*key))
        return self._sizes[key]

    def _microbatches(self, shards: int, pipe: int, context: int) -> Iterator[tuple[int, int]]:
        choices = {}
        for size in self._microbatch_sizes(shards, context):
            for rounds in {1, pipe}:
                num_sequences = nearest_multiple(self.workload.num_sequences, shards * size * rounds)
                if num_sequences in self._batches:
                    choices[num_sequences // (shards * size), num_sequences] = None
        for microbatches, num_sequences in choices:
            if (microbatches > 1 or pipe == 1) and self._meets("microbatches", microbatches):
                yield microbatches, num_sequences

    def _microbatch_sizes(self, shards: int, context: int) -> list[int]:
        """Sequences of a microbatch on one data rank to try, about doubling.

        Divisors of the rank's share, with powers of two if divisors are far apart.
        """
        share = max(1, nearest_multiple(self.workload.num_sequences, shards) // shards)
        dividing = divisors(share) if "microbatches" in self._given_schedule else _spread(divisors(share))
        powers = (2**n for n in range(share.bit_length()))
        between = [power for power in powers if not any(power < 2 * d < 4 * power for d in dividing)]
        most = max(1, _MAX_PASS_TOKENS * context // self.workload.seq_len)
        return sorted(size for size in (*dividing, *between) if size <= most)

    def schedules(self, mesh: Layout, microbatches: int) -> list[tuple[str, int]]:
        """(schedule, chunks per stage) that exist, have the mesh's rules and meet the conditions."""
        pipe = mesh.pipe
        key = mesh.schedule.is_spmd, pipe, microbatches
        if key not in self._schedules:
            self._schedules[key] = [
                (record.name, chunks)
                for record in _schedules_of(mesh.schedule.is_spmd, pipe)
                for chunks in self._chunks(record, pipe)
                if record.exists(pipe, microbatches, chunks)
                and not cuts_groups(self.config, record.name, pipe, chunks)
            ]
        return self._schedules[key]

    @cached_property
    def remats(self) -> list[str]:
        """The policies that are searched, or one that is given."""
        conditions = [one for one in self._of_schedule if one.field == "remat"]
        asked = [str(one.value) for one in conditions if one.comparison == "="]
        searched = self._launcher.remats if self._launcher else SEARCHED_REMATS
        tried = [remat for remat in asked or searched if self._meets("remat", remat)]
        return tried if asked else different_remats(self.config, self.hardware, tried)

    def first_savings(self, pipe: int) -> Sequence[Saving]:
        """What layouts with `pipe` stages save, of all that is tried the first: what recomputes least."""
        on_chip, offloaded = self._savings(pipe)
        return on_chip[:1] or offloaded

    def next_savings(self, saving: Saving, pipe: int) -> Sequence[Saving]:
        """Policies to try if `saving` does not fit: the next remat policy, and `saving` with offload."""
        on_chip, offloaded = self._savings(pipe)
        if saving.offload:
            return ()
        place = on_chip.index(saving) + 1
        return [*on_chip[place : place + 1], *(one for one in offloaded if one.remat == saving.remat)]

    def tries_next(self, choice: Considered) -> bool:
        """Whether to try another policy: `choice` does not fit, or its policy does not run."""
        return choice.lacking_bytes > 0 or choice.remat == "attention"

    def _savings(self, pipe: int) -> tuple[Sequence[Saving], Sequence[Saving]]:
        """Policies that save on the chip, by rising recomputation, and policies with offload.

        Offload is searched if conditions name it. On platforms that hide the transfers
        (`Platform.hides_offload`) it is also searched without stages; with stages it does not run.
        """
        asked = any(one.field == "offload" for one in self._of_schedule)
        asked = asked or (pipe == 1 and self.hardware.chip.platform.hides_offload)
        on_chip = self.remats if self._meets("offload", False) else []
        offloaded = self.remats if asked and self._meets("offload", True) else []
        return [Saving(remat) for remat in on_chip], [Saving(remat, True) for remat in offloaded]

    def _meets(self, field: str, value: object) -> bool:
        return all(one.holds(value) for one in self._of_schedule if one.field == field)


def _schedules_of(is_spmd: bool, pipe: int) -> Iterator[PipelineSchedule]:
    """The records whose stages run one program, or programs of their own; one stage is the second kind."""
    return (record for record in SCHEDULES.values() if (record.spmd and pipe > 1) == is_spmd)


class StageGroup:
    """The members of a family with equal numbers of stages. A place is a member's index.

    unsharded_seconds: lower bounds of their steps (`Unsharded`).
    """

    def __init__(self, space: Space, family: LayoutFamily, pipe: int, unsharded_seconds: Numeric) -> None:
        self.space, self.family, self.pipe = space, family, pipe
        self._slowdown = family.chip.step.slowdown
        rows = family.rows[pipe]
        self.all_places = np.arange(len(rows))
        self.num_sequences = np.array([family.members[row].num_sequences for row in rows])
        self.unsharded_seconds: Any = self._slowdown * unsharded_seconds
        self.schedules: dict[tuple[str, int], list[int]] = {}
        for place, row in enumerate(rows):
            for schedule in space.schedules(family.members[row].mesh, family.members[row].microbatches):
                self.schedules.setdefault(schedule, []).append(place)

    @cached_property
    def least_seconds(self) -> Any:
        """Tighter lower bounds, which need the family's graph."""
        return self._slowdown * self.family.least_seconds[self.family.rows[self.pipe]]

    @property
    def num_layouts(self) -> int:
        return sum(map(len, self.schedules.values()))

    def member(self, place: int) -> Member:
        """The mesh and batch at this index of the group's arrays."""
        return self.family.members[self.family.rows[self.pipe][place]]

    def least_seconds_of(self, schedule: str, interleave: int, saving: Saving, places: Sequence[int]) -> Any:
        """Lower bounds on the seconds of a step, an array with one for each of the members at `places`."""
        stages = self.family.stages(schedule, self.pipe, interleave, saving)
        return self._slowdown * stages.least_seconds(places, schedule)

    def holds_state(self, schedule: str, interleave: int) -> Any:
        """Whether a chip holds the weights, gradients and optimizer state of each member; an array."""
        states = self.family.states(schedule, self.pipe, interleave)
        return states.least_bytes <= self.family.chip.program_bytes

    def choices(
        self, schedule: str, interleave: int, saving: Saving, places: Sequence[int]
    ) -> list[Considered]:
        """The members at `places` under one schedule, which save the same."""
        stages = self.family.stages(schedule, self.pipe, interleave, saving)
        on_chip, of_host = (needed.tolist() for needed in stages.needed_bytes(places, schedule))
        rows, members = self.family.rows[self.pipe], self.family.members
        return [
            Considered(needed, host, *members[rows[place]], schedule, interleave, *saving, stages, place)
            for place, needed, host in zip(places, on_chip, of_host, strict=True)
        ]


def different_remats(
    config: ModelConfig, hardware: Hardware, remats: Sequence[str] = SEARCHED_REMATS
) -> list[str]:
    """The remat policies that differ for this model on this machine.

    Where attention saves no scores `attention` is `none`, and without latents `latents` is `matmuls`.
    """
    flash = hardware.software.has_flash(config.d_head, hardware.chip.compute_capability)
    alike = {"attention"} if flash else set()
    return [remat for remat in remats if remat in remats_of(config) and remat not in alike]


def _spread(degrees: list[int]) -> list[int]:
    """Every degree that is at least twice the one kept before, and the last.

    >>> _spread([1, 2, 3, 4, 6, 12])
    [1, 2, 4, 12]
    """
    chosen = degrees[:1]
    for degree in degrees:
        if degree >= 2 * chosen[-1]:
            chosen.append(degree)
    return list(dict.fromkeys([*chosen, degrees[-1]]))
