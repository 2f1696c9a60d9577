"""The forward and backward algorithm of a chain: its numbered steps, as in a textbook.

derive.py makes one from a chain and a layout. For their layouts it yields the published algorithms of data,
fully sharded, tensor, expert and sequence parallelism; none of them is written out.

The dependencies of a step decide its timing:

    critical   it is between the input and the output of the pass: the next layer waits for it
    ahead      it depends on no step of this pass: a stored weight may be gathered ahead of time
    deferred   no step of this pass depends on it: a gradient may be reduced later, and since sums
               commute only once for several microbatches
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
    """An operation of each device on its own blocks.

    function: the name in the chain's line, "." for a contraction. wrt: None forward; backward the number of
    the operand whose cotangent is made. A backward operation reads the cotangent of the result and the
    operands that it needs. In a contraction this cotangent replaces the operand `wrt`, otherwise it is first.
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

    accumulates: its result is added to the result of an earlier step for the same array. repeats: the forward
    step whose result it computes again; keeping that result takes memory. maximum: its reduction takes the
    maximum instead of the sum.
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
        timings = {"critical": "on critical path", "ahead": "ahead of time", "deferred": "can be deferred"}
        again = f"; or keep forward {self.repeats}" if self.repeats else ""
        return f"  ({timings[self.timing]}{again})"


@dataclass(frozen=True)
class Algorithm:
    """The steps of both passes, numbered from 1."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    def lines(self) -> list[str]:
        """The algorithm as text, as in a textbook."""
        passes = (("Forward", self.forward), ("Backward", self.backward))
        return [line for title, steps in passes for line in _numbered(title, steps)]

    def collectives(self, *timings: StepTiming) -> list[Collective]:
        """The collectives of both passes, of these timings if any are given, without slices."""
        return [
            step.action
            for step in (*self.forward, *self.backward)
            if isinstance(step.action, Collective)
            and step.action.op != "slice"
            and (not timings or step.timing in timings)
        ]


def _numbered(title: str, steps: tuple[Step, ...]) -> Iterator[str]:
    yield f"{title} pass:"
    width = len(str(len(steps)))
    yield from (f"  {number:{width}}. {step}" for number, step in enumerate(steps, 1))
