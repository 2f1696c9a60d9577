"""A row that differs, in words: what the compiler does instead of what was planned, and what mends it."""

from collections.abc import Iterable

from meshwright.audit.compare.line_up import Row
from meshwright.audit.facts.emitted import Emitted


def summed_whole(row: Row) -> tuple[str, str] | None:
    """(what, change) where a sum does the work of a gather, or of a reduce-scatter whose slices are kept."""
    sums = [e for e in row.emitted if e.collective.op == "all_reduce"]
    gathered = {axis for e in sums if e.collective.gathers for axis in e.axes}
    if gathered:
        return (
            f"{row.tensor} is gathered over {_joined(gathered)} by a sum of shards in zeros: twice the bytes",
            "gather over fewer devices: beside a second mesh axis (data=4,fsdp=16 for fsdp=64) XLA for TPU "
            "has gathers of its own",
        )
    planned = {axis for p in row.planned if p.op == "reduce_scatter" for axis in p.axes}
    scattered = {axis for e in row.emitted if e.op == "reduce_scatter" for axis in e.axes}
    whole = {axis for e in sums for axis in e.axes} & planned - scattered
    if not whole:
        return None
    rings = _round_rings(e for e in sums if whole.intersection(e.axes))
    cure = (
        f"sum it with the scattered dimension split into [{_joined(whole)}, rest], so that a slice is one "
        "part of it and not some rows: XLA then keeps the reduce-scatter"
    )
    return (
        f"{row.tensor} is all-reduced over {_joined(whole)} where a reduce-scatter is planned: every device "
        f"receives the whole sum and keeps a slice, twice the bytes{rings}",
        "" if rings else cure,
    )


def _round_rings(sums: Iterable[Emitted]) -> str:
    """How a sum goes round the rings of several torus dimensions at once, where the TPU's compiler says so.

    Round k directed rings a sum of V bytes takes 2V / (k w), w a link's bytes/s one way. Of reduce-scatters
    libtpu 0.0.42 has only those round one ring, both ways: V / (2 w).
    """
    rings = min((e.collective.num_rings or 1 for e in sums), default=1)
    if rings <= 2:
        return ""
    return f", round {rings} rings at once, in {4 / rings:.0%} of the time of a reduce-scatter round one ring"


def _joined(axes: Iterable[str]) -> str:
    return "·".join(sorted(axes))
