"""Seconds that each instruction of a compiled program computes: the compiler's estimate or a roofline.

XLA for TPU prints the cycles that it reckons with for each fusion:

    seconds = estimated_cycles / clock

Of kernels, and of everything that XLA for GPU prints, the time is that of a roofline at what whole steps
reach of the chip's ratings (the chip's `[step]`):

    seconds = max(FLOPs / FLOPs a second, bytes / HBM bytes a second) + seconds of a kernel
"""

import re
from collections.abc import Iterator, Mapping

from meshwright.audit.facts.flops import flops_of
from meshwright.audit.facts.kernels import attention_flops, is_attention_kernel
from meshwright.audit.hlo.parse import ArrayShape, Computation, Instruction, Program
from meshwright.audit.hlo.trace import TracedValue, called_by
from meshwright.hardware.chip import Chip

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# XLA's word for "not known".
_NO_CYCLES = 2**62
# Systolic arrays of a chip, each of matrix_unit x matrix_unit multiply-adds a cycle: with the peak they give
# the clock, 1.05, 1.5, 1.75 and 1.75 GHz. Source: How to Scale Your Model, TPUs; of v6e Google's clock is not
# published, and four arrays give the same 1.75 GHz as v5p.
_ARRAYS: Mapping[str, int] = {"v4p": 8, "v5e": 4, "v5p": 8, "v6e": 4}
# What takes no time of its own: names, tuples, and calls whose bodies are walked.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "add-dependency", "while", "conditional", "call", "copy-start",
    "copy-done", "slice-start", "slice-done", "async-start", "async-update", "async-done", "send",
    "send-done", "recv", "recv-done",
})  # fmt: skip


def clock_hertz(chip: Chip) -> float | None:
    """Cycles a second of a TPU; None where its arrays are not known."""
    arrays = _ARRAYS.get(chip.name)
    if arrays is None or chip.matrix_unit is None:
        return None
    return chip.flops("bf16") / (2 * chip.matrix_unit**2 * arrays)


def has_cycles(program: Program) -> bool:
    """Whether the compiler prints estimates: XLA for TPU does."""
    instructions = (one for c in program.computations.values() for one in c.instructions.values())
    return any(_CYCLES.search(one.attributes.get("backend_config", "")) for one in instructions)


class InstructionSeconds:
    """The seconds of instructions of one program on one chip; what is not known takes none."""

    def __init__(self, program: Program, chip: Chip) -> None:
        self.program, self.chip = program, chip
        self.clock = clock_hertz(chip) if has_cycles(program) else None

    @property
    def is_known(self) -> bool:
        """Whether anything tells the time: a TPU's cycles and clock, or a GPU's ratings."""
        return self.clock is not None or (self.chip.kind == "gpu" and not has_cycles(self.program))

    def seconds(self, value: TracedValue) -> float:
        """The time of one run of an instruction that is no collective and no loop."""
        instruction = value.instruction
        if instruction.opcode in _FREE:
            return 0.0
        if is_attention_kernel(instruction):
            flops = attention_flops(self.program, value) or 0
            head = max((shape.dims[-1] for shape in instruction.shapes if len(shape.dims) > 2), default=128)
            return flops / self.chip.attention_flops_per_second("bf16", head) + self.chip.step.kernel_seconds
        if self.clock is not None:
            said = _CYCLES.search(instruction.attributes.get("backend_config", ""))
            return int(said[1]) / self.clock if said and int(said[1]) < _NO_CYCLES else 0.0
        return self._roofline(value)

    def _roofline(self, value: TracedValue) -> float:
        instruction, computation = value.instruction, value.place.computation
        called = called_by(self.program, instruction)
        flops = sum(flops_of(one, c) for c in called for one in c.instructions.values())
        flops += flops_of(instruction, computation)
        num_bytes = _touched(instruction, computation, called)
        dtype = (
            "f32"
            if any(shape.dtype == "f32" for shape in _operands(instruction, computation)[:2])
            else "bf16"
        )
        computing = flops / self.chip.matmul_flops_per_second(dtype) if flops else 0.0
        return (
            max(computing, num_bytes / self.chip.memory_bytes_per_second("bf16"))
            + self.chip.step.kernel_seconds
        )


def _operands(instruction: Instruction, computation: Computation) -> list[ArrayShape]:
    return [shape for name in instruction.operands for shape in computation.instructions[name].shapes]


def _touched(instruction: Instruction, computation: Computation, called: list[Computation]) -> int:
    """Bytes that an instruction reads and writes: of an array of which it takes a slice, the slice alone."""
    written = sum(shape.num_bytes for shape in instruction.shapes)
    if instruction.opcode == "dynamic-slice":
        return 2 * written
    if not called:
        return written + sum(shape.num_bytes for shape in _operands(instruction, computation))
    fused = called[0]
    read = sum(_read(fused, parameter) for parameter in fused.parameters)
    for update in (one for one in fused.instructions.values() if one.opcode in _UPDATES):
        whole = update.shapes[0].num_bytes
        part = fused.instructions[update.operands[_UPDATES[update.opcode]]].shapes[0].num_bytes
        written -= whole - part if written >= whole else 0
    return read + written


# What writes a part of its first operand in place, and which operand that part is.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SLICES = ("dynamic-slice", "slice", "gather")


def _read(fused: Computation, parameter: Instruction) -> int:
    """Bytes that a fusion reads of one of its operands."""
    users = list(_users(fused, parameter))
    if users and all(user.opcode in _SLICES and at == 0 for user, at in users):
        return sum(shape.num_bytes for user, _ in users for shape in user.shapes)
    if users and all(user.opcode in _UPDATES and at == 0 for user, at in users):
        return 0
    return sum(shape.num_bytes for shape in parameter.shapes)


def _users(fused: Computation, one: Instruction) -> Iterator[tuple[Instruction, int]]:
    """What reads an instruction's numbers, past bitcasts, and as which operand."""
    for user in fused.users[one.name]:
        if user.opcode == "bitcast":
            yield from _users(fused, user)
        else:
            yield user, user.operands.index(one.name)
