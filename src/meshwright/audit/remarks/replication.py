"""Repeated state and work: state that is not sharded, products that several devices compute.

State is the optimizer's moments, and caches of keys and values.

If a product's operands do not differ over a mesh axis (`differing`), all devices along the axis compute the
same.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.audit.facts.communication import is_differentiated, narrowest_dtype
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES, Emitted
from meshwright.audit.facts.groups import copied_over, copies_of
from meshwright.audit.facts.instruction_work import flops_of, is_attention_kernel
from meshwright.audit.facts.matmuls import Product, innermost_name, products
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.facts.shards import slice_offsets
from meshwright.audit.hlo.op_names import is_written_by_hand, phase_of, primitive_of
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import (
    MOVES,
    CallPath,
    TracedValue,
    ancestors,
    entered_as,
    places,
    readers,
    resolve,
    sources,
    value_key,
)
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.accidents import batch_of, written_in_part
from meshwright.audit.remarks.activations import are_rows
from meshwright.audit.remarks.differing import SAME_ON_ALL, Differing, DifferingOverAny
from meshwright.audit.remarks.fault_rule import BATCH_GATHERED, BATCH_SHUFFLED, SENT_BY_A_SUM
from meshwright.audit.remarks.origins import DRAWS
from meshwright.audit.remarks.sums import REPLICATED_STATE
from meshwright.notation.mesh import Mesh
from meshwright.units import and_more, format_seconds

REPEATED = "computed_repeatedly"
_CACHE = re.compile(r"(?i)cache|(?:^|[^a-z])kv(?:$|[^a-z])")
_MOMENT = re.compile(r"opt_state|optimizer|momentum|moments|(?:^|[^a-z])(?:mu|nu)(?:$|[^a-z])")
# Tensors with a smaller share of the program's inputs are not worth sharding.
_STATE_SHARE = 0.01


def replicated_state(
    program: Program, prices: Prices, state: Iterable[Instruction], peak_bytes: int = 0
) -> list[Remark]:
    """A warning for unsharded optimizer state or, in inference, unsharded caches.

    state: the inputs to check (`state_of`). peak_bytes: of one device's temporaries. State that is a small
    part of a device's memory is not reported.
    """
    training = is_differentiated(program)
    total = sum(one.shapes[0].num_bytes for one in _arrays(program) if one.shapes)
    replicated = [
        (array, copies)
        for array in state
        if (copies := copies_of(array, program.num_devices)) > 1
        and array.shapes[0].num_bytes >= _STATE_SHARE * total
    ]
    excess = sum(one.shapes[0].num_bytes * (1 - 1 / copies) for one, copies in replicated)
    if excess <= _STATE_SHARE * (total + peak_bytes):
        return []
    return [_of_state(replicated, prices, training=training)]


def state_of(program: Program, multiplied: Collection[int]) -> list[Instruction]:
    """The inputs that are an optimizer's moments or, in inference, caches.

    multiplied: identities of the inputs that products read (`multiplied_inputs`).
    """
    return _moments(program, multiplied) if is_differentiated(program) else _caches(program)


def _moments(program: Program, multiplied: Collection[int]) -> list[Instruction]:
    """Arrays with an optimizer's name, or that only the update reads and no earlier product depends on."""
    return [
        each
        for each in _arrays(program)
        if _MOMENT.search(each.op_name)
        or (id(each) not in multiplied and _read_by_update_only(program, each))
    ]


def _read_by_update_only(program: Program, parameter: Instruction) -> bool:
    left, names = [TracedValue(parameter, CallPath(program.main))], set[str]()
    while left:
        for user, at in readers(program, left.pop()):
            if at < 0:
                continue
            if user.instruction.opcode in ("while", "call", "conditional"):
                return False
            if user.instruction.opcode in MOVES:  # XLA may give slices of one array the same name
                left.append(user)
            elif user.instruction.op_name:
                names.add(user.instruction.op_name)
    return bool(names) and all(phase_of(name, differentiated=True) == "update" for name in names)


