"""The derivation of a chain's algorithm under a layout.

Forward, each operation reshards its operands, computes on the local blocks and reshards its result.
Backward, the same reshards are transposed: the cotangent of a result is resharded as the operation yielded
the result, and gives the operands' cotangents, which are partial over the axes along which an operand was
repeated. The cotangents of an array are added before they are resharded as the array.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from meshwright.notation.algorithm import GIVEN, Algorithm, Local, Step, StepTiming
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import CONTRACTION, VIEWS, Chain, ChainLine
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import cotangent
from meshwright.notation.operation import Operation, placed_operation

# Their transposes read only the cotangent.
_LINEAR = ("add", "sum", *VIEWS)


def derive(chain: Chain, layout: Mapping[str, ShardedArray]) -> Algorithm:
    """The algorithm of `chain` with the shardings of `layout`.

    Stored arrays and a source that are not in the layout are whole; other arrays keep the sharding that their
    operation yields, with sums finished. Raises NotationError if no operation can yield a wanted sharding.

    >>> mlp = Chain.parse("Tmp[B, F] = In[B, D] . Win[D, F]\\nOut[B, D] = Tmp . Wout[F, D]")
    >>> layout = mlp.layout("In[B, D_Y] Win[D, F_Y] Wout[F_Y, D] Out[B, D_Y]")
    >>> print(*derive(mlp, layout).lines(), sep="\\n")
    Forward pass:
      1. In[B, D] = AllGather_Y(In[B, D_Y])  (on critical path)
      2. Tmp[B, F_Y] = In[B, D] ·_D Win[D, F_Y]
      3. Out[B, D]{U_Y} = Tmp[B, F_Y] ·_F Wout[F_Y, D]
      4. Out[B, D_Y] = ReduceScatter_Y(Out[B, D]{U_Y})  (on critical path)
    Backward pass:
      1. dOut[B, D_Y] = ...
      2. dOut[B, D] = AllGather_Y(dOut[B, D_Y])  (on critical path)
      3. dWout[F_Y, D] = Tmp[B, F_Y] ·_B dOut[B, D]
      4. dTmp[B, F_Y] = dOut[B, D] ·_D Wout[F_Y, D]
      5. In[B, D] = AllGather_Y(In[B, D_Y])  (ahead of time; or keep forward 1)
      6. dWin[D, F_Y] = In[B, D] ·_B dTmp[B, F_Y]
      7. dIn[B, D]{U_Y} = dTmp[B, F_Y] ·_F Win[D, F_Y]
      8. dIn[B, D_Y] = ReduceScatter_Y(dIn[B, D]{U_Y})  (on critical path)
    """
    return derive_placed(chain, _place(chain, layout))


def derive_placed(chain: Chain, operations: list[Operation]) -> Algorithm:
    """The algorithm of `chain`, with an operation for each line."""
    homes = {a.name: a for op in operations for a in (*op.operands, op.out)}
    forward = _Pass()
    for line, operation in zip(chain.lines, operations, strict=True):
        for operand in operation.reshards:
            forward.bring(operand.forward)
        used = tuple(operand.used for operand in operation.reshards)
        forward.record(Local(line.call, used, operation.finish.given))
        forward.bring(operation.finish.forward, maximum=line.function == "max")
    backward = _transpose(chain, operations, homes, forward)
    source = homes[chain.source]
    ends = [cotangent(source)] if chain.source in chain.differentiated else []
    seeds = [cotangent(homes[name]) for name in chain.results]
    return Algorithm(
        tuple(forward.timed([source], [homes[name] for name in chain.results])),
        tuple(_with_repeats(backward.timed(seeds, ends), forward)),
    )


def _place(chain: Chain, layout: Mapping[str, ShardedArray]) -> list[Operation]:
    """An operation with roles for each line."""
    homes = {name: layout.get(name, chain.arrays[name]) for name in (*chain.stored, chain.source)}
    operations = []
    for line in chain.lines:
        operation = _placed(chain, line, homes, layout.get(line.out.name))
        if line.is_view and line.out.name not in layout:
            operation = _placed_for_reader(chain, layout, line, homes) or operation
        homes[line.out.name] = operation.out
        operations.append(operation)
    return operations


def _placed(
    chain: Chain, line: ChainLine, homes: Mapping[str, ShardedArray], wanted: ShardedArray | None
) -> Operation:
    return placed_operation(
        tuple(homes[a.name] for a in line.operands),
        wanted or line.out,
        wanted=wanted is not None,
        stored=chain.stored,
        whole=line.whole,
        renamed=tuple(line.aliases.items()),
    )


def _placed_for_reader(
    chain: Chain, layout: Mapping[str, ShardedArray], view: ChainLine, homes: Mapping[str, ShardedArray]
) -> Operation | None:
    """The view with a result as its first reader needs it, since a view is free.

    None if another array of the reader is not placed yet, and if the result would be gathered, which the
    reader does by itself.
    """
    name, reader = view.out.name, chain.reader(view.out.name)
    if reader is None or not {a.name for a in reader.operands} <= {name, *homes}:
        return None
    reading = _placed(chain, reader, {**homes, name: view.out}, layout.get(reader.out.name))
    used = next(operand.used for operand in reading.reshards if operand.used.name == name)
    operation = _placed(chain, view, homes, used)
    gathered = any(step.op == "all_gather" for step in operation.finish.forward)
    return None if gathered else operation


class _Pass:
    """The recorded steps of a pass, with the steps that each one reads."""

    def __init__(self, existing: Iterable[ShardedArray] = ()) -> None:
        self.steps: list[Step] = []
        self.reads: list[set[int]] = []
        self.existing = {_key(array) for array in existing}
        self._makers: dict[ShardedArray, set[int]] = {}

    def record(self, action: Local | Collective, *, accumulates: bool = False, maximum: bool = False) -> None:
        number, result = len(self.steps), _key(action.result)
        operands = (action.operand,) if isinstance(action, Collective) else action.operands
        self.reads.append({maker for a in operands for maker in self._makers.get(_key(a), ())})
        self._makers[result] = {number, *(self._makers.get(result, ()) if accumulates else ())}
        self.steps.append(Step(action, "critical", accumulates, None, maximum))
        self.existing.add(result)

    def bring(self, steps: list[Collective], *, maximum: bool = False) -> None:
        """Record the steps with results that do not exist yet; two readers share one gather."""
        if steps and _key(steps[-1].result) in self.existing:
            return
        for step in steps:
            if _key(step.result) not in self.existing:
                self.record(step, maximum=maximum)

    def timed(self, starts: list[ShardedArray], ends: list[ShardedArray]) -> Iterator[Step]:
        """The steps with their timing: those after `starts` and before `ends` are critical."""
        first, last = {_key(a) for a in starts}, {_key(a) for a in ends}
        after: set[int] = set()
        for number, step in enumerate(self.steps):
            action = step.action
            operands = (action.operand,) if isinstance(action, Collective) else action.operands
            if self.reads[number] & after or first & {_key(a) for a in (*operands, action.result)}:
                after.add(number)
        before: set[int] = set()
        for number in reversed(range(len(self.steps))):
            if number in before or _key(self.steps[number].result) in last:
                before |= {number, *self.reads[number]}
        for number, step in enumerate(self.steps):
            late: StepTiming = "critical" if number in before else "deferred"
            yield replace(step, timing=late if number in after else "ahead")


def _key(array: ShardedArray) -> ShardedArray:
    """The array with sorted partial axes, whose order does not matter."""
    return array.replace(unreduced=tuple(sorted(array.unreduced))) if array.unreduced else array


def _with_repeats(steps: Iterable[Step], forward: _Pass) -> Iterator[Step]:
    made = {_key(step.result): number for number, step in enumerate(forward.steps, 1)}
    for step in steps:
        yield replace(step, repeats=made.get(_key(step.result)))


def _kept(homes: Mapping[str, ShardedArray], forward: _Pass) -> set[ShardedArray]:
    """The arrays kept for the backward pass: all but gathered arrays, which it gathers again."""
    kept = {_key(home) for home in homes.values()}
    for step in forward.steps:
        action = step.action
        if isinstance(action, Collective) and action.op != "all_gather" and _key(action.operand) in kept:
            kept.add(_key(action.result))
    return kept


def _transpose(
    chain: Chain, operations: list[Operation], homes: Mapping[str, ShardedArray], forward: _Pass
) -> _Pass:
    """The backward pass: operations in reverse, each with the stored operand's gradient first."""
    tape = _Cotangents(_Pass(_kept(homes, forward)), chain, operations)
    for name in chain.results:
        if name in chain.differentiated:
            tape.steps.record(Local(GIVEN, (), cotangent(homes[name])))
    for line, operation in zip(reversed(chain.lines), reversed(operations), strict=True):
        if operation.out.name in chain.differentiated:
            tape.pull_back(line, operation)
    return tape.steps


