"""The rules that recognise mistakes, in order of precedence.

Each checks one collective in its program and returns a fault or None.
"""

from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.remarks.activations import (
    along_the_contraction,
    batch_gathered,
    batch_moved,
    cut_along_shards,
    merged_dimensions,
    over_a_part,
    over_the_batch,
    resharded_activations,
    sliced_again,
    there_and_back,
    two_sides,
)
from meshwright.audit.remarks.by_index import (
    added_by_index,
    batch_by_index,
    batch_in_an_index,
    rows_of_all,
    table_gathered,
    table_summed,
)
from meshwright.audit.remarks.fault_rule import Fault, FaultRule, ProgramContext
from meshwright.audit.remarks.sums import summed_apart, summed_each_turn, summed_for_one, whole_sum, wide_sum
from meshwright.audit.remarks.weights import (
    flat_array,
    for_few_tokens,
    iterated_update,
    moved_update,
    moved_weight,
    of_all_experts,
    repeated_gather,
    returned_whole,
    stack_of_layers,
)
from meshwright.audit.remarks.whole_dimension import (
    along_the_whole,
    only_reduced,
    read_at_an_offset,
    scanned_in_halves,
    written_whole,
)


def exposed(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A gather that no product overlaps, by a compiler that can overlap."""
    if (
        emitted.op != "all_gather"
        or not context.schedule.is_async
        or context.schedule.overlapped_products(emitted.value)
    ):
        return None
    return (
        "gather_on_critical_path",
        f"`{emitted.tensor}` is gathered over {context.over(emitted)} while no matmul runs: its time is "
        "exposed",
        "start it earlier (prefetch the next layer's weights), or overlap it with its own matmul "
        "(collective matmul)",
    )


# In order of precedence.
FAULT_RULES: tuple[FaultRule, ...] = (
    batch_in_an_index,
    rows_of_all,
    table_gathered,
    table_summed,
    batch_by_index,
    flat_array,
    returned_whole,
    iterated_update,
    moved_update,
    scanned_in_halves,
    there_and_back,
    along_the_whole,
    written_whole,
    read_at_an_offset,
    only_reduced,
    stack_of_layers,
    batch_moved,
    over_the_batch,
    repeated_gather,
    over_a_part,
    merged_dimensions,
    two_sides,
    sliced_again,
    cut_along_shards,
    moved_weight,
    for_few_tokens,
    of_all_experts,
    batch_gathered,
    along_the_contraction,
    wide_sum,
    resharded_activations,
    added_by_index,
    summed_each_turn,
    summed_apart,
    summed_for_one,
    whole_sum,
)
