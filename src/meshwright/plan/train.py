"""Search for the best layouts to train a model on a machine, by the cost model.

plan/space.py gives every layout with its memory and its time. cost/step_cost.py prices the ranked layouts
again and itemises their time.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest
from itertools import chain, islice
from math import inf

from meshwright.collector import collector_paused
from meshwright.cost.collectives import forget_prices
from meshwright.cost.graph import Graph
from meshwright.cost.many import Member
from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_cost import StepPricer
from meshwright.cost.step_memory import step_memory
from meshwright.cost.transfer_prices import at_step_rates
from meshwright.errors import PlanError
from meshwright.hardware.topology import Hardware, forget_placements
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits, check_layout_fields
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import train_flops_per_token
from meshwright.plan.assumptions import assumptions
from meshwright.plan.batch_size import check_enough, nearest_batch, planned_words
from meshwright.plan.candidate import Candidate
from meshwright.plan.degrees import check_chips
from meshwright.plan.fastest import Fastest
from meshwright.plan.given import NOT_SEARCHED, Condition
from meshwright.plan.launcher_limits import launcher_lacks
from meshwright.plan.nothing import nothing_found
from meshwright.plan.rank import TIE, plainness, ranked, structure, ties
from meshwright.plan.space import Considered, Space, StageGroup
from meshwright.programs.launcher import Launcher
from meshwright.units import format_bytes, format_seconds

# Candidates that are priced and ranked, at least.
NUM_RANKED = 20
# Number of the first, and of the fastest, candidates with prices for every placement of axes on links.
NUM_PLACED = 5
# The planned batch may differ from the requested one by the first share. If no batch within it divides, by
# the second, which always includes a multiple of every smaller number.
BATCH_WITHIN = (0.1, 0.5)


@dataclass(frozen=True)
class Faster:
    """The fastest layout that does not run yet, and the reason."""

    candidate: Candidate
    why_not: str

    def to_dict(self) -> dict[str, object]:
        layout, seconds = str(self.candidate.layout), self.candidate.step_seconds
        return {"layout": layout, "step_seconds": seconds, "why_not": self.why_not}


@dataclass(frozen=True)
class Search:
    """Candidates, best first; candidates that do not fit come last.

    config: the model. workload: the planned workload. notices: sentences to show first, if the planned batch
    is not the requested one or no ranked layout runs. faster: a layout that does not run and is more than 2%
    faster than the best runnable one, or None. launcher: the program whose layouts these are, if not
    `mw train`. given: the requested conditions, as the user wrote them.
    """

    candidates: tuple[Candidate, ...]
    considered: int
    seconds: float
    config: ModelConfig
    workload: Workload
    notices: tuple[str, ...] = ()
    faster: Faster | None = None
    launcher: Launcher | None = None
    given: str = ""

    def __repr__(self) -> str:
        return f"Search(best of {self.considered:,} layouts: {self.best})"

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on the best layout's price; made when asked, since they price it many times."""
        return assumptions(self.config, self.workload, self.best)

    @cached_property
    def _ties(self) -> set[int]:
        tied = ties(self.candidates)
        return {id(candidate) for candidate in tied} if len(tied) > 1 else set()

    @property
    def faster_words(self) -> str | None:
        """A sentence on `faster`: its step time, the gain over the best layout, and why it does not run."""
        if self.faster is None:
            return None
        other, best = self.faster.candidate, self.best
        gain = f"{1 - other.step_seconds / best.step_seconds:.0%} less" if best.fits else "and fits"
        return (
            f"{other.layout} would take {format_seconds(other.step_seconds)}, {gain}, but does not run yet "
            f"({self.faster.why_not}); --any ranks it"
        )

    def is_tie(self, candidate: Candidate) -> bool:
        """Whether the candidate ties with others for the shortest step."""
        return id(candidate) in self._ties


