"""The work of a recorded pass on one chip, priced node by node.

    seconds of a piece of work = max(FLOPs / rate, bytes / HBM rate) + kernels . seconds of a kernel

Rates are what the chip's `[step]` says whole steps reach. These prices depend on the graph and the chip
alone, so layouts that differ in what lies between the chips share them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshwright.cost.figures import each, larger
from meshwright.cost.graph import Direction, Node, Segment, Transfer, Work, recomputed_nodes
from meshwright.hardware.chip import Chip
from meshwright.hardware.efficiency import share_at
from meshwright.layout import Layout

# Kinds of work whose bytes one kernel reads and writes as they are counted, and that have FLOPs.
_STREAMED = ("matmul", "attention", "update")


@dataclass(frozen=True)
class Dtypes:
    """What a pass computes in: activations, and the operands of its matmuls."""

    compute: str
    matmul: str

    @classmethod
    def of(cls, layout: Layout) -> "Dtypes":
        return cls(layout.compute_dtype, layout.matmul_dtype or layout.compute_dtype)


@dataclass(frozen=True, eq=False)
class Pass:
    """One direction of one run of a segment.

    terms: (name, bound, seconds) of its compute, by kind. transfers: also those of a step, which the
    first forward pass (an update's) or the last backward pass (gradients') hides. put_off: seconds of
    weight gradients, which a zero-bubble schedule may run later. Of many layouts both are arrays, and flops
    and terms are not told.
    """

    direction: Direction
    seconds: Any
    put_off: Any
    flops: float
    terms: tuple[tuple[str, str, float], ...]
    transfers: tuple[Transfer, ...]


@lru_cache(maxsize=512)
def passes(segment: Segment, remat: str, dtypes: Dtypes, chip: Chip) -> tuple[Pass, ...]:
    """Forward, recompute and backward of one run of `segment`."""
    forward, backward = _there_and_back(segment, dtypes, chip)
    return forward, _pass("recompute", recomputed_nodes(segment, remat), dtypes, chip), backward


@lru_cache(maxsize=512)
def _there_and_back(segment: Segment, dtypes: Dtypes, chip: Chip) -> tuple[Pass, Pass]:
    """Forward and backward, whatever is recomputed between them."""
    return (
        _pass("forward", segment.nodes, dtypes, chip),
        _pass("backward", segment.nodes, dtypes, chip),
    )


def _pass(direction: Direction, nodes: Iterable[Node], dtypes: Dtypes, chip: Chip) -> Pass:
    terms: dict[tuple[str, str], float] = {}
    flops = put_off = 0.0
    for kind, work, may_wait in _pieces(direction, nodes):
        seconds, bound = work_seconds(work, kind, dtypes, chip)
        key = f"{kind} ({direction})", bound
        terms[key] = terms.get(key, 0.0) + seconds
        flops += work.flops
        put_off += seconds if may_wait else 0.0
    summed = tuple((name, bound, seconds) for (name, bound), seconds in terms.items() if seconds)
    transfers = _transfers(direction, nodes)
    return Pass(direction, sum(seconds for *_, seconds in summed), put_off, flops, summed, transfers)


def pass_of_many(direction: Direction, nodes: Sequence[Node], dtypes: Dtypes, chip: Chip) -> Pass:
    """One direction of `nodes`, for each of the layouts that they were recorded for."""
    seconds = put_off = 0.0
    for kind, work, may_wait in _pieces(direction, nodes):
        taken = seconds_of(work, kind, dtypes, chip)
        seconds = seconds + taken
        put_off = put_off + taken if may_wait else put_off
    return Pass(direction, seconds, put_off, 0.0, (), _transfers(direction, nodes))


def _pieces(direction: Direction, nodes: Iterable[Node]) -> Iterator[tuple[str, Work, bool]]:
    """(kind of the node, piece of its work, whether it may be put off)."""
    for node in nodes:
        for work in node.backward if direction == "backward" else node.forward:
            yield node.kind, work, False
        for work in node.weight_gradient if direction == "backward" else ():
            yield node.kind, work, True


def _transfers(direction: Direction, nodes: Iterable[Node]) -> tuple[Transfer, ...]:
    found: list[Transfer] = []
    for node in nodes:
        found += node.backward_transfers if direction == "backward" else node.forward_transfers
        found += node.update_transfers if direction == "forward" else ()
    return tuple(found)


def work_seconds(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> tuple[float, str]:
    """(seconds, "compute" or "hbm", whichever takes longer)."""
    compute, hbm = _compute_and_hbm(work, kind, dtypes, chip)
    return max(compute, hbm) + _overhead(work, chip), "compute" if compute >= hbm else "hbm"


def seconds_of(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> Any:
    """The seconds of `work_seconds`, of work of many layouts."""
    return larger(*_compute_and_hbm(work, kind, dtypes, chip)) + _overhead(work, chip)


def _compute_and_hbm(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> tuple[float, float]:
    """Seconds of the FLOPs and of the bytes."""
    hbm = work.hbm_bytes / chip.memory_bytes_per_second(dtypes.compute)
    if kind not in _STREAMED:
        hbm /= chip.step.elementwise
    return compute_seconds(work, kind, dtypes, chip), hbm


def _overhead(work: Work, chip: Chip) -> float:
    return work.kernels * chip.step.kernel_seconds


def compute_seconds(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> float:
    """Of the FLOPs alone: of matmuls in their own type, of attention in that of activations.

    Where the chip was calibrated, a product runs at the rate measured for its size.
    """
    if kind not in _STREAMED:
        return 0.0
    if kind == "attention":
        assert work.shape is not None, "attention has a shape"
        return work.flops / chip.attention_flops_per_second(dtypes.compute, work.shape[1])
    if dtypes.matmul in chip.matmul_rates:
        rates = chip.matmul_rates[dtypes.matmul]
        return work.flops / each(lambda flops: share_at(rates, flops), work.flops)
    grouped = each(lambda batch: chip.step.experts if batch > 1 else 1.0, work.batch)
    return work.flops / (chip.matmul_flops_per_second(dtypes.matmul) * grouped)
