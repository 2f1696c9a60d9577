"""Curves of the textbook's closed forms, and of prices of collectives, as figures over one variable.

A `Plot` has a frame for each position of its slider. A frame has panels, and a panel has curves over the same
values of x. Symbols as in `explain/thresholds.py`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from meshwright.cost.collectives import Op, collective_seconds
from meshwright.dtypes import dtype_bytes
from meshwright.errors import HardwareError, MeshwrightError
from meshwright.hardware import catalog
from meshwright.hardware.chip import SharedMemory, Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params, forward_flops, kv_cache_bytes
from meshwright.notation.mesh import Mesh
from meshwright.plan.explain.thresholds import (
    Links,
    active_d_ff,
    data_parallel_tokens_per_chip,
    links,
    mixed_batch_shards,
    mixed_tokens_per_chip,
    sparsity,
)
from meshwright.plan.serve.phase import PhasePoint, price_phase
from meshwright.units import divisors

# Values of curves by name, over the same x.
Values = dict[str, Sequence[float | None]]
Unit = Literal["seconds", "bytes", "bytes/s", "FLOP/s", "number", "count", "share", "tokens/s", "ratio"]
_OPS: dict[str, Op] = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "AllToAll": "all_to_all",
}
_AXIS_NAMES = "XYZ"


@dataclass(frozen=True)
class CurvePanel:
    """Curves over x in one unit; a value is None if it does not exist at that x."""

    title: str
    unit: Unit
    curves: Values


@dataclass(frozen=True)
class CurveFrame:
    """The panels at one position of the slider."""

    label: str
    panels: tuple[CurvePanel, ...]


@dataclass(frozen=True)
class Plot:
    """A figure over x. first: the frame shown first. remarks: sentences below it."""

    name: str
    title: str
    caption: str
    x_title: str
    x_unit: Unit
    x: tuple[float, ...]
    frames: tuple[CurveFrame, ...]
    slider: str = ""
    first: int = 0
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """The keys of `mw plot` in docs/reference/json.md."""
        return {
            "kind": self.name,
            "title": self.title,
            "caption": self.caption,
            "x": {"title": self.x_title, "unit": self.x_unit, "values": list(self.x)},
            "slider": self.slider or None,
            "first": self.first,
            "frames": [
                {
                    "label": frame.label,
                    "panels": [
                        {"title": panel.title, "unit": panel.unit, "curves": panel.curves}
                        for panel in frame.panels
                    ],
                }
                for frame in self.frames
            ],
            "remarks": list(self.remarks),
        }


def _powers(low: float, high: float, factor: float = 2.0) -> tuple[float, ...]:
    """low, factor low, ... up to high.

    >>> _powers(1, 8)
    (1, 2.0, 4.0, 8.0)
    """
    values = [low]
    while values[-1] * factor <= high * 1.000001:
        values.append(values[-1] * factor)
    return tuple(values)


def _least(holds: Callable[[int], bool], low: float, high: float) -> int:
    """The least whole number from `low` on for which `holds`; it holds from there up to `high`.

    >>> _least(lambda number: number**2 >= 50, 1, 16)
    8
    """
    numbers = range(round(low), round(high) + 1)
    return numbers[bisect_left(numbers, True, key=holds)]


def bandwidth_plot(hardware: Hardware) -> Plot:
    """Bytes a second that each collective reaches over one dimension of a machine, by V.

    Source: How to Scale Your Model, "Sharded Matrices", the measured AllGather of a v5e.
    """
    mesh, axis = _mesh_of(hardware)
    placement, sizes = hardware.place(mesh), _powers(1024, 2**30, 4)

    def rate(size: float, op: Op = "all_gather") -> float:
        return size / collective_seconds(op, size, axis, placement).seconds

    curves: Values = {name: [rate(size, op) for size in sizes] for name, op in _OPS.items()}
    half = _least(lambda size: 2 * rate(size) >= rate(sizes[-1]), sizes[0], sizes[-1])
    return Plot(
        "bandwidth",
        f"Bandwidth of collectives on {hardware.spec}",
        f"V, the bytes of the gathered array, over the time of each collective along {axis} of "
        f"{', '.join(f'{name}={size}' for name, size in mesh.sizes.items())}. Small arrays wait for hops.",
        "V",
        "bytes",
        sizes,
        (CurveFrame("", (CurvePanel("V over time", "bytes/s", curves),)),),
        remarks=(f"An AllGather reaches half of its bandwidth from {half:,} bytes.",),
    )


def roofline(name: str) -> Plot:
    """FLOPs a second that a chip reaches at most, by FLOPs per byte of its memory, for each number type.

    Source: How to Scale Your Model, "All About Rooflines".
    """
    chip = catalog.chip_of(name)
    intensities, bandwidth = _powers(1, 2**14, 2), chip.hbm_bytes_per_second
    peaks = {dtype: rate for dtype, rate in chip.flops_per_second.items() if rate > 0}
    curves: Values = {
        dtype: [min(peak, at * bandwidth) for at in intensities] for dtype, peak in peaks.items()
    }
    ridges = [f"{dtype} {peak / bandwidth:,.0f}" for dtype, peak in peaks.items()]
    return Plot(
        "roofline",
        f"{chip.name}: roofline of its memory",
        "The smaller of the peak rate and the memory's bandwidth times the arithmetic intensity. A matmul of "
        "B tokens with large weights has about B FLOPs a byte in bf16.",
        "FLOPs a byte",
        "number",
        intensities,
        (CurveFrame("", (CurvePanel("attainable", "FLOP/s", curves),)),),
        remarks=(f"Bound by FLOPs from this arithmetic intensity: {', '.join(ridges)}.",),
    )


def _mesh_of(hardware: Hardware) -> tuple[Mesh, str]:
    """A mesh with an axis for each dimension longer than one, and the axis with the fastest links."""
    sizes = [size for size in hardware.dims if size > 1]
    if not sizes:
        raise HardwareError(f"{hardware.spec} has one chip and no links; fits: {hardware.chip.name}:8")
    inside_first = sizes if isinstance(hardware.chip.network, Torus) else sizes[::-1]
    mesh = Mesh(dict(zip(_AXIS_NAMES, inside_first, strict=False)))
    return mesh, "X"


def ring_latency(chip: str, num_bytes: int, most: int = 1024) -> Plot:
    """Seconds of a small collective by the number of devices.

    Torus: over one dimension of a slice, which is a ring if its links close. GPUs: over whole nodes.
    """
    machines = list(_machines(chip, most))
    if len(machines) < 2:
        raise HardwareError(f"{chip} has links between fewer than two sizes of machine; fits: v5p, h100")
    is_torus = isinstance(catalog.chip(chip).network, Torus)
    over = [_over(machine, along_one=is_torus) for machine in machines]
    sizes = tuple(float(prod(mesh.sizes[axis] for axis in axes)) for mesh, axes in over)
    curves: Values = {
        name: [
            collective_seconds(op, num_bytes, axes, machine.place(mesh)).seconds
            for machine, (mesh, axes) in zip(machines, over, strict=True)
        ]
        for name, op in _OPS.items()
    }
    where = (
        "over one dimension of a slice. The latency of a ring grows with half of its devices, that of a "
        "line, whose links do not close, with all."
        if is_torus
        else "over all devices of whole nodes. The latency of a ring grows with its devices, that of a tree "
        "with their logarithm."
    )
    return Plot(
        "latency",
        f"{chip}: time of collectives by the number of devices",
        f"V = {num_bytes:,} bytes {where}",
        "devices",
        "count",
        sizes,
        (CurveFrame("", (CurvePanel("time", "seconds", curves),)),),
    )


def _machines(chip: str, most: int) -> Iterable[Hardware]:
    """Machines of growing size: slices of a torus that grow in one dimension, or more GPUs.

    The other dimensions of a slice are the smallest with which its links close to rings.
    """
    network = catalog.chip(chip).network
    if isinstance(network, SharedMemory):
        return
    if isinstance(network, Torus):
        others = [network.wraparound_multiple_of or 1] * (len(network.pod) - 1)
        for size in (2, *range(4, 33, 4)):
            if size <= min(max(network.pod), most):
                yield catalog.load(f"{chip}:{'x'.join(map(str, (size, *others)))}")
        return
    domain = catalog.load(f"{chip}:8").dims[-1]
    for size in _powers(2, most):
        devices = round(size)
        yield catalog.load(
            f"{chip}:{devices}" if devices <= domain else f"{chip}:{devices // domain}x{domain}"
        )


def _over(machine: Hardware, *, along_one: bool) -> tuple[Mesh, tuple[str, ...]]:
    """A mesh with an axis for each dimension above 1, and the axes to time: the first, or all."""
    mesh = Mesh(dict(zip(_AXIS_NAMES, (size for size in machine.dims if size > 1), strict=False)))
    return mesh, tuple(mesh.sizes)[: 1 if along_one else None]


def attention_share(config: ModelConfig, low: int = 1024, high: int = 2**20) -> Plot:
    """FLOPs of a token by component, and attention's share, over the length of the sequence.

    Source: How to Scale Your Model, "Transformer Math", question 4.
    """
    lengths = _powers(low, high)
    counts = [forward_flops(config, round(length)) for length in lengths]
    parts: Values = {
        "feed-forward": [c.mlp + c.router for c in counts],
        "projections": [c.attention for c in counts],
        "scores, values": [c.scores for c in counts],
    }
    shares: Values = {"scores, values": [c.scores / c.total for c in counts]}

    def passes(length: int) -> bool:
        flops = forward_flops(config, length)
        return flops.scores >= flops.mlp > 0

    words = ""
    if passes(high):
        equal = _least(passes, low, high)
        words = f"Scores cost no less than the feed-forward layers from {equal:,} positions."
    return Plot(
        "attention",
        f"Attention of {config.name} over the context",
        "Forward FLOPs of a token, averaged over the positions of a sequence of T tokens; causal attention "
        "counts half.",
        "T",
        "count",
        lengths,
        (
            CurveFrame(
                "", (CurvePanel("FLOPs per token", "number", parts), CurvePanel("share", "share", shares))
            ),
        ),
        remarks=tuple(filter(None, (words,))),
    )


def _textbook_links(hardware: Hardware) -> Links:
    ideal = links(hardware)
    if ideal is None:
        raise HardwareError(f"{hardware.spec} has no links of the closed forms; fits: v5p:4x4x4, h100:8x8")
    return ideal


@dataclass(frozen=True)
class _LayerTimes:
    """Seconds of the MLPs of one step, forward and backward, by the closed forms of `thresholds`.

    compute: 12 B D F L / (N C). FSDP: 12 D F L / (Y M_X W), times E / k with experts, since all of them move.
    TP: 12 B D L / (X M_Y W), without the shared gather. rate: C. axis: W of one torus dimension.
    """

    config: ModelConfig
    rate: float
    ideal: Links

    @property
    def axis(self) -> float:
        return self.rate / self.ideal.alpha

    @property
    def _weights(self) -> float:
        return self.config.d_model * active_d_ff(self.config) * self.config.num_layers

    def compute(self, tokens: float, chips: float) -> float:
        return 12 * tokens * self._weights / (chips * self.rate)

    def fsdp(self, tensor: float, num_axes: float) -> float:
        return 12 * self._weights * sparsity(self.config) / (tensor * num_axes * self.axis)

    def batch_shards(self, tokens: float, num_chips: float) -> float:
        """X that moves the fewest bytes."""
        d_ff = round(active_d_ff(self.config) * sparsity(self.config))
        return mixed_batch_shards(tokens, d_ff, num_chips, self.ideal.axes_ratio)

    def tensor(self, tokens: float, shards: float, num_axes: float) -> float:
        moved = 12 * tokens * self.config.d_model * self.config.num_layers
        return moved / (shards * num_axes * self.axis)


def fsdp_degree(config: ModelConfig, hardware: Hardware, tokens: int) -> Plot:
    """Seconds of a step's MLPs over X at a fixed number of chips, Y = N / X; a slider over the batch.

    Source: How to Scale Your Model, "Training", the interactive figure of FSDP with TP.
    """
    ideal = _textbook_links(hardware)
    times = _LayerTimes(config, hardware.chip.flops("bf16"), ideal)
    chips, (m_x, m_y) = hardware.num_chips, ideal.mixed_axes
    degrees = tuple(float(x) for x in divisors(chips))

    def frame(batch: float) -> CurveFrame:
        compute = [times.compute(batch, chips) for _ in degrees]
        fsdp = [times.fsdp(chips / x, m_x) if x > 1 else None for x in degrees]
        tensor = [times.tensor(batch, x, m_y) if x < chips else None for x in degrees]
        step = [max(filter(None, row)) for row in zip(compute, fsdp, tensor, strict=True)]
        curves: Values = {"compute": compute, "FSDP": fsdp, "TP": tensor, "step": step}
        return CurveFrame(
            f"{batch:,.0f} tokens", (CurvePanel("time of the MLPs of a step", "seconds", curves),)
        )

    batches = [tokens * factor for factor in (0.125, 0.25, 0.5, 1, 2, 4, 8)]
    best = times.batch_shards(tokens, chips)
    return Plot(
        "fsdp",
        f"{config.name} on {hardware.spec}: step over the FSDP degree",
        f"X chips of FSDP times Y = {chips:,} / X of tensor parallelism, M_X = {m_x:g}, M_Y = {m_y:g}. MLPs "
        "have two matrices, as in the book. The step is the longest of compute and transfers, which overlap.",
        "X",
        "count",
        degrees,
        tuple(frame(batch) for batch in batches),
        slider="batch",
        first=3,
        remarks=(f"At {tokens:,} tokens X = {best:,.0f} moves the fewest bytes.",),
    )


def strategies_over_batch(config: ModelConfig, hardware: Hardware) -> Plot:
    """Compute and transfers of FSDP, TP and both over the batch; a slider over the number of chips.

    Source: How to Scale Your Model, "Training", the two figures of FSDP with TP.
    """
    ideal = _textbook_links(hardware)
    times = _LayerTimes(config, hardware.chip.flops("bf16"), ideal)
    (m_x, m_y), n, chips = ideal.mixed_axes, ideal.num_axes, hardware.num_chips
    batches = _powers(2**14, 2**24)

    def frame(num_chips: float) -> CurveFrame:
        compute = [times.compute(batch, num_chips) for batch in batches]
        best = [min(max(1.0, times.batch_shards(batch, num_chips)), num_chips) for batch in batches]
        transfers = {
            "FSDP": [times.fsdp(1, n) for _ in batches],
            "TP": [times.tensor(batch, 1, n) for batch in batches],
            "FSDP and TP": [
                min(max(times.fsdp(num_chips / x, m_x), times.tensor(batch, x, m_y)), times.fsdp(1, n))
                for batch, x in zip(batches, best, strict=True)
            ],
        }
        ratios: Values = {
            name: [a / b for a, b in zip(compute, seconds, strict=True)]
            for name, seconds in transfers.items()
        }
        shown: Values = {"compute": compute, **transfers}
        panels = (
            CurvePanel("time of the MLPs of a step", "seconds", shown),
            CurvePanel("compute over communication", "ratio", ratios),
        )
        return CurveFrame(f"{num_chips:,.0f} chips", panels)

    counts = sorted({chips * factor for factor in (1 / 64, 1 / 16, 1 / 4, 1, 4) if chips * factor >= 2})
    copies = sparsity(config)
    fsdp = data_parallel_tokens_per_chip(ideal.alpha, n, copies) * chips
    mixed = mixed_tokens_per_chip(ideal.alpha, active_d_ff(config), ideal.axes_product, copies) * chips
    return Plot(
        "strategies",
        f"{config.name} on {hardware.chip.name}: strategies over the batch",
        "FSDP over all chips, TP over all chips, and both with the X that moves the fewest bytes. MLPs have "
        "two matrices, as in the book. Above a ratio of 1 a strategy is compute-bound.",
        "tokens per batch",
        "number",
        batches,
        tuple(frame(count) for count in counts),
        slider="chips",
        first=counts.index(chips),
        remarks=(
            f"On {chips:,} chips FSDP is compute-bound from {fsdp:,.0f} tokens, "
            f"FSDP with TP from {mixed:,.0f}.",
        ),
    )


def decode_batch(
    config: ModelConfig, hardware: Hardware, context: int, layout: Layout, batches: Sequence[int]
) -> Plot:
    """Step and tokens per second of generation over the batch: the closed form and the ideal price.

        t = B KV / W + max(2 B P / C, P bytes / W)

    Source: How to Scale Your Model, "Inference", equation 1 and the tables of LLaMA-2 13B.
    """
    chips, precision = hardware.num_chips, layout.precision
    weights, cache = precision.weights_dtype, precision.cache_dtype
    params = count_params(config)
    memory = chips * hardware.chip.hbm_bytes_per_second
    compute = chips * hardware.chip.flops(precision.operand_dtype)
    active = params.active
    each = kv_cache_bytes(config, context, cache)

    def formula(batch: int) -> float:
        read = params.total * dtype_bytes(weights) / memory
        return batch * each / memory + max(2 * batch * active / compute, read)

    points = [
        _priced_decode(config, hardware, Workload(batch, context, "generate"), layout) for batch in batches
    ]
    steps: Values = {
        "closed form": [formula(batch) for batch in batches],
        "ideal price": [point.step_seconds if point else None for point in points],
    }
    rates: Values = {
        name: [batch / seconds if seconds else None for batch, seconds in zip(batches, values, strict=True)]
        for name, values in steps.items()
    }
    held: Values = {
        "cache": [batch * each for batch in batches],
        "cache and weights": [batch * each + params.total * dtype_bytes(weights) for batch in batches],
    }
    most = max((point.max_batch for point in points if point), default=0)
    panels = (
        CurvePanel("step", "seconds", steps),
        CurvePanel("tokens per second", "tokens/s", rates),
        CurvePanel("bytes of all chips", "bytes", held),
    )
    return Plot(
        "decode",
        f"{config.name} on {hardware.spec}: generation over the batch",
        f"{context:,} positions of cache for each sequence, {weights} weights, {cache} cache, {layout}.",
        "sequences",
        "count",
        tuple(map(float, batches)),
        (CurveFrame("", panels),),
        remarks=(f"At most {most:,} sequences fit.",) if most else (),
    )


def _priced_decode(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout
) -> PhasePoint | None:
    """The ideal price of a step; None if the batch does not divide."""
    ideal = replace(hardware, chip=hardware.chip.roofline())
    try:
        return price_phase(config, ideal, workload, [layout])
    except MeshwrightError:  # the batch does not divide
        return None


def look_ahead(acceptances: Sequence[float], draft_cost: float, most: int = 10) -> Plot:
    """Tokens per step and time per token of speculative decoding over the number of drafts k.

        tokens = (1 - a^(k+1)) / (1 - a)      time of a token = (1 + k c) / tokens

    a: the probability that a draft is accepted. c: the time of a draft as a share of a step's. A step that
    verifies k drafts takes the time of one that generates, which holds while it is bound by memory.
    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8.
    """
    drafts = range(most + 1)
    tokens = {f"acceptance {a:g}": [_expected_tokens(a, k) for k in drafts] for a in acceptances}
    times = {
        name: [(1 + k * draft_cost) / value for k, value in zip(drafts, values, strict=True)]
        for name, values in tokens.items()
    }
    remarks = []
    for name, values in times.items():
        best = min(drafts, key=lambda k, values=values: values[k])
        gain = f"{1 / values[best]:.2f} times as fast" if best else "drafts do not pay"
        remarks.append(f"{name}: best with k = {best}, {gain}.")
    panels = (
        CurvePanel("tokens per step", "ratio", dict(tokens)),
        CurvePanel("time of a token over that without drafts", "ratio", dict(times)),
    )
    return Plot(
        "lookahead",
        "Speculative decoding over the look-ahead",
        f"A draft takes {draft_cost:.3g} of a step's time.",
        "drafts k",
        "count",
        tuple(map(float, drafts)),
        (CurveFrame("", panels),),
        remarks=tuple(remarks),
    )


def _expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens of a step: the accepted drafts, and the token sampled after them.

    >>> _expected_tokens(0.5, 2), _expected_tokens(1, 2)
    (1.75, 3.0)
    """
    return float(sum(acceptance**k for k in range(drafts + 1)))
