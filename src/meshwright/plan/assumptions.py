"""What a plan's price rests on, in sentences."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.space import RESERVED_SHARE
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.plan.train import Candidate


def assumptions(
    config: ModelConfig, hardware: Hardware, workload: Workload, best: "Candidate"
) -> Iterator[str]:
    """What the price of `best` rests on, a sentence each."""
    chip = hardware.chip
    yield (
        "MFU counts 6 FLOPs a matmul parameter and token and half of 12 B T^2 N H a layer for causal "
        f"attention, over the dense {best.layout.compute_dtype} peak of "
        f"{chip.flops(best.layout.compute_dtype):.3g} FLOP/s a chip"
    )
    narrow = best.layout.matmul_dtype or best.layout.compute_dtype
    yield (
        f"large {narrow} matmuls reach {chip.step.matmul_share(narrow):.0%} of the peak; weight gathers "
        f"and gradient reductions hide under {chip.step.overlap:.0%} of the compute, those of "
        "activations do not"
    )
    if chip.step.slowdown != 1:
        yield f"every step takes {chip.step.slowdown:.3g} times what is priced, as the anchoring run did"
    yield f"{RESERVED_SHARE:.0%} of {format_bytes(chip.hbm_bytes)} HBM is left to the runtime"
    if chip.kind != "cpu":
        yield "attention runs a flash kernel that skips masked blocks; scores stay on chip"
    shards = best.layout.num_batch_shards * best.layout.microbatches
    if workload.num_sequences % shards:
        fit = round(workload.num_sequences / shards) * shards
        yield (
            f"{workload.num_sequences} sequences do not divide over {shards} batch shards and are priced as "
            f"if they did; a run takes {fit} ({fit * workload.seq_len} tokens)"
        )