def _caches(program: Program) -> list[Instruction]:
    """Inputs that the program updates in part and returns, or donates to a result, or named as a cache."""
    written = {program.main.parameters[number].name for number in program.donated}
    returned = {shape.dims for shape in program.main.result.shapes}
    of_shapes = {one.name for one in _arrays(program) if one.shapes[0].dims in returned}
    written |= written_in_part(program) & of_shapes
    return [one for one in _arrays(program) if one.name in written or _CACHE.search(one.op_name)]


def _arrays(program: Program) -> list[Instruction]:
    """Inputs that are arrays of numbers; not counters and positions."""
    arrays = [one for one in program.main.parameters if isinstance(one.shape, ArrayShape)]
    return [
        each
        for each in arrays
        if each.shapes[0].dims and not re.match(r"[su](32|64)|pred", each.shapes[0].dtype)
    ]


def _of_state(replicated: list[tuple[Instruction, int]], prices: Prices, *, training: bool) -> Remark:
    largest, copies = max(replicated, key=lambda pair: pair[0].shapes[0].num_bytes)
    name = largest.label
    excess = round(sum(one.shapes[0].num_bytes * (1 - 1 / count) for one, count in replicated))
    over = prices.over(copied_over(largest, prices.mesh), copies)
    others = and_more(len(replicated) - 1)
    what = f"`{name}`{others}: replicated on {copies} devices over {over}, {excess:,} B a device more"
    if training:
        kind, change = REPLICATED_STATE, f"shard the optimizer state over {over} too (ZeRO-1)"
    else:
        kind, change = "replicated_cache", f"shard the cache over {over} too: by sequence, head or position"
    seconds = prices.read_seconds(excess)
    return Remark(kind, name, what, "", change, excess, seconds, instruction=largest.name)


# Repeated products are reported if their share of the program's FLOPs is larger: a router is meant to be
# repeated, and so are heads if there are fewer than devices.
_PRODUCT_SHARE = 0.05


@dataclass(frozen=True)
class Alike:
    """A product that `copies` devices over `axes` repeat."""

    product: Product
    axes: tuple[str, ...]
    copies: int

    @property
    def excess_flops(self) -> float:
        return self.product.flops * (1 - 1 / self.copies)


class Repeated(NamedTuple):
    """The repeated products of a program, and the FLOPs of all products of one device."""

    products: list[Alike]
    flops_of_all: float


def repeated_products(
    repeated: Repeated,
    program: Program,
    prices: Prices,
    gathers: Iterable[Emitted] = (),
    sent: Sequence[Emitted] = (),
) -> list[Remark]:
    """A warning for each set of axes that repeats a good part of the program's products.

    gathers: the ones that other warnings report; products repeated because of them are left out. sent: all
    collectives.
    """
    by_axes: dict[tuple[str, ...], list[Alike]] = {}
    gathers = list(gathers)
    for product in repeated.products:
        if not _follows(program, product, gathers):
            by_axes.setdefault(product.axes, []).append(product)
    return [
        _of_products(alike, program, prices)
        for alike in by_axes.values()
        if sum(one.excess_flops for one in alike) > _PRODUCT_SHARE * repeated.flops_of_all
        and not _is_cheaper_than_a_sum(alike, program, prices, sent)
        and not _is_cheaper_than_results(alike, program, prices, sent)
    ]


def with_repeated_work(
    faults: Sequence[Remark],
    repeated: Repeated,
    program: Program,
    prices: Prices,
    sent: Sequence[Emitted],
) -> list[Remark]:
    """The faults, with the seconds of products that all devices repeat because of a gathered operand.

    `repeated_products` leaves these products out. Each is added to the first fault whose gather it follows.
    """
    left = repeated.products
    remarks = list[Remark]()
    for fault in faults:
        gathers = gathered_operands([fault], sent)
        follows = [one for one in left if gathers and _follows(program, one, gathers)]
        left = [one for one in left if one not in follows]
        excess = _excess_seconds(follows, program, prices) if follows else None
        if excess is not None and fault.seconds is not None:
            fault = replace(
                fault,
                what=f"{fault.what}; all of them repeat matmuls of {format_seconds(excess)}",
                seconds=fault.seconds + excess,
            )
        remarks.append(fault)
    return remarks


