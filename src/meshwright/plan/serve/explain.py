"""A serving plan in words: where a step's time goes, where it is compute-bound, what int8 would give."""

from dataclasses import dataclass
from math import ceil

from meshwright.cost.serving_step import cache_bytes, pass_cost
from meshwright.dtypes import dtype_bytes
from meshwright.hardware.links import bound_name
from meshwright.hardware.roofs import compute_bound_batch
from meshwright.layout import Layout
from meshwright.layout.paged import why_no_paged_kernel
from meshwright.models.count import count_params, kv_cache_bytes
from meshwright.plan.explain.explanation import Section
from meshwright.plan.serve.point import Point
from meshwright.plan.serve.prefill import runs_with
from meshwright.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ServeExplanation:
    """Figures and prose on one point.

    critical_batch: the number of sequences from which matmuls are compute-bound. crossover_batch: the number
    from which the caches are larger than the weights. int8_gain: seconds of a step over those with int8
    weights and cache.
    """

    critical_batch: float
    crossover_batch: int
    int8_gain: float
    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.sections))

    def to_dict(self) -> dict[str, object]:
        return {
            "explanation": str(self),
            "critical_batch": self.critical_batch,
            "crossover_batch": self.crossover_batch,
            "int8_gain": self.int8_gain,
        }


def explain_serving(point: Point) -> ServeExplanation:
    """What limits a generate step of `point`, and what would change that."""
    critical, crossover, gain = _critical(point), _crossover(point), _int8_gain(point)
    sections = (
        Section("Generate", tuple(_generate(point, critical))),
        Section("Cache", tuple(_cache(point, crossover))),
        Section("Layout", tuple(_layout(point))),
        Section("Prefill", tuple(_prefill(point))),
        Section("What int8 would give", (_int8(point, gain),)),
    )
    return ServeExplanation(critical, crossover, gain, sections)


def _critical(point: Point) -> float:
    layout, moe = point.layout, point.config.moe
    dense = compute_bound_batch(
        point.hardware.chip, layout.weights_dtype, layout.matmul_dtype or layout.compute_dtype
    )
    tokens = dense * (moe.num_experts / moe.experts_per_token if moe else 1)
    return tokens * _num_apart(point) / (1 + point.requests.drafts)


def _num_apart(point: Point) -> int:
    """Groups of chips whose matmuls, of experts where there are any, each have tokens of their own."""
    at = point.layout.at("generate")
    shared = at.expert_axes if point.config.moe else ()
    return at.mesh.size(tuple(axis for axis in at.batch_axes if axis not in shared))


def _crossover(point: Point) -> int:
    weights = count_params(point.config).total * dtype_bytes(point.layout.weights_dtype)
    a_sequence = kv_cache_bytes(point.config, point.requests.mean_context, point.layout.kv_dtype)
    return ceil(weights / a_sequence)


def _int8_gain(point: Point) -> float:
    narrow = point.layout.replace(weights_dtype="int8", kv_dtype="int8")
    return point.cost.seconds / _seconds(point, narrow)


def _seconds(point: Point, layout: Layout) -> float:
    queries, context = 1 + point.requests.drafts, point.requests.mean_context
    at = layout.at("generate")
    return pass_cost(point.config, at, point.hardware, point.batch, queries, context)[0].seconds


def _generate(point: Point, critical: float) -> list[str]:
    chip, cost, layout = point.hardware.chip, point.cost, point.layout
    computes = layout.matmul_dtype or layout.compute_dtype
    parts = [
        f"{format_seconds(term.seconds)} ({term.seconds / cost.seconds:.0%}) {term.name}, bound by "
        f"{bound_name(term.bound, chip.network)}"
        for term in cost.terms
        if term.seconds > 0.01 * cost.seconds
    ]
    start = (
        f"A step of {point.batch} sequences takes {format_seconds(cost.seconds)}: it reads "
        f"{format_bytes(point.memory.weights)} of weights per chip at any batch size, and the cache of every "
        f"sequence. Its parts: {'; '.join(parts)}."
    )
    beta = dtype_bytes(layout.weights_dtype) / 2
    experts = point.config.moe
    times = f" x E/k = {experts.num_experts}/{experts.experts_per_token}" if experts else ""
    drafts, apart = point.requests.drafts, _num_apart(point)
    times += f" x {apart} groups of chips" if apart > 1 else ""
    times += f" / {1 + drafts} tokens of a sequence, {drafts} of them drafts" if drafts else ""
    sides = "below" if point.batch < critical else "at or above"
    bound = (
        f"Matmuls are memory-bound below B_crit = beta C / W = {beta:g} x {chip.flops(computes):.3g} / "
        f"{chip.hbm_bytes_per_second:.3g}{times} = {critical:,.0f} sequences (beta: bytes per weight / 2; C: "
        "FLOP/s; W: bytes/s of "
        f"HBM); {point.batch} is {sides} it."
    )
    more = (
        "A larger batch reads the same weights for more tokens."
        if point.batch < critical
        else "A larger batch takes proportionally longer."
    )
    return [start, f"{bound} {more}"]


