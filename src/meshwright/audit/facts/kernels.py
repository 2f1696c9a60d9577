"""FLOPs of attention kernels, which are custom calls: what of the scores they compute, from the program.

Splash attention (TPU) is told which blocks of keys each block of queries visits by a constant; cuDNN's
call (GPU) carries the name of its mask and its window.
"""

import re
from typing import NamedTuple

from meshwright.audit.hlo.parse import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import TracedValue, resolve

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_CUDNN = "__cudnn$fmhaSoftmax"


class _Products(NamedTuple):
    """How many products a kernel makes over the head dimension of queries, and of values."""

    queries: int
    values: int


# Forward q . k and p . v. Backward the scores again; dP = dO . v; dV, dK and dQ.
_FORWARD, _BACKWARD = _Products(1, 1), _Products(3, 2)
_SPLASH_PRODUCTS = {"fwd": _FORWARD, "dq": _Products(2, 1), "dkv": _Products(2, 2)}


def is_attention_kernel(instruction: Instruction) -> bool:
    """Whether a custom call is an attention kernel that this module knows."""
    return bool(_splash_pass(instruction)) or _is_cudnn(instruction)


def attention_flops(program: Program, call: TracedValue) -> int | None:
    """FLOPs of one run of an attention kernel; None where the program does not say what it skips."""
    flops = _cudnn if _is_cudnn(call.instruction) else _splash
    return flops(program, call)


def _splash_pass(instruction: Instruction) -> str:
    """Which of its passes a kernel of splash attention is: fwd, dq or dkv; "" of others."""
    target = instruction.attributes.get("custom_call_target", "")
    found = _SPLASH.search(instruction.op_name) if target == '"tpu_custom_call"' else None
    return found[1] if found else ""


def _splash(program: Program, call: TracedValue) -> int | None:
    """Operands: where to read next and which blocks to visit [heads or 1, rows, columns]; then q, k, v.

    q[batch, N, T, H], without batch if there is none. A block is left out where its number is 0. The one
    backward kernel, which is dkv with more to do, gives a dQ [batch, columns, N, T, H] of each column.
    """
    which = _splash_pass(call.instruction)
    mask = resolve(program, call.operand(1)).instruction
    numbers = re.findall(r"\d+", mask.literal)
    sizes = _block_sizes(call.instruction)
    if mask.opcode != "constant" or len(numbers) != mask.shapes[0].num_elements or not sizes:
        return None
    q, _, v = [shape for shape in _operands(call) if not shape.dtype.startswith("s")][:3]
    suffix = "" if which == "fwd" else f"_{which}"
    visited = sum(number != "0" for number in numbers) / mask.shapes[0].dims[0]
    one_head = visited * sizes[f"block_q{suffix}"] * sizes[f"block_kv{suffix}"]
    scores = round(one_head * q.num_elements / (q.dims[-2] * q.dims[-1]))
    makes_dq = any(len(result.dims) > len(q.dims) for result in call.instruction.shapes)
    products = _BACKWARD if which == "dkv" and makes_dq else _SPLASH_PRODUCTS[which]
    return 2 * scores * (products.queries * q.dims[-1] + products.values * v.dims[-1])


def _block_sizes(instruction: Instruction) -> dict[str, int]:
    """Positions of a block of queries and of keys, as the kernel notes them."""
    notes = instruction.attributes.get("frontend_attributes", "").replace("\\", "")
    return {name: int(size) for name, size in re.findall(r'"(block_\w+)": (\d+)', notes)}


def _is_cudnn(instruction: Instruction) -> bool:
    return instruction.attributes.get("custom_call_target", "").strip('"').startswith(_CUDNN)


def _cudnn(program: Program, call: TracedValue) -> int | None:
    """Operands q[B, T, N, H], k and v[B, S, K, H]; the call notes the shape [B, N, T, S] of the scores."""
    notes = call.instruction.attributes.get("backend_config", "")
    shape = re.search(r'"intermediate_tensor_shape":\s*{.*?"dimensions":\s*\[([^\]]*)\]', notes)
    mask = re.search(r'"mask_type":\s*"(\w+)"', notes)
    if not shape or not mask or mask[1] not in ("CAUSAL", "NO_MASK"):
        return None
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", shape[1]))
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', notes)
    seen = int(window[1]) if window and int(window[1]) else keys
    pairs = queries * keys if mask[1] == "NO_MASK" else sum(min(t + 1, seen) for t in range(queries))
    q, _, v = _operands(call)[:3]
    products = _BACKWARD if "Backward" in call.instruction.attributes["custom_call_target"] else _FORWARD
    return 2 * batch * heads * pairs * (products.queries * q.dims[-1] + products.values * v.dims[-1])


def _operands(call: TracedValue) -> list[ArrayShape]:
    instructions = call.place.computation.instructions
    return [instructions[name].shapes[0] for name in call.instruction.operands]