def price(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    layout: Layout,
    *,
    whole: bool = True,
    graph: Graph | None = None,
) -> Candidate:
    """One layout, priced, with its innermost axes on the innermost links.

    whole: refuse microbatches of part of a sequence. No step takes them, but published rows may have them.
    graph: the recorded graph of a microbatch, if known.
    Raises LayoutError if the layout does not divide or has another chip count.
    """
    layout.precision.check_trains(bool(config.lora_rank))
    check_enough(workload, layout)
    num_sequences = workload.num_sequences if whole else None
    check_fits(layout, config, num_sequences, workload.seq_len, padded=True)
    graph = graph or record_training(config, hardware, layout, PassShape.of_microbatch(workload, layout))
    pricer = StepPricer(graph, layout, hardware)
    return Candidate(
        layout=layout,
        cost=pricer.cost(),
        memory=step_memory(graph, layout, hardware.software),
        model_flops=train_flops_per_token(config, workload.attended_len) * workload.num_tokens,
        num_tokens=workload.num_tokens,
        hardware=hardware,
        placement=pricer.placement,
        graph=graph,
    )


def price_layout(
    config: ModelConfig, hardware: Hardware, workload: Workload, layouts: Sequence[Layout]
) -> Search:
    """A Search of one layout, in the fastest dtype of `layouts`.

    layouts: the layout in each dtype to compare. The batch is the nearest that the layout divides. Raises
    LayoutError if the layout does not divide the model, has more ranks than the batch has sequences, or
    another number of devices than the machine.
    """
    started = time.perf_counter()
    for layout in layouts:
        check_chips(hardware, layout, config)
    planned = nearest_batch(workload, layouts[0])
    priced = [price(config, hardware, planned, layout) for layout in layouts]
    best = min(priced, key=lambda candidate: candidate.step_seconds)
    shards = best.layout.num_batch_shards * best.layout.schedule.microbatches
    why = f"do not divide over data·fsdp·microbatches = {shards:,}"
    notices = () if planned == workload else (planned_words(workload, planned, why),)
    return Search((best,), 1, time.perf_counter() - started, config, planned, notices)


def well_placed(candidate: Candidate) -> Candidate:
    """The candidate in the placement of axes on links with the shortest step."""
    layout, hardware = candidate.layout, candidate.hardware
    placements = at_step_rates(hardware).placements(layout.mesh)
    costs = [StepPricer(candidate.graph, layout, hardware, placement).cost() for placement in placements]
    seconds = [cost.seconds for cost in costs]
    if not (shortest := seconds.index(min(seconds))):
        return candidate
    return replace(candidate, cost=costs[shortest], placement=placements[shortest])


@collector_paused()
def search(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    *,
    weights_dtype: str,
    compute_dtypes: tuple[str, ...],
    given: Sequence[Condition] = (),
    runnable: bool | None = None,
    batch_within: Sequence[float] = BATCH_WITHIN,
    num_ranked: int = NUM_RANKED,
    on_progress: Callable[[int], None] | None = None,
    launcher: Launcher | None = None,
    explained: bool = True,
) -> Search:
    """The `num_ranked` best layouts by step time, or the nearest to fitting.

    given: conditions on every layout. runnable: True ranks runnable layouts, False all layouts; None ranks
    runnable layouts, or all if none is runnable. batch_within: shares by which the batch may differ from the
    workload's. A later share is tried only if no earlier one has a layout. launcher: ranks the layouts that
    this program runs, with the machine `running` it; `runnable` has no effect. explained: False leaves out
    notices and the faster layout that does not run. Raises PlanError if no layout divides.
    """
    started = time.perf_counter()
    runnable = True if launcher else runnable
    scout = _Scout(config, hardware, weights_dtype, compute_dtypes, tuple(given), on_progress, launcher)
    pool, runs = scout.pool(workload, runnable, batch_within)
    if not pool:
        reason = scout.why_not if runnable else None
        if launcher and (first := next(iter(_all(scout, workload, batch_within[-1], given)), None)):
            raise PlanError(
                f"{config.name} on {hardware.spec}: nothing that is asked for is run by {launcher.name} "
                f"({scout.why_not(first)}); leave out --for, or a part of --given"
            )
        raise nothing_found(config, hardware, workload, scout.spaces, given, reason)
    planned = replace(workload, num_sequences=_planned_batch(pool, workload.num_sequences))
    limit = _tied_seconds_per_sequence(pool, workload, planned)
    scout.narrow(pool, workload, planned, runs=runs)
    priced = _priced(_best(pool, num_ranked), config, hardware, planned)
    notices = []
    if explained and planned != workload:
        near = scout.nearest(workload, runs=runs)
        notices.append(planned_words(workload, planned, _why_another(pool, near, hardware)))
    if not runs and runnable is None:
        why = scout.reason(priced[0].layout)
        notices.append(f"No layout of the list runs yet ({why}): all can only be planned.")
    plainer = scout.plainer(priced[0].layout, limit, workload, planned, runs=runs) if explained else None
    if plainer:
        other = price(config, hardware, replace(planned, num_sequences=plainer.num_sequences), plainer.layout)
        notices.append(
            f"{other.num_tokens:,.0f} tokens a step allow {other.layout}, which is plainer: "
            f"{format_seconds(other.step_seconds)}, {format_bytes(other.needed_bytes)} a chip."
        )
    looks_further = explained and runs and not launcher
    faster = scout.faster(priced, workload, planned) if looks_further else None
    forget_prices()
    forget_placements()
    return Search(
        candidates=tuple(priced),
        considered=scout.considered,
        seconds=time.perf_counter() - started,
        config=config,
        workload=planned,
        notices=tuple(notices),
        faster=faster,
        launcher=launcher,
    )


