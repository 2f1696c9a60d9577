"""The work of a recorded pass on one chip, priced node by node.

    seconds of a piece of work = max(FLOPs / rate, bytes / HBM rate) + kernels . seconds of a kernel

Rates are what the chip's `[step]` says whole steps reach. These prices depend on the graph and the chip
alone, so layouts that differ in what lies between the chips share them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from meshwright.cost.graph import Direction, Node, Segment, Transfer, Work, recomputed_nodes
from meshwright.hardware.chip import Chip
from meshwright.hardware.efficiency import share_at
from meshwright.layout import Layout

# Kinds of work whose bytes one kernel reads and writes as they are counted.
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
    weight gradients, which a zero-bubble schedule may run later.
    """

    direction: Direction
    seconds: float
    put_off: float
    flops: float
    terms: tuple[tuple[str, str, float], ...]
    transfers: tuple[Transfer, ...]


@lru_cache(maxsize=16384)
def passes(segment: Segment, remat: str, dtypes: Dtypes, chip: Chip) -> tuple[Pass, ...]:
    """Forward, recompute and backward of one run of `segment`."""
    forward, backward = _there_and_back(segment, dtypes, chip)
    return forward, _pass("recompute", recomputed_nodes(segment, remat), dtypes, chip), backward


@lru_cache(maxsize=16384)
def _there_and_back(segment: Segment, dtypes: Dtypes, chip: Chip) -> tuple[Pass, Pass]:
    """Forward and backward, whatever is recomputed between them."""
    return (
        _pass("forward", segment.nodes, dtypes, chip),
        _pass("backward", segment.nodes, dtypes, chip),
    )


def _pass(direction: Direction, nodes: Iterable[Node], dtypes: Dtypes, chip: Chip) -> Pass:
    terms: dict[tuple[str, str], float] = {}
    flops = put_off = 0.0
    transfers: list[Transfer] = []
    backward = direction == "backward"
    for node in nodes:
        now = node.backward if backward else node.forward
        for index, work in enumerate((*now, *node.weight_gradient) if backward else now):
            seconds, bound = work_seconds(work, node.kind, dtypes, chip)
            key = f"{node.kind} ({direction})", bound
            terms[key] = terms.get(key, 0.0) + seconds
            flops += work.flops
            put_off += seconds if index >= len(now) else 0.0
        transfers += node.backward_transfers if backward else node.forward_transfers
        transfers += node.update_transfers if direction == "forward" else ()
    summed = tuple((name, bound, seconds) for (name, bound), seconds in terms.items() if seconds)
    return Pass(direction, sum(seconds for *_, seconds in summed), put_off, flops, summed, tuple(transfers))


def work_seconds(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> tuple[float, str]:
    """(seconds, "compute" or "hbm", whichever takes longer)."""
    compute = compute_seconds(work, kind, dtypes, chip)
    hbm = work.hbm_bytes / chip.memory_bytes_per_second(dtypes.compute)
    if kind not in _STREAMED:
        hbm /= chip.step.elementwise
    overhead = work.kernels * chip.step.kernel_seconds
    return max(compute, hbm) + overhead, "compute" if compute >= hbm else "hbm"


def compute_seconds(work: Work, kind: str, dtypes: Dtypes, chip: Chip) -> float:
    """Of the FLOPs alone: of matmuls in their own type, of attention in that of activations.

    Where the chip was calibrated, a product runs at the rate measured for its size.
    """
    if not work.flops:
        return 0.0
    if kind == "attention":
        assert work.shape is not None, "attention has a shape"
        return work.flops / chip.attention_flops_per_second(dtypes.compute, work.shape[1])
    if dtypes.matmul in chip.matmul_rates:
        return work.flops / share_at(chip.matmul_rates[dtypes.matmul], work.flops)
    grouped = chip.step.experts if work.batch > 1 else 1.0
    return work.flops / (chip.matmul_flops_per_second(dtypes.matmul) * grouped)
