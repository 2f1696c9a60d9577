"""The error of a search without layouts: the condition at fault, or the sequences needed."""

from collections.abc import Callable, Iterator, Sequence

from meshwright.errors import LayoutError, PlanError
from meshwright.hardware.topology import Hardware
from meshwright.layout import COMPANY, DEGREES, MULTIPLIED, Layout
from meshwright.layout.axes import RANKS, TENSOR2
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.given import Condition
from meshwright.plan.space import Considered, Space

# (workload, share, conditions) -> spaces of layouts that meet the conditions, for batches within the share.
Spaces = Callable[[Workload, float, Sequence[Condition]], Iterator[Space]]
_WITHIN = 0.5


def nothing_found(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    spaces: Spaces,
    given: Sequence[Condition],
    why_not: Callable[[Considered], str | None] | None,
) -> PlanError:
    """The error of a search that has no layout to rank.

    why_not: why a layout does not run; None if layouts need not run.
    """
    about = f"{config.name} on {hardware.spec}"
    if why_not and (choice := _first(spaces, workload, given)):
        return PlanError(
            f"{about}: no layout that meets the request runs yet ({why_not(choice)}); "
            "--any ranks all layouts that can be planned"
        )

    def is_found(conditions: Sequence[Condition]) -> bool:
        return _first(spaces, workload, conditions) is not None

    if not is_found(()):
        if once := next((one for one in given if (one.field, one.value) == ("dispatch", "once")), None):
            return PlanError(
                f"{about}: --given {once}: experts are within nodes of {hardware.chips_per_node} chips, so "
                "no token crosses; fits: dispatch=each, or expert_nodes>1 with it, for parts of a node"
            )
        return PlanError(f"{about}: {_nothing_divides(hardware, workload, spaces)}")
    if at_fault := [one for one in given if is_found(_without(given, one))]:
        reasons = [_leaves_none(config, hardware, workload, spaces, given, one) for one in at_fault]
        return PlanError(f"{about}: --given {'; or '.join(reasons)}")
    together = next(number for number in range(1, len(given) + 1) if not is_found(given[:number]))
    some = ",".join(map(str, given[:together]))
    return PlanError(f"{about}: --given {some}: no layout that divides meets all of them; leave some out")


def _first(spaces: Spaces, workload: Workload, given: Sequence[Condition]) -> Considered | None:
    for space in spaces(workload, _WITHIN, given):
        for choice in space.choices(space.meshes()):
            return choice
    return None


def _without(given: Sequence[Condition], condition: Condition) -> list[Condition]:
    return [other for other in given if other is not condition]


def _leaves_none(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    spaces: Spaces,
    given: Sequence[Condition],
    condition: Condition,
) -> str:
    """`tensor=3 leaves no layout: 128 chips do not divide over tensor = 3; fits: tensor in {1, 2, 4, 8}`."""
    rest = _without(given, condition)
    others = f" with {','.join(map(str, rest))}" if rest else ""
    values = {value for space in spaces(workload, _WITHIN, rest) for value in _values(space, condition.field)}
    fits = ", ".join(str(value).lower() for value in sorted(values, key=lambda v: (str(type(v)), v)))
    why = _why_none(config, hardware, workload, condition)
    reason = f": {why}" if why else ""
    return f"{condition}{others} leaves no layout{reason}; fits: {condition.field} in {{{fits}}}"


def _values(space: Space, field: str) -> set[object]:
    """The values of a searched field in the layouts of a space."""
    if field in Considered._fields:
        return {getattr(choice, field) for choice in space.choices(space.meshes())}
    values = set()
    for mesh in space.meshes():
        value = mesh.rules.zero_stage if field == "zero" else mesh.word(field)
        if value not in values and next(space.choices([mesh]), None):
            values.add(value)
    return values


def _why_none(
    config: ModelConfig, hardware: Hardware, workload: Workload, condition: Condition
) -> str | None:
    """The reason why no layout meets one condition, if it does not depend on the others."""
    chips, degree = hardware.num_chips, condition.value
    if condition.field not in (*DEGREES, "grouped", "remat") or condition.comparison != "=":
        return None
    if isinstance(degree, int) and condition.field in MULTIPLIED and chips % degree:
        return f"{chips} chips do not divide over {condition.field} = {degree}"
    try:
        alone = Layout.of().replace(
            **dict.fromkeys((*COMPANY.get(condition.field, ()), condition.field), degree)
        )
        check_fits(alone, config, None, workload.seq_len, padded=True)
    except LayoutError as error:
        return str(error).partition(";")[0]
    if condition.field in RANKS and isinstance(degree, int) and degree > workload.num_sequences:
        return f"{degree} ranks are more than the {workload.num_sequences} sequences"
    return None


def _nothing_divides(hardware: Hardware, workload: Workload, spaces: Spaces) -> str:
    """The number of sequences that the layout with the fewest batch shards needs, in words."""
    chips = hardware.num_chips
    enough = Workload(chips, workload.seq_len)
    meshes = [mesh for space in spaces(enough, 0.0, ()) for mesh in space.meshes()]
    fewest = min(meshes, key=lambda mesh: mesh.num_batch_shards)
    least = fewest.num_batch_shards
    tensor = fewest.tensor * fewest.degree(TENSOR2.name)
    return (
        f"{workload.num_sequences} sequences of {workload.seq_len} tokens do not divide over {chips} chips; "
        f"with tensor={tensor},context={fewest.context},pipe={fewest.pipe} "
        f"it takes {least} sequences; fits: --batch-tokens {least * workload.seq_len}"
    )