def _tied_seconds_per_sequence(pool: Fastest, asked: Workload, planned: Workload) -> float:
    """The largest seconds per sequence that tie with the fastest layout of the planned batch."""
    same = (pair for pair in pool if pair[1].num_sequences == planned.num_sequences)
    seconds = next((seconds for seconds, _ in same), 0.0)
    return (1 + TIE) * seconds / _priced_sequences(asked, planned.num_sequences)


def _priced_sequences(asked: Workload, number: int) -> int:
    """The number of sequences that a pool's seconds are for, for layouts with a batch of `number`.

    Steps of a smaller batch than the requested one are repeated, as in `Fastest`.
    """
    return max(asked.num_sequences, number)


def _all(
    scout: "_Scout", workload: Workload, within: float, given: Sequence[Condition]
) -> Iterator[Considered]:
    for space in scout.spaces(workload, within, given):
        yield from space.choices(space.meshes())


class _Scout:
    """The layouts of a machine that a search looks at, and which of them run."""

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        weights_dtype: str,
        compute_dtypes: tuple[str, ...],
        given: tuple[Condition, ...],
        on_progress: Callable[[int], None] | None,
        launcher: Launcher | None,
    ) -> None:
        self._launcher = launcher
        self._config, self._hardware, self._on_progress = config, hardware, on_progress
        fixed = {one.field: one.value for one in given if one.field in NOT_SEARCHED}
        base = Layout.of(weights_dtype=weights_dtype).replace(**fixed)
        check_layout_fields(base, config)
        base.precision.check_trains(bool(config.lora_rank))
        self._bases = [base.replace(compute_dtype=dtype) for dtype in compute_dtypes]
        self._given = tuple(one for one in given if one.field not in NOT_SEARCHED)
        self._reasons: dict[tuple, tuple[Layout, str | None]] = {}
        # The groups of the pool, and the groups that `narrow` added.
        self._pooled: list[StageGroup] = []
        self._few: list[StageGroup] = []
        self.within = 0.0
        self.considered = 0

    def pool(
        self, workload: Workload, runnable: bool | None, batch_within: Sequence[float]
    ) -> tuple[Fastest, bool]:
        """The layouts considered for every batch, and whether they are limited to runnable ones.

        Sets `within`, the share by which their batches may differ from the workload's.
        """
        asked, fastest = workload.num_sequences, Fastest([])
        some_run = bool(self._launcher) or why_not(self._config, self._bases[0]) is None
        for runs in [True] * (runnable is not False and some_run) + [False] * (runnable is not True):
            for within in batch_within:
                self.within = within
                self._pooled = list(self._groups(workload, within, runs=runs or None))
                if fastest := self._fastest(self._pooled, asked, runs=runs):
                    return fastest, runs
        return fastest, bool(runnable)

    def nearest(self, workload: Workload, *, runs: bool) -> Fastest:
        """The layouts for exactly the workload's batch; runs: only runnable ones."""
        return self._fastest(self._groups(workload, 0.0, runs=runs or None), None, runs=runs)

    def _fastest(
        self,
        groups: Iterable[StageGroup],
        asked: int | None,
        *,
        runs: bool,
        members: Callable[[Member], bool] | None = None,
    ) -> Fastest:
        wanted = (lambda choice: self.why_not(choice) is None) if runs else None
        return Fastest(groups, asked=asked, wanted=wanted, members=members)

    def narrow(self, pool: Fastest, asked: Workload, planned: Workload, *, runs: bool) -> None:
        """Keep in the pool only layouts of the planned batch, and add the missing ones.

        Meshes of few shards are missing: the pool has them for a divisible batch nearer to the requested one.
        """
        few = _few_shards(asked, planned)
        self._few = list(self._groups(planned, 0.0, runs=runs or None, most_shards=few)) if few else []
        pool.keep(_takes(planned.num_sequences, few))
        pool.add(self._few)

    def plainer(
        self, than: Layout, limit: float, asked: Workload, planned: Workload, *, runs: bool
    ) -> Considered | None:
        """The plainest layout of another batch with a simpler structure than `than`, or None.

        limit: the largest seconds per sequence.
        """

        def is_plainer(member: Member) -> bool:
            if member.num_sequences == planned.num_sequences:
                return False
            return structure(member.mesh) < structure(than)

        pool = self._fastest(self._pooled, asked.num_sequences, runs=runs, members=is_plainer)
        largest = round((1 + self.within) * asked.num_sequences)
        near = sorted(pool.within(limit * largest), key=lambda choice: plainness(choice.layout))
        may_take = (limit * _priced_sequences(asked, choice.num_sequences) for choice in near)
        timed = (choice for choice, most in zip(near, may_take, strict=True) if pool.seconds(choice) <= most)
        return next(timed, None)

    def faster(self, candidates: Sequence[Candidate], asked: Workload, planned: Workload) -> Faster | None:
        """The fastest layout that does not run, if it is faster than all candidates by more than a tie.

        Call it after `narrow`, which finds the layouts of few shards.
        """
        others = Fastest(self._pooled, wanted=lambda choice: self.why_not(choice) is not None)
        others.keep(_takes(planned.num_sequences, _few_shards(asked, planned)))
        others.add(chain(self._few, self._groups(planned, 0.0, runs=False)))
        least = min((one.step_seconds for one in candidates if one.fits), default=inf)
        for _, choice in islice(others, 1):
            candidate = well_placed(price(self._config, self._hardware, planned, choice.layout))
            if (1 + TIE) * candidate.step_seconds < least:
                return Faster(candidate, self.reason(candidate.layout) or "")
        return None

    def _groups(
        self, workload: Workload, within: float, *, runs: bool | None, most_shards: float = inf
    ) -> Iterator[StageGroup]:
        """The groups of meshes that run, that do not run, or of all meshes if `runs` is None."""
        for space in self.spaces(workload, within, self._given):
            meshes = (
                mesh
                for mesh in space.meshes(running=runs is True)
                if mesh.num_batch_shards <= most_shards
                and (runs is None or runs == (self._why_not_mesh(mesh) is None))
            )
            for group in space.groups(meshes):
                self.considered += group.num_layouts
                if self._on_progress:
                    self._on_progress(self.considered)
                yield group

    def spaces(self, workload: Workload, within: float, given: Sequence[Condition]) -> Iterator[Space]:
        """The spaces of layouts, one for each dtype to compute in."""
        for base in self._bases:
            yield Space(
                self._config,
                self._hardware,
                workload,
                base,
                batch_within=within,
                given=tuple(given),
                launcher=self._launcher,
            )

    def why_not(self, choice: Considered) -> str | None:
        """Why a layout does not run: the reason of its mesh, or of its schedule with any microbatches."""
        reasons, mesh = self._reasons, choice.mesh
        of_schedule = (id(mesh), choice.schedule, choice.interleave, choice.remat, choice.offload)
        of_mesh = self._why_not_mesh(mesh)
        if of_mesh is None and of_schedule not in reasons:
            reasons[of_schedule] = mesh, self.reason(choice.layout)
        return of_mesh or reasons[of_schedule][1]

    def _why_not_mesh(self, mesh: Layout) -> str | None:
        reasons, key = self._reasons, (id(mesh),)
        if key not in reasons:  # with the mesh itself, or another one may get its id
            reasons[key] = mesh, self.reason(mesh)
        return reasons[key][1]

    def reason(self, layout: Layout) -> str | None:
        """Why a layout does not run on this machine; None if it does."""
        if self._launcher is not None:
            return launcher_lacks(self._launcher, self._config, layout)
        return why_not(self._config, layout, hardware=self._hardware)