class _Cotangents:
    """The parts of each array's cotangent that its readers have yielded so far."""

    def __init__(self, steps: _Pass, chain: Chain, operations: list[Operation]) -> None:
        self.steps, self.differentiated, self.stored = steps, chain.differentiated, chain.stored
        self.made = {operation.out.name: operation.finish for operation in operations}
        self.yielded: dict[str, dict[ShardedArray, ShardedArray]] = {}
        self.chosen: dict[ShardedArray, list[Collective]] = {}  # steps of yielded arrays, if chosen
        self.readers: dict[str, int] = {}
        for line in chain.lines:
            for operand in line.operands if line.out.name in chain.differentiated else ():
                self.readers[operand.name] = self.readers.get(operand.name, 0) + 1

    def pull_back(self, line: ChainLine, operation: Operation) -> None:
        """Record a line's backward steps: from the result's cotangent to the operands', weights first."""
        self.steps.bring(operation.finish.backward)
        names = [operand.name for operand in operation.operands]
        for wrt in sorted(range(len(names)), key=lambda i: names[i] not in self.stored):
            name = names[wrt]
            if name in self.differentiated:
                self._local(line, operation, wrt)
            self.readers[name] -= 1
            if not self.readers[name] and name in self.differentiated:
                self._settle(operation.operands[wrt])

    def _local(self, line: ChainLine, operation: Operation, wrt: int) -> None:
        operand, spread = operation.reshards[wrt], operation.finish.backward
        given = spread[-1].result if spread else cotangent(operation.out)
        if line.function == CONTRACTION:
            others = [operation.reshards[1 - wrt]]
            operands = (others[0].used, given) if wrt else (given, others[0].used)
        else:
            others = [] if line.function in _LINEAR else operation.reshards
            operands = (given, *(other.used for other in others))
        for other in others:
            self.steps.bring(other.forward)
        earlier = self.yielded.setdefault(operand.given.name, {})
        accumulates = _key(operand.yielded) in earlier
        self.steps.record(Local(line.call, operands, operand.yielded, wrt), accumulates=accumulates)
        earlier[_key(operand.yielded)] = operand.yielded
        if operand.chosen.backward is not None:
            self.chosen[_key(operand.yielded)] = operand.backward

    def _settle(self, array: ShardedArray) -> None:
        """Record the sum of the yielded parts of a cotangent: each kind of partial sum is reduced once."""
        end, pending = self._end(array), self.yielded[array.name]
        # The most partial first, so that its result can be added to another part and moved with it.
        for key in sorted(pending, key=lambda a: -len(a.unreduced)):
            addend = pending.pop(key)
            steps = self.chosen[key] if key in self.chosen else reshard(addend, end)
            for step in steps:
                accumulates = _key(step.result) in pending
                self.steps.record(step, accumulates=accumulates)
                if accumulates:
                    break
            else:
                pending[_key(end)] = end
            # The results in between are addends, and must not be taken for the cotangent.
            self.steps.existing -= {key, *(_key(step.result) for step in steps)}
        self.steps.existing.add(_key(end))

    def _end(self, array: ShardedArray) -> ShardedArray:
        """The wanted sharding of the cotangent.

        The cotangent is sharded as the array is. If the transpose would only slice, it is sharded as the
        array was before its collectives: a sum is then scattered, and not gathered and sliced.
        """
        made = self.made.get(array.name)
        if made and made.backward and all(step.op == "slice" for step in made.backward):
            return cotangent(made.given)
        return cotangent(array)
