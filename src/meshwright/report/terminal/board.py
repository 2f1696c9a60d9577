"""A contraction's strategies, a reshard, or a chain, derived step by step as lines of text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.cost.chain_search import ChainChoice
from meshwright.cost.derivation import PricedLine, PricedSteps
from meshwright.cost.strategy import ContractionQuestion, Objective, PricedStep, Strategy
from meshwright.notation.array import ShardedArray, subscript
from meshwright.notation.roles import case_of
from meshwright.units import format_bytes, format_count, format_seconds

MAX_ROWS = 8  # strategies listed under the derivation

_CASES = {
    1: "the blocks that multiply share a device",
    2: "gather that operand, or slice the other to match and reduce the partial sums",
    3: "multiply locally and reduce the partial sums",
}
_CONFLICT = "an array can use an axis once, so one operand is resharded"


def contraction_lines(
    question: ContractionQuestion,
    strategies: Sequence[Strategy],
    objective: Objective,
    memory_limit_bytes: float | None,
) -> Iterator[str]:
    """The question, its cases, the best strategy step by step, the others, and the difference to the next."""
    best = strategies[0]
    yield from _given(question)
    yield ""
    yield from _cases(question)
    yield ""
    yield from _derivation(best)
    if len(strategies) > 1:
        yield ""
        yield from _table(strategies, objective, memory_limit_bytes)
        yield ""
        yield from _why(best, strategies, objective, memory_limit_bytes)


def reshard_lines(
    array: ShardedArray, target: ShardedArray, steps: Sequence[PricedStep], machine: str
) -> Iterator[str]:
    """The collectives of one array and their sum."""
    yield f"{array} -> {target}    on {machine}"
    yield ""
    if not steps:
        yield "  nothing to send"
    yield from aligned([_step_row(step) for step in steps])
    yield f"  total {format_seconds(sum(step.seconds for step in steps))}"


def run_lines(ran: Mapping[str, Any]) -> Iterator[str]:
    """The error of a run, and each derived collective with the emitted ones."""
    if not ran:
        return
    yield ""
    yield f"  ran on virtual devices: largest difference from the dense result {ran['max_abs_error']:.3g}"
    if "gradient_max_abs_errors" in ran:
        errors = " and ".join(f"{error:.3g}" for error in ran["gradient_max_abs_errors"])
        yield f"  and of the gradients of both operands from the dense ones {errors}"
    if not ran["pairs"]:
        return
    yield ""
    rows = [("", "derived", "emitted by XLA", "")]
    for pair in ran["pairs"]:
        derived, emitted = (
            ", ".join(_ran_text(ran[side][index]) for index in pair[side]) or "none"
            for side in ("derived", "emitted")
        )
        rows.append(("", derived, emitted, pair["status"]))
    yield from aligned(rows)


def _ran_text(steps: Mapping[str, Any]) -> str:
    return f"{steps['op']}{subscript(tuple(steps['axes']))} {format_bytes(steps['bytes'])}"


def chain_lines(passes: Mapping[str, PricedSteps], given: str) -> Iterator[str]:
    """The given sharding, and every pass of a chain."""
    yield f"  {given}"
    for title, steps in passes.items():
        yield ""
        yield from pass_lines(title, steps)


def choices_lines(choices: Sequence[ChainChoice], memory_limit_bytes: float) -> Iterator[str]:
    """The searched shardings, the best first; layouts that do not fit are marked."""
    rows = [("", "", "total", "memory", "shardings")]
    for number, choice in enumerate(choices[:MAX_ROWS], 1):
        held, fits = format_bytes(choice.bytes_per_device), choice.bytes_per_device <= memory_limit_bytes
        words = ("  ".join(map(str, choice.arrays)) or "as written") + ("" if fits else ", does not fit")
        rows.append(("", str(number), format_seconds(choice.seconds), held, words))
    num_fit = sum(choice.bytes_per_device <= memory_limit_bytes for choice in choices)
    yield from aligned(rows)
    yield ""
    limit = format_bytes(memory_limit_bytes)
    yield f"  {num_fit:,} of {len(choices):,} tried fit {limit} per device"


def pass_lines(title: str, priced: PricedSteps) -> Iterator[str]:
    """The numbered steps of a pass with bytes or FLOPs and seconds, and its time."""
    yield f"  {title}"
    steps = enumerate(priced.lines, 1)
    yield from aligned([("", f"{number}.", str(line.step), *_figures(line)) for number, line in steps])
    yield ""
    yield f"     t = {_pass_sum(priced)}"


def _figures(line: PricedLine) -> tuple[str, str]:
    if not line.seconds:
        return "", ""
    amount = f"{format_count(line.flops)} FLOPs" if line.flops else format_bytes(line.num_bytes)
    return amount, format_seconds(line.seconds)


def _pass_sum(steps: PricedSteps) -> str:
    """`local 21.8 us + critical 93 us = 115 us; 93 us if all but the critical path overlaps`."""
    parts = [("local", steps.seconds_compute)]
    parts += [(timing, steps.seconds_comms(timing)) for timing in ("critical", "ahead", "deferred")]
    text = " + ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds) or "0"
    if text.count(" + "):
        text += f" = {format_seconds(steps.seconds)}"
    if steps.seconds_overlapped < steps.seconds:
        text += f"; {format_seconds(steps.seconds_overlapped)} if all but the critical path overlaps"
    return text


def _given(q: ContractionQuestion) -> Iterator[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in q.mesh.sizes.items())
    sizes = ", ".join(f"{dim}={q.sizes[dim]:,}" for dim in q.einsum.letters)
    wanted = q.out or f"C[{', '.join(q.einsum.out)}] of any sharding"
    yield f"{q.lhs} . {q.rhs} -> {wanted}"
    yield f"  {mesh} on {q.hardware.spec}; {sizes}; {q.dtype}"
    yield ""
    rows = []
    for array in filter(None, (q.lhs, q.rhs, q.out)):
        size, copies = array.bytes_per_device(q.mesh, q.sizes, q.dtype), array.replicas(q.mesh)
        held = f"{copies} copies of each block" if copies > 1 else "each block once"
        if array.unreduced:
            held = f"partial sums over {'·'.join(array.unreduced)}"
        rows.append((str(array), f"{format_bytes(size)} per device", held))
    yield from aligned(rows)


def _cases(q: ContractionQuestion) -> Iterator[str]:
    for axis in q.mesh:
        case = case_of(q.einsum, q.lhs, q.rhs, axis)
        words = _CONFLICT if case.conflict else _CASES[case.number]
        if case.summed:
            summed = " and ".join(array.name for array in case.summed)
            words = f"{summed} is summed before the matmul; {words}"
        yield f"  {axis}: case {case.number}, {_role(q, axis)}: {words}"


def _role(q: ContractionQuestion, axis: str) -> str:
    """`splits only J of A`, `splits I of A and K of B`, `holds partial sums of A`."""
    parts, summed = [], [array.name for array in (q.lhs, q.rhs) if axis in array.unreduced]
    for array, other in ((q.lhs, q.rhs), (q.rhs, q.lhs)):
        if letter := array.dim_of(axis):
            only = "only " if letter in other.dims and not other.dim_of(axis) else ""
            parts.append(f"{only}{letter} of {array.name}")
    strategies = [f"splits {' and '.join(parts)}"] if parts else []
    strategies += [f"holds partial sums of {' and '.join(summed)}"] if summed else []
    return ", ".join(strategies) or "splits neither operand"


def _derivation(best: Strategy) -> Iterator[str]:
    plan = best.contraction
    rows = [_step_row(step) for step in best.steps]
    product = f"{plan.lhs_computed} . {plan.rhs_computed} -> {plan.product}"
    work = f"{format_count(best.flops_per_device)} FLOPs"
    multiply = ("Multiply", product, work, format_seconds(best.seconds_compute), "")
    rows.insert(len(plan.lhs_steps) + len(plan.rhs_steps), multiply)
    yield f"  cheapest: {best.name}"
    yield ""
    yield from aligned([("", *row) for row in rows])
    yield ""
    yield f"     {_sum(best)}"
    sends = (
        f"each sends {format_bytes(best.bytes_moved_per_device)}"
        if best.bytes_moved_per_device
        else "sends nothing"
    )
    yield f"     holds {format_bytes(best.bytes_per_device)} per device at most; {sends}"


def _sum(strategy: Strategy) -> str:
    """`t = matmul 43.6 us + collectives 280 us = 324 us`, and the overlap."""
    compute, comms = format_seconds(strategy.seconds_compute), format_seconds(strategy.seconds_comms)
    together = strategy.seconds_compute + strategy.seconds_comms
    text = f"t = matmul {compute} + collectives {comms} = {format_seconds(together)}"
    if strategy.window is None:
        return text
    hidden = format_seconds(together - strategy.seconds)
    return f"{text}, {hidden} overlapped: {format_seconds(strategy.seconds)}"


def _step_row(step: PricedStep) -> tuple[str, ...]:
    c = step.collective
    written = (c.title + subscript(c.axes), f"{c.operand} -> {c.result}")
    if c.op == "slice":
        return (*written, "", "free", "")
    mark = "overlaps the matmul" if step.windowed else ""
    return (*written, format_bytes(step.num_bytes), format_seconds(step.seconds), mark)


def _table(strategies: Sequence[Strategy], objective: Objective, limit: float | None) -> Iterator[str]:
    total = "total" if objective == "latency" else "overlapped"
    rows: list[tuple[str, ...]] = [("", total, "matmul", "collectives", "memory", "output", "strategy")]
    for number, s in enumerate(strategies[:MAX_ROWS], 1):
        seconds = map(format_seconds, (s.objective_seconds(objective), s.seconds_compute, s.seconds_comms))
        memory = format_bytes(s.bytes_per_device) + ("" if s.fits(limit) else " (too much)")
        rows.append((str(number), *seconds, memory, str(s.out), s.name))
    one_output = len({strategy.out for strategy in strategies}) == 1
    yield from aligned(rows, hidden=5 if one_output else None)
    if len(strategies) > MAX_ROWS:
        yield f"     and {len(strategies) - MAX_ROWS} more (--json has all)"


def _why(
    best: Strategy, strategies: Sequence[Strategy], objective: Objective, limit: float | None
) -> Iterator[str]:
    """The difference between the best strategy and the next that leaves the same kind of result."""
    if not best.fits(limit):
        yield f"  none fits {format_bytes(limit or 0)} per device; the first is the fastest"
        return
    seconds = best.objective_seconds(objective)
    faster = [s for s in strategies if s.objective_seconds(objective) < seconds and not s.fits(limit)]
    for other in faster[:1]:
        yield f"  {other.name} is faster, but needs {format_bytes(other.bytes_per_device)}"
    following = [s for s in strategies[1:] if s.leaves_partial_sum == best.leaves_partial_sum]
    for other in following[:1]:
        yield f"  against the next: {'; '.join(_differences(best, other, objective))}"


def _differences(best: Strategy, other: Strategy, objective: Objective) -> list[str]:
    strategies = []
    for what, mine, theirs in (
        ("matmul", best.seconds_compute, other.seconds_compute),
        ("collectives", best.seconds_comms, other.seconds_comms),
    ):
        if format_seconds(mine) != format_seconds(theirs):
            more = "less" if mine < theirs else "more"
            strategies.append(f"{what} {format_seconds(abs(theirs - mine))} {more}")
    if best.window and not other.window and objective == "latency":
        strategies.append("a transfer overlaps the matmul")
    mine, theirs = best.objective_seconds(objective), other.objective_seconds(objective)
    if not strategies:
        strategies.append("the same time" if best.out != other.out else "less memory")
    return (
        [*strategies, f"it takes {theirs / mine:.2f} times the time"] if theirs > 1.005 * mine else strategies
    )


def aligned(rows: Sequence[Sequence[str]], hidden: int | None = None) -> Iterator[str]:
    """The rows with aligned columns, figures to the right. hidden: a column to leave out."""
    kept = [[cell for i, cell in enumerate(row) if i != hidden] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*kept, strict=True)]
    for row in kept:
        cells = (
            cell.rjust(width) if cell[:1].isdigit() or cell == "free" else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        )
        yield "  " + "  ".join(cells).rstrip()
