"""One step along time: the work of a chip, and the collectives that each group of links carries.

Made of the plan's own terms. Within a pass the work comes first and the waiting last; the order of the layers
is not modelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost.priced import PricedCollective
from meshwright.plan.candidate import Candidate
from meshwright.plan.study.split import LINK_BOUNDS

# The passes of a step in order. A layer is recomputed during its backward pass.
PASSES = ("forward", "recompute", "backward", "update")
CHIP = "chip"
_WORK: tuple[str, ...] = ("compute", "hbm", "launch")


@dataclass(frozen=True)
class Block:
    """A stretch of one row, from `start` to `end` seconds after the start of the step.

    row: "chip", or the mesh axes whose links are busy. kind: the bound of the chip's work ("compute", "hbm",
    "launch"), "links" or "host_link" if it waits, "bubble"; on links the kind of array. seconds: its own
    duration, which is longer than the block if the collective also runs during another pass.
    """

    row: str
    kind: str
    start: float
    end: float
    seconds: float
    direction: str = ""
    op: str = ""


def step_blocks(candidate: Candidate) -> list[Block]:
    """The blocks of a step. The chip's blocks fill the step without gaps."""
    blocks: list[Block] = []
    start = 0.0
    for direction in PASSES:
        passes = list(_pass(candidate, direction, start))
        blocks += passes
        start = max((block.end for block in passes if block.row == CHIP), default=start)
    for kind, seconds in _idle(candidate):
        blocks.append(Block(CHIP, kind, start, start + seconds, seconds))
        start += seconds
    return blocks


def _pass(candidate: Candidate, direction: str, start: float) -> Iterator[Block]:
    collectives = [planned for planned in candidate.cost.collectives if planned.direction == direction]
    spent = dict.fromkeys(_WORK, 0.0)
    for term in candidate.cost.terms:
        if term.bound in spent and _direction(term.name) == direction:
            spent[term.bound] += term.seconds
    spent["links"] = sum(planned.exposed_seconds for planned in collectives)
    end = start
    for kind, seconds in spent.items():
        if seconds > 0:
            yield Block(CHIP, kind, end, end + seconds, seconds, direction)
            end += seconds
    for row in dict.fromkeys("·".join(planned.axes) for planned in collectives):
        carried = [planned for planned in collectives if "·".join(planned.axes) == row]
        yield from _carried(row, carried, direction, start, end)


def _carried(
    row: str, collectives: list[PricedCollective], direction: str, start: float, end: float
) -> Iterator[Block]:
    """One group of links in one pass. The exposed collectives come last and end with the pass.

    If the links are busy for longer than the pass, because some transfers run during another, they fill it.
    """
    total = sum(planned.step_seconds for planned in collectives)
    scale = min(1.0, (end - start) / total) if total else 0.0
    at = end - total * scale
    for planned in sorted(collectives, key=lambda planned: planned.exposed):
        seconds = planned.step_seconds
        yield Block(row, planned.what, at, at + seconds * scale, seconds, direction, planned.op)
        at += seconds * scale


def _direction(name: str) -> str:
    """The pass in the brackets of a term's name, as `matmul (backward)`; otherwise the update."""
    known = name.rpartition(" (")[2].removesuffix(")")
    return known if known in PASSES else "update"


def _idle(candidate: Candidate) -> Iterator[tuple[str, float]]:
    """Seconds that belong to no pass: the bubble, and waiting for links that no single collective causes."""
    terms = candidate.cost.terms
    for kind in ("bubble", "host_link"):
        if (seconds := sum(term.seconds for term in terms if term.bound == kind)) > 0:
            yield kind, seconds
    links = sum(term.seconds for term in terms if term.bound in LINK_BOUNDS)
    rest = links - sum(planned.exposed_seconds for planned in candidate.cost.collectives)
    if rest > 1e-9 * candidate.step_seconds:
        yield "links", rest