def gathered_operands(remarks: Iterable[Remark], sent: Iterable[Emitted]) -> list[Emitted]:
    """The gathers that warnings of gathered contractions and batches report.

    All devices of such a gather compute the same product with it, which needs no warning of its own.
    """
    tensors = {(remark.kind, remark.tensor) for remark in remarks}
    kinds = {
        "all_gather": ("contraction_gathered", BATCH_GATHERED, BATCH_SHUFFLED),
        "all_reduce": (BATCH_SHUFFLED,),  # rows read by index, summed with the other devices' zeros
    }
    return [one for one in sent if any((kind, one.tensor) in tensors for kind in kinds.get(one.op, ()))]


def _is_cheaper_than_results(
    repeated: Sequence[Alike], program: Program, prices: Prices, sent: Sequence[Emitted]
) -> bool:
    """Whether products of gathered rows take less time than gathers of the products' results.

    An example is keys and values of all positions, computed on each device from gathered rows. If each
    device multiplied its own rows, the results would be gathered in place of the rows.
    """
    by_name = {one.value.instruction.name: one for one in sent if one.op == "all_gather" and one.is_written}
    rows: dict[str, float] = {}
    results = 0.0
    for alike in repeated:
        product = alike.product.value
        operands = product.operands()
        names = [resolve(program, each, MOVES).instruction.name for each in operands]
        gather = next((by_name[name] for name in names if name in by_name), None)
        seconds = prices.seconds(gather) if gather else None
        if gather is None or seconds is None or not gather.elements:
            return False
        rows[gather.collective.name] = seconds
        runs = alike.product.flops / max(flops_of(product.instruction, product.place.computation), 1)
        share = product.instruction.shapes[0].num_elements / gather.elements
        results += seconds / gather.runs * share * runs
    excess = _excess_seconds(repeated, program, prices)
    return excess is not None and excess < results - sum(rows.values())


def _is_cheaper_than_a_sum(
    repeated: Sequence[Alike], program: Program, prices: Prices, sent: Sequence[Emitted]
) -> bool:
    """Whether products of whole weights take less time than sums in place of the gathers of their rows.

    If the weights were split along the summed dimension, the results would be all-reduced, which sends
    the bytes of the gathers once more.
    """
    gathers = [
        gather
        for product in repeated
        if (gather := _gathered_rows(product, program, prices.mesh)) is not None
    ]
    if not gathers or len(gathers) < len(repeated):
        return False
    names = {gather.name for gather, _ in gathers}
    again = prices.total_seconds([one for one in sent if one.value.instruction.name in names])
    excess = _excess_seconds(repeated, program, prices)
    return again is not None and excess is not None and excess < again


def _excess_seconds(repeated: Sequence[Alike], program: Program, prices: Prices) -> float | None:
    """Seconds of the repetitions of products, in the type of the largest; None if they have no price."""
    largest = max(repeated, key=lambda product: product.excess_flops)
    dtype = narrowest_dtype(program, largest.product.value.operand(0))
    return prices.product_seconds(sum(one.excess_flops for one in repeated), dtype)


def _follows(program: Program, repeated: Alike, gathers: Sequence[Emitted]) -> bool:
    """Whether a product depends on a gather, among these, over all axes that repeat it."""
    keys = {id(one.value.instruction) for one in gathers if set(repeated.axes) <= set(one.axes)}
    return bool(keys) and any(
        id(value.instruction) in keys for value in ancestors(program, repeated.product.value)
    )


def repeated_on(program: Program, mesh: Mesh) -> Repeated:
    """The products that devices along the axes of `mesh` repeat."""
    axes = tuple(axis for axis, size in mesh.sizes.items() if size > 1)
    differing = [Differing(program, mesh, axis) for axis in axes]
    repeated, total = [], 0.0
    for product in products(program):
        if is_attention_kernel(product.value.instruction) or _factorises_gathered(program, product.value):
            continue
        value, total = product.value, total + product.flops
        operands = value.operands()
        if any(_is_spread(program, operand) for operand in operands):
            continue
        over = tuple(one.axis for one in differing if not any(map(one.differs, operands)))
        if over:
            repeated.append(Alike(product, over, mesh.size(over)))
    return Repeated(repeated, total)


