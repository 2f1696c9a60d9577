"""The best layouts to train a model on a machine, ranked by the cost model, and why.

Every layout of plan/space.py is considered, with its memory and its time. Those that rank are priced
once more by cost/step.py, which says what their time consists of.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nsmallest
from itertools import islice

from meshwright.cost.graph import Graph
from meshwright.cost.memory import Memory, train_memory
from meshwright.cost.step import StepCost, StepPricer, at_step_rates
from meshwright.errors import LayoutError, PlanError
from meshwright.hardware.links import bound_name
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.layout.axes import divisors
from meshwright.layout.axes.context import splits
from meshwright.layout.axes.tensor import tensor_degrees
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import train_flops_per_token
from meshwright.plan.assumptions import assumptions
from meshwright.plan.space import Choice, Space, record, usable_bytes
from meshwright.units import format_bytes, format_seconds

# Fields of a layout that a search does not choose.
NOT_SEARCHED = (
    "context_method",
    "offload",
    "matmul_dtype",
    "gradients_dtype",
    "optimizer_dtype",
    "master_weights",
)
# Candidates that are priced and ranked, at least.
NUM_RANKED = 20
# The best of them, for which every placement of their axes on the links is priced.
NUM_PLACED = 5


@dataclass(frozen=True)
class Candidate:
    """One layout with its price. placement: the links that its axes take.

    compiled_bytes: of one chip, as a compiler says; None where none was asked.
    """

    layout: Layout
    cost: StepCost
    memory: Memory
    model_flops: float
    num_tokens: float
    hardware: Hardware
    placement: Placement
    compiled_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Candidate({self})"

    def __str__(self) -> str:
        """The layout and its headlines: `fsdp=64,remat=full: 2.61 s a step, MFU 48.3%, 8.6 GB a chip`."""
        fits = "" if self.fits else ", does not fit"
        needed = f"{format_bytes(self.needed_bytes)} a chip{fits}"
        return f"{self.layout}: {format_seconds(self.step_seconds)} a step, MFU {self.mfu:.1%}, {needed}"

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds

    @property
    def needed_bytes(self) -> int:
        """Of one chip: the compiler's figure where it was asked."""
        return self.memory.total if self.compiled_bytes is None else self.compiled_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= usable_bytes(self.hardware)

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak: causal attention counted half, recomputation not at all."""
        return self.model_flops / (self.cost.seconds * self._peak_flops)

    @property
    def hfu(self) -> float:
        """Executed FLOPs, recomputation included, over the dense peak."""
        chips = self.hardware.num_chips
        return self.cost.executed_flops * chips / (self.cost.seconds * self._peak_flops)

    @property
    def _peak_flops(self) -> float:
        layout = self.layout
        return self.hardware.num_chips * self.hardware.chip.flops(layout.matmul_dtype or layout.compute_dtype)

    def to_dict(self) -> dict:
        """The keys of `mw plan train` in contract.md."""
        chips, seconds = self.hardware.num_chips, self.cost.seconds
        network = self.hardware.chip.network
        return {
            "layout": str(self.layout),
            "mesh": dict(self.layout.mesh.sizes),
            "placement": {axis: list(map(str, links)) for axis, links in self.placement.links.items()},
            "step_seconds": seconds,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tflops_per_chip": self.model_flops / seconds / chips / 1e12,
            "tokens_per_second_per_chip": self.num_tokens / seconds / chips,
            "bytes_per_chip": self.memory.to_dict(),
            **({} if self.compiled_bytes is None else {"compiled_bytes_per_chip": self.compiled_bytes}),
            "fits": self.fits,
            "bound": self.cost.bound,
            "bound_name": bound_name(self.cost.bound, network),
            "breakdown": [
                {
                    "name": t.name,
                    "seconds": t.seconds,
                    "share": t.seconds / seconds,
                    "bound": t.bound,
                    "bound_name": bound_name(t.bound, network),
                }
                for t in self.cost.terms
            ],
        }


@dataclass(frozen=True)
class Search:
    """Candidates, best first; those that do not fit come last."""

    candidates: tuple[Candidate, ...]
    considered: int
    seconds: float
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Search(best of {self.considered:,} layouts: {self.best})"

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def price(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> Candidate:
    """One layout, priced, with its innermost axes on the innermost links.

    Raises LayoutError where it does not divide or has another chip count.
    """
    layout.check(config, seq_len=workload.seq_len, padded=True)
    _check_batch(workload, layout)
    sequences = workload.num_sequences / layout.microbatches
    graph = record(config, hardware, layout, sequences, workload.seq_len)
    return _price(layout, graph, hardware, workload, config)


@contextmanager
def _without_collections() -> Iterator[None]:
    """The garbage collector takes a sixth of a search, which makes much that lasts and no cycles.

    What it made counts as old afterwards, or the next object would set off a look at all of it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()


