"""The instructions of a program that the audit cannot count, so that nothing is dropped silently."""

from meshwright.audit.facts.communication import unreadable_groups
from meshwright.audit.facts.factorisations import factorisation_flops
from meshwright.audit.facts.instruction_work import (
    attention_flops,
    is_attention_kernel,
    is_library_matmul,
    joins_parts,
    multiplies,
    only_allocates,
)
from meshwright.audit.facts.opcodes import crossing_op, op_of
from meshwright.audit.hlo.read import Instruction, Program
from meshwright.audit.hlo.trace import CallPath, TracedValue, places, run_count

_COMMUNICATES = ("send", "recv", "collective-broadcast", "ragged-all-to-all", "infeed", "outfeed")
# Custom calls that neither talk to other devices nor multiply matrices.
_HARMLESS = frozenset({
    "TopK", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer", "ConcatBitcast",
    "AsyncCollectiveStart", "AsyncCollectiveDone", "MoveToHost", "MoveToDevice", "cu_threefry2x32",
    "annotate_device_placement", "LayoutConstraint", "AssumeGatherIndicesInBound", "__onednn$softmax",
    "__onednn$layernorm", "__cub$DeviceRadixSort", "xla.gpu.ext.cub_sort_pairs",
    "GatherScatterIndicesBitpacked",
    "PartialReduce", "SliceToDynamic", "PadToStatic", "xla_python_cpu_callback", "PrintPrimitive",
    "xla_ffi_python_cpu_callback", "xla_ffi_python_gpu_callback", "xla_ffi_partitioned_python_cpu_callback",
    "SliceId", "ZeroCrop", "PrepareAsyncCallStart", "PrepareAsyncCallDone",
    # Of a triangular solve on TPUs, which then multiplies by the inverse in products that are counted.
    "InvertDiagBlocksLowerTriangular",
    # A triangular solve on GPUs. Plans count no FLOPs of it either (models/mixers/gated_delta.py).
    "__cublas$triangularSolve",
})  # fmt: skip

# Opcodes of XLA's HloOpcode, without the endings of asynchronous pairs.
_OPCODES = """
abs acos acosh add add-dependency after-all all-gather all-reduce all-to-all and asin asinh async atan2 atanh
batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
cholesky clamp clz collective-broadcast collective-permute compare complex concatenate conditional constant
convert convolution copy cosh cosine count-leading-zeros custom-call divide domain dot dynamic-reshape
dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather
get-dimension-size get-tuple-element imag infeed iota is-finite log log-plus-one logistic map maximum minimum
multiply negate not opt-barrier or outfeed pad parameter partition-id popcnt popcount power
ragged-all-to-all ragged-dot real recv reduce reduce-precision reduce-scatter reduce-window remainder
replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
round-nearest-even rsqrt scan scatter select select-and-scatter send set-dimension-size shift-left
shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract tan tanh
topk transpose triangular-solve tuple while xor
"""
_KNOWN = frozenset(_OPCODES.split())
_NOT_COUNTED = "its FLOPs and bytes are not counted"


def not_understood(program: Program) -> list[str]:
    """A line for each loop, custom call and collective that the counts leave out or count once."""
    lines: dict[str, None] = {}
    if program.num_partitions > 1 < program.num_replicas:
        both = f"{program.num_replicas} replicas of {program.num_partitions} partitions"
        lines[f"{both}: the audit cannot tell which devices a group contains"] = None
    for place in places(program):
        matters = False
        for instruction in place.computation.instructions.values():
            problem = _problem(program, TracedValue(instruction, place))
            lines |= {problem: None} if problem else {}
            matters |= op_of(instruction) is not None or multiplies(instruction, place.computation)
        if matters and run_count(program, place) is None:
            lines[_unknown_loop(place)] = None
    return list(lines)


def _problem(program: Program, value: TracedValue) -> str:
    instruction = value.instruction
    opcode = instruction.opcode.removesuffix("-start")
    if op_of(instruction) and (why := unreadable_groups(instruction, program.num_devices)):
        return f"{_named(instruction)}: {why}"
    if instruction.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update") not in _KNOWN:
        return f"{_named(instruction)}: opcode {instruction.opcode} is unknown; {_NOT_COUNTED}"
    if opcode in _COMMUNICATES and not (op_of(instruction) or crossing_op(instruction)):
        return f"{_named(instruction)}: {opcode} communicates; its bytes are not counted"
    if opcode == "dot" and "lhs_contracting_dims" not in instruction.attributes:
        return f"{_named(instruction)}: its contracted dimensions are missing; its FLOPs are not counted"
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if (
        opcode != "custom-call"
        or target in _HARMLESS
        or is_library_matmul(instruction)
        or factorisation_flops(instruction, value.place.computation)
        or joins_parts(instruction)
        or only_allocates(instruction)
    ):
        return ""
    if not is_attention_kernel(instruction):
        return f"{_named(instruction)}: custom call {target}; {_NOT_COUNTED}"
    if attention_flops(program, value) is None:
        return f"{_named(instruction)}: this kernel's mask is not printed; its FLOPs are not counted"
    return ""


def _unknown_loop(place: CallPath) -> str:
    loop = place.loops[-1]
    return f"{_named(loop)}: its trip count is unknown, so its body is counted once"


def _named(instruction: Instruction) -> str:
    return f"{instruction.name} ({instruction.op_name})" if instruction.op_name else instruction.name
