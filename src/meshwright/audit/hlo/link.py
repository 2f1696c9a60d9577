"""The programs that a loop dispatches, linked to one for each stage of a pipeline.

Its entry calls every program once; an attribute of the call says how often the stage runs it in a step, and
that of other stages' programs is 0, as of their inputs: what is traced through them is counted nowhere. A
call is given what the program's first run is given, by what made that. Names of programs' parts begin with
the call's.
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


class Call(NamedTuple):
    """A program of the loop: how often its stage runs it in a step, and what its first run is given.

    program: its number. given: for each parameter, by JAX's name of it, the `result_name` of what another
    call made, or JAX's name of what is there when the step begins.
    """

    name: str
    program: int
    stage: int
    runs: int
    given: Mapping[str, str]


class Sent(NamedTuple):
    """An array that the loop sends from one stage to another. what: in the loop's words."""

    stage: int
    to_stage: int
    what: str
    num_bytes: int


def result_name(call: str, place: int) -> str:
    """The name of a call's result with that number."""
    return f"{call}{_RESULT}{place}"


def is_given(source: str) -> bool:
    """Whether an array is there when the step begins."""
    return _RESULT not in source


def linked(programs: Sequence[Program], calls: Iterable[Call], results: Iterable[str], stage: int) -> Program:
    """The program of one stage. results: of the step there, as in `Call.given`.

    Raises AuditError for a parameter without a name that a call knows.
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
        for one in program.main.parameters:
            if one.op_name not in call.given:
                raise AuditError(f"{program.name}: its parameter {one.name} has no name that JAX gave it")
            operands.append(operand(call.given[one.op_name], one, call.stage))
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
    """The computations of a program, each name within with the prefix."""

    def text(key: str, value: str) -> str:
        if key == "channel_id":  # which tells the collectives of one program apart
            return prefix + value
        return _NAME.sub(lambda found: prefix + found[0], value) if key in CALLED else value

    def instruction(one: Instruction) -> Instruction:
        attributes = {key: text(key, value) for key, value in one.attributes.items()}
        operands = tuple(prefix + name for name in one.operands)
        return replace(one, name=prefix + one.name, operands=operands, attributes=attributes)

    found = {}
    for name, computation in program.computations.items():
        own = map(instruction, computation.instructions.values())
        found[prefix + name] = Computation(
            prefix + name, {one.name: one for one in own}, prefix + computation.root
        )
    return found
