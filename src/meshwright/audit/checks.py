"""Bounds on the bytes that a program may move, and differences between two audits.

A bound is a line of words:

    at most 100 MB over data      bytes that each device sends in a step over this axis, other axes included
    nothing over dcn              between the slices of the hardware; `network`: between its nodes
    no gather of w_*              tensors, by JAX's name of the input or by named scope

Each form may name tensors (`of w_*`), axes (`over data·fsdp`: any of them) or both. Differences between two
audits are lines of a diff.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.seconds import Prices
from meshwright.cost.collectives import Op
from meshwright.errors import AuditError, nearest
from meshwright.units import format_bytes, format_count, format_seconds

# The networks between slices of TPUs and between nodes of GPUs.
OUTER = ("dcn", "network")
_WORDS: dict[str, Op] = {
    "gather": "all_gather",
    "allgather": "all_gather",
    "sum": "all_reduce",
    "allreduce": "all_reduce",
    "scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "permute": "permute",
}
_NO_CHANGES = "nothing changed: the same collectives, FLOPs, memory and time"
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FORM = re.compile(
    r"(?:at most (?P<size>[\d.]+) ?(?P<unit>[kMGT]?B)|(?P<nothing>nothing)|no (?P<op>[\w-]+))"
    r"(?: of (?P<tensors>\S+))?(?: over (?P<axes>\S+))?"
)


@dataclass(frozen=True)
class TransferLimit:
    """A bound on the bytes that each device sends in a step.

    most_bytes: the maximum of the matching collectives together. op, axes: None for any. tensors: a shell
    pattern of names; None for any.
    """

    text: str
    most_bytes: int
    op: Op | None
    tensors: str | None
    axes: tuple[str, ...] | None

    def is_of(self, emitted: Emitted, crosses: bool) -> bool:
        """Whether the bound applies to a collective.

        crosses: its groups join devices of several slices or nodes.
        """
        return (
            (self.op is None or self.op in (emitted.op, *_kept(emitted)))
            and (self.tensors is None or any(fnmatchcase(name, self.tensors) for name in _names(emitted)))
            and (self.axes is None or self._is_over(emitted, crosses))
        )

    def _is_over(self, emitted: Emitted, crosses: bool) -> bool:
        # Groups that follow no mesh axes may cross any of them.
        strays = not emitted.axes and emitted.collective.groups.size != 1
        asked = set(self.axes or ())
        return strays or bool(asked & set(emitted.axes)) or (crosses and bool(asked & set(OUTER)))


def parse_bound(text: str) -> TransferLimit:
    """Parse a bound. Raises AuditError if the text has no known form."""
    form = _FORM.fullmatch(" ".join(text.split()))
    if not form:
        raise AuditError(
            f"{text!r} is not a bound; write 'at most 100 MB over data', 'nothing over dcn' or "
            "'no gather of w_*'"
        )
    op = None
    if word := form["op"]:
        name = word.lower().replace("-", "").replace("_", "").removesuffix("s")
        if name not in _WORDS:
            raise AuditError(f"{text!r}: no collective is called {word!r}; {nearest(name, list(_WORDS))}")
        op = _WORDS[name]
    most = round(float(form["size"]) * _UNITS[form["unit"]]) if form["size"] else 0
    axes = tuple(re.split("[·,]", form["axes"])) if form["axes"] else None
    return TransferLimit(text, most, op, form["tensors"], axes)


def check_bounds(bounds: Iterable[TransferLimit], sent: Sequence[Emitted], prices: Prices) -> list[str]:
    """One line for each broken bound, with the bytes sent.

    Raises AuditError if the mesh lacks an axis, or if a bound names `dcn` or `network` and the hardware has
    one slice or node.
    """
    broken = []
    for bound in bounds:
        _check_axes(bound, prices)
        matching = [one for one in sent if bound.is_of(one, _crosses(one, prices))]
        total = sum(prices.sent(one) for one in matching)
        if total > bound.most_bytes:
            names = ", ".join(dict.fromkeys(f"{one.op} {one.tensor}" for one in matching))
            broken.append(f"{bound.text}: {format_bytes(total)} a device and step ({names})")
    return broken


def _kept(emitted: Emitted) -> tuple[Op, ...]:
    """Ops that a scattered sum counts as in addition to its own."""
    return ("reduce_scatter",) if emitted.kept else ()


def _names(emitted: Emitted) -> tuple[str, ...]:
    """A tensor's name, its last key (`w_in` of `params['w_in']`), and its named scopes."""
    keys = re.findall(r"\w+", emitted.tensor)
    return (emitted.tensor, *keys[-1:], *emitted.collective.scope)


