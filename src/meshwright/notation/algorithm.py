"""The forward and backward algorithm of a chain: its numbered steps, as a book prints them.

derive.py makes one from a chain and a layout. The published algorithms of data, fully sharded,
tensor, expert and sequence parallelism are what it yields for their layouts; none is written anywhere.

What a step waits for and what waits for it say when it must run:

    critical   it is between the pass's input and the pass's output: the next layer waits
    ahead      nothing of this pass comes before it: a stored weight may be gathered beforehand
    deferred   nothing of this pass comes after it: a gradient may be reduced at leisure, and as
               sums commute once for several microbatches
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.notation.array import ShardedArray, subscript
from meshwright.notation.chain import CONTRACTION
from meshwright.notation.collective import Collective

StepTiming = Literal["critical", "ahead", "deferred"]
GIVEN = "given"


@dataclass(frozen=True)
class Local:
    """One operation on every device's own blocks.

    function: as the chain's line writes it, "." for a contraction. wrt: None forward; backward the
    number of the operand whose cotangent is made. It reads the cotangent of the result, which takes
    that operand's place in a contraction and else comes first, and what it needs of the operands.
    """

    function: str
    operands: tuple[ShardedArray, ...]
    result: ShardedArray
    wrt: int | None = None

    def __str__(self) -> str:
        if self.function == GIVEN:
            return f"{self.result} = ..."
        if self.function == CONTRACTION:
            summed = dict.fromkeys(d for a in self.operands for d in a.dims if d not in self.result.dims)
            dot = f" ·_{''.join(summed)} " if summed else " · "
            return f"{self.result} = {dot.join(map(str, self.operands))}"
        if self.wrt is None:
            return f"{self.result} = {self.function}({', '.join(map(str, self.operands))})"
        given, *read = map(str, self.operands)
        if not read:
            return f"{self.result} = {self.function}'({given})"
        which = f"'{self.wrt + 1}" if len(read) > 1 else "'"
        return f"{self.result} = {given} * {self.function}{which}({', '.join(read)})"


@dataclass(frozen=True)
class Step:
    """One step of a pass.

    accumulates: its result is added to what an earlier step made of the same array. repeats: the
    forward step whose result it makes again; to keep that one instead costs its memory. maximum:
    a reduction that takes the largest instead of the sum.
    """

    action: Local | Collective
    timing: StepTiming
    accumulates: bool = False
    repeats: int | None = None
    maximum: bool = False

    @property
    def result(self) -> ShardedArray:
        return self.action.result

    def __str__(self) -> str:
        action = self.action
        if isinstance(action, Local):
            text = str(action)
        else:
            kind = action.op.title().replace("_", "") + ("Max" if self.maximum else "")
            text = f"{action.result} = {kind}{subscript(action.axes)}({action.operand})"
        if self.accumulates:
            text = text.replace(" = ", " += ", 1)
        return f"{text}{self._remark}"

    @property
    def _remark(self) -> str:
        if isinstance(self.action, Local) or self.action.op == "slice":
            return ""
        said = {"critical": "on critical path", "ahead": "ahead of time", "deferred": "can be deferred"}
        again = f"; or keep forward {self.repeats}" if self.repeats else ""
        return f"  ({said[self.timing]}{again})"


@dataclass(frozen=True)
class Algorithm:
    """The steps of both passes; the number of a step is its place, from 1."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    def lines(self) -> list[str]:
        """The algorithm as a book prints it."""
        passes = (("Forward", self.forward), ("Backward", self.backward))
        return [line for title, steps in passes for line in _numbered(title, steps)]

    def collectives(self, *timings: StepTiming) -> list[Collective]:
        """Every collective of both passes, of these timings if any are given; slices move nothing."""
        return [
            step.action
            for step in (*self.forward, *self.backward)
            if isinstance(step.action, Collective)
            and step.action.op != "slice"
            and (not timings or step.timing in timings)
        ]

    def readers(self, step: Step) -> list[Step]:
        """The local operations of the step's pass that read its result: who shares a gather."""
        steps = self.forward if step in self.forward else self.backward
        return [s for s in steps if isinstance(s.action, Local) and step.result in s.action.operands]


def _numbered(title: str, steps: tuple[Step, ...]) -> Iterator[str]:
    yield f"{title} pass:"
    width = len(str(len(steps)))
    yield from (f"  {number:{width}}. {step}" for number, step in enumerate(steps, 1))
