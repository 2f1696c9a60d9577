"""Notes on choices between time and memory. They may be right: only the user knows which is short."""

from collections.abc import Collection, Iterable

from meshwright.audit.facts.communication import is_differentiated
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES, Emitted
from meshwright.audit.facts.groups import copied_over, tiles_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.remarks.accidents import batch_of
from meshwright.audit.remarks.fault_rule import is_integer
from meshwright.audit.remarks.weights import is_of_layers, loop_that_repeats
from meshwright.units import format_bytes

# Whole weights with a smaller share of the inputs' bytes are not worth sharding.
_SHARE = 0.1


def repeated_sums_note(sent: Iterable[Emitted], prices: Prices) -> str:
    """A sentence on all-reduces that jax.checkpoint repeats in the backward pass; "" without any."""
    repeated = [
        emitted
        for emitted in sent
        if emitted.collective.phase == "remat"
        and emitted.op in ("all_reduce", "reduce_scatter")
        and emitted.num_bytes > NEGLIGIBLE_BYTES
    ]
    if not repeated:
        return ""
    largest = max(repeated, key=lambda one: one.bytes_per_step)
    num_bytes = sum(one.bytes_per_step for one in repeated)
    over = prices.over(largest.axes, largest.collective.groups.size)
    return (
        f"jax.checkpoint repeats sums over {over} in the backward pass (`{largest.tensor}`, "
        f"{format_bytes(num_bytes)} a step); if memory allows, keep their results: name them by "
        "checkpoint_name, with policy=save_only_these_names(...)"
    )


def repeated_gathers_note(program: Program, sent: Iterable[Emitted], prices: Prices) -> str:
    """A sentence on weights that FSDP gathers again for each microbatch; "" without any."""
    repeated = [
        emitted
        for emitted in sent
        if emitted.op == "all_gather"
        and is_differentiated(program)
        and (loop := loop_that_repeats(emitted, program)) is not None
        and is_of_layers(emitted, loop)
    ]
    if not repeated:
        return ""
    largest = max(repeated, key=lambda one: one.bytes_per_step)
    over = prices.over(largest.axes, largest.collective.groups.size)
    return (
        f"each microbatch gathers the layers' weights over {over} again (`{largest.tensor}`, "
        f"{format_bytes(sum(one.bytes_per_step for one in repeated))} a step); if memory allows, gather them "
        "once before the loop over microbatches, or make it shorter"
    )


def whole_weights_note(program: Program, prices: Prices, multiplied: Collection[int]) -> str:
    """A sentence on large weights that are whole where other weights are sharded; "" without any.

    Such a weight may be frozen, as a teacher's, or forgotten in the tree of shardings. multiplied: identities
    of the inputs that products read (`multiplied_inputs`).
    """
    if not is_differentiated(program):
        return ""
    batch = batch_of(program, prices.mesh)
    arrays = [one for one in program.main.parameters if isinstance(one.shape, ArrayShape)]
    axes = batch.fsdp_axes or _axes_of_weights(arrays, prices, multiplied) - batch.axes
    if not axes:
        return ""
    total = sum(one.shapes[0].num_bytes for one in arrays)
    of_batch = [one for one in arrays if one.label in batch.names and one.shapes[0].dims]
    # A whole array of the batch, such as a mask, has the number of rows of one that is split.
    rows = {one.shapes[0].dims[0] for one in of_batch if not _is_whole(one, axes, prices)}
    with_rows = {id(one) for one in of_batch if one.shapes[0].dims[0] in rows}
    whole = [
        parameter
        for parameter in arrays
        if id(parameter) in multiplied
        and id(parameter) not in with_rows
        and (batch.fsdp_axes or parameter.label not in batch.names)
        and len(parameter.shapes[0].dims) > 1
        and not is_integer(parameter)
        and _is_whole(parameter, axes, prices)
        and parameter.shapes[0].num_bytes > _SHARE * total
    ]
    if not whole:
        return ""
    largest = max(whole, key=lambda one: one.shapes[0].num_bytes)
    which = f" and {len(whole) - 1} more are" if len(whole) > 1 else " is"
    num_bytes = sum(one.shapes[0].num_bytes for one in whole)
    size = prices.mesh.size(tuple(axes))
    alike = next((one for one in arrays if one is not largest and _is_shard_of(one, largest)), None)
    example = f", as `{alike.label}` of the same shape is" if alike else ""
    return (
        f"`{largest.label}`{which} whole on each device, {format_bytes(num_bytes)}, although other weights "
        f"are sharded over {prices.over(tuple(sorted(axes)), size)}{example}; if memory is short, shard it "
        "there too"
    )


def _is_shard_of(parameter: Instruction, whole: Instruction) -> bool:
    """Whether an input is a shard of an array with the shape and type of `whole`."""
    shard, array = parameter.shapes[0], whole.shapes[0]
    tiles = tiles_of(parameter.attributes.get("sharding", ""))
    if tiles <= 1 or len(shard.dims) != len(array.dims) or shard.dtype != array.dtype:
        return False
    divides = all(part and size % part == 0 for size, part in zip(array.dims, shard.dims, strict=True))
    return divides and shard.num_elements * tiles == array.num_elements


def _axes_of_weights(
    arrays: Iterable[Instruction], prices: Prices, multiplied: Collection[int]
) -> frozenset[str]:
    """The mesh axes that split at least two of the multiplied matrices, as tensor parallelism does."""
    matrices = [one for one in arrays if id(one) in multiplied and len(one.shapes[0].dims) > 1]
    axes = (axis for axis, size in prices.mesh.sizes.items() if size > 1)
    split = {axis: sum(axis not in {*copied_over(one, prices.mesh)} for one in matrices) for axis in axes}
    return frozenset(axis for axis, count in split.items() if count > 1)


def _is_whole(parameter: Instruction, axes: frozenset[str], prices: Prices) -> bool:
    """Whether each device has all of an input, along some axes."""
    return axes <= {*copied_over(parameter, prices.mesh)}
