"""The closed forms of the literature for one case, to be read next to the searched answer.

Nothing is priced with them. They assume ideal links and the dense peak, count only the MLP, and let every
transfer overlap with compute; the search does none of that. Symbols: C FLOP/s of a chip, W bytes/s of one
mesh axis in both directions, alpha = C / W, B tokens of a step, N chips, X shards of the batch, Y of the
model, D and F as in the model, M_X and M_Y the mesh axes that each uses.

    layout    compute (layer)   bytes (layer)                            compute-bound if
    DP        12 BDF / X        8DF                                      B / X > alpha / n
    FSDP      12 BDF / X        4DF + 8DF                                B / X > alpha / n
    TP        12 BDF / Y        4BD + 4BD                                Y < M_Y F / alpha
    FSDP+TP   12 BDF / XY       (4BD/X + 4DF/Y) + (8BD/X + 8DF/Y)        B / N > alpha^2 / (M_X M_Y F)

Source: How to Scale Your Model, "Training"; tests count the same bytes from the derived algorithm.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log, prod, sqrt

from meshwright.dtypes import dtype_bytes
from meshwright.hardware.chip import Switch, Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes.tensor import tensor_degrees
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.words import TRAINING, sentence
from meshwright.units import divisors

# bf16 weights and Adam's two moments in float32; gradients are freed.
BYTES_PER_PARAM = 10


def data_parallel_tokens_per_chip(alpha: float, num_axes: float, sparsity: float = 1.0) -> float:
    """Least tokens per chip that make DP and FSDP compute-bound: alpha / n.

    A weight is multiplied with B/X tokens and moved once per pass over n axes at once. If k of E experts see
    a token, every weight moves for k/E of the products: sparsity E/k.
    """
    return alpha / num_axes * sparsity


def tensor_limit(alpha: float, d_ff: int, num_axes: float = 1.0) -> float:
    """The tensor degree below which TP is compute-bound: M_Y F / alpha."""
    return num_axes * d_ff / alpha


def mixed_batch_shards(batch_tokens: float, d_ff: int, num_chips: float, axes_ratio: float) -> float:
    """X that moves the fewest bytes under FSDP with TP: sqrt(B/F M_X/M_Y N).

    FSDP moves 4DF/(Y M_X W) and TP 4BD/(X M_Y W) seconds; with Y = N/X they are equal there.
    The source's third question prints F/B; its derivation and its number need B/F.
    """
    return sqrt(batch_tokens / d_ff * axes_ratio * num_chips)


def mixed_tokens_per_chip(
    alpha: float, d_ff: int, axes_product: float, sparsity: float = 1.0, *, overlapped: bool = True
) -> float:
    """Least tokens per chip that make FSDP with TP compute-bound: alpha^2 / (M_X M_Y F).

    Four times that if the two transfers do not overlap. X is at its optimum. With experts, F is the width
    that a token uses and all E move: weights take E/k times longer, and X falls by the root of E/k.
    """
    return alpha**2 / (axes_product * d_ff) * sparsity * (1 if overlapped else 4)


def slice_tokens(flops_per_second: float, dcn_bytes_per_second: float) -> float:
    """Least tokens per slice that hide the sum of gradients between slices: C / W_dcn.

    Each chip sums its shard, 2 x 4DF / chips, during the 8BDF / chips of its slice's backward pass.
    """
    return flops_per_second / dcn_bytes_per_second


def pipeline_bubble(num_stages: int, microbatches: int, chunks: int = 1) -> float:
    """The idle share of a pipeline's step: (p - 1) / (v m + p - 1), v chunks per stage."""
    return (num_stages - 1) / (chunks * microbatches + num_stages - 1)


@dataclass(frozen=True)
class Links:
    """The ideal links of a machine, in the terms of the closed forms.

    alpha: FLOPs per byte of one axis. num_axes: n, the axes of FSDP over every chip; a fraction if the links
    of a machine differ. mixed_axes: (M_X, M_Y) of FSDP with TP. tensor_reach: the number of chips that TP's
    links join.
    """

    alpha: float
    num_axes: float
    mixed_axes: tuple[float, float]
    tensor_reach: int

    @property
    def axes_ratio(self) -> float:
        """M_X / M_Y."""
        return self.mixed_axes[0] / self.mixed_axes[1]

    @property
    def axes_product(self) -> float:
        """M_X M_Y."""
        return self.mixed_axes[0] * self.mixed_axes[1]


def links(hardware: Hardware, compute_dtype: str = "bf16", matmul_dtype: str | None = None) -> Links | None:
    """The links of `hardware`; None on one chip, and on devices that share a memory.

    TPU: W is both directions of a ring, one of a line; TP takes one axis and FSDP the others. GPU: W is the
    NVLink bandwidth of one GPU. FSDP over several domains uses the network cards of a whole domain at once;
    if TP fills the domain, each GPU uses its own.
    """
    # The forms assume two bytes per element.
    flops = hardware.chip.flops(matmul_dtype or compute_dtype) * dtype_bytes(compute_dtype) / 2
    network = hardware.chip.network
    if hardware.num_chips == 1:
        return None
    if isinstance(network, Torus):
        dims = zip(hardware.dims, hardware.wraparound, strict=True)
        directions = [2 if ring else 1 for size, ring in dims if size > 1] or [2]
        num_axes, alpha = sum(directions) / max(directions), flops / network.one_way_bytes_per_second
        mixed = max(1.0, num_axes - 1), 1.0
        return Links(alpha / max(directions), num_axes, mixed, prod(hardware.dims))
    if isinstance(network, Switch):
        num_domains, inside = hardware.dims
        alpha, ratio = flops / network.nvlink_bytes_per_second, 1.0
        if num_domains > 1:
            ratio = network.nic_bytes_per_second / network.nvlink_bytes_per_second
        return Links(alpha, min(1.0, ratio * inside), (ratio, 1.0), inside)
    return None


