"""FLOPs of one matrix product, from its shapes."""

import re
from math import prod

from meshwright.audit.facts.kernels import is_attention_kernel
from meshwright.audit.hlo.parse import ArrayShape, Computation, Instruction

MATMUL_TARGETS = ("__onednn$matmul", "__cublas$gemm", "__cublas$lt$matmul")


def multiplies(instruction: Instruction, computation: Computation) -> bool:
    """Whether an instruction is a matrix product or a kernel of several."""
    return is_attention_kernel(instruction) or flops_of(instruction, computation) > 0


def flops_of(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of one instruction, 0 if it is not a matrix product."""
    if instruction.opcode == "dot":
        return _dot(instruction, computation)
    if instruction.opcode == "ragged-dot":
        return _ragged_dot(instruction, computation)
    if instruction.opcode == "convolution":
        return _convolution(instruction, computation)
    return _library_matmul(instruction, computation) if is_library_matmul(instruction) else 0


def is_library_matmul(instruction: Instruction) -> bool:
    """Whether a custom call is a matrix product whose FLOPs its shapes tell."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return instruction.opcode == "custom-call" and target.startswith(MATMUL_TARGETS)


def _operand(instruction: Instruction, computation: Computation, index: int) -> ArrayShape:
    return computation.instructions[instruction.operands[index]].shapes[0]


def _dot(instruction: Instruction, computation: Computation) -> int:
    """2 * elements of the result * product of the contracting dimensions."""
    left = _operand(instruction, computation, 0)
    contracting = re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", ""))
    return 2 * instruction.shapes[0].num_elements * prod(left.dims[int(d)] for d in contracting)


def _ragged_dot(instruction: Instruction, computation: Computation) -> int:
    """FLOPs are those of a dot, since each row meets one group; where rows are summed, those of one group."""
    flops, named = _dot(instruction, computation), instruction.attributes
    summed = named.get("lhs_ragged_dims") == named.get("lhs_contracting_dims")
    return flops // instruction.shapes[0].dims[0] if summed else flops


def _library_matmul(instruction: Instruction, computation: Computation) -> int:
    """2 m n k of each batch entry: k = lhs elements / (m * batch), m * batch = result elements / n."""
    result, left, right = instruction.shapes[0], *(_operand(instruction, computation, i) for i in (0, 1))
    n = result.dims[-1] if len(right.dims) > 1 and result.dims else 1
    return 2 * left.num_elements * n


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """2 * batch * output features * input features * (window positions that meet real input).

    The TPU compiler writes every dot as a convolution, batch dimensions as padded and dilated
    window dimensions; counting the padding would multiply their FLOPs.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])
    assert labels, instruction.attributes["dim_labels"]
    source, kernel = (_operand(instruction, computation, i).dims for i in (0, 1))
    result = instruction.shapes[0].dims
    window = _window(instruction.attributes.get("window", ""))
    num_spatial = sum(label.isdigit() for label in labels[1])
    pairs = 1
    for d in range(num_spatial):
        at = str(d)
        pairs *= _positions(
            source[labels[1].index(at)], result[labels[3].index(at)], kernel[labels[2].index(at)], window, d
        )
    features = result[labels[3].index("f")] * kernel[labels[2].index("i")]
    return 2 * result[labels[3].index("b")] * features * pairs


def _window(text: str) -> dict[str, list[str]]:
    return {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-]+)", text)}


def _positions(size: int, num_outputs: int, num_taps: int, window: dict[str, list[str]], dim: int) -> int:
    """(output, tap) pairs along one dimension whose tap falls on an input element."""
    names = ("stride", "lhs_dilate", "rhs_dilate")
    stride, dilate, tap_dilate = (int(window[name][dim]) if name in window else 1 for name in names)
    low = int(window["pad"][dim].split("_")[0]) if "pad" in window else 0
    last = (size - 1) * dilate
    return sum(
        0 <= at <= last and at % dilate == 0
        for o in range(num_outputs)
        for at in range(o * stride - low, o * stride - low + num_taps * tap_dilate, tap_dilate)
    )
