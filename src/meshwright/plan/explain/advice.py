"""What to change so that a layout gets faster, or fits: by what it takes most of."""

from collections.abc import Iterator

from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.comparison import bound_seconds, percent, ratio_words, resource_name
from meshwright.plan.explain.fitting import Change
from meshwright.plan.train import price
from meshwright.units import format_bytes, format_seconds

# A resource below this share of the step is not what to work on.
_WORTH_ADVICE = 0.05
_WORTH_SAYING = 0.01

_FP8_COSTS = ": casts and scales cost more than the matmuls save"

_ADVICE = {
    "compute": "More chips, faster chips or matmuls in a narrower dtype shorten it; another layout of the "
    "same "
    "chips does not.",
    "hbm": "Larger microbatches, less recomputation and fewer optimizer bytes (more shards, narrower "
    "moments) shorten it.",
    "ici": "A larger batch gives more compute per gathered weight, a smaller tensor degree moves fewer "
    "activations, and fewer chips for the same batch wait less.",
    "dcn": "A larger batch per slice or node, or fewer slices or nodes, hides more of the transfers.",
    "host_link": "More shards, narrower moments, a larger batch per update or less offloading shorten it.",
    "bubble": "More microbatches, more chunks per stage (interleave), a zero-bubble schedule or fewer stages "
    "make the bubble smaller.",
    "launch": "Larger microbatches launch fewer kernels for the same work.",
}


def to_go_faster(
    config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate
) -> Iterator[str]:
    """What to change, by the resources that take most; tried where it can be."""
    shares = bound_seconds(best)
    for bound in sorted(shares, key=shares.__getitem__, reverse=True)[:2]:
        share = shares[bound] / best.step_seconds
        if bound in _ADVICE and share >= _WORTH_ADVICE:
            name = resource_name(bound, hardware)
            yield f"{name[0].upper()}{name[1:]}, {percent(share)} of the step. {_ADVICE[bound]}"
    again = sum(t.seconds for t in best.cost.terms if "recompute" in t.name)
    if again / best.step_seconds >= _WORTH_SAYING:
        yield (
            f"Recomputing the forward pass takes {percent(again / best.step_seconds)} of the step; more "
            "memory per chip, or more chips, would need less of it."
        )
    if twice := _twice_the_batch(config, hardware, workload, best):
        yield (
            f"Tried: with twice the batch, a step on this mesh takes {format_seconds(twice.step_seconds)}, "
            f"at {twice.mfu:.1%} MFU instead of {best.mfu:.1%}."
        )
    if narrow := _narrower_matmuls(config, hardware, workload, best):
        yield (
            f"Tried: with fp8 matmuls (--given matmul_dtype=fp8), a step takes "
            f"{format_seconds(narrow.step_seconds)}, "
            f"{ratio_words(narrow.step_seconds / best.step_seconds - 1)}"
            f"{_FP8_COSTS if narrow.step_seconds >= best.step_seconds else ''}. The planner cannot know "
            "whether the model still trains well."
        )


def _narrower_matmuls(
    config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate
) -> Candidate | None:
    """The same layout with fp8 products, where the chip has faster units for them."""
    used = best.layout.matmul_dtype or best.layout.compute_dtype
    if hardware.chip.flops_per_second.get("fp8", 0.0) <= hardware.chip.flops(used):
        return None
    return price(config, hardware, workload, best.layout.replace(matmul_dtype="fp8"))


def to_fit(best: Candidate, change: Change | None) -> Iterator[str]:
    """What to change where nothing fits: the change that was found to do, or more chips."""
    usable, needed = best.hardware.chip.program_bytes, best.memory.total
    lack, (largest, num_bytes) = best.shortage, best.memory.largest
    yield (
        f"It lacks {format_bytes(lack.over_bytes)} {lack.where}; the largest part of what a chip needs is "
        f"{largest}, {format_bytes(num_bytes)}."
    )
    if change:
        yield f"Tried: {change}."
    else:
        yield (
            "Tried without success: more microbatches, more recomputation, ZeRO, offloading, wider context "
            "and tensor axes, bf16 moments, smaller batches."
        )
    yield (
        f"Divided evenly, this memory would fill {-(-needed * best.hardware.num_chips // usable):,} chips; "
        "--smallest finds the fewest that suffice."
    )


def _twice_the_batch(
    config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate
) -> Candidate | None:
    """The layout at twice the batch, with as many or twice as many microbatches; None where neither fits."""
    batch, layout = Workload(2 * workload.num_sequences, workload.seq_len), best.layout
    tried = [
        price(config, hardware, batch, layout.replace(microbatches=factor * layout.microbatches))
        for factor in (1, 2)
    ]
    return min((c for c in tried if c.fits), key=lambda c: c.step_seconds, default=None)