@dataclass(frozen=True)
class Threshold:
    """One closed form with the figures of a case.

    limit: the value of the formula. value: the planned layout's figure, in the same unit. holds: whether the
    layout is on the good side; None for an optimum, which has no sides. meaning: a sentence with both.
    """

    name: str
    formula: str
    limit: float
    value: float
    unit: str
    holds: bool | None
    meaning: str


def thresholds(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout
) -> tuple[Threshold, ...]:
    """Every closed form that applies to this case, with the figure of the planned layout."""
    params, hbm = count_params(config).total, hardware.chip.hbm_bytes
    limit, each = hbm / BYTES_PER_PARAM, BYTES_PER_PARAM
    figures: dict[str, float] = {"needed": each * params, "each": each, "hbm": hbm}
    holds = params < limit
    thresholds = [
        _form("data_parallel_memory", "P < HBM / 10", limit, params, "parameters", holds, **figures)
    ]
    if ideal := links(hardware, layout.precision.compute_dtype, layout.precision.matmul_dtype):
        thresholds += _communication(config, hardware, workload, layout, ideal)
    network = hardware.chip.network
    if isinstance(network, Torus) and hardware.num_slices > 1:
        flops = hardware.chip.flops(layout.precision.operand_dtype)
        limit = slice_tokens(flops, network.dcn_bytes_per_second)
        value, formula = workload.num_tokens / hardware.num_slices, "B / slices > C / W_dcn"
        thresholds.append(_form("tokens_per_slice", formula, limit, value, "tokens per slice", value > limit))
    stages, chunks, count = layout.pipe, layout.schedule.interleave, layout.schedule.microbatches
    if stages > 1:
        needed = -(-9 * (stages - 1) // chunks)
        figures = {"stages": stages, "chunks": chunks, "bubble": pipeline_bubble(stages, count, chunks)}
        unit, formula = "microbatches", "m > 9 (p - 1) / v"
        thresholds.append(_form(unit, formula, needed, count, unit, count >= needed, **figures))
    return tuple(thresholds)


def _form(
    name: str, formula: str, limit: float, value: float, unit: str, holds: bool | None, **figures: float
) -> Threshold:
    """A closed form, with the sentence of its name. figures: further figures of the sentence."""
    words = name.removesuffix("_in_turn")
    meaning = sentence(TRAINING, words, value=value, limit=limit, **figures)
    return Threshold(name, formula, limit, value, unit, holds, meaning)


def sparsity(config: ModelConfig) -> float:
    """E / k: experts over experts per token; 1 without experts."""
    moe = config.moe
    return moe.num_experts / moe.experts_per_token if moe else 1.0


def active_d_ff(config: ModelConfig) -> int:
    """The feed-forward width that one token uses: F, or its k experts and the shared experts."""
    moe = config.moe
    return moe.experts_per_token * moe.d_ff + moe.d_ff_all_shared if moe else config.d_ff


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of `number` nearest to `wanted` by ratio.

    >>> nearest_divisor(4096, 1333), nearest_divisor(64, 13.7)
    (1024, 16)
    """
    return _nearest(divisors(number), wanted)


def nearest_tensor_degree(config: ModelConfig, num_chips: int, wanted: float) -> int:
    """The tensor degree nearest to `wanted` by ratio that splits `num_chips` and the heads of the model."""
    return _nearest(tensor_degrees(config, num_chips), wanted)


def _nearest(degrees: Iterable[int], wanted: float) -> int:
    return min(degrees, key=lambda d: abs(log(d / wanted)))


def _communication(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout, ideal: Links
) -> Iterator[Threshold]:
    chips, tokens = hardware.num_chips, workload.num_tokens
    per_chip, d_ff, copies = tokens / chips, active_d_ff(config), sparsity(config)
    experts, unit = "" if copies == 1 else " * E / k", "tokens per chip"
    limit = data_parallel_tokens_per_chip(ideal.alpha, ideal.num_axes, copies)
    name, formula = "data_parallel_tokens_per_chip", f"B / N > alpha / n{experts}"
    yield _form(name, formula, limit, per_chip, unit, per_chip > limit, chips=chips)
    degree, limit = layout.tensor, tensor_limit(ideal.alpha, d_ff, ideal.mixed_axes[1])
    holds, reach = degree < limit, ideal.tensor_reach
    yield _form("tensor_degree", "Y < M_Y F / alpha", limit, degree, "chips", holds, reach=reach)
    best = mixed_batch_shards(tokens, round(d_ff * copies), chips, ideal.axes_ratio)
    shards = layout.num_batch_shards * layout.context
    tensor = nearest_tensor_degree(config, min(chips, reach), chips / best)
    figures = {"fsdp": chips // tensor, "tensor": tensor, "sequences": workload.num_sequences}
    formula = f"X = sqrt(B / {'F' if copies == 1 else '(F E / k)'} * M_X / M_Y * N)"
    yield _form("fsdp_with_tensor_degree", formula, best, shards, "shards of the batch", None, **figures)
    for overlapped in (True, False):
        limit = mixed_tokens_per_chip(ideal.alpha, d_ff, ideal.axes_product, copies, overlapped=overlapped)
        name = "fsdp_with_tensor_tokens_per_chip" + ("" if overlapped else "_in_turn")
        formula = f"B / N > {'' if overlapped else '4 '}alpha^2 / (M_X M_Y F){experts}"
        figures = {"chips": chips, "overlapped": overlapped}
        yield _form(name, formula, limit, per_chip, unit, per_chip > limit, **figures)
