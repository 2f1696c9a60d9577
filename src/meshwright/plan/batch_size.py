"""The planned batch: the given batch, or the nearest that divides.

Each microbatch of each data rank takes the same number of whole sequences. 977 sequences are prime and
divide over no two ranks, 980 over 10 ranks with 98 microbatches each.
"""

from dataclasses import replace

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload


def nearest_multiple(number: int, step: int) -> int:
    """The multiple of `step` nearest to `number`, of two the larger; 0 where `number` is below half of it.

    >>> nearest_multiple(977, 10), nearest_multiple(12, 8), nearest_multiple(3, 8)
    (980, 16, 0)
    """
    return (2 * number + step) // (2 * step) * step


def nearest_batch(workload: Workload, layout: Layout) -> Workload:
    """The workload with the nearest number of sequences that divides over a layout's microbatches and ranks.

    Raises LayoutError where there are fewer sequences than these.
    """
    check_enough(workload, layout)
    shards = layout.num_batch_shards * layout.schedule.microbatches
    return replace(workload, num_sequences=nearest_multiple(workload.num_sequences, shards))


def check_enough(workload: Workload, layout: Layout) -> None:
    """Raises LayoutError where a microbatch of a data rank has less than a sequence."""
    sequences, shards = workload.num_sequences, layout.num_batch_shards * layout.schedule.microbatches
    if sequences < shards:
        most = sequences // layout.num_batch_shards
        fits = f"microbatches up to {most}" if most else f"data·fsdp up to {sequences}"
        raise LayoutError(
            f"x[B_{{data,fsdp}}, T, D]: {sequences} sequences (B) are fewer than data·fsdp·microbatches = "
            f"{shards}; fits: {fits}, or --batch-tokens {shards * workload.seq_len}"
        )


def planned_words(asked: Workload, planned: Workload, why: str) -> str:
    """`Planned for 980 sequences of 4,096 tokens (4,014,080 tokens): the 977 asked for ...`."""
    return (
        f"Planned for {planned.num_sequences:,} sequences of {planned.seq_len:,} tokens "
        f"({planned.num_tokens:,} tokens): the {asked.num_sequences:,} asked for {why}"
    )
