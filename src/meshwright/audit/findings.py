"""What each difference costs on the planned hardware, where in the model it arises, and what to change."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from meshwright.audit.compare import DIFFERENT, Emitted, Row
from meshwright.audit.prices import Prices


@dataclass(frozen=True)
class Finding:
    """A difference. extra_bytes: what each device sends beyond the plan in a step.

    extra_seconds: the time of that on the links, hidden or not; None where the devices that talk
    follow no mesh axes, so that no links can be named. change: what mends it, "" where nothing is known.
    """

    tensor: str
    direction: str
    what: str
    where: str
    change: str
    extra_bytes: int
    extra_seconds: float | None

    def to_dict(self) -> dict:
        return asdict(self)


def findings(rows: Iterable[Row], prices: Prices) -> list[Finding]:
    """A finding for each row that differs, the costliest first."""
    found = [_finding(row, prices) for row in rows if row.status in DIFFERENT]
    return sorted(found, key=lambda one: (-(one.extra_seconds or 0.0), -one.extra_bytes))


def _finding(row: Row, prices: Prices) -> Finding:
    what, change = _summed_whole(row) or (row.note, "")
    seconds = [prices.seconds(e) for e in row.emitted]
    known = [s for s in seconds if s is not None]
    planned_seconds = sum(p.seconds * p.count for p in row.planned)
    return Finding(
        tensor=row.tensor,
        direction=row.direction,
        what=what,
        where=next((_where(e) for e in row.emitted), ""),
        change=change,
        extra_bytes=round(sum(map(prices.sent, row.emitted)) - sum(map(prices.planned_sent, row.planned))),
        extra_seconds=sum(known) - planned_seconds if len(known) == len(seconds) else None,
    )


def _summed_whole(row: Row) -> tuple[str, str] | None:
    """(what, change) where a gradient is summed whole that each device needs a slice of."""
    axes = {axis for p in row.planned if p.transfer.op == "reduce_scatter" for axis in p.transfer.axes}
    scattered = {axis for e in row.emitted if e.op == "reduce_scatter" for axis in e.axes}
    whole = {axis for e in row.emitted if e.op == "all_reduce" for axis in e.axes} & axes - scattered
    if not whole:
        return None
    over = "·".join(sorted(whole))
    return (
        f"{row.tensor} is all-reduced over {over} where a reduce-scatter is planned: every device receives "
        "the whole sum and keeps a slice, twice the bytes",
        f"sum it with the scattered dimension split into [{over}, rest], so that a slice is one part of it "
        "and not some rows: XLA then keeps the reduce-scatter",
    )


def _where(e: Emitted) -> str:
    c = e.collective
    line = f" ({c.source_file}:{c.source_line})" if c.source_file and c.source_line else ""
    return f"{c.op_name or c.name}{line}"
