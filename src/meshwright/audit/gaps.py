"""What the audit could not read in a program, said aloud so that nothing is dropped in silence."""

from meshwright.audit.collectives import op_of
from meshwright.audit.flops import flops_of, is_library_matmul
from meshwright.audit.hlo import Instruction, Program
from meshwright.audit.trace import Place, places, run_count

_COMMUNICATES = ("send", "recv", "collective-broadcast", "ragged-all-to-all", "infeed", "outfeed")
# Custom calls that neither talk to other devices nor multiply matrices.
_HARMLESS = frozenset({
    "TopK", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer", "ConcatBitcast",
    "AsyncCollectiveStart", "AsyncCollectiveDone", "MoveToHost", "MoveToDevice", "cu_threefry2x32",
    "annotate_device_placement", "LayoutConstraint", "AssumeGatherIndicesInBound", "__onednn$softmax",
    "__onednn$layernorm", "__cub$DeviceRadixSort", "xla.gpu.ext.cub_sort_pairs",
    "PartialReduce", "SliceToDynamic", "PadToStatic", "xla_python_cpu_callback", "PrintPrimitive",
})  # fmt: skip


def not_understood(program: Program) -> list[str]:
    """A line for each loop, custom call and collective that the counts leave out or count once."""
    found: dict[str, None] = {}
    for place in places(program):
        matters = False
        for instruction in place.computation.instructions.values():
            problem = _problem(instruction)
            found |= {problem: None} if problem else {}
            matters |= op_of(instruction) is not None or flops_of(instruction, place.computation) > 0
        if matters and run_count(program, place) is None:
            found[_unknown_loop(place)] = None
    return list(found)


def _problem(instruction: Instruction) -> str:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _COMMUNICATES:
        return f"{_named(instruction)}: {opcode} communicates, and its bytes are not counted"
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if opcode != "custom-call" or target in _HARMLESS or is_library_matmul(instruction):
        return ""
    return f"{_named(instruction)}: custom call {target}: its FLOPs and communication are not counted"


def _unknown_loop(place: Place) -> str:
    loop = place.loops[-1]
    return f"{_named(loop)}: trip count unknown, so what its body computes is counted once"


def _named(instruction: Instruction) -> str:
    return f"{instruction.name} ({instruction.op_name})" if instruction.op_name else instruction.name
