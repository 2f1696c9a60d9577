"""A rule that recognises a mistake by one collective, and facts that several rules ask for."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.audit.facts.compiled_schedule import ProgramSchedule
from meshwright.audit.facts.emitted import ELEMENTWISE, Emitted
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Instruction, Program
from meshwright.audit.hlo.trace import MOVES, TracedValue, called_by, loop_body, resolve, sources

Fault = tuple[str, str, str]  # kind, what, change


@dataclass(frozen=True)
class ProgramContext:
    """Facts about the program that rules need in addition to a collective.

    fsdp_axes: mesh axes that shard both the batch's rows and weights. batch_axes: mesh axes that shard the
    batch. batch_elements: numbers of the batch on one device, such as its tokens. batch_names: its inputs.
    saved_by_gathers: the share of the bytes sent over fsdp_axes that gathered weights would save.
    """

    program: Program
    sent: tuple[Emitted, ...]
    prices: Prices
    differentiated: bool
    schedule: ProgramSchedule
    fsdp_axes: frozenset[str] = frozenset()
    batch_axes: frozenset[str] = frozenset()
    batch_elements: int = 0
    batch_names: frozenset[str] = frozenset()
    saved_by_gathers: float = 1.0

    def over(self, emitted: Emitted) -> str:
        """The devices that a collective joins, in words."""
        return self.prices.over(emitted.axes, emitted.collective.groups.size)

    def gathered(self, emitted: Emitted) -> str:
        """The begin of a sentence on an array that is gathered."""
        return f"{_with_bytes(emitted)} is gathered over {self.over(emitted)}"

    def moved(self, emitted: Emitted) -> str:
        """The begin of a sentence on an array that is moved, with the collective that moves it."""
        return f"{_with_bytes(emitted)} is moved over {self.over(emitted)} ({emitted.op})"

    def is_of_batch(self, parameter: Instruction) -> bool:
        """Whether an input is a part of the batch: integers, or one of the batch's names."""
        return is_integer(parameter) or parameter.label in self.batch_names


def _with_bytes(emitted: Emitted) -> str:
    return f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B)"


FaultRule = Callable[[Emitted, ProgramContext], Fault | None]

# A collective is reported if another way of computing the same sends fewer bytes by this factor.
FEWER_BYTES = 4
# An all-reduce sends its operand twice.
SENT_BY_A_SUM = 2
# Limit of the values that a search through a program visits.
MOST_VALUES = 16
# Collectives that move an array and do not sum it.
MOVED = ("permute", "all_to_all", "all_gather")
# JAX's primitives of a sharding that the user asks for.
CONSTRAINTS = ("sharding_constraint", "reshard")
# JAX's primitives by which a loop reads the row of its turn.
TURN_BY_TURN = ("dynamic_slice", "dynamic_index_in_dim", "squeeze")
# Kind of a fault: the batch, or activations, are gathered, so that all devices repeat the work on all rows.
BATCH_GATHERED = "batch_gathered"
# Kind of a fault: devices read rows of the batch, or of activations, by index from other devices.
BATCH_SHUFFLED = "batch_shuffled"
# Opcodes of reductions.
REDUCES = ("reduce", "reduce-window")
# Opcodes that assemble an array from parts.
_JOINED = ("concatenate", "pad", "select", "dynamic-update-slice")


def is_like_a_result(parameter: Instruction, context: ProgramContext) -> bool:
    """Whether an input of an inference step has the shape of a result: activations, or a cache."""
    shapes = () if context.differentiated else context.program.main.result.shapes
    return parameter.shapes[0].dims in {shape.dims for shape in shapes}


def is_integer(parameter: Instruction) -> bool:
    """Whether an input holds integers or booleans, as tokens, labels and masks of rows, not 4-bit weights."""
    return re.fullmatch(r"[su](8|16|32|64)|pred", parameter.shapes[0].dtype) is not None


