"""The explanation of a serving plan: its figures. Their words are in serving.txt.jinja."""

from dataclasses import dataclass
from math import ceil

from meshwright.cost.record_inference import cache_bytes
from meshwright.cost.serving_step import pass_cost
from meshwright.dtypes import dtype_bytes
from meshwright.hardware.links import bound_name
from meshwright.hardware.roofs import compute_bound_batch
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import why_no_paged
from meshwright.layout.axes import AXES
from meshwright.layout.moves.attention import uses_ring
from meshwright.models.count import count_params, kv_cache_bytes, mixer_state_bytes
from meshwright.plan.serve.point import Point
from meshwright.plan.serve.prefill import runs_with
from meshwright.plan.words import SERVING, Section, sections


@dataclass(frozen=True)
class ServeExplanation:
    """The explanation of one point, as figures and as text.

    critical_batch: the fewest sequences with compute-bound matmuls. crossover_batch: the fewest whose caches
    and states are larger than the weights. int8_gain: the step time over the step time with int8 weights and
    cache.
    """

    critical_batch: float
    crossover_batch: int
    int8_gain: float
    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.sections))

    def to_dict(self) -> dict[str, object]:
        """The keys that `mw plan serve --json` adds."""
        return {
            "explanation": str(self),
            "critical_batch": self.critical_batch,
            "crossover_batch": self.crossover_batch,
            "int8_gain": self.int8_gain,
        }


def explain_serving(point: Point) -> ServeExplanation:
    """The limits of a generate step of `point`, and changes that would shift them."""
    config, layout, hardware, requests = point.config, point.layout, point.hardware, point.requests
    computes, chip = layout.precision.operand_dtype, hardware.chip
    apart = _num_groups(point)
    sparsity = config.moe.num_experts / config.moe.experts_per_token if config.moe else 1
    weights_dtype = layout.precision.weights_dtype
    critical = compute_bound_batch(chip, weights_dtype, computes) * sparsity * apart / (1 + requests.drafts)
    states = mixer_state_bytes(config, layout.precision.compute_dtype)
    cached = kv_cache_bytes(config, requests.mean_context, layout.precision.cache_dtype) + states
    crossover = ceil(count_params(config).total * dtype_bytes(weights_dtype) / cached)
    gain = point.cost.seconds / _seconds(point, layout.replace(weights_dtype="int8", kv_dtype="int8"))
    shards = max(1, point.prefill_layout.num_prompt_shards)
    split = next((way for way in point.other_prefills if way.layout.num_prompt_shards > shards), None)
    present = [axis for axis in AXES if layout.degree(axis.name) > 1]
    present.sort(key=lambda axis: (axis.is_ranks, axis.turn))
    text = sections(
        SERVING,
        "explanation",
        point=point,
        axes=list(filter(None, (axis.serving_words(config, layout.words) for axis in present))),
        by_ring=uses_ring(point.prefill_layout),
        computes=computes,
        beta=f"{dtype_bytes(weights_dtype) / 2:g}",
        critical=critical,
        apart=apart,
        parts=[
            (term, bound_name(term.bound, chip.network))
            for term in point.cost.terms
            if term.seconds > 0.01 * point.cost.seconds
        ],
        cached=cached,
        states=states,
        crossover=crossover,
        lacking=_lacking_kernel(point),
        gathering=_gathering_seconds(point),
        chunked=next((way for way in point.other_prefills if way.chunk != requests.chunk), None),
        split=split,
        split_runs=split is None or runs_with(config, layout, split.layout),
        gain=gain,
    )
    return ServeExplanation(critical, crossover, gain, text)


def _num_groups(point: Point) -> int:
    """Groups of chips whose matmuls (of experts, if there are any) each have other tokens."""
    at = point.layout.at("generate")
    shared = at.table.axes_of("E") if point.config.moe else ()
    return at.mesh.size(tuple(axis for axis in at.batch_axes if axis not in shared))


def _seconds(point: Point, layout: Layout) -> float:
    queries, context = 1 + point.requests.drafts, point.requests.mean_context
    at = layout.at("generate")
    return pass_cost(point.config, at, point.hardware, point.batch, queries, context)[0].seconds


def _lacking_kernel(point: Point) -> str | None:
    """The reason why attention over pages has no kernel in `mw serve`; None if it has one, or is not ours."""
    platform = point.hardware.chip.platform
    if platform.page_by_page or not point.hardware.software.is_ours:
        return None
    return why_no_paged(platform, point.config, point.layout.at("generate"))


def _gathering_seconds(point: Point) -> float:
    """Seconds to write the cached pages into tables and read them, which the price leaves out."""
    layout = point.layout.at("generate")
    cached = cache_bytes(point.config, layout, point.batch, point.requests.mean_context)
    return 2 * cached / point.hardware.chip.memory_bytes_per_second("bf16")
