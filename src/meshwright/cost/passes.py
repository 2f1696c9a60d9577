"""The work of a recorded pass on one chip, priced node by node.

    seconds of a piece of work = max(FLOPs / rate, bytes / HBM rate) + kernels . seconds of a kernel

Rates are from the chip's `[step]` table, so they hold for whole steps. These prices depend only on the graph
and the chip, so layouts that differ only between chips share them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from meshwright.cost.arrays import larger, mapped, smaller
from meshwright.cost.graph import Direction, Node, Segment, Transfer, Work, kept_with, recomputed_nodes
from meshwright.dtypes import number_type
from meshwright.hardware.chip import Chip
from meshwright.layout import Layout
from meshwright.points import share_at

# Kinds of work with FLOPs whose counted bytes one kernel reads and writes.
_STREAMED = ("matmul", "attention", "update")


@dataclass(frozen=True)
class Dtypes:
    """The types of a pass: of activations, of operands of its matmuls, and of experts' if they differ."""

    compute: str
    matmul: str
    experts: str | None = None

    @classmethod
    def of(cls, layout: Layout) -> "Dtypes":
        precision = layout.precision
        return cls(precision.compute_dtype, precision.operand_dtype, precision.experts_dtype)


@dataclass(frozen=True, eq=False)
class SegmentPass:
    """One direction of one run of a segment.

    seconds: of its work. Four parts of it: streamed: waiting for products' weights. idle: start and end of
    kernels, when memory is free. put_off: weight gradients, which a zero-bubble schedule may run later.
    looped: loops over blocks of experts' rows, during which no collective runs.
    transfers: including transfers once per step, hidden by the first forward pass (an update's) or the last
    backward pass (gradients'). Seconds are arrays if the segment was recorded for many layouts.
    """

    direction: Direction
    nodes: tuple[Node, ...]
    dtypes: Dtypes
    chip: Chip
    seconds: Any
    put_off: Any
    streamed: Any
    idle: Any
    looped: Any
    transfers: tuple[Transfer, ...]

    @cached_property
    def terms(self) -> tuple[tuple[str, str, float], ...]:
        """(name, bound, seconds) of its compute, by kind; for one layout."""
        by_kind: dict[tuple[str, str], float] = {}
        for kind, work, _ in _pieces(self.direction, self.nodes):
            priced = work_seconds(work, kind, self.dtypes, self.chip)
            key = f"{kind} ({self.direction})", priced.bound
            by_kind[key] = by_kind.get(key, 0.0) + priced.seconds
        return tuple((name, bound, seconds) for (name, bound), seconds in by_kind.items() if seconds)

    @cached_property
    def launches(self) -> int:
        """Operations that a host launches one by one if no compiler fuses them."""
        return sum(1 for _ in _pieces(self.direction, self.nodes))

    @cached_property
    def flops(self) -> float:
        return sum(work.flops for _, work, _ in _pieces(self.direction, self.nodes))


def passes(
    segment: Segment, directions: Iterable[Direction], remat: str, dtypes: Dtypes, chip: Chip
) -> list[SegmentPass]:
    """One run of `segment` in each direction; only `recompute` depends on the remat policy."""
    return [
        _segment_pass(segment, direction, remat if direction == "recompute" else "", dtypes, chip)
        for direction in directions
    ]


@kept_with
def _segment_pass(
    segment: Segment, direction: Direction, remat: str, dtypes: Dtypes, chip: Chip
) -> SegmentPass:
    nodes = tuple(recomputed_nodes(segment, remat)) if direction == "recompute" else segment.nodes
    seconds = put_off = streamed = idle = looped = 0.0
    for kind, work, may_wait in _pieces(direction, nodes):
        priced = work_seconds(work, kind, dtypes, chip)
        seconds = seconds + priced.seconds
        put_off = put_off + priced.seconds if may_wait else put_off
        looped = looped + priced.seconds * work.looped
        if chip.step.prefetch:
            streamed = streamed + larger(priced.hbm - priced.compute, 0.0) if kind == "matmul" else streamed
            idle = idle + priced.overhead
    transfers = _transfers(direction, nodes)
    return SegmentPass(direction, nodes, dtypes, chip, seconds, put_off, streamed, idle, looped, transfers)