def _few_shards(asked: Workload, planned: Workload) -> int:
    """Maximum shards of a batch that is nearer to the requested batch than the planned batch is."""
    return 2 * abs(planned.num_sequences - asked.num_sequences)


def _takes(num_sequences: int, few: int) -> Callable[[Considered], bool]:
    """Test for layouts with `num_sequences` sequences on a mesh of more than `few` shards."""
    return lambda choice: choice.num_sequences == num_sequences and choice.mesh.num_batch_shards > few


def _planned_batch(pool: Fastest, asked: int) -> int:
    """The batch nearest to `asked` sequences among the batches of the fastest layouts.

    A layout counts as fastest within TIE of the minimum. If no layout fits, lacking bytes replace seconds.
    """
    best, near = None, set[int]()
    for seconds, choice in pool:
        best = seconds if best is None else best
        if seconds > (1 + TIE) * best or asked in near:
            break
        near.add(choice.num_sequences)
    if best is None:
        least = (1 + TIE) * min(choice.lacking_bytes for choice in pool.lacking)
        near = {choice.num_sequences for choice in pool.lacking if choice.lacking_bytes <= least}
    # At equal distance the larger batch.
    return min(near, key=lambda number: (abs(number - asked), -number))


def _best(layouts: Fastest, num_ranked: int) -> list[Layout]:
    """The fastest layouts that fit, plus the plainest that ties; or the nearest to fitting."""
    fastest = list(islice(layouts, num_ranked))
    if not fastest:
        nearest = nsmallest(num_ranked, layouts.lacking, key=lambda choice: choice.lacking_bytes)
        return [choice.layout for choice in nearest]
    tie = (1 + TIE) * fastest[0][0]
    plainest = min(plainness(choice.layout) for seconds, choice in fastest if seconds <= tie)
    near = ((plainness(choice.layout), choice) for choice in layouts.within(tie))
    plainer = sorted((pair for pair in near if pair[0] < plainest), key=lambda pair: pair[0])
    first = next((choice.layout for _, choice in plainer if layouts.seconds(choice) <= tie), None)
    return [choice.layout for _, choice in fastest] + ([first] if first else [])


