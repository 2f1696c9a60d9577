"""Tokens per second per chip against time per token: the frontier over machines, layouts, types and batches.

Every layout is recorded once, for all of its batches, and priced on each machine of its size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from meshwright.collector import collector_paused
from meshwright.cost.collectives import forget_prices
from meshwright.cost.record_inference import alike_of, cache_bytes
from meshwright.cost.serving_step import InferenceMemory, Passes
from meshwright.dtypes import dtype_bytes, types_for
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.chip import SharedMemory
from meshwright.hardware.prices import without_price
from meshwright.hardware.topology import Hardware, forget_placements
from meshwright.layout import Layout
from meshwright.layout.axes import EXPERT
from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.precision import Precision, published_precision, stored_bytes
from meshwright.layout.server_programs import server_programs
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.serve.layouts import serving_layouts
from meshwright.plan.serve.point import Point
from meshwright.plan.serve.prefill import PromptPasses, by_position, prefilling, runs_with
from meshwright.plan.serve.requests import Requests, Targets
from meshwright.plan.smallest import sizes
from meshwright.units import format_bytes, format_seconds, whole

# For a kind of chip that is named without a topology.
MOST_CHIPS = 256
# Sequences that the devices of each shard of the batch have: four to every doubling.
_SEQUENCES = np.unique(np.round(2 ** np.arange(0, 13.01, 0.25)))
# Relative difference in throughput (or price) below which two points are equally good. Near its limit by
# compute throughput grows by less than this for each doubling of the batch, and of the time per token.
AS_GOOD = 0.02

_NO_TARGETS = Targets()


class Infeasible(PlanError):
    """No point meets the targets, or none fits. nearest: the nearest point; None if none fits."""

    def __init__(self, message: str, nearest: Point | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest


@dataclass(frozen=True)
class SmallestMachine:
    """The fewest chips of a kind that hold the model and one request; None if none tried does."""

    chip: str
    weights_dtype: str
    hardware: str | None
    chips: int | None


@dataclass(frozen=True)
class ServePlan:
    """The result of a serving search.

    frontier: by time per token. best: the point with the most tokens per chip, or the cheapest per token if
    every chip has a price, among points that meet the targets. Without a target for the time per token, it is
    the point with the shortest time within AS_GOOD of that point. by_chip: the frontier of each kind of chip.
    """

    frontier: tuple[Point, ...]
    best: Point
    by_chip: dict[str, tuple[Point, ...]]
    smallest: tuple[SmallestMachine, ...]
    considered: int
    seconds: float


def serving_machines(specs: Iterable[str]) -> list[Hardware]:
    """The machines that `specs` name; of a chip without a topology all that double, up to MOST_CHIPS."""
    machines_by_spec: dict[str, Hardware] = {}
    for spec in map(catalog.usual, specs):
        if ":" in spec or spec.endswith(".toml"):
            machines = [catalog.load(spec)]
        elif isinstance(catalog.chip(spec).network, SharedMemory):
            raise PlanError(f"hardware {spec!r} has no topology; write {spec}:8")
        else:
            machines = [m for m in sizes(spec) if m.num_chips <= MOST_CHIPS and m.num_chips.bit_count() == 1]
        machines_by_spec |= {machine.spec: machine for machine in machines}
    return list(machines_by_spec.values())


@collector_paused()
def search_serving(
    config: ModelConfig,
    machines: Sequence[Hardware],
    requests: Requests,
    targets: Targets = _NO_TARGETS,
    *,
    precisions: Sequence[Mapping[str, object]],
    layout: Layout | None = None,
    runnable: bool = True,
    accepts: Callable[[Layout], bool] | None = None,
    programs: bool = True,
) -> ServePlan:
    """The frontier over `machines`. layout: price only this layout. accepts: whether a layout is tried.

    Raises Infeasible if no point fits or meets the targets. runnable: prompts are prefilled only in ways that
    `mw serve` runs; otherwise in any way that can be planned. programs: the code of `mw serve` takes memory,
    if its size is known; False for other engines.
    precisions: words of the layout's precision (weights_dtype, kv_dtype, ...), one set for each type tried.
    """
    started = time.perf_counter()
    swept = _Sweep(config, requests, targets.ttft, runnable=runnable, programs=programs)
    points: list[Point] = []
    smallest: dict[tuple[str, str], SmallestMachine] = {}
    named = {machine.chip.name for machine in machines if ":" in machine.spec}
    for machine in machines:
        replicas = len(machines) == 1 or sum(machine.chip.name == m.chip.name for m in machines) == 1
        for precision in precisions:
            tried = (
                [layout.replace(**precision)]
                if layout
                else serving_layouts(config, machine, precision, replicas=replicas and bool(named))
            )
            tried = [each for each in tried if accepts is None or accepts(each)]
            fitting = [point for one in tried for point in swept.points(one, machine)]
            key = machine.chip.name, _narrowest(precision)
            have = (
                SmallestMachine(*key, machine.spec, machine.num_chips)
                if fitting
                else SmallestMachine(*key, None, None)
            )
            known = smallest.get(key)
            if known is None or (have.chips or inf) < (known.chips or inf):
                smallest[key] = have
            points += fitting
    forget_prices()
    forget_placements()
    if not points:
        raise Infeasible(_nothing_fits(config, machines, requests, precisions, programs=programs))
    priced = all(point.price_per_hour is not None for point in points)
    best = _best(points, targets, priced=priced)
    kinds = dict.fromkeys(point.hardware.chip.name for point in points)
    return ServePlan(
        frontier=tuple(pareto(points)),
        best=best,
        by_chip={kind: tuple(pareto(p for p in points if p.hardware.chip.name == kind)) for kind in kinds},
        smallest=tuple(smallest.values()),
        considered=swept.considered,
        seconds=time.perf_counter() - started,
    )


def pareto(points: Iterable[Point]) -> list[Point]:
    """The Pareto front of time per token and tokens per second per chip."""
    front: list[Point] = []
    for point in sorted(
        points, key=lambda p: (p.tpot_seconds, -p.tokens_per_second_per_chip, p.ttft_seconds)
    ):
        if not front or point.tokens_per_second_per_chip > front[-1].tokens_per_second_per_chip:
            front.append(point)
    return front


class _Sweep:
    """All batches of a layout on a machine; a layout is recorded once for all machines.

    most_ttft: if a prompt takes longer, its positions are split too. runnable: only if that runs. programs:
    count the code of the programs of `mw serve`.
    """

    def __init__(
        self, config: ModelConfig, requests: Requests, most_ttft: float, *, runnable: bool, programs: bool
    ) -> None:
        self.config, self.requests, self._most_ttft = config, requests, most_ttft
        self._runnable, self._programs = runnable, programs
        self.considered = 0
        self._steps: dict[tuple[object, ...], Passes] = {}
        self._prefills: dict[tuple[object, ...], PromptPasses] = {}

    def points(self, layout: Layout, machine: Hardware) -> Iterator[Point]:
        """The batches that fit, and the largest that does."""
        usable = machine.chip.program_bytes
        if self._weights_bytes(layout) > usable:
            return
        generate, prefill_layout = self._generate(layout, machine), prefilling(layout)
        prefill = self._prompts(prefill_layout, machine)
        head = self._head(layout, machine)
        batches, memory = generate.batches, self._memory(machine, generate, prefill, head)
        self.considered += len(batches)
        code = self._code_bytes(layout, machine, batches)
        if memory.total[0] + code[0] > usable:
            return
        steps, prompts = generate.seconds(machine), prefill.seconds(machine)
        if head is not None:
            steps += self.requests.drafts * head.seconds(machine)
        if prompts[0] > self._most_ttft:
            for other in by_position(self.config, layout, self.requests):
                if self._runnable and not runs_with(self.config, layout, other):
                    continue
                passes = self._prompts(other, machine)
                held = self._memory(machine, generate, passes, head)
                if held.total[0] + code[0] <= usable and passes.seconds(machine)[0] < prompts[0]:
                    prefill_layout, prefill, memory = other, passes, held
                    prompts = passes.seconds(machine)
        most = self._max_batch(generate, memory, usable - code)
        # Between two batches near each other all figures are as good as linear.
        tried = np.append(batches[memory.total + code <= usable], most)
        for batch in np.unique(tried).tolist():
            yield Point(
                self.config,
                machine,
                layout,
                self.requests,
                int(batch),
                _at(batch, batches, steps) / self.requests.tokens_a_step,
                float(prompts[0]),
                float((prompts / prefill.batches).min()),
                InferenceMemory(
                    memory.weights,
                    round(_at(batch, batches, memory.cache)),
                    round(_at(batch, batches, memory.buffers)),
                ),
                most,
                prefill_layout,
            )

    def _weights_bytes(self, layout: Layout) -> float:
        """Lower bound on a chip's bytes of weights: an even split."""
        precision = layout.precision
        narrow = min(dtype_bytes(each) for each in (precision.weights_dtype, precision.experts_dtype) if each)
        total = count_params(self.config).total * narrow
        return total / (layout.mesh.num_devices // max(1, layout.data // layout.degree(EXPERT.name)))

    def _generate(self, layout: Layout, machine: Hardware) -> Passes:
        """The generate steps of all batches."""
        requests, generate = self.requests, layout.at("generate")
        key = generate, *alike_of(machine, "generate")
        if key not in self._steps:
            shards = num_replicas(generate, self.config)
            self._steps[key] = Passes(
                self.config,
                generate,
                shards * _SEQUENCES,
                1 + requests.drafts,
                requests.mean_context,
                machine,
            )
        return self._steps[key]

    def _head(self, layout: Layout, machine: Hardware) -> Passes | None:
        """The steps of the draft head for all batches; None without one."""
        if not self.requests.draft_head:
            return None
        generate = layout.at("generate")
        key = "head", generate, *alike_of(machine, "generate")
        if key not in self._steps:
            batches = num_replicas(generate, self.config) * _SEQUENCES
            context = self.requests.mean_context
            self._steps[key] = Passes(self.config.head, generate, batches, 1, context, machine)
        return self._steps[key]

    def _prompts(self, layout: Layout, machine: Hardware) -> PromptPasses:
        """The passes that prefill."""
        key = layout, *alike_of(machine, "prefill")
        if key not in self._prefills:
            passes = PromptPasses(self.config, layout, self.requests, self.requests.chunk, machine)
            self._prefills[key] = passes
        return self._prefills[key]

    def _memory(
        self, machine: Hardware, generate: Passes, prefill: PromptPasses, head: Passes | None
    ) -> InferenceMemory:
        """The memory of a server: weights, the caches of all requests, and the buffers of the larger pass.

        A draft head reads the model's table and output projection.
        """
        held = generate.layout, generate.batches, self.requests.held_context
        replicas, is_ours = num_replicas(held[0], self.config), machine.software.is_ours
        entries = self.requests.num_state_entries(generate.batches, replicas, is_ours=is_ours)
        weights, cache = generate.memory.weights, cache_bytes(self.config, *held, entries)
        if head is not None:
            of_model = {part.name for part in generate.graph.weights}
            weights += whole(
                sum(part.stored_bytes for part in head.graph.weights if part.name not in of_model)
            )
            cache += cache_bytes(self.config.head, *held)
        buffers = np.maximum(generate.memory.buffers, prefill.buffers[0])
        return InferenceMemory(weights, cache, buffers)

    def _code_bytes(self, layout: Layout, machine: Hardware, batches: np.ndarray) -> np.ndarray:
        """Bytes of the code of all programs of a server, for each batch; 0 if they are unknown."""
        platform, bytes_per_chip = machine.chip.platform, np.zeros(len(batches))
        if self._programs and platform.compiler.step_code_bytes is not None:
            # The number of programs grows by one with each doubling of the slots of a replica.
            doublings = np.ceil(np.log2(np.maximum(1, batches // int(batches[0]))))
            for number in np.unique(doublings):
                same = doublings == number
                slots = int(batches[same][-1])
                counts = server_programs(self.config, layout, platform, slots, self.requests.context)
                bytes_per_chip[same] = counts.code_bytes(platform.compiler, self.config.num_layers)
        return bytes_per_chip

    def _max_batch(self, generate: Passes, memory: InferenceMemory, usable: np.ndarray) -> int:
        """The largest batch that fits, of whole shards.

        usable: bytes without the programs, for each batch. Bytes grow by a line from batch to batch, and
        programs of a batch between two are those of the larger.
        """
        batches, shards = generate.batches, int(generate.batches[0])
        fitting = int((memory.total <= usable).sum())
        if fitting == len(batches):
            return int(batches[-1])
        low, high = batches[fitting - 1 : fitting + 1]
        have, over = memory.total[fitting - 1 : fitting + 1]
        most = low + (high - low) * max(0.0, (usable[fitting] - have) / (over - have))
        return shards * int(most // shards)


def _at(batch: float, batches: np.ndarray, figures: np.ndarray) -> float:
    return float(np.interp(batch, batches, figures))


def _best(points: Sequence[Point], targets: Targets, *, priced: bool) -> Point:
    """The point with the cheapest tokens among points that meet the targets.

    Without a target for the time per token, a faster point within AS_GOOD of its cost is preferred.
    """
    wanted = [point for point in points if _excess(point, targets) <= 1]
    if not wanted:
        raise _missed(points, targets)

    def cost(point: Point) -> float:
        """The cost of a token: money, or chip-seconds."""
        return (point.price_per_million_tokens or inf) if priced else 1 / point.tokens_per_second_per_chip

    most = min(map(cost, wanted)) * (1 + (AS_GOOD if targets.tpot == inf else 0))
    as_good = (point for point in wanted if cost(point) <= most)
    return min(as_good, key=lambda p: (p.tpot_seconds, cost(p)))


def _excess(point: Point, targets: Targets) -> float:
    """The largest ratio of a point's figure to its target."""
    return max(share for _, share in _shares(point, targets))


def _shares(point: Point, targets: Targets) -> list[tuple[str, float]]:
    price = point.price_per_hour
    if price is None and targets.price_per_hour < inf:
        raise PlanError(without_price(point.hardware.chip.name, "--max-price-per-hour"))
    return [
        ("ttft", point.ttft_seconds / targets.ttft),
        ("tpot", point.tpot_seconds / targets.tpot),
        ("price", (price or 0.0) / targets.price_per_hour),
    ]


def _missed(points: Sequence[Point], targets: Targets) -> Infeasible:
    """The error that names the missed targets and the nearest points."""
    reached = {
        "ttft": ("--ttft", min(p.ttft_seconds for p in points), targets.ttft),
        "tpot": ("--tpot", min(p.tpot_seconds for p in points), targets.tpot),
        "price": (
            "--max-price-per-hour",
            min(p.price_per_hour or 0.0 for p in points),
            targets.price_per_hour,
        ),
    }
    nearest = min(points, key=lambda p: _excess(p, targets))

    def line(what: str, why: str) -> str:
        option, least, target = reached[what]
        return f"{option} {_written(what, target, nearest)} {why.format(_written(what, least, nearest))}"

    named = [what for what, (_, least, target) in reached.items() if least > target]
    why = "is met by no layout; the lowest is {}"
    if not named:
        named = [max(_shares(nearest, targets), key=lambda pair: pair[1])[0]]
        why = "is the tightest target: layouts that meet it miss another"
    return Infeasible(
        "; ".join(line(what, why) for what in named)
        + f"; the nearest point is {nearest}, with TTFT {format_seconds(nearest.ttft_seconds)} and "
        f"{format_seconds(nearest.tpot_seconds)} per token"
        + (_sooner_by_position(nearest) if "ttft" in named else ""),
        nearest,
    )


def _sooner_by_position(point: Point) -> str:
    """The TTFT with prompts split by position, if it is shorter and does not run yet."""
    for way in point.other_prefills:  # the fastest first
        is_sooner = way.layout.num_prompt_shards > 1 and way.ttft_seconds < point.ttft_seconds
        if is_sooner and not runs_with(point.config, point.layout, way.layout):
            return (
                f"; with prompts split by position over context={way.layout.num_prompt_shards} it would be "
                f"{format_seconds(way.ttft_seconds)}, which mw serve does not run yet: --any ranks such "
                "layouts"
            )
    return ""


def _written(what: str, value: float, point: Point) -> str:
    return f"{value:,.2f} {point.hardware.chip.currency}" if what == "price" else format_seconds(value)


def _nothing_fits(
    config: ModelConfig,
    machines: Sequence[Hardware],
    requests: Requests,
    precisions: Sequence[Mapping[str, object]],
    *,
    programs: bool,
) -> str:
    """The message for a model that fits none of the machines, with a remedy."""
    largest = max(machines, key=lambda machine: machine.num_chips * machine.chip.program_bytes)
    weights, narrow = min((_weight_bytes(config, words), _narrowest(words)) for words in precisions)
    capacity = largest.num_chips * largest.chip.program_bytes
    code = " and the server's programs" if programs else ""
    start = f"{config.name} does not fit {largest.spec}: its weights in {narrow} are "
    fits = "take more chips" + _narrower(config, precisions[0], capacity)
    if weights > capacity:
        return f"{start}{format_bytes(weights)} and all chips have {format_bytes(capacity)}; {fits}"
    return (
        f"{start}{format_bytes(weights)} of {format_bytes(capacity)}, and no layout that divides leaves "
        f"memory for one request of {requests.context:,} tokens{code}; {fits}"
    )


def _narrowest(words: Mapping[str, Any]) -> str:
    """The type of most weights of a layout with these words."""
    return str(words.get("experts_dtype") or words["weights_dtype"])


def _weight_bytes(config: ModelConfig, words: Mapping[str, Any]) -> float:
    """The bytes of all weights as a layout with these words stores them."""
    return stored_bytes(config, Precision(**words))


def _narrower(config: ModelConfig, words: Mapping[str, Any], capacity: float) -> str:
    """The remedy of a narrower type of weights that chips have memory for; "" if there is none."""
    published = published_precision(config, by_engine=True)
    needed = _weight_bytes(config, {**words, **published})
    if "experts_dtype" in published and needed < capacity:
        return f", or --engine vllm: with experts in {config.stored_dtype} weights are {format_bytes(needed)}"
    least = min(capacity, _weight_bytes(config, words))
    for dtype in types_for("weights", "serve"):  # the widest first
        needed = _weight_bytes(config, {**words, "weights_dtype": dtype})
        if needed < least:
            return f", or --weights-dtype {dtype}: {format_bytes(needed)} of weights"
    return ""