def _pieces(direction: Direction, nodes: tuple[Node, ...]) -> Iterator[tuple[str, Work, bool]]:
    """(kind of the node, piece of its work, whether it may be deferred)."""
    for node in nodes:
        for work in node.backward if direction == "backward" else node.forward:
            yield node.kind, work, False
        for work in node.weight_gradient if direction == "backward" else ():
            yield node.kind, work, True


def _transfers(direction: Direction, nodes: tuple[Node, ...]) -> tuple[Transfer, ...]:
    transfers: list[Transfer] = []
    for node in nodes:
        transfers += node.transfers(direction)
        transfers += node.update_transfers if direction == "forward" else ()
    return tuple(transfers)


class WorkSeconds(NamedTuple):
    """Seconds of a piece of work; numbers, or arrays for many layouts.

    seconds: in total. compute, hbm: of its FLOPs, and of its bytes. overhead: of its kernels' start and end.
    """

    seconds: Any
    compute: Any
    hbm: Any
    overhead: Any

    @property
    def bound(self) -> str:
        """ "compute" or "hbm", whichever takes longer, of one layout."""
        return "compute" if self.compute >= self.hbm else "hbm"


def work_seconds(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> WorkSeconds:
    """The seconds of `work` by a node of this kind."""
    # One kernel has the products of experts in 4 bits and the activation in between (trtllm-gen and
    # flashinfer, in vLLM, SGLang and TensorRT-LLM).
    is_one_kernel = work.routed and chip.step.grouped and _is_native_4_bits(dtypes.experts, chip)
    if kind == "cast" and work.routed and not is_one_kernel:
        return WorkSeconds(0.0, 0.0, 0.0, 0.0)  # experts' weights are widened instead
    compute, hbm = _compute_and_hbm(work, kind, dtypes, chip)
    longer, overlap = larger(compute, hbm), chip.step.roofline
    busy = longer if overlap == 1 else longer + (1 - overlap) * smaller(compute, hbm)
    kernels = work.kernels
    if work.routed and chip.step.grouped:
        kernels = 0 if is_one_kernel else 1  # the activation counts as that kernel
    overhead = kernels * chip.step.kernel_seconds
    # To bring tokens to the experts of a product.
    routing = chip.step.experts_seconds if kind == "matmul" and work.routed else 0.0
    return WorkSeconds(busy + overhead + routing, compute, hbm, overhead)


def _is_native_4_bits(dtype: str | None, chip: Chip) -> bool:
    if dtype is None:
        return False
    number = number_type(dtype)
    return number.bits == 4 and not number.is_integer and dtype in chip.flops_per_second


def _compute_and_hbm(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> tuple[float, float]:
    """Seconds of the FLOPs and of the bytes."""
    is_fused = kind == "cast" and chip.platform.fuses_casts
    if is_fused or (chip.step.is_roofline and kind not in _STREAMED):
        return 0.0, 0.0
    moved = work.hbm_bytes + (work.unfused_bytes if chip.step.unfused_norms else 0.0)
    hbm = moved / chip.memory_bytes_per_second(dtypes.compute)
    if kind not in (*_STREAMED, "softmax"):  # softmax counts each pass over memory
        hbm /= chip.step.elementwise
    elif kind == "attention":
        hbm /= chip.step.cache
    elif work.widened:
        hbm /= chip.step.widened
    elif work.shape and (packed := chip.step.packed.get(dtypes.matmul, 1.0)) < 1:
        hbm = hbm / mapped(lambda rows: packed if rows > 1 else 1.0, work.shape[0])
    return compute_seconds(work, kind, dtypes, chip), hbm


def compute_seconds(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> float:
    """Seconds of only the FLOPs: matmuls in their type, attention in the type of activations.

    On a calibrated chip, a product runs at the measured rate of its size.
    """
    if kind not in _STREAMED:
        return 0.0
    if kind == "attention":
        assert work.shape is not None, "attention has a shape"
        return work.flops / chip.attention_flops_per_second(dtypes.compute, *work.shape[1:])
    operands = dtypes.compute if work.wide else (dtypes.experts if work.routed else None) or dtypes.matmul
    if operands in chip.matmul_rates:
        rates = chip.matmul_rates[operands]
        return work.flops / mapped(lambda flops: share_at(rates, flops), work.flops)
    grouped = chip.step.experts if work.routed else 1.0
    rows, _, columns = work.shape or (inf, 0.0, inf)
    return work.flops / (chip.matmul_flops_per_second(operands, rows * columns * work.batch) * grouped)
