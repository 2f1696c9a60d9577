"""Work and waits that no large transfer shows: tiny sums in loops, one-hot products, 64-bit numbers."""

from collections.abc import Callable, Iterable, Sequence

from meshwright.audit.facts.communication import bits_of, narrowest_dtype
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES, Emitted
from meshwright.audit.facts.matmuls import Product, products
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import MOVES, MOVES_OR_REPEATS, TracedValue, resolve, sources
from meshwright.audit.remarks import Remark
from meshwright.dtypes import of_hlo

# Tiny sums are reported if they run at least this often and take a larger share of the communication.
_MANY, _SHARE_OF_TIME = 8, 0.05
# Products are reported if they have a larger share of the program's FLOPs.
_SHARE_OF_FLOPS = 0.05
_WIDEST = 64


def tiny_sums(program: Program, prices: Prices, sent: Sequence[Emitted]) -> list[Remark]:
    """A warning of sums of a few numbers in each turn of a loop that only returns or adds them.

    Their time is that of the links' latency: losses and statistics of layers, steps or microbatches.
    """
    tiny = [
        emitted
        for emitted in sent
        if emitted.collective.op == "all_reduce"
        and emitted.collective.gathered_bytes <= NEGLIGIBLE_BYTES
        and emitted.runs >= _MANY
        and emitted.value.place.loops
        and _is_only_kept(program, emitted)
    ]
    seconds, total = prices.total_seconds(tiny), prices.total_seconds(sent)
    if not tiny or seconds is None or total is None or seconds <= _SHARE_OF_TIME * total:
        return []
    largest = max(tiny, key=lambda one: prices.seconds(one) or 0.0)
    over = prices.over(largest.axes, largest.collective.groups.size)
    times = sum(one.runs for one in tiny)
    return [
        Remark(
            "summed_repeatedly",
            largest.tensor,
            f"`{largest.tensor}` of {largest.collective.gathered_bytes:,} B is reduced over {over} in each "
            f"turn of a loop, {times:,} times in all, and no turn reads it: each waits for the links",
            largest.where,
            "return each device's own numbers from the loop and reduce them once after it (jax.lax.pmean or "
            "pmax of the stack; without jax.shard_map, take the mean after the loop), or leave them out",
            sum(prices.sent(one) for one in tiny),
            seconds,
            instruction=largest.collective.name,
        )
    ]


def _is_only_kept(program: Program, emitted: Emitted) -> bool:
    """Whether a loop only stores, adds up or returns the results of a sum."""
    uses = list(emitted.uses(program, elementwise=True))
    return bool(uses) and all(
        at < 0 or user.instruction.opcode in ("dynamic-update-slice", "tuple") for user, at in uses
    )


def one_hot_products(program: Program, prices: Prices) -> list[Remark]:
    """Warnings of matmuls by rows that have a single 1, which reading or moving rows by index replaces.

    The other operand is a table among the program's inputs, or computed rows, such as tokens of experts. The
    latter are reported only if they are most of the program's FLOPs: with few experts the matmul may be best.
    """
    of_table = _one_hot(
        program,
        prices,
        _is_of_one_hot,
        _SHARE_OF_FLOPS,
        "multiplies a table by one-hot rows, {flops:.3g} FLOPs per device ({share:.0%} of all): each result "
        "is a row of the table",
        "look the rows up: table[indices], or jnp.take(table, indices, axis=0), whose gradient adds rows "
        "by index too",
    )
    of_rows = _one_hot(
        program,
        prices,
        _moves_rows,
        _SHARE_OF_MOVES,
        "and others like it only move rows by one-hot numbers, {flops:.3g} FLOPs per device ({share:.0%} of "
        "all, more than the other matmuls): each result is one row, or zeros",
        "move the rows by index: buffer.at[expert, place].set(rows, mode='drop') and buffer[expert, place]; "
        "or dispatch smaller groups of tokens, since these FLOPs grow with the square of a group",
    )
    return of_table or of_rows


# Products that move computed rows are reported if they have a larger share of the program's FLOPs.
_SHARE_OF_MOVES = 0.5


