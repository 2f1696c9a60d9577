"""What changed between two audits, as the lines of a diff: for a comment on a change of the program."""

from collections import defaultdict
from collections.abc import Mapping

from meshwright.units import format_bytes, format_count, format_seconds

# Totals, and how they are written.
_TOTALS = {
    "bytes": ("bytes moved", format_bytes),
    "sent": ("bytes sent", format_bytes),
    "flops": ("FLOPs", format_count),
    "memory": ("memory per device", format_bytes),
    "step_seconds": ("step, as scheduled", format_seconds),
}
# A total that moved by less is the same.
_SHARE = 1e-3


def changes(before: Mapping, after: Mapping) -> list[str]:
    """The collectives and totals that differ, - before and + after; one line where none does.

    before, after: documents of `mw audit`, of plans or of programs.
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
    return lines or ["nothing changed: the same collectives, FLOPs, memory and time"]


def _collectives(document: Mapping) -> dict[str, str]:
    """Times a step and bytes of each, by tensor, pass, operation and axes."""
    found: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for one in document["emitted"]:
        over = "·".join(one["axes"]) or "no axes"
        name = f"{one['tensor']} {one['direction']} {one['op']} over {over}"
        found[name][one["bytes"]] += one["count"] or 1
    return {
        name: ", ".join(f"{count:,} x {format_bytes(size)}" for size, count in sorted(sizes.items()))
        for name, sizes in found.items()
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
