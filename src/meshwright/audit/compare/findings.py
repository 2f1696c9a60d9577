"""What each difference costs on the planned hardware, where in the model it arises, and what to change."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from meshwright.audit.compare.line_up import DIFFERENT, Row
from meshwright.audit.compare.products import ProductDifference
from meshwright.audit.compare.weigh import extra_seconds
from meshwright.audit.compare.words import summed_whole
from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.prices import Prices
from meshwright.audit.facts.products import Product
from meshwright.audit.facts.timeline import StepTimeline
from meshwright.audit.hlo.op_names import scope_of

# Products in a wider type than planned are told of where they are more than this of all FLOPs.
WIDE_SHARE = 0.01
# A tensor for which the schedule waits longer than planned is told of where that is more than this of the
# step.
EXPOSED_SHARE = 0.05


@dataclass(frozen=True)
class Finding:
    """A difference between plan and program. kind: collective, product, dtype, exposure or memory.

    extra_bytes: bytes per device and step beyond the plan, sent, or held for kind memory. extra_seconds:
    their time on the links, or that of extra matmuls, hidden or exposed; None for memory, and where the
    collective's device groups follow no mesh axes. change: the remedy, "" where none is known.
    """

    kind: str
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
    """A finding for each row that differs."""
    return [_of_row(row, prices) for row in rows if row.status in DIFFERENT]


def product_findings(differences: Iterable[ProductDifference], prices: Prices, dtype: str) -> list[Finding]:
    """A finding for each product that is not computed as often as planned; `dtype` gives its rate."""
    return [
        Finding(
            "product",
            one.tensor,
            one.direction,
            one.what,
            one.where,
            _RECOMPUTED if one.direction == "backward" and one.planned < one.compiled else "",
            0,
            prices.product_seconds(one.extra_flops, dtype),
        )
        for one in differences
    ]


_RECOMPUTED = "probably recomputed: compare the program's remat policy with the plan's"


def wide_findings(wide: Sequence[Product], dtype: str, total: float, prices: Prices) -> list[Finding]:
    """One finding for all products in a wider type than planned, where they are many of all `total` FLOPs."""
    flops = sum(one.flops for one in wide)
    if flops <= WIDE_SHARE * total:
        return []
    largest = max(wide, key=lambda one: one.flops)
    scopes = scope_of(largest.op_name)
    slower, planned = prices.product_seconds(flops, "f32"), prices.product_seconds(flops, dtype)
    return [
        Finding(
            "dtype",
            scopes[-1] if scopes else "products",
            "",
            f"{len(wide)} matmuls, {flops / total:.0%} of the FLOPs, run in a wider type than {dtype}",
            largest.op_name,
            f"cast both operands to {dtype} before the matmul",
            0,
            slower - planned if slower is not None and planned is not None else None,
        )
    ]


def exposure_findings(rows: Iterable[Row], line: StepTimeline | None, step_seconds: float) -> list[Finding]:
    """A finding for each row for which the schedule waits much longer than planned."""
    if line is None:
        return []
    return [
        Finding(
            "exposure",
            row.tensor,
            row.direction,
            f"{row.tensor}: {waits:.3g} s exposed, {planned:.3g} s planned",
            _where(row.emitted[0]),
            "start it earlier, or overlap it with a matmul step by step (nn/compiler.py has XLA's options)",
            0,
            waits - planned,
        )
        for row in rows
        if row.emitted
        and (waits := sum(line.exposed[id(e)] for e in row.emitted))
        - (planned := sum(p.exposed_seconds for p in row.planned))
        > EXPOSED_SHARE * step_seconds
    ]


def _of_row(row: Row, prices: Prices) -> Finding:
    what, change = summed_whole(row) or (f"{row.tensor}: {row.note}", "")
    return Finding(
        kind="collective",
        tensor=row.tensor,
        direction=row.direction,
        what=what,
        where=next((_where(e) for e in row.emitted), ""),
        change=change,
        extra_bytes=round(sum(map(prices.sent, row.emitted)) - sum(map(prices.planned_sent, row.planned))),
        extra_seconds=extra_seconds(row, prices),
    )


def _where(e: Emitted) -> str:
    c = e.collective
    line = f" ({c.source_file}:{c.source_line})" if c.source_file and c.source_line else ""
    return f"{c.op_name or c.name}{line}"
