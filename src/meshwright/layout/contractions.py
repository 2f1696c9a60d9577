"""Contractions of activations with weights under a Layout, with the reshards of their operands."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.layout.layout import Layout
from meshwright.layout.moves.experts import expert_table, has_fixed_rows, row_routing
from meshwright.layout.rules import AxisTable, Rules
from meshwright.models.scopes import input_of
from meshwright.notation.einsum import ChosenSteps, Contraction, Reshard, Roles, contraction
from meshwright.notation.operation import placed_operation


def contraction_of(layout: Layout, name: str, spec: str) -> Contraction:
    """The contraction of an activation with the weight `name` that moves the fewest arrays.

    >>> print(*contraction_of(Layout.of(fsdp=4), "wq", "BTD,DNH->BTNH").steps)
    AllGather_{fsdp} wq[D_fsdp, N, H] -> wq[D, N, H]
    """
    if "C" not in spec:
        return _planned(layout.rules, layout.table, name, spec)
    by_row = has_fixed_rows(layout) or row_routing(layout).rows
    plan = _planned if by_row else _summed_by_token
    return plan(layout.rules, expert_table(layout), name, spec)


class InputGroup(NamedTuple):
    """Contractions of one input that need the same reshard of it, by the names of their weights.

    The input is moved once, and its cotangents are summed before they move back. name: of the moved input;
    groups that send the same have the same name. is_sent: whether a group before this one has sent it.
    """

    name: str
    reshard: Reshard
    plans: Mapping[str, Contraction]
    is_sent: bool

    @property
    def takes_slices(self) -> bool:
        """Whether a device can compute them by chunks of positions.

        Nothing may move, and a device needs all positions T and the whole vocabulary V.
        """
        reshards = self.reshard, *(plan.out_reshard for plan in self.plans.values())
        moves = any(one.forward or one.backward for one in reshards)
        splits = (plan.lhs_computed.axes_of("T") or plan.product.axes_of("V") for plan in self.plans.values())
        return not moves and not any(splits)


def input_groups(layout: Layout, specs: Mapping[str, str]) -> list[InputGroup]:
    """Contractions of one input, grouped by the reshard of the input.

    There is one group, unless some weights are split over axes that others repeat, such as weights of keys
    with replicated heads.
    """
    groups: dict[Reshard, dict[str, Contraction]] = {}
    for name, spec in specs.items():
        plan = contraction_of(layout, name, spec)
        groups.setdefault(plan.lhs_reshard, {})[name] = plan
    sent = {reshard: [step for step in reshard.forward if step.op != "slice"] for reshard in groups}
    inputs: list[InputGroup] = []
    for reshard, plans in groups.items():
        same = [other for other in groups if sent[other] == sent[reshard]]
        name = input_of(*(weight for other in same for weight in groups[other]))
        inputs.append(InputGroup(name, reshard, plans, bool(sent[reshard]) and same[0] != reshard))
    return inputs


@lru_cache(maxsize=8192)
def _planned(rules: Rules, activations: AxisTable, name: str, spec: str) -> Contraction:
    """An axis of the weight in use keeps its letter; the others split letters that move the fewest arrays."""
    operands, _, out = spec.partition("->")
    x, w = operands.split(",")
    given, weight = activations.split("x", x), rules.stored.split(name, w)
    used, product = rules.used.split(name, w), activations.split(f"{name}_out", out)
    elected: Roles = placed_operation((given, used), product, wanted=True, stored=frozenset({name})).roles
    fixed = {axis: dim for dim, axes in zip(used.dims, used.axes, strict=True) for axis in axes}
    return contraction(spec, given, weight, product, {**elected, **fixed})


@lru_cache(maxsize=4096)
def _summed_by_token(rules: Rules, activations: AxisTable, name: str, spec: str) -> Contraction:
    """A contraction of an expert's rows whose partial sums over M are left to the tokens, which are fewer.

    Forward these are sums of y[E, C, D], backward of the cotangent of d[E, C, D].
    """
    plan = _planned(rules, activations, name, spec)
    if plan.einsum.contracted == "M":
        return replace(plan, out=plan.product)
    return replace(plan, lhs_chosen=ChosenSteps(backward=()))
