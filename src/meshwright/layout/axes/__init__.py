"""The axes of parallelism, one record each, which the short form, searches, checks and prose read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from meshwright.layout.axes.axis import Ask, Axis, Composition, FormWord, ShortForm
from meshwright.layout.axes.context import CONTEXT
from meshwright.layout.axes.data import DATA
from meshwright.layout.axes.expert import EXPERT, EXPERT_NODES
from meshwright.layout.axes.fsdp import FSDP
from meshwright.layout.axes.kv_replicas import KV_REPLICAS
from meshwright.layout.axes.pipe import PIPE
from meshwright.layout.axes.tensor import TENSOR, TENSOR2

__all__ = [
    "AXES",
    "CONTEXT",
    "DATA",
    "DEGREES",
    "EXPERT",
    "EXPERT_NODES",
    "FSDP",
    "KV_REPLICAS",
    "MULTIPLIED",
    "OPTIONS",
    "PIPE",
    "RANKS",
    "TENSOR",
    "TENSOR2",
    "Ask",
    "Axis",
    "Composition",
    "FormWord",
    "ShortForm",
    "chosen_forms",
]

# From the outermost axis of a mesh to the innermost.
AXES: tuple[Axis, ...] = (PIPE, DATA, FSDP, EXPERT_NODES, EXPERT, CONTEXT, TENSOR2, TENSOR, KV_REPLICAS)
_SEARCHED = tuple(sorted(AXES, key=lambda axis: axis.turn))
DEGREES = tuple(axis.name for axis in AXES)
# Degrees that multiply to the chips: axes cut out of others do not count.
MULTIPLIED = tuple(axis.name for axis in AXES if not axis.needs)
RANKS = tuple(axis.name for axis in AXES if axis.is_ranks)
OPTIONS = {name: option for axis in AXES for name, option in axis.options.items()}


def chosen_forms(
    ask: Ask,
    start: ShortForm,
    *,
    holds: Callable[[ShortForm, Mapping[str, Any]], bool] = lambda form, chosen: True,
    axes: Sequence[Axis] = _SEARCHED,
) -> Iterator[ShortForm]:
    """Forms whose axes take all chips of `ask`, each axis chosen after those before it.

    holds(form, chosen): whether a form with the words chosen last may be part of a wanted layout. Degrees
    that a later axis changes are not among these words.
    """
    taken = prod(start[name] for name in MULTIPLIED)
    if not axes:
        if taken == ask.chips:
            yield start
        return
    axis, later = axes[0], axes[1:]
    choices = axis.choices if ask.workload.phase == "train" else axis.serving_choices
    changed = {name for other in later for name in other.takes_from}
    for words in choices(replace(ask, chips=ask.chips // taken), start):
        form = {**start, **words}
        if holds(form, {name: value for name, value in words.items() if name not in changed}):
            yield from chosen_forms(ask, form, holds=holds, axes=later)