def _check_axes(bound: TransferLimit, prices: Prices) -> None:
    mesh = prices.named
    for axis in bound.axes or ():
        if axis in OUTER and _num_blocks(prices) == 1:
            raise AuditError(f"{bound.text!r}: name hardware of several slices or nodes: 2*v5e:4x4, h100:8x8")
        if axis not in OUTER and (mesh is None or axis not in mesh):
            known = ", ".join(mesh) if mesh else "no axes with names"
            raise AuditError(f"{bound.text!r}: the mesh has no axis {axis!r}; it has {known}")


def _num_blocks(prices: Prices) -> int:
    """Slices or nodes of the hardware; 1 if no hardware is named."""
    if prices.placement is None:
        return 1
    links = (link for over in prices.placement.links.values() for link in over)
    return prod(link.size for link in links if link.is_outer)


def _crosses(emitted: Emitted, prices: Prices) -> bool:
    """Whether a group joins devices of several slices.

    Device ids count through one slice after another.
    """
    block = prices.mesh.num_devices // _num_blocks(prices)
    return any(len({device // block for device in group}) > 1 for group in emitted.collective.groups.members)


# The totals with their titles and formats.
_TOTALS = {
    "bytes": ("bytes moved", format_bytes),
    "sent": ("bytes sent", format_bytes),
    "flops": ("FLOPs", format_count),
    "memory": ("memory per device", format_bytes),
    "step_seconds": ("step, as scheduled", format_seconds),
}
# Totals that differ by a smaller share count as equal.
_SHARE = 1e-3


def changes(before: Mapping, after: Mapping) -> list[str]:
    """Collectives and totals that differ, as lines of a diff; one line if none differ.

    before, after: documents of `mw audit`, with or without a plan.
    """
    lines = []
    if before["verdict"] != after["verdict"]:
        lines += [f"- verdict: {before['verdict']}", f"+ verdict: {after['verdict']}"]
    old, new = _collectives(before), _collectives(after)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            lines += [f"- {name}: {old[name]}"] if name in old else []
            lines += [f"+ {name}: {new[name]}"] if name in new else []
    for key in _TOTALS:
        lines += _total(key, before, after)
    if "prefill" in before and "prefill" in after:
        prefill = changes(before["prefill"], after["prefill"])
        lines += [f"prefill: {line}" for line in prefill if line != _NO_CHANGES]
    return lines or [_NO_CHANGES]


def _collectives(document: Mapping) -> dict[str, str]:
    """Runs per step and bytes of each collective, by tensor, pass, operation and axes."""
    by_name: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for emitted in document["emitted"]:
        over = "·".join(emitted["axes"]) or "no axes"
        name = f"{emitted['tensor']} {emitted['direction']} {emitted['op']} over {over}"
        by_name[name][emitted["bytes"]] += emitted["count"] or 1
    return {
        name: ", ".join(f"{count:,} x {format_bytes(size)}" for size, count in sorted(sizes.items()))
        for name, sizes in by_name.items()
    }


def _total(key: str, before: Mapping, after: Mapping) -> list[str]:
    title, write = _TOTALS[key]
    old, new = (_figure(one.get(key)) for one in (before, after))
    if old == new or (old and new and abs(new - old) <= _SHARE * old):
        return []
    share = f" ({new / old - 1:+.1%})" if old and new else ""
    texts = ["unavailable" if value is None else write(value) for value in (old, new)]
    return [f"- {title}: {texts[0]}", f"+ {title}: {texts[1]}{share}"]


def _figure(sides: Mapping | None) -> float | None:
    return None if sides is None else sides.get("compiled", sides.get("scheduled"))
