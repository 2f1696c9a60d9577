"""Findings: differences from the plan with their cost, their place and a remedy.

These are collectives that differ, matmuls that are unplanned or in a wider type, longer waits of the schedule
than planned, passes over weights, gradients and caches, and memory.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from meshwright.audit.compare.flops import ProductDifference
from meshwright.audit.compare.line_up import DIFFERENT, TensorRow, extra_seconds, summed_whole
from meshwright.audit.compile.planned_program import PlannedStep, PlannedUpdate
from meshwright.audit.facts.buffers import Peak, layer_saved_bytes
from meshwright.audit.facts.compiled_schedule import StepTimeline
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES
from meshwright.audit.facts.matmuls import Product
from meshwright.audit.facts.outside_products import (
    ScopedArithmetic,
    StatePass,
    UpdateArithmetic,
    made_by,
    multiplied_results,
    nameless_sums,
    weights_depend_on_a_norm,
)
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.op_names import begins_or_is, is_of, keys_of, primitive_of, scope_of, split_op_name
from meshwright.audit.hlo.read import Instruction, Program, arrays
from meshwright.audit.hlo.trace import CallPath, TracedValue, resolve
from meshwright.audit.remarks import Remark
from meshwright.dtypes import dtype_bytes
from meshwright.units import and_more, format_bytes

# Products in a wider type than planned are reported above this share of all FLOPs.
WIDE_SHARE = 0.01
# Longer waits for a tensor than planned are reported above this share of the step.
EXPOSED_SHARE = 0.05


def findings(rows: Iterable[TensorRow], prices: Prices) -> list[Remark]:
    """A finding for each row that differs."""
    return [_of_row(row, prices) for row in rows if row.status in DIFFERENT]


def product_findings(differences: Iterable[ProductDifference], prices: Prices, dtype: str) -> list[Remark]:
    """A finding for each product with other FLOPs than planned; `dtype` gives its rate."""
    return [
        Remark(
            "product",
            difference.tensor,
            difference.what,
            difference.where,
            _change_of(difference),
            0,
            prices.product_seconds(difference.extra_flops, dtype),
            difference.direction,
        )
        for difference in differences
    ]


def _change_of(difference: ProductDifference) -> str:
    """The remedy of FLOPs that differ; "" if none is known."""
    # Products that the compiler repeats explain most of the extra FLOPs.
    if 0 < difference.extra_flops / 2 < difference.repeated:
        return _REPEATED
    return _RECOMPUTED if difference.direction == "backward" and difference.extra_flops > 0 else ""


_RECOMPUTED = "probably recomputed: compare the program's remat policy with the plan's"
_REPEATED = "the compiler computes it again since memory is short: take a smaller batch, or save less"


def wide_findings(wide: Sequence[Product], dtype: str, total: float, prices: Prices) -> list[Remark]:
    """One finding for products in a wider type, if they are many of all `total` FLOPs."""
    flops = sum(one.flops for one in wide)
    if flops <= WIDE_SHARE * total:
        return []
    largest = max(wide, key=lambda product: product.flops)
    scopes = scope_of(largest.op_name)
    slower, planned = prices.product_seconds(flops, "f32"), prices.product_seconds(flops, dtype)
    return [
        Remark(
            "dtype",
            scopes[-1] if scopes else "products",
            f"{len(wide)} matmuls, {flops / total:.0%} of the FLOPs, run in a wider type than {dtype}",
            largest.op_name,
            f"cast both operands to {dtype} before the matmul",
            0,
            slower - planned if slower is not None and planned is not None else None,
        )
    ]


def exposure_findings(
    rows: Iterable[TensorRow], line: StepTimeline | None, step_seconds: float
) -> list[Remark]:
    """A finding for each row with much longer waits in the schedule than planned."""
    if line is None:
        return []
    return [
        Remark(
            "exposure",
            row.tensor,
            f"{row.tensor}: {waits:.3g} s exposed, {planned:.3g} s planned",
            row.emitted[0].where,
            "start it earlier, or overlap it with a matmul step by step (with XLA's compiler options)",
            0,
            waits - planned,
            row.direction,
        )
        for row in rows
        if row.emitted
        and (waits := sum(line.exposed[id(e)] for e in row.emitted))
        - (planned := sum(p.exposed_seconds for p in row.planned))
        > EXPOSED_SHARE * step_seconds
    ]


def _of_row(row: TensorRow, prices: Prices) -> Remark:
    what, change = summed_whole(row) or (f"{row.tensor}: {row.note}", "")
    return Remark(
        kind="collective",
        tensor=row.tensor,
        direction=row.direction,
        what=what,
        where=next((e.where for e in row.emitted), ""),
        change=change,
        bytes=round(sum(map(prices.sent, row.emitted)) - sum(map(prices.planned_sent, row.planned))),
        seconds=extra_seconds(row, prices),
    )


def kept_findings(program: Program) -> list[Remark]:
    """One finding for arrays that a training step returns without an update."""
    results = [buffer for path, _ in arrays(program.main.result.shape) if (buffer := _origin(program, path))]
    kept = [one for one in results if one.shapes[0].num_bytes > NEGLIGIBLE_BYTES]
    if not kept:
        return []
    largest = max(kept, key=lambda buffer: buffer.shapes[0].num_bytes)
    name, others = largest.label, and_more(len(kept) - 1)
    num_bytes = sum(one.shapes[0].num_bytes for one in kept)
    what = f"`{name}`{others}, {format_bytes(num_bytes)}: given back as it came, not updated"
    return [Remark("state", name, what, "", "return the optimizer's result", 0)]


def weight_findings(program: Program, planned: Iterable[str]) -> list[Remark]:
    """One finding if a training step has other weights than planned, by path."""
    named = (one.op_name for one in program.main.parameters if "params[" in one.op_name)
    given = {"/".join(keys_of(name)) for name in named}
    planned = set(planned)
    differences = [
        f"{', '.join(sorted(names))}: {what}"
        for names, what in ((given - planned, "not in the plan"), (planned - given, "not in the program"))
        if names and given
    ]
    return [Remark("state", "weights", "; ".join(differences), "", "", 0)] if differences else []


# The update may compute this share more or less than planned. Correct steps have 0.947 to 1.053 on GPUs and
# TPUs, which merge or repeat one of AdamW's 19 operations, and up to 1.09 on CPUs (small models, with vectors
# of a matrix's size). At least half of the planned sums must be in the program.
UPDATE_TOLERANCE, LEAST_REDUCED = 0.1, 0.5
_NUMBER_BYTES = dtype_bytes("f32")


def update_findings(planned: PlannedUpdate, update: UpdateArithmetic, prices: Prices) -> list[Remark]:
    """Findings if the update computes or reduces more or fewer elements than planned."""
    again = update.computed / planned.computed - 1
    reduced = update.reduced - planned.reduced
    figures = (
        ("computes", update.computed, planned.computed, again * planned.num_bytes, 1 - UPDATE_TOLERANCE),
        ("reduces", update.reduced, planned.reduced, reduced * _NUMBER_BYTES, LEAST_REDUCED),
    )
    return [
        Remark(
            "update",
            "update",
            f"the update {does} {compiled:.3g} elements, planned are {wanted:.3g}",
            "",
            "",
            0,
            prices.read_seconds(extra),
        )
        for does, compiled, wanted, extra, least in figures
        if not least * wanted <= compiled <= (1 + UPDATE_TOLERANCE) * wanted
    ]


def norm_findings(program: Program) -> list[Remark]:
    """One finding if a training step does not clip its gradients by their norm."""
    if weights_depend_on_a_norm(program):
        return []
    what = "the new weights depend on no norm of the gradients, by which the planned step clips them"
    return [Remark("update", "grad_norm", what, "", "clip by the norm: make_optimizer", 0)]


def sum_findings(program: Program) -> list[Remark]:
    """One finding if weights or moments are multiplied again after their update."""
    count = multiplied_results(program)
    if not count:
        return []
    what = f"{count} arrays of the new state are products; the planned update adds to each at last"
    return [Remark("update", "update", what, "", "", 0)]


# The functions of an activation; other activations use none.
_OF_ACTIVATION = {
    "silu": {"exp", "logistic"},
    "clamped_silu": {"exp", "logistic"},
    "limited_silu": {"exp", "logistic"},
    "gelu": {"tanh"},
    "gelu_erf": {"erf", "erfc"},
}
_ACTIVATION = "_activation"


def activation_findings(
    compiled: Mapping[str, Collection[str]], operations: Iterable[str], kind: str
) -> list[Remark]:
    """A finding for each activation with another function than the planned `kind`.

    compiled: the functions of the program, by scope.
    """
    fits = _OF_ACTIVATION.get(kind, set())
    scopes = [name for name in operations if name.endswith(_ACTIVATION) and name in compiled]
    wrong = [name for name in scopes if not fits.issuperset(compiled[name])]
    wrong += [name for name in operations if name.endswith(_ACTIVATION) and fits and not compiled.get(name)]
    return [
        Remark(
            "elementwise",
            name,
            f"{name}: planned {kind}, by {_words(fits)}; the program takes {_words(compiled.get(name, ()))}",
            "",
            "",
            0,
        )
        for name in sorted(wrong)
    ]


def _words(names: Iterable[str]) -> str:
    return " or ".join(sorted(names)) or "no function"


# The share of elementwise operations that may have a name without an operation in the plan: loop counters.
UNPLANNED_SHARE = 0.01


def unplanned_findings(
    compiled: Iterable[ScopedArithmetic],
    operations: Collection[str],
    prices: Prices,
    float_share: float = 1.0,
) -> list[Remark]:
    """One finding if elementwise operations have names of no planned operation: dropout, a second norm.

    A sort, which makes many passes over its numbers, is always reported. float_share: share of the
    operations that may be floating-point without a planned name.
    """
    total, sorts, unplanned, floats = 0, False, Counter[str](), 0
    for computed in compiled:
        total += computed.elements
        if not is_of(computed.op_name, operations):
            unplanned[computed.op_name] += computed.elements
            sorts |= computed.sorts
            floats += computed.elements * computed.is_float
    elements = unplanned.total()
    is_little = elements <= UNPLANNED_SHARE * total
    is_little &= floats <= float_share * total
    if is_little and not sorts:
        return []
    name = unplanned.most_common(1)[0][0]
    scopes = scope_of(name)
    return [
        Remark(
            "elementwise",
            scopes[-1] if scopes else primitive_of(name),
            f"{elements:.3g} elements, {elements / total:.1%} of all that is computed outside of products, "
            "belong to no planned operation",
            name,
            "",
            0,
            prices.read_seconds(elements * _NUMBER_BYTES),
        )
    ]


def missing_findings(program: Program, elementwise: Iterable[str]) -> list[Remark]:
    """One finding for planned elementwise operations that the program lacks, such as a rotation.

    Only for XLA:CPU, which keeps all names except the names of sums in another order. Other compilers merge
    operations of two names into one.
    """
    scopes = {
        scope
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        for name in split_op_name(instruction.op_name)
        for scope in scope_of(name)
    }
    absent = sorted(name for name in elementwise if not begins_or_is(name, scopes))
    if len(absent) <= nameless_sums(program):
        return []
    what = f"{', '.join(absent)}: planned, but not in the compiled program"
    return [Remark("elementwise", absent[0], what, "", "", 0)]


def result_findings(program: Program, operations: Collection[str]) -> list[Remark]:
    """A finding for each result of an inference step that no planned operation makes."""
    made = [one for one in made_by(program) if one.op_name and not is_of(one.op_name, operations)]
    return [
        Remark(
            "elementwise",
            primitive_of(instruction.op_name),
            f"a result is made by {instruction.op_name}, which belongs to no planned operation",
            instruction.op_name,
            "",
            0,
        )
        for instruction in made
    ]


def state_findings(passes: Iterable[StatePass], planned: PlannedStep, prices: Prices) -> list[Remark]:
    """One finding if weights or caches are computed with outside of products, or copied.

    A planned operation's arithmetic on its own weight is planned, for example in a norm that adds one to its
    scale.
    """
    passes = [one for one in passes if not is_of(one.by.op_name, planned.operations)]
    num_bytes = sum(one.num_bytes for one in passes)
    if num_bytes <= STATE_TOLERANCE * planned.state_bytes:
        return []
    largest = max(passes, key=lambda collective: collective.num_bytes)
    name, inputs = largest.state.label, {one.state.name for one in passes}
    others = and_more(len(inputs) - 1)
    what = f"`{name}`{others}: {format_bytes(num_bytes)} pass through memory outside of products"
    where = largest.by.label
    return [
        Remark("state", name, what, where, "do it once, before the step", 0, prices.read_seconds(num_bytes))
    ]


def _origin(program: Program, path: tuple[int, ...]) -> Instruction | None:
    """The input that a result of the program is; None if it is computed."""
    source = resolve(program, TracedValue(program.main.result, CallPath(program.main), path)).instruction
    return source if source.opcode == "parameter" and source.name in program.main.instructions else None


# Weights, moments and caches are counted, so they agree except for the tiles that a compiler fills.
STATE_TOLERANCE = 0.03
# Of a chip's memory: of small models compilers join all collectives, so that more arrays wait.
NEGLIGIBLE_MEMORY = 1e-3


def compare_memory(
    planned: PlannedStep,
    compiled: Mapping[str, int],
    inputs: int,
    results: int,
    capacity: int | None,
    tolerance: float,
    peak: Peak | None = None,
) -> list[Remark]:
    """Differences of the compiled memory from the plan.

    compiled: `arguments`, `outputs` (without outputs that reuse an argument), `temporaries` and their
    `total`. inputs, results: bytes of arguments and of results that are no state (tokens, logits). capacity:
    of the chip; None for another chip's compiler. tolerance: accepted difference of the total, as a share.
    peak: the temporaries at the peak.
    """
    total, state = compiled["total"], planned.state_bytes
    fresh = compiled["outputs"] - results
    held = compiled["arguments"] - inputs + fresh
    remarks = []
    if abs(held - state) > STATE_TOLERANCE * state:
        remarks.append(_state(held, state, fresh))
    compared, wanted = total - held + state, planned.memory_total
    is_much = abs(compared - wanted) > NEGLIGIBLE_MEMORY * (capacity or 0)
    if is_much and not 1 / (1 + tolerance) <= compared / wanted <= 1 + tolerance:
        remarks.append(
            _finding(
                "temporaries",
                f"the program takes {format_bytes(total)}, {total / planned.memory_total:.2f} times the "
                f"planned {format_bytes(planned.memory_total)}; its largest buffers are in memory.peak"
                + (f": {peak.by_tensor()}" if peak else ""),
                "",
                total - planned.memory_total,
            )
        )
    if capacity is not None and total > capacity:
        remarks.append(too_large(total, capacity))
    return remarks


def saved_findings(planned: PlannedStep, program: Program) -> list[Remark]:
    """One finding if loops over layers keep more or less for the backward pass than planned.

    Only for XLA:CPU, which stores the values that JAX saves. Other compilers recompute some and store some
    elsewhere.
    """
    wanted, saved = planned.layer_saved_bytes, layer_saved_bytes(program)
    if not wanted or not saved or abs(saved - wanted) <= STATE_TOLERANCE * wanted:
        return []
    what = f"layers keep {format_bytes(saved)} for the backward pass, planned {format_bytes(round(wanted))}"
    return [_finding("activations", what, "", round(saved - wanted))]


def too_large(total: int | None, capacity: int, message: str = "") -> Remark:
    """A program that exceeds a chip's memory; message: the compiler's message."""
    needs = f"the program needs {format_bytes(total)};" if total else "the program does not fit:"
    what = f"{needs} a chip has {format_bytes(capacity)}" + (f" ({message})" if message else "")
    change = "shard more, recompute more (remat), or use more microbatches"
    return _finding("memory", what, change, total - capacity if total else 0)


def _state(held: int, state: int, fresh: int) -> Remark:
    if fresh > STATE_TOLERANCE * state and held > state:
        return _finding(
            "state",
            f"{format_bytes(fresh)} of new state is allocated beside the old, which is not donated",
            "donate the state: jax.jit(step, donate_argnums=0)",
            fresh,
        )
    return _finding(
        "state",
        f"weights, the optimizer's state and caches take {format_bytes(held)}, planned {format_bytes(state)}",
        "",
        held - state,
    )


def _finding(tensor: str, what: str, change: str, extra_bytes: int) -> Remark:
    return Remark("memory", tensor, what, "", change, extra_bytes)
