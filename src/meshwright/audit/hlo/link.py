"""The programs that a loop dispatches, linked to one program per pipeline stage.

The linked entry calls every program once. An attribute of the call states how often the stage runs it in a
step. Programs and inputs of other stages have 0 runs: values are traced through them, but they do not count.
The operands of a call are taken from the program's first run. Names of a program's parts start with the name
of its call.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.audit.hlo.read import ArrayShape, Computation, Instruction, Program
from meshwright.audit.hlo.trace import CALLED, RUNS
from meshwright.errors import AuditError

_NAME = re.compile(r"[\w.\-<>]+")
_RESULT = "#"


class StageCall(NamedTuple):
    """A program of the loop, with its runs and the operands of its first run.

    program: its number. runs: of its stage in a step. given: for each parameter, by JAX's name, the
    `result_name` of another call's result, or JAX's name of an array that exists when the step begins.
    """

    name: str
    program: int
    stage: int
    runs: int
    given: Mapping[str, str]


class Sent(NamedTuple):
    """An array that the loop sends between stages. what: the loop's name for it."""

    stage: int
    to_stage: int
    what: str
    num_bytes: int


def result_name(call: str, place: int) -> str:
    """The name of a call's result number `place`."""
    return f"{call}{_RESULT}{place}"


def is_given(source: str) -> bool:
    """Whether an array exists when the step begins."""
    return _RESULT not in source


def linked(
    programs: Sequence[Program], calls: Iterable[StageCall], results: Iterable[str], stage: int
) -> Program:
    """The program of one stage. results: of the stage's step, named as in `StageCall.given`.

    Raises AuditError if a call does not name one of its parameters.
    """
    computations: dict[str, Computation] = {}
    main: dict[str, Instruction] = {}
    inputs: dict[tuple[int, str], str] = {}

    def operand(source: str, like: Instruction, at: int) -> str:
        if is_given(source):
            if (at, source) not in inputs:
                number = len(inputs)
                inputs[at, source] = name = f"given.{number}"
                known = {} if at == stage else {RUNS: "0"}
                main[name] = replace(like, name=name, literal=str(number), op_name=source, attributes=known)
            return inputs[at, source]
        made_by, _, place = source.partition(_RESULT)
        call = main[made_by]
        if isinstance(call.shape, ArrayShape):
            return made_by
        if source not in main:
            shape = call.shape[int(place)]
            main[source] = Instruction(source, shape, "get-tuple-element", (made_by,), {"index": place})
        return source

    for call in calls:
        program = programs[call.program]
        computations |= _renamed(program, f"{call.name}.")
        operands = []
        for parameter in program.main.parameters:
            if parameter.op_name not in call.given:
                raise AuditError(
                    f"{program.name}: its parameter {parameter.name} has no name that JAX gave it"
                )
            operands.append(operand(call.given[parameter.op_name], parameter, call.stage))
        runs = str(call.runs if call.stage == stage else 0)
        attributes = {"to_apply": f"{call.name}.{program.entry}", RUNS: runs}
        shape = program.main.result.shape
        main[call.name] = Instruction(call.name, shape, "call", tuple(operands), attributes)
    made = [operand(source, main[source.partition(_RESULT)[0]], stage) for source in results]
    shapes = tuple(main[name].shape for name in made)
    main["results"] = Instruction("results", shapes, "tuple", tuple(made), {})
    computations["step"] = Computation("step", main, "results")
    return Program("step", computations, "step", programs[0].num_partitions, programs[0].num_replicas)


def _renamed(program: Program, prefix: str) -> dict[str, Computation]:
    """The computations of a program with `prefix` before each name in them."""

    def text(key: str, value: str) -> str:
        if key == "channel_id":  # identifies the collectives of one program
            return prefix + value
        return _NAME.sub(lambda name: prefix + name[0], value) if key in CALLED else value

    def instruction(old: Instruction) -> Instruction:
        attributes = {key: text(key, value) for key, value in old.attributes.items()}
        operands = tuple(prefix + name for name in old.operands)
        return replace(old, name=prefix + old.name, operands=operands, attributes=attributes)

    computations = {}
    for name, computation in program.computations.items():
        instructions = map(instruction, computation.instructions.values())
        computations[prefix + name] = Computation(
            prefix + name, {each.name: each for each in instructions}, prefix + computation.root
        )
    return computations