@_without_collections()
def search(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    *,
    weights_dtype: str,
    compute_dtypes: tuple[str, ...],
    given: Mapping[str, object] | None = None,
    runnable: bool | None = None,
    num_ranked: int = NUM_RANKED,
    on_progress: Callable[[int], None] | None = None,
) -> Search:
    """The `num_ranked` best layouts by step time, or those that come nearest to fitting.

    given: fields that every layout must have, such as tensor=8 or matmul_dtype="fp8". runnable: only what
    `nn/` runs; by default on CPUs, where a plan is run at once. Raises PlanError where no layout divides.
    """
    started = time.perf_counter()
    given = dict(given or {})
    base = Layout.of(weights_dtype=weights_dtype).replace(
        **{key: given.pop(key) for key in NOT_SEARCHED if key in given}
    )
    runnable = hardware.chip.kind == "cpu" if runnable is None else runnable
    choices: list[Choice] = []
    for compute_dtype in compute_dtypes:
        typed = base.replace(compute_dtype=compute_dtype)
        space = Space(config, hardware, workload, typed, runnable=runnable, given=given)
        for choice in space.choices(space.meshes()):
            choices.append(choice)
            if on_progress:
                on_progress(len(choices))
    if not choices:
        if given:
            wanted = ",".join(f"{key}={value}" for key, value in given.items())
            raise PlanError(f"{config.name} on {hardware.spec}: no layout that divides has {wanted}")
        raise PlanError(_nothing_divides(config, hardware, workload, runnable))
    found = _priced(choices, config, hardware, workload, num_ranked)
    found.sort(key=rank)
    found[:NUM_PLACED] = [well_placed(config, workload, candidate) for candidate in found[:NUM_PLACED]]
    found.sort(key=rank)
    said = tuple(assumptions(config, hardware, workload, found[0]))
    return Search(tuple(found), len(choices), time.perf_counter() - started, said)


def _priced(
    choices: list[Choice], config: ModelConfig, hardware: Hardware, workload: Workload, num_ranked: int
) -> list[Candidate]:
    """The fastest choices that fit, of equals the first one first; or those that come nearest to fitting."""
    usable = usable_bytes(hardware)
    fitting = [choice for choice in choices if choice.bytes_per_chip <= usable]
    if fitting:
        fastest = islice(_ascending(fitting), num_ranked)
        chosen = [fitting[place] for place in sorted(place for _, place in fastest)]
    else:
        chosen = nsmallest(num_ranked, choices, key=lambda choice: choice.bytes_per_chip)
    return [price(config, hardware, workload, choice.layout) for choice in chosen]


def _ascending(choices: list[Choice]) -> Iterator[tuple[float, int]]:
    """(seconds, place) of choices, in ascending order; seconds are asked for only once their bound is due."""
    known: list[tuple[float, int]] = []  # a heap
    for place in sorted(range(len(choices)), key=lambda place: choices[place].least_seconds):
        while known and known[0][0] <= choices[place].least_seconds:
            yield heappop(known)
        heappush(known, (choices[place].seconds, place))
    yield from sorted(known)


def rank(candidate: Candidate) -> tuple:
    """Those that fit by time; the others by how much memory they lack."""
    over = 0 if candidate.fits else candidate.needed_bytes
    return (over, candidate.step_seconds)


def _price(
    layout: Layout, graph: Graph, hardware: Hardware, workload: Workload, config: ModelConfig
) -> Candidate:
    pricer = StepPricer(graph, layout, hardware)
    return Candidate(
        layout=layout,
        cost=pricer.cost(),
        memory=train_memory(graph, layout),
        model_flops=train_flops_per_token(config, workload.seq_len) * workload.num_tokens,
        num_tokens=workload.num_tokens,
        hardware=hardware,
        placement=pricer.placement,
    )


def well_placed(config: ModelConfig, workload: Workload, candidate: Candidate) -> Candidate:
    """The candidate with each axis on the links with which its step is shortest."""
    layout, hardware = candidate.layout, candidate.hardware
    sequences = workload.num_sequences / layout.microbatches
    graph = record(config, hardware, layout, sequences, workload.seq_len)
    best = candidate
    for placement in at_step_rates(hardware).placements(layout.mesh)[1:]:
        cost = StepPricer(graph, layout, hardware, placement).cost()
        if cost.seconds < best.step_seconds:
            best = replace(best, cost=cost, placement=placement)
    return best


def _check_batch(workload: Workload, layout: Layout) -> None:
    sequences, shards = workload.num_sequences, layout.num_batch_shards * layout.microbatches
    if sequences < shards:
        most = sequences // layout.num_batch_shards
        fits = f"microbatches up to {most}" if most else f"data·fsdp up to {sequences}"
        raise LayoutError(
            f"x[B_{{data,fsdp}}, T, D]: {sequences} sequences (B) are fewer than data·fsdp·microbatches = "
            f"{shards}; fits: {fits}, or --batch-tokens {shards * workload.seq_len}"
        )


def _nothing_divides(config: ModelConfig, hardware: Hardware, workload: Workload, runnable: bool) -> str:
    chips = hardware.num_chips
    widest = max(tensor_degrees(config, chips))
    context = max(d for d in divisors(chips // widest) if d == 1 or splits(workload.seq_len, d))
    stages = max(
        d for d in divisors(chips // widest // context) if d <= (1 if runnable else config.num_layers)
    )
    least = chips // widest // context // stages
    return (
        f"{config.name} on {hardware.spec}: {workload.num_sequences} sequences of {workload.seq_len} tokens "
        f"do not divide over {chips} chips; with tensor at most {widest}, context at most {context} and pipe "
        f"at most {stages} it takes {least} sequences; fits: --batch-tokens {least * workload.seq_len}"
    )
