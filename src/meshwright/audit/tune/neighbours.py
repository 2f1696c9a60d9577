"""Plans one change away from a plan, those first that the cost model prices lowest."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import load
from meshwright.layout import DEGREES, REMATS, Layout
from meshwright.layout.axes import divisors
from meshwright.layout.runs import why_not
from meshwright.plan.candidate import Candidate
from meshwright.plan.space import remats_of
from meshwright.plan.train import price
from meshwright.plan_file import Plan

# A layout is compiled although it does not fit by the plan, if it lacks no more than this: the compiled
# memory of whole steps is 0.7 to 1.3 of the planned (docs/how-to/read-an-audit.md, the matrix).
_MEMORY_MARGIN = 1.2
_ZERO_STAGES = (0, 1, 2)


def remats(plan: Plan) -> Iterator[Plan]:
    """The plan under each of the other remat policies that run and make another program."""
    for remat in remats_of(plan.model, load(plan.hardware), REMATS):
        layout = plan.layout.replace(remat=remat)
        if remat != plan.layout.remat and why_not(plan.model, layout) is None:
            yield replace(plan, layout=layout)


def neighbours(plan: Plan) -> list[Plan]:
    """The layouts one step from the plan's that run, by planned step time: each in its fastest remat policy
    that fits, or nearly does, by the plan.

    A step: a factor moved from one mesh axis to another, half or twice the microbatches, another ZeRO stage,
    sequence parallelism on or off. A layout whose rules have no short form has no neighbours.
    """
    if plan.layout.form is None:
        return []
    found: dict[str, tuple[float, Plan]] = {}
    for layout in _steps(plan.layout):
        best = _fastest(plan, layout)
        if best and best.layout != plan.layout:
            near = replace(plan, layout=best.layout)
            found.setdefault(str(best.layout), (best.step_seconds, near))
    return [near for _, near in sorted(found.values(), key=lambda pair: pair[0])]


def _fastest(plan: Plan, layout: Layout) -> Candidate | None:
    """The layout in the remat policy in which it is fastest by the plan; None where it fits in none."""
    hardware, found = load(plan.hardware), []
    for remat in remats_of(plan.model, hardware, REMATS):
        one = layout.replace(remat=remat)
        try:
            if why_not(plan.model, one) is None:
                found.append(price(plan.model, hardware, plan.workload, one))
        except MeshwrightError:  # it does not divide the model, the batch or the sequence
            continue
    usable = _MEMORY_MARGIN * hardware.chip.program_bytes
    fitting = [one for one in found if one.memory.total <= usable]
    return min(fitting, key=lambda one: one.step_seconds, default=None)


def _steps(layout: Layout) -> Iterator[Layout]:
    """The layouts one step away; those that cannot be written are left out."""
    words = [
        *_moved(layout),
        *({"microbatches": count} for count in _halved_and_doubled(layout.microbatches)),
        *({"zero": stage} for stage in _ZERO_STAGES if layout.data > 1 and stage != layout.zero_stage),
        {"sequence_parallel": not layout.word("sequence_parallel")},
    ]
    for change in words:
        try:
            yield layout.replace(**change)
        except MeshwrightError:
            continue


def _moved(layout: Layout) -> Iterator[dict[str, int]]:
    """The smallest factor of one degree, given to another."""
    axes = [axis for axis in DEGREES if axis != "expert"]
    for source in (axis for axis in axes if layout.degree(axis) > 1):
        degree = layout.degree(source)
        factor = divisors(degree)[1]
        for goal in (axis for axis in axes if axis != source):
            yield {source: degree // factor, goal: layout.degree(goal) * factor}


def _halved_and_doubled(count: int) -> Iterator[int]:
    yield 2 * count
    if count % 2 == 0:
        yield count // 2