def parts_before(emitted: Emitted, program: Program) -> Iterator[TracedValue]:
    """The values that a collective's operand is assembled from, also by earlier collectives."""
    left, seen = [emitted.operand()], 0
    while left and seen < MOST_VALUES:
        origin = resolve(program, left.pop(), MOVES)
        yield origin
        is_moved = op_of(origin.instruction) in MOVED
        if is_moved or origin.instruction.opcode in (*ELEMENTWISE, *_JOINED):
            left += sources(program, origin)
        seen += 1


def written_rows(value: TracedValue) -> list[TracedValue]:
    """[the array before, the rows], if a value is an array with rows written by index; otherwise empty.

    XLA for CPU turns a scatter into a loop, which carries a counter, the array, the indices and the rows.
    """
    if value.instruction.opcode == "scatter":
        return [value.operand(0), value.operand(2)]
    if value.instruction.opcode != "while" or len(value.path) != 1:
        return []
    if not primitive_of(value.instruction.op_name).startswith("scatter"):
        return []
    (written,) = value.path
    array = value.instruction.shapes[written]
    rows = [
        at
        for at, shape in enumerate(value.instruction.shapes)
        if at != written and shape.dims and shape.dtype == array.dtype
    ]
    return [value.operand(0, value.path), *(value.operand(0, (at,)) for at in rows)]


def is_cut_in_a_loop(emitted: Emitted, program: Program, along: int = 0) -> bool:
    """Whether a loop reads one entry of an array's dimension `along` in each turn."""
    dims = emitted.result().instruction.shapes[-1].dims
    entry = (*dims[:along], 1, *dims[along + 1 :])
    loops = {
        user.instruction.name: user for user, _ in emitted.uses(program) if user.instruction.opcode == "while"
    }
    for loop in loops.values():
        body = loop_body(program, loop.instruction)
        inside = [body, *(one for each in body.instructions.values() for one in called_by(program, each))]
        for computation in inside:
            for each in computation.instructions.values():
                if each.opcode == "dynamic-slice" and each.shapes[0].dims == entry:
                    return computation.instructions[each.operands[0]].shapes[0].dims == dims
    return False


def is_shift(emitted: Emitted) -> bool:
    """Whether each device sends to the next or the one before: a pipeline's shift, or a halo's rows."""
    pairs = pairs_of(emitted)
    if emitted.op != "permute" or not pairs or any(a == b for a, b in pairs):
        return False
    # All go the same way, except the ones that close a ring; or few devices send, as the last of a pipeline.
    (_, times), *others = Counter(b - a for a, b in pairs).most_common()
    num_devices = emitted.mesh.num_devices if emitted.mesh else 0
    is_ring = len(pairs) > 2 and len(others) <= 1 and 2 * times > len(pairs)
    return is_ring or 2 * len(pairs) < num_devices


# The sides of a product, as its attributes name them.
SIDES = ("lhs", "rhs")


def side_of_gathered(product: TracedValue, other: TracedValue) -> int:
    """The index of a product's gathered operand; `other` is the one that is not gathered."""
    return int(other.instruction is product.operand(0).instruction)


def pairs_of(emitted: Emitted) -> list[tuple[int, int]]:
    """(sender, receiver) of each pair of a permute."""
    text = emitted.value.instruction.attributes.get("source_target_pairs", "")
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]


def stored_otherwise(emitted: Emitted, context: ProgramContext) -> Fault:
    """The fault of an array that is stored in other shards than its matmul uses."""
    return (
        "weight_resharded",
        f"`{emitted.tensor}` is stored with one sharding and used with another: {emitted.op} over "
        f"{context.over(emitted)} before its matmul",
        "store it with the sharding that its matmul uses",
    )


def same_devices(first: Emitted, second: Emitted) -> bool:
    """Whether two collectives join the same groups of devices."""
    groups = [{frozenset(group) for group in s.collective.groups.members} for s in (first, second)]
    return groups[0] == groups[1]
