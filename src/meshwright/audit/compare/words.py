"""The words of a row that differs: what the compiler does in place of the plan, and what to change."""

from collections.abc import Iterable

from meshwright.audit.compare.line_up import Row
from meshwright.audit.facts.emitted import Emitted


def summed_whole(row: Row) -> tuple[str, str] | None:
    """(what, change) where an all-reduce does the work of an all-gather or of a reduce-scatter; else None."""
    sums = [e for e in row.emitted if e.collective.op == "all_reduce"]
    gathered = {axis for e in sums if e.collective.gathers for axis in e.axes}
    if gathered:
        return (
            f"{row.tensor}: the all-gather over {_joined(gathered)} is compiled to an all-reduce of "
            "zero-padded shards, which sends twice the bytes",
            "use a smaller fsdp axis beside a second axis (data=4,fsdp=16 in place of fsdp=64): there "
            "XLA:TPU emits all-gathers",
        )
    planned = {axis for p in row.planned if p.op == "reduce_scatter" for axis in p.axes}
    scattered = {axis for e in row.emitted if e.op == "reduce_scatter" for axis in e.axes}
    whole = {axis for e in sums for axis in e.axes} & planned - scattered
    if not whole:
        return None
    rings = _round_rings(e for e in sums if whole.intersection(e.axes))
    cure = (
        f"reshape the scattered dimension to [{_joined(whole)}, rest] before the sum, so that a device keeps "
        "one index of it: XLA then emits a reduce-scatter"
    )
    return (
        f"{row.tensor}: the plan has a reduce-scatter over {_joined(whole)}, the compiler emits an "
        f"all-reduce of which each device keeps a slice: twice the bytes{rings}",
        "" if rings else cure,
    )


def _round_rings(sums: Iterable[Emitted]) -> str:
    """The rings that an all-reduce uses at once and its time; "" where the TPU's compiler names at most two.

    An all-reduce of V bytes over k directed rings takes 2V / (k w), w a link's bytes/s one way. A
    reduce-scatter of libtpu 0.0.42 uses one ring in both directions: V / (2 w).
    """
    rings = min((e.collective.num_rings or 1 for e in sums), default=1)
    if rings <= 2:
        return ""
    return (
        f", but over {rings} rings at once, in {4 / rings:.0%} of the time of a reduce-scatter over one ring"
    )


def _joined(axes: Iterable[str]) -> str:
    return "·".join(sorted(axes))
