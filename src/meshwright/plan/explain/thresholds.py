"""The closed forms of the literature for one case, to be read beside the searched answer.

Nothing is priced with them. They assume ideal links and the dense peak, count the MLP alone and let
every transfer hide under compute; the search does none of that. Symbols: C FLOPs per second of a chip,
W bytes per second of one mesh axis in both directions, alpha = C / W, B tokens of a step, N chips,
X shards of the batch, Y of the model, D and F as in the model, M_X and M_Y the axes that each takes.

    layout    compute (layer)   bytes (layer)                            bound by compute where
    DP        12 BDF / X        8DF                                      B / X > alpha / n
    FSDP      12 BDF / X        4DF + 8DF                                B / X > alpha / n
    TP        12 BDF / Y        4BD + 4BD                                Y < M_Y F / alpha
    FSDP+TP   12 BDF / XY       (4BD/X + 4DF/Y) + (8BD/X + 8DF/Y)        B / N > alpha^2 / (M_X M_Y F)

Source: How to Scale Your Model, "Training"; tests count the same bytes from the derived algorithm.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import log, sqrt

from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.explain.ideal_links import Links, links
from meshwright.units import format_bytes, format_count

# bf16 weights and Adam's two moments in float32; gradients come and go.
BYTES_PER_PARAM = 10


def data_parallel_tokens_per_chip(alpha: float, num_axes: float, sparsity: float = 1.0) -> float:
    """Tokens per chip from which DP and FSDP are bound by compute: alpha / n.

    A weight is multiplied with B/X tokens and moved once a pass over n axes at once. Of E experts k
    see a token, so every weight moves for k/E of the products: sparsity E/k.
    """
    return alpha / num_axes * sparsity


def tensor_limit(alpha: float, d_ff: int, num_axes: float = 1.0) -> float:
    """The tensor degree below which TP is bound by compute: M_Y F / alpha."""
    return num_axes * d_ff / alpha


def mixed_batch_shards(batch_tokens: float, d_ff: int, num_chips: int, axes_ratio: float) -> float:
    """X that moves fewest bytes under FSDP with TP: sqrt(B/F M_X/M_Y N).

    FSDP moves 4DF/(Y M_X W) and TP 4BD/(X M_Y W) seconds; with Y = N/X they are equal there.
    The source's third question prints F/B; its derivation and its number need B/F.
    """
    return sqrt(batch_tokens / d_ff * axes_ratio * num_chips)


def mixed_tokens_per_chip(
    alpha: float, d_ff: int, axes_product: float, sparsity: float = 1.0, *, overlapped: bool = True
) -> float:
    """Tokens per chip from which FSDP with TP at its best X is bound by compute: alpha^2 / (M_X M_Y F).

    Four times that where the two transfers do not hide under each other. With experts F is the width that
    a token uses and all E move: weights take E/k times as long, and X falls by its root.
    """
    return alpha**2 / (axes_product * d_ff) * sparsity * (1 if overlapped else 4)


def slice_tokens(flops_per_second: float, dcn_bytes_per_second: float) -> float:
    """Tokens a slice from which the gradients' sum between slices hides: C / W_dcn.

    Each chip sums its shard, 2 x 4DF / chips, under the 8BDF / chips of its slice's backward pass.
    """
    return flops_per_second / dcn_bytes_per_second


def pipeline_bubble(num_stages: int, microbatches: int, chunks: int = 1) -> float:
    """The idle share of a pipeline's step: (p - 1) / (v m + p - 1), v chunks per stage."""
    return (num_stages - 1) / (chunks * microbatches + num_stages - 1)


def train_seconds(
    num_params: float, num_tokens: float, num_chips: float, flops_per_second: float, mfu: float
) -> float:
    """Seconds of a whole training run: 6 P tokens over the FLOPs that the chips reach."""
    return 6 * num_params * num_tokens / (num_chips * flops_per_second * mfu)


@dataclass(frozen=True)
class Threshold:
    """One closed form with this case's numbers.

    limit: what the formula gives. value: what the planned layout has, in the same unit. holds: whether
    the layout is on the good side; None where the form is an optimum and has no sides. meaning: a sentence
    with both figures.
    """

    name: str
    formula: str
    limit: float
    value: float
    unit: str
    holds: bool | None
    meaning: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def rounded(value: float) -> str:
    """A count in three digits: 5.42, 768, 1,365, 3.48M."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else format_count(value)


def thresholds(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout
) -> tuple[Threshold, ...]:
    """Every closed form that speaks of this case, with the planned layout's figure beside it."""
    found = [_memory(config, hardware, layout)]
    if ideal := links(hardware, layout.compute_dtype, layout.matmul_dtype):
        found += _communication(config, hardware, workload, layout, ideal)
    found += _slices(hardware, workload, layout)
    found += _pipeline(layout)
    return tuple(found)


def sparsity(config: ModelConfig) -> float:
    """E / k: how many times more expert weights a model stores than a token uses; 1 without experts."""
    moe = config.moe
    return moe.num_experts / moe.experts_per_token if moe else 1.0