def _priced(
    layouts: list[Layout], config: ModelConfig, hardware: Hardware, workload: Workload
) -> list[Candidate]:
    """The layouts priced and ranked, the first and the fastest of them on the links that suit them best."""
    priced = [price(config, hardware, workload, layout) for layout in layouts]
    candidates = ranked(priced)
    first = [
        *candidates[:NUM_PLACED],
        *nsmallest(NUM_PLACED, candidates, key=lambda candidate: candidate.step_seconds),
    ]
    placed = {id(one): well_placed(one) for one in {id(one): one for one in first}.values()}
    return ranked(placed.get(id(candidate), candidate) for candidate in candidates)


def _why_another(pool: Fastest, near: Fastest, hardware: Hardware) -> str:
    """Why the requested batch is not planned.

    pool: layouts of any batch. near: layouts that divide the requested batch.
    """
    if not near:
        return f"do not divide over {hardware.num_chips:,} chips"
    planned, asked = next(iter(pool), None), next(iter(near), None)
    if planned is None or asked is None:
        return "divide only over layouts that do not fit"
    # Seconds of `pool` are for num_asked sequences, or for a layout's own batch if it is larger.
    num_asked = asked[1].num_sequences
    ratio = asked[0] / planned[0] * max(num_asked, planned[1].num_sequences) / num_asked
    longer = f"{ratio:.1f} times as long" if ratio >= 2 else f"{ratio - 1:.0%} longer"
    return f"divide only over layouts that take {longer} a token"