def _is_spread(program: Program, operand: TracedValue) -> bool:
    """Whether an operand is a broadcast of a smaller array, such as the gradient of a mean.

    Its product repeats work on one device too, which no sharding saves. The broadcast may be scaled.
    """
    origin = resolve(program, operand, MOVES)
    while origin.instruction.opcode in ("multiply", "divide"):
        pair = [resolve(program, origin.operand(i), MOVES) for i in (0, 1)]
        spread = [each for each in pair if each.instruction.opcode in ("broadcast", "multiply", "divide")]
        if len(spread) < len(pair):
            return False
        origin = pair[0]
    if origin.instruction.opcode != "broadcast":
        return False
    before = origin.operand(0).instruction.shapes[0]
    return before.num_elements < origin.instruction.shapes[0].num_elements


def repeated_calls(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """A warning of arrays gathered for a shard_map or a kernel, if each device keeps a part of its results.

    All devices of the gather compute the same from the same arrays.
    """
    gathers = {
        id(gather.value.instruction): gather
        for gather in sent
        if gather.op == "all_gather" and primitive_of(gather.collective.op_name) in _CALLED_WHOLE
    }
    repeated: dict[int, Emitted] = {}
    for axis in sorted({axis for one in gathers.values() for axis in one.axes}):
        differing = Differing(program, prices.mesh, axis)
        for result in _cut_by_device(program):
            if not differing.differs(result):
                keys = (id(one.instruction) for one in ancestors(program, result))
                earlier = {key: gathers[key] for key in keys if key in gathers}
                repeated |= {key: one for key, one in earlier.items() if axis in one.axes}
    return [_of_call(list(repeated.values()), prices)] if repeated else []


def equal_values(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """A warning of the user's collectives (psum, all_gather) whose devices all send the same values.

    XLA's partitioner emits no such collective.
    """
    differing = DifferingOverAny(program, prices.mesh)
    equal: list[Emitted] = []
    for emitted in sent:
        is_large = emitted.collective.gathered_bytes > NEGLIGIBLE_BYTES
        if emitted.op not in SAME_ON_ALL or not emitted.is_written or not emitted.axes or not is_large:
            continue
        if not differing.differs(emitted.operand(), emitted.axes):
            equal.append(emitted)
    return [_of_equal(equal, prices)] if equal else []


def drawn_whole(program: Program, prices: Prices) -> list[Remark]:
    """A warning of random numbers that all devices draw, although each keeps only a part of them."""
    axes = [axis for axis, size in prices.mesh.sizes.items() if size > 1]
    drawn: dict[str, tuple[Instruction, tuple[str, ...]]] = {}
    for axis in axes:
        differing = Differing(program, prices.mesh, axis)
        for whole in _cut_by_device(program):
            num_bytes = whole.instruction.shapes[0].num_bytes
            # The partitioner itself divides draws outside of a shard_map.
            is_by_hand = is_written_by_hand(whole.instruction.op_name)
            if num_bytes <= _FEW_RANDOM_BYTES or not is_by_hand or differing.differs(whole):
                continue
            draws = _draw_of(program, whole)
            if draws is not None:
                _, over = drawn.get(draws.name, (draws, ()))
                drawn[draws.name] = draws, (*over, axis)
    if not drawn:
        return []
    largest, over = max(drawn.values(), key=lambda one: one[0].shapes[0].num_bytes)
    size, num_bytes = prices.mesh.size(over), largest.shapes[0].num_bytes
    return [
        Remark(
            REPEATED,
            "random numbers",
            f"{largest.shapes[0].num_elements:,} random numbers ({num_bytes:,} B) are drawn by each of "
            f"{size} devices over {prices.over(over, size)}, which keeps its own part of them",
            largest.op_name,
            "let each device draw only its own: jax.random.fold_in(key, jax.lax.axis_index(axis)), with the "
            "shape of its part; or draw outside of the shard_map, where the partitioner splits them",
            round(num_bytes * (1 - 1 / size)),
            prices.read_seconds(round(num_bytes * (1 - 1 / size))),
            instruction=largest.name,
        )
    ]


# Fewer random bytes take no time, such as the keys of layers.
_FEW_RANDOM_BYTES = 1 << 16


def _draw_of(program: Program, whole: TracedValue) -> Instruction | None:
    """The nearest earlier value that a generator draws; None if it is small, or a product is between."""
    left, seen = [whole], set[tuple[object, ...]]()
    while left and len(seen) < _MOST_STEPS:
        value = left.pop(0)
        instruction = value.instruction
        if value_key(value) in seen or instruction.opcode in ("dot", "convolution"):
            continue
        seen.add(value_key(value))
        shapes = instruction.shapes
        if shapes and shapes[0].dims and DRAWS.search(instruction.op_name):
            return instruction if shapes[0].num_bytes > _FEW_RANDOM_BYTES else None
        left += sources(program, value)
    return None


def summed_after_gather(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """Warnings of arrays that the user gathers, and that all devices multiply to the same smaller result.

    Such a product sums over the gathered dimension, as a weighted sum of all experts' rows does.
    """
    remarks, differing = list[Remark](), DifferingOverAny(program, prices.mesh)
    for gather in sent:
        if gather.op != "all_gather" or not gather.is_written or not gather.axes:
            continue
        for user, other in gather.products(program):
            result_bytes = user.instruction.shapes[0].num_bytes
            is_small = gather.collective.gathered_bytes > SENT_BY_A_SUM * result_bytes
            if is_small and not are_rows(gather, user, other) and not differing.differs(user, gather.axes):
                remarks.append(_of_sum(gather, result_bytes, prices))
    return remarks


def _of_sum(gather: Emitted, result_bytes: int, prices: Prices) -> Remark:
    over = prices.over(gather.axes, gather.collective.groups.size)
    return Remark(
        "contraction_gathered",
        gather.tensor,
        f"`{gather.tensor}` ({gather.collective.gathered_bytes:,} B) is gathered over {over} for a matmul "
        f"that sums over the devices' parts: all devices compute the same result of {result_bytes:,} B",
        gather.where,
        "multiply each device's own part with its part of the other operand, and sum the results (psum)",
        prices.sent(gather),
        prices.seconds(gather),
        instruction=gather.collective.name,
    )


def _of_equal(equal: Sequence[Emitted], prices: Prices) -> Remark:
    largest = max(equal, key=prices.sent)
    others = and_more(len(equal) - 1)
    size = largest.collective.groups.size
    primitive = largest.collective.primitive
    return Remark(
        "sent_although_equal",
        largest.tensor,
        f"`{primitive}` of `{largest.tensor}`{others} over {prices.over(largest.axes, size)}: the values are "
        f"the same on all {size} devices, as after an earlier collective",
        largest.where,
        f"leave it out: a mean of equal values changes nothing, and a sum multiplies them by {size}",
        sum(prices.sent(one) for one in equal),
        prices.total_seconds(equal),
        instruction=largest.collective.name,
    )


# The primitive of a gather, if a shard_map, or a kernel outside of one, takes the whole array.
_CALLED_WHOLE = ("shard_map", "pallas_call")


def _cut_by_device(program: Program) -> Iterator[TracedValue]:
    """Arrays that are sliced at offsets that differ between devices: each keeps its own part."""
    for place in places(program):
        for instruction in place.computation.instructions.values():
            # A slice of one number reads the partitioner's own table of offsets.
            if instruction.opcode != "dynamic-slice" or instruction.shapes[0].num_elements == 1:
                continue
            piece = TracedValue(instruction, place)
            offsets = slice_offsets(program, piece, first=1)
            if offsets and len(set(offsets)) > 1:
                yield piece.operand(0)


def _of_call(gathers: Sequence[Emitted], prices: Prices) -> Remark:
    largest = max(gathers, key=prices.sent)
    over = prices.over(largest.axes, largest.collective.groups.size)
    num_bytes = largest.collective.gathered_bytes
    others = and_more(len(gathers) - 1)
    names = ", ".join(f'"{axis}"' for axis in largest.axes) if prices.named else ""
    spec = f" (P({names}))" if names else ""
    return Remark(
        REPEATED,
        largest.tensor,
        f"`{largest.tensor}`{others} ({num_bytes:,} B) is gathered over {over} for a shard_map or a kernel: "
        f"all {largest.collective.groups.size} devices repeat its work, and each keeps a part of the result",
        largest.where,
        f"split the array in in_specs, and the result in out_specs, of the shard_map{spec}; call a "
        "kernel in such a shard_map, since XLA cannot divide it",
        sum(prices.sent(one) for one in gathers),
        prices.total_seconds(gathers),
        instruction=largest.collective.name,
    )


def _factorises_gathered(program: Program, value: TracedValue) -> bool:
    """Whether a factorisation's operand is gathered, which another warning reports."""
    if len(value.instruction.operands) != 1:
        return False
    origin = resolve(program, value.operand(0), MOVES)
    return op_of(origin.instruction) == "all_gather"


def _of_products(repeated: list[Alike], program: Program, prices: Prices) -> Remark:
    largest = max(repeated, key=lambda product: product.excess_flops)
    instruction = largest.product.value.instruction
    name = innermost_name(instruction)
    over, excess = prices.over(largest.axes, largest.copies), sum(one.excess_flops for one in repeated)
    others = and_more(len(repeated) - 1)
    change = _to_share(repeated, largest, program, prices)
    return Remark(
        REPEATED,
        name,
        f"the matmul `{name}`{others}: {largest.copies} devices over {over} compute the same values, "
        f"{excess:.3g} FLOPs per device more than if they shared the work",
        instruction.op_name,
        change,
        0,
        _excess_seconds(repeated, program, prices),
        instruction=instruction.name,
    )


def _to_share(repeated: list[Alike], largest: Alike, program: Program, prices: Prices) -> str:
    """The change that lets devices share the work of repeated products, for the first cause that fits."""
    over = prices.over(largest.axes, largest.copies)
    if is_written_by_hand(largest.product.value.instruction.op_name):
        return (
            f"split an operand over {over} in the shard_map's in_specs: the batch, or a weight along its "
            "columns, and the next one along its rows, with a psum of the partial results"
        )
    axes = ", ".join(f"'{axis}'" for axis in largest.axes) if prices.named else "axis"
    if not _is_split_over(program, prices.mesh, largest.axes):
        of_batch = batch_of(program, prices.mesh).axes if prices.named else ()
        joined = ", ".join(repr(axis) for axis in (*sorted(of_batch), *largest.axes))
        every = f"({joined})" if of_batch else axes
        return (
            f"no input is sharded over {over}: give the step its batch in parts (jax.device_put(batch, "
            f"NamedSharding(mesh, PartitionSpec({every})))), or constrain it so at the start of the step"
        )
    if _is_sorted(program, largest.product.value):
        return (
            f"a sort over all devices along {over} orders the rows, so that no device keeps its own: sort "
            "and multiply each device's rows in jax.shard_map, and exchange them (all_to_all) if experts are "
            "split"
        )
    weight = _gathered_weight(repeated, program, prices.mesh)
    if weight and _is_most(repeated, program):
        return (
            f"shard the batch over {over} too, next to its own axes (P((..., {axes}))): `{weight}` and other "
            "weights are gathered there, and all devices multiply the same rows"
        )
    if weight:
        return (
            f"`{weight}` is sharded over {over}, and gathered for a result that is whole there: drop the "
            "constraint on the result, or constrain it to be sharded along the weight's dimension too"
        )
    if whole := _whole_weight(repeated, program, prices.mesh):
        return (
            f"shard `{whole}` over {over} along the dimension that the matmul sums over, such as its rows "
            f"or its heads (P({axes}, ...)): its other operand is split there, and is gathered because the "
            "weight is whole; each device then multiplies its part, and the results are summed"
        )
    if (whole := _whole_input(largest, program, prices.mesh)) and not _is_most(repeated, program):
        return (
            f"shard `{whole}`, which is whole, over {over} too, as other weights are: along the dimension "
            f"that stays in the result, such as the vocabulary of a head (P(None, {axes})) or of a tied "
            f"table (P({axes}, None)), so that each device has a part; {largest.copies} must divide that "
            "dimension: if it does not, pad it, as is usual for a vocabulary, and mask the padding"
        )
    return (
        f"shard an operand over {over} too: constrain the activations to keep their batch sharded "
        "(with_sharding_constraint), also after a reshape"
    )


# The most values to visit between a product and the gather of its rows.
_MOST_STEPS = 64


def _is_sorted(program: Program, product: TracedValue) -> bool:
    """Whether rows of an operand of a product are gathered by indices that depend on a sort."""
    left = product.operands()
    seen = set[tuple[object, ...]]()
    while left and len(seen) < _MOST_STEPS:
        value = resolve(program, left.pop(), MOVES)
        if value_key(value) in seen or value.instruction.opcode in ("dot", "convolution"):
            continue
        seen.add(value_key(value))
        if value.instruction.opcode != "gather":
            left += sources(program, value)
        elif any(one.instruction.opcode == "sort" for one in ancestors(program, value.operand(1))):
            return True
    return False


# If repeated products have more of a program's FLOPs than this share, it is the batch that is not split.
_MOST = 0.9


def _is_most(repeated: list[Alike], program: Program) -> bool:
    """Whether nearly all FLOPs of a program are in repeated products."""
    total = sum(one.flops for one in products(program))
    return sum(one.product.flops for one in repeated) > _MOST * total


def _whole_weight(repeated: list[Alike], program: Program, mesh: Mesh) -> str | None:
    """An input that repeated products multiply whole with activations gathered over the axes that repeat."""
    for product in repeated:
        if pair := _gathered_rows(product, program, mesh):
            return pair[1].op_name
    return None


def _gathered_rows(repeated: Alike, program: Program, mesh: Mesh) -> tuple[Instruction, Instruction] | None:
    """(the gather of its rows, its whole weight) of a repeated product of activations and an input."""
    axes, product = set(repeated.axes), repeated.product.value
    operands = product.operands()
    origins = [resolve(program, each, MOVES) for each in operands]
    for weight, rows in zip(origins, reversed(origins), strict=True):
        stored, gather = weight.instruction, rows.instruction
        is_input = weight.is_input and stored.op_name
        if is_input and axes <= {*copied_over(stored, mesh)} and op_of(gather) == "all_gather":
            along = next(iter(gather.numbers("dimensions")), 0)
            if gather.shapes[-1].dims[along] in stored.shapes[0].dims:
                return gather, stored
    return None


def _whole_input(repeated: Alike, program: Program, mesh: Mesh) -> str | None:
    """The input that a repeated product multiplies whole, if the axes that repeat it split no batch."""
    if set(repeated.axes) & batch_of(program, mesh).axes:
        return None
    operands = repeated.product.value.operands()
    for operand in sorted(operands, key=lambda each: -each.instruction.shapes[0].num_elements):
        origin = resolve(program, operand, MOVES)
        stored = origin.instruction
        is_weight = origin.is_input and len(stored.shapes[0].dims) > 1
        if is_weight and stored.op_name and {*repeated.axes} <= {*copied_over(stored, mesh)}:
            return stored.op_name
    return None


def _is_split_over(program: Program, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether an input of the program is sharded over one of the axes."""
    inputs = [one for one in program.main.parameters if isinstance(one.shape, ArrayShape)]
    return any(set(axes) - {*copied_over(one, mesh)} for one in inputs)


def _gathered_weight(repeated: list[Alike], program: Program, mesh: Mesh) -> str | None:
    """The largest input that is gathered for repeated products over axes that do not shard the batch."""
    if set(repeated[0].axes) & batch_of(program, mesh).axes:
        return None
    pairs = ((one.product.value, index) for one in repeated for index in (0, 1))
    sizes: dict[str, int] = {}
    for value in (each.operand(index) for each, index in pairs if index < len(each.instruction.operands)):
        origin = resolve(program, value, MOVES)
        if op_of(origin.instruction) != "all_gather":
            continue
        gathered = entered_as(program, origin.operand(0)).instruction
        if gathered.opcode == "parameter" and gathered.op_name:
            sizes[gathered.op_name] = origin.instruction.shapes[-1].num_bytes
    return max(sizes, key=lambda name: sizes[name], default=None)