def active_d_ff(config: ModelConfig) -> int:
    """The feed-forward width that one token uses: F, or its k experts' and the shared ones'."""
    moe = config.moe
    return moe.experts_per_token * moe.d_ff + moe.d_ff_all_shared if moe else config.d_ff


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of `number` nearest to `wanted` by ratio.

    >>> nearest_divisor(4096, 1333), nearest_divisor(64, 13.7)
    (1024, 16)
    """
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(log(d / wanted)))


def _memory(config: ModelConfig, hardware: Hardware, layout: Layout) -> Threshold:
    params, hbm = count_params(config).total, hardware.chip.hbm_bytes
    limit = hbm / BYTES_PER_PARAM
    return Threshold(
        "data_parallel_memory",
        "P < HBM / 10",
        limit,
        params,
        "parameters",
        params < limit,
        f"Pure data parallelism keeps {format_bytes(BYTES_PER_PARAM * params)} of weights and moments on "
        f"every chip ({BYTES_PER_PARAM} bytes per parameter); a chip has {format_bytes(hbm)}, and gradients, "
        "activations and buffers need room too",
    )


def _communication(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout, ideal: Links
) -> Iterator[Threshold]:
    chips, tokens = hardware.num_chips, workload.num_tokens
    per_chip, d_ff, copies = tokens / chips, active_d_ff(config), sparsity(config)
    experts = "" if copies == 1 else " * E / k"
    limit = data_parallel_tokens_per_chip(ideal.alpha, ideal.num_axes, copies)
    yield Threshold(
        "data_parallel_tokens_per_chip",
        f"B / N > alpha / n{experts}",
        limit,
        per_chip,
        "tokens per chip",
        per_chip > limit,
        f"{rounded(per_chip)} tokens per chip; DP or FSDP over all {chips:,} chips needs {rounded(limit)} to "
        f"be compute-bound, {format_count(limit * chips)} tokens per step",
    )
    limit = tensor_limit(ideal.alpha, d_ff, ideal.mixed_axes[1])
    yield Threshold(
        "tensor_degree",
        "Y < M_Y F / alpha",
        limit,
        layout.tensor,
        "chips",
        layout.tensor < limit,
        f"tensor={layout.tensor}; tensor parallelism is compute-bound up to {limit:.3g} chips at any "
        "batch size" + (f"; NVLink joins {ideal.tensor_reach}" if ideal.tensor_reach < limit else ""),
    )
    best = mixed_batch_shards(tokens, round(d_ff * copies), chips, ideal.axes_ratio)
    shards = layout.num_batch_shards * layout.context
    tensor = nearest_divisor(min(chips, ideal.tensor_reach), chips / best)
    yield Threshold(
        "fsdp_with_tensor_degree",
        f"X = sqrt(B / {'F' if copies == 1 else '(F E / k)'} * M_X / M_Y * N)",
        best,
        shards,
        "shards of the batch",
        None,
        f"{rounded(shards)} shards of the batch; FSDP with TP moves the fewest bytes with {rounded(best)} "
        f"(about fsdp={chips // tensor}, tensor={tensor})",
    )
    for overlapped in (True, False):
        limit = mixed_tokens_per_chip(ideal.alpha, d_ff, ideal.axes_product, copies, overlapped=overlapped)
        yield Threshold(
            "fsdp_with_tensor_tokens_per_chip" + ("" if overlapped else "_in_turn"),
            f"B / N > {'' if overlapped else '4 '}alpha^2 / (M_X M_Y F){experts}",
            limit,
            per_chip,
            "tokens per chip",
            per_chip > limit,
            f"{rounded(per_chip)} tokens per chip; FSDP with TP at that X needs {rounded(limit)} to be "
            f"compute-bound if its two transfers {'overlap' if overlapped else 'take turns'}, "
            f"{format_count(limit * chips)} tokens per step",
        )


def _slices(hardware: Hardware, workload: Workload, layout: Layout) -> Iterator[Threshold]:
    network = hardware.chip.network
    if isinstance(network, Torus) and hardware.num_slices > 1:
        flops = hardware.chip.flops(layout.matmul_dtype or layout.compute_dtype)
        limit = slice_tokens(flops, network.dcn_bytes_per_second)
        value = workload.num_tokens / hardware.num_slices
        yield Threshold(
            "tokens_per_slice",
            "B / slices > C / W_dcn",
            limit,
            value,
            "tokens per slice",
            value > limit,
            f"{rounded(value)} tokens per slice; the all-reduce of gradients between slices is hidden behind "
            f"the backward pass from {rounded(limit)}",
        )


def _pipeline(layout: Layout) -> Iterator[Threshold]:
    stages, chunks = layout.pipe, layout.interleave
    if stages > 1:
        bubble = pipeline_bubble(stages, layout.microbatches, chunks)
        needed = -(-9 * (stages - 1) // chunks)
        yield Threshold(
            "microbatches",
            "m > 9 (p - 1) / v",
            needed,
            layout.microbatches,
            "microbatches",
            layout.microbatches >= needed,
            f"{layout.microbatches} microbatches (m), {stages} stages (p), v = {chunks}; the "
            f"bubble of 1F1B, (p - 1) / (v m + p - 1), is {bubble:.1%} of the step, and at most 10% from "
            f"{needed} microbatches",
        )