def _cache(point: Point, crossover: int) -> list[str]:
    config, requests, dtype = point.config, point.requests, point.layout.kv_dtype
    a_sequence = kv_cache_bytes(config, requests.mean_context, dtype)
    text = (
        f"The cache of one sequence of {requests.mean_context:,} tokens is {format_bytes(a_sequence)} in "
        f"{dtype}; from {crossover:,} sequences on, the caches are larger than the weights"
    )
    if point.batch >= crossover:
        text += (
            ", as here: a step takes longer with each sequence, and a larger batch gains little throughput"
        )
    fit = f"Memory holds {point.max_batch:,} sequences in this layout"
    kind = (
        "of mean length, because pages are allocated as they fill"
        if requests.paged
        else f"of {requests.context:,} tokens, allocated from the start; --paged counts mean lengths instead"
    )
    return [f"{text}.", *_gathered(point), f"{fit}, {kind}."]


def _gathered(point: Point) -> list[str]:
    """What the server does and the price leaves out, where attention over pages has no kernel."""
    config, hardware, layout = point.config, point.hardware, point.layout.at("generate")
    lacking = why_no_paged_kernel(hardware.chip.kind, config, layout)
    if hardware.chip.kind == "cpu" or not hardware.software.is_ours or lacking is None:
        return []
    cached = cache_bytes(config, layout, point.batch, point.requests.mean_context)
    more = 2 * cached / hardware.chip.memory_bytes_per_second("bf16")
    return [
        f"The price has each key and value read once, by a kernel. `mw serve` has none here ({lacking}): it "
        f"gathers pages into tables, which are written and read again, {format_seconds(more)} more a step at "
        "these lengths."
    ]


def _layout(point: Point) -> list[str]:
    layout, heads = point.layout, point.config.num_kv_heads
    said = []
    if layout.tensor > 1:
        said.append(
            f"Heads and feed-forward width are split over tensor = {layout.tensor}, and so are the weights "
            "and "
            f"the {heads} KV heads (K) of the cache. Each layer has two all-reduces of one token per "
            "sequence, "
            "which are latency-bound."
        )
    if (copies := layout.degree("kv_replicas")) > 1:
        how = {
            "copies": "hold copies of the same KV heads",
            "batch": "split the cache by sequence, with two all-to-alls per layer",
            "sequence": "split the cache by position and combine partial softmax sums",
        }[str(layout.word("cache"))]
        said.append(f"There are more devices than the {heads} KV heads: kv_replicas = {copies} {how}.")
    if (second := layout.degree("tensor2")) > 1:
        said.append(f"D is split over tensor2 = {second} (2D weight-stationary).")
    if (experts := layout.degree("expert")) > 1:
        said.append(f"Experts are split over {experts} devices, to which tokens travel.")
    if layout.data > 1:
        said.append(
            f"data = {layout.data} groups of chips hold the same weights and serve different requests."
        )
    return said or ["One chip holds everything; nothing is communicated."]


def _prefill(point: Point) -> list[str]:
    prefill, generate = point.chip_seconds
    chunk, ways = point.requests.chunk, point.other_prefills
    how = "whole" if chunk is None else f"in chunks of {chunk:,} tokens"
    split = point.prefill_layout.context
    keys = "ring attention" if point.prefill_layout.passes_keys_round else "keys and values all-gathered"
    how += f", split by position over context = {split} ({keys})" if split > 1 else ""
    said = [
        f"A prompt of {point.requests.prompt_tokens:,} tokens takes {format_seconds(point.ttft_seconds)} on "
        f"idle chips (TTFT), prefilled {how}. A request takes {prefill:.3g} chip-seconds of prefill and "
        f"{generate:.3g} of generation: {point.prefill_to_generate_ratio:.2g} prefill chips per generate "
        "chip."
    ]
    if other := next((way for way in ways if way.chunk != chunk), None):
        slower = other.ttft_seconds / point.ttft_seconds
        how = (
            "Whole"
            if other.chunk is None
            else f"In chunks of {other.chunk:,}, which delay running answers less"
        )
        said.append(f"{how}, it takes {format_seconds(other.ttft_seconds)}, {slower:.2f} times as long.")
    if other := next((way for way in ways if way.layout.context > max(1, split)), None):
        slower = other.ttft_seconds / point.ttft_seconds
        unlike = "" if runs_with(point.config, point.layout, other.layout) else "; mw serve does not run that"
        said.append(
            f"Split by position over context = {other.layout.context} ({other.layout}), it would take "
            f"{format_seconds(other.ttft_seconds)}, {slower:.2f} times as long{unlike}."
        )
    return said


def _int8(point: Point, gain: float) -> str:
    layout = point.layout
    if layout.weights_dtype == layout.kv_dtype == "int8":
        return "Weights and cache are in int8 already."
    return (
        f"With weights and cache in int8, widened for the matmul, the same step is {gain:.2f} times as fast. "
        f"Here weights are {layout.weights_dtype} and the cache is {layout.kv_dtype}."
    )