def _one_hot(
    program: Program,
    prices: Prices,
    is_such: Callable[[Program, TracedValue], bool],
    least: float,
    what: str,
    change: str,
) -> list[Remark]:
    """A warning of the products that `is_such` accepts, if their share of all FLOPs is above `least`.

    what: has the fields `flops` and `share`.
    """
    largest, flops, share = _largest(program, is_such, least)
    if largest is None:
        return []
    instruction = largest.value.instruction
    name = primitive_of(instruction.op_name) or instruction.name
    return [
        Remark(
            "one_hot_multiplied",
            name,
            f"the matmul `{name}` {what.format(flops=flops, share=share)}",
            instruction.where,
            change,
            0,
            prices.product_seconds(flops, narrowest_dtype(program, largest.value.operand(0))),
            instruction=instruction.name,
        )
    ]


def _largest(
    program: Program, is_such: Callable[[Program, TracedValue], bool], least: float = _SHARE_OF_FLOPS
) -> tuple[Product | None, float, float]:
    """The largest of such products, the FLOPs of all of them, and their share of the program's FLOPs.

    The product is None if the share is too small to report.
    """
    total, chosen = 0.0, list[Product]()
    for product in products(program):
        total += product.flops
        if is_such(program, product.value):
            chosen.append(product)
    flops = sum(one.flops for one in chosen)
    if flops <= least * total:
        return None, flops, 0.0
    return max(chosen, key=lambda one: one.flops), flops, flops / total


def _is_of_one_hot(program: Program, product: TracedValue) -> bool:
    """Whether a product multiplies an input of the program by one-hot rows."""
    operands = product.operands()
    pairs = zip(operands, reversed(operands), strict=True)
    return any(_is_one_hot(program, rows) and _is_input(program, table) for rows, table in pairs)


def _moves_rows(program: Program, product: TracedValue) -> bool:
    """Whether a product multiplies by one-hot numbers, or by such numbers that are scaled."""
    return any(is_scaled_one_hot(program, operand) for operand in product.operands())


def is_scaled_one_hot(program: Program, value: TracedValue) -> bool:
    """Whether a value is one-hot, or an elementwise product with a one-hot factor.

    Also if a collective sent the value or one of its factors.
    """
    left = [value]
    for _ in range(_MOST_FACTORS):
        if not left:
            return False
        origin = resolve(program, left.pop(), MOVES_OR_REPEATS)
        if _is_one_hot(program, origin):
            return True
        if origin.instruction.opcode in ("multiply", "and", "concatenate") or op_of(origin.instruction):
            left += sources(program, origin)
    return False


# Limit of the factors that a backward search visits.
_MOST_FACTORS = 32


def _is_one_hot(program: Program, value: TracedValue) -> bool:
    """Whether a value is `jax.nn.one_hot` of indices: a comparison with 0, 1, 2, ..., as numbers."""
    origin = resolve(program, value, MOVES)
    if origin.instruction.opcode != "compare" or origin.instruction.attributes.get("direction") != "EQ":
        return False
    sides = (resolve(program, origin.operand(at), MOVES_OR_REPEATS) for at in (0, 1))
    return any(side.instruction.opcode == "iota" for side in sides)


def _is_input(program: Program, value: TracedValue) -> bool:
    """Whether a value is an input of the program, perhaps gathered."""
    return resolve(program, value, MOVES | {"all-gather"}).is_input


def double_products(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """A warning of matmuls in 64 bits, for which accelerators have no units."""
    largest, _, share = _largest(program, _is_double)
    if largest is None:
        return []
    instruction = largest.value.instruction
    name = primitive_of(instruction.op_name) or instruction.name
    wide = [one for one in sent if bits_of(one.collective.dtype) == _WIDEST]
    seconds = prices.total_seconds(wide)
    return [
        Remark(
            "promoted",
            name,
            f"the matmul `{name}` and others compute in f64, {share:.0%} of all FLOPs, and "
            f"{len(wide):,} collectives send f64: jax_enable_x64 is on, and a NumPy array of float64 "
            "promotes what it meets",
            instruction.where,
            "cast NumPy arrays to float32 where they enter (jnp.asarray(array, jnp.float32)), or leave out "
            "jax_enable_x64: half the bytes",
            sum(prices.sent(one) for one in wide) // 2,
            None if seconds is None else seconds / 2,
            instruction=instruction.name,
        )
    ]


def _is_double(program: Program, product: TracedValue) -> bool:
    """Whether a product's result has 64 bits."""
    shapes = product.instruction.shapes
    return bool(shapes) and of_hlo(shapes[0].dtype) == "f64"
