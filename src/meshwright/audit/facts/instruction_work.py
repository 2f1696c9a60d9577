"""The work of one instruction of a compiled program: its FLOPs, and its seconds of compute.

The FLOPs of a product follow from its shapes. The FLOPs of an attention kernel, a custom call, follow from
the part of the scores that it computes: a constant states the blocks of keys that each block of queries of
splash attention (TPU) visits, and cuDNN's call (GPU) has the name of its mask and its window. The lengths of
sequences in a cache of pages depend on data: paged attention counts all positions of its tables.

XLA for TPU prints its estimate of the cycles of each fusion:

    seconds = estimated_cycles / clock

The time of kernels, and of all instructions of XLA for GPU, is a roofline at the rates of whole steps (the
chip's `[step]`):

    seconds = max(FLOPs / FLOPs per second, bytes / HBM bytes per second) + seconds of a kernel
"""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from meshwright.audit.hlo.read import ArrayShape, Computation, Instruction, Program
from meshwright.audit.hlo.trace import COPIES, SLICES, TracedValue, called_by, resolve
from meshwright.dtypes import NUMBER_TYPES, NumberType, number_type, of_hlo
from meshwright.hardware.chip import Chip
from meshwright.nn.kernel_names import ALLOCATE, DECODE_PAGES, JOIN_PARTS

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_RAGGED = "ragged_paged_attention_kernel"
_PAGES_OF = re.compile(rf"{DECODE_PAGES}_(\d+)")
_TRITON = '"__gpu$xla.gpu.triton"'
_CUDNN = "__cudnn$fmhaSoftmax"


class _Products(NamedTuple):
    """Products of a kernel over the head dimensions of queries and of values."""

    queries: int
    values: int


# Forward q . k and p . v. Backward the scores again; dP = dO . v; dV, dK and dQ.
_FORWARD, _BACKWARD = _Products(1, 1), _Products(3, 2)
_SPLASH_PRODUCTS = {"fwd": _FORWARD, "dq": _Products(2, 1), "dkv": _Products(2, 2)}


def is_attention_kernel(instruction: Instruction) -> bool:
    """Whether a custom call is a known attention kernel."""
    return bool(_splash_pass(instruction)) or _is_cudnn(instruction) or _reads_pages(instruction)


def attention_flops(program: Program, call: TracedValue) -> int | None:
    """FLOPs of one run of an attention kernel; None if the program does not state its mask."""
    if _reads_pages(call.instruction):
        return _Pages.of(call).flops
    flops = _cudnn if _is_cudnn(call.instruction) else _splash
    return flops(program, call)


def _is_of_tpu(instruction: Instruction) -> bool:
    return instruction.attributes.get("custom_call_target", "") == '"tpu_custom_call"'


def _reads_pages(instruction: Instruction) -> bool:
    """Whether it is a kernel over a cache of pages, on a TPU or a GPU."""
    return _is_ragged(instruction) or _is_triton(instruction, DECODE_PAGES)


def joins_parts(instruction: Instruction) -> bool:
    """Whether it is the kernel that joins parts of attention over pages on a GPU, without matrix products."""
    return _is_triton(instruction, JOIN_PARTS)


def only_allocates(instruction: Instruction) -> bool:
    """Whether it is the kernel that allocates its result on a TPU, and does nothing."""
    return _is_of_tpu(instruction) and f"/{ALLOCATE}/" in instruction.op_name


def _is_triton(instruction: Instruction, name: str) -> bool:
    return instruction.attributes.get("custom_call_target", "") == _TRITON and name in instruction.op_name


def _is_ragged(instruction: Instruction) -> bool:
    return _is_of_tpu(instruction) and _RAGGED in instruction.op_name


class _Pages(NamedTuple):
    """FLOPs and bytes of a kernel over pages, with rows of the length of their tables."""

    flops: int
    num_bytes: int

    @classmethod
    def of(cls, call: TracedValue) -> "_Pages":
        """FLOPs and bytes from the shapes of the operands.

        On TPUs lengths[R], tables[R, P], three of integers, then q[tokens, N, H] and kv[B, S, 2K, H]. On GPUs
        q[R, K, G, H], k[B K S, H], v of the same shape, scales [B K S] of both if they are narrow, tables
        [R, P] and positions; the kernel's name has the size of a page.
        """
        given = _kernel_operands(call)
        if _is_ragged(call.instruction):
            tables, q, pool = given[1], given[-2], given[-1]
            size, of_a_key = pool.dims[1], pool.num_bytes // prod(pool.dims[:2])
        else:
            tables, q, pools = given[-2], given[0], given[1:-2]
            named = _PAGES_OF.search(call.instruction.op_name)
            assert named, call.instruction.op_name
            size = int(named[1])
            of_a_key = q.dims[1] * sum(pool.num_bytes // pool.dims[0] for pool in pools)
        keys = tables.dims[1] * size
        read = tables.dims[0] * keys * of_a_key
        return cls(4 * keys * q.num_elements, read + 2 * q.num_bytes)


def _splash_pass(instruction: Instruction) -> str:
    """The pass of a splash attention kernel: fwd, dq or dkv; "" for other instructions."""
    kernel = _SPLASH.search(instruction.op_name) if _is_of_tpu(instruction) else None
    return kernel[1] if kernel else ""


def _splash(program: Program, call: TracedValue) -> int | None:
    """FLOPs from the shapes and masks of the operands.

    Operands: where to read next and which blocks to visit [heads or 1, rows, columns]; then q, k, v. q[batch,
    N, T, H], without batch if there is none. A block with number 0 is skipped. The single backward kernel,
    which is dkv with more work, returns a dQ [batch, columns, N, T, H] of each column. If devices have
    queries of different positions, each takes its part of all numbers, and the mean counts.
    """
    which = _splash_pass(call.instruction)
    mask = resolve(program, call.operand(1), COPIES | SLICES).instruction
    numbers = re.findall(r"\d+", mask.literal)
    sizes = _block_sizes(call.instruction)
    if mask.opcode != "constant" or len(numbers) != mask.shapes[0].num_elements or not sizes:
        return None
    q, _, v = [shape for shape in _kernel_operands(call) if not shape.dtype.startswith("s")][:3]
    suffix = "" if which == "fwd" else f"_{which}"
    num_devices = len(numbers) / call.operand(1).instruction.shapes[0].num_elements
    visited = sum(number != "0" for number in numbers) / mask.shapes[0].dims[0] / num_devices
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
    """FLOPs from operands q[B, T, N, H], k and v[B, S, K, H].

    The call notes the shape [B, N, T, S] of the scores.
    """
    notes = call.instruction.attributes.get("backend_config", "")
    shape = re.search(r'"intermediate_tensor_shape":\s*{.*?"dimensions":\s*\[([^\]]*)\]', notes)
    mask = re.search(r'"mask_type":\s*"(\w+)"', notes)
    if not shape or not mask or mask[1] not in ("CAUSAL", "NO_MASK"):
        return None
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", shape[1]))
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', notes)
    seen = int(window[1]) if window and int(window[1]) else keys
    pairs = queries * keys if mask[1] == "NO_MASK" else sum(min(t + 1, seen) for t in range(queries))
    q, _, v = _kernel_operands(call)[:3]
    products = _BACKWARD if "Backward" in call.instruction.attributes["custom_call_target"] else _FORWARD
    return 2 * batch * heads * pairs * (products.queries * q.dims[-1] + products.values * v.dims[-1])


class KernelHeads(NamedTuple):
    """Numbers of query heads and of KV heads that an attention kernel reads on a device.

    bytes_per_head: bytes of the keys and values of one KV head.
    """

    queries: int
    keys: int
    bytes_per_head: int


def kernel_heads(call: TracedValue) -> KernelHeads | None:
    """The heads of a kernel over whole sequences (cuDNN's or splash); None for other instructions."""
    if _is_cudnn(call.instruction):
        q, k, v = _kernel_operands(call)[:3]
        heads_dim = -2
    elif _splash_pass(call.instruction):
        q, k, v = [shape for shape in _kernel_operands(call) if not shape.dtype.startswith("s")][:3]
        heads_dim = -3
    else:
        return None
    num_kv_heads = k.dims[heads_dim]
    return KernelHeads(q.dims[heads_dim], num_kv_heads, (k.num_bytes + v.num_bytes) // num_kv_heads)


def _kernel_operands(call: TracedValue) -> list[ArrayShape]:
    instructions = call.place.computation.instructions
    return [instructions[name].shapes[0] for name in call.instruction.operands]


MATMUL_TARGETS = ("__onednn$matmul", "__cublas$gemm", "__cublas$lt$matmul", "__cudnn$blockScaledDot")


def multiplies(instruction: Instruction, computation: Computation) -> bool:
    """Whether an instruction is a matrix product or a kernel of several."""
    return is_attention_kernel(instruction) or flops_of(instruction, computation) > 0


def flops_of(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of one instruction; 0 if it is not a matrix product."""
    if instruction.opcode == "dot":
        return _dot(instruction, computation)
    if instruction.opcode == "ragged-dot":
        return _ragged_dot(instruction, computation)
    if instruction.opcode == "convolution":
        return _convolution(instruction, computation)
    return _library_matmul(instruction, computation) if is_library_matmul(instruction) else 0


def is_library_matmul(instruction: Instruction) -> bool:
    """Whether a custom call is a matrix product with FLOPs that follow from its shapes."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return instruction.opcode == "custom-call" and target.startswith(MATMUL_TARGETS)


def _operand(instruction: Instruction, computation: Computation, index: int) -> ArrayShape:
    return computation.instructions[instruction.operands[index]].shapes[0]


def _dot(instruction: Instruction, computation: Computation) -> int:
    """2 * elements of the result * product of the contracting dimensions."""
    left = _operand(instruction, computation, 0)
    contracting = instruction.numbers("lhs_contracting_dims")
    return 2 * instruction.shapes[0].num_elements * prod(left.dims[d] for d in contracting)


def _ragged_dot(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of a dot, since each row is in one group; of one group if rows are summed."""
    flops, named = _dot(instruction, computation), instruction.attributes
    summed = named.get("lhs_ragged_dims") == named.get("lhs_contracting_dims")
    return flops // instruction.shapes[0].dims[0] if summed else flops


def _library_matmul(instruction: Instruction, computation: Computation) -> int:
    """2 m n k of each batch entry: k = lhs elements / (m * batch), m * batch = result elements / n."""
    result, left, right = instruction.shapes[0], *(_operand(instruction, computation, i) for i in (0, 1))
    n = result.dims[-1] if len(right.dims) > 1 and result.dims else 1
    return 2 * left.num_elements * n


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """2 * batch * output features * input features * (window positions on real input).

    The TPU compiler writes every dot as a convolution, with batch dimensions as padded and dilated window
    dimensions; counting the padding would multiply their FLOPs.
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
    """(output, tap) pairs along one dimension with the tap on an input element."""
    names = ("stride", "lhs_dilate", "rhs_dilate")
    stride, dilate, tap_dilate = (int(window[name][dim]) if name in window else 1 for name in names)
    low = int(window["pad"][dim].split("_")[0]) if "pad" in window else 0
    last = (size - 1) * dilate
    return sum(
        0 <= at <= last and at % dilate == 0
        for o in range(num_outputs)
        for at in range(o * stride - low, o * stride - low + num_taps * tap_dilate, tap_dilate)
    )


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# XLA's number for "unknown".
_NO_CYCLES = 2**62
# Opcodes without time: names, tuples, and calls whose bodies are counted.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "add-dependency", "while", "conditional", "call", "copy-start",
    "copy-done", "slice-start", "slice-done", "async-start", "async-update", "async-done", "send",
    "send-done", "recv", "recv-done",
})  # fmt: skip


def has_cycles(program: Program) -> bool:
    """Whether the compiler prints estimates: XLA for TPU does."""
    instructions = (one for c in program.computations.values() for one in c.instructions.values())
    return any(_CYCLES.search(one.attributes.get("backend_config", "")) for one in instructions)


class HostCopy(NamedTuple):
    """A copy between the memories of the device and its host."""

    num_bytes: int
    to_host: bool


# Opcodes that copy an array or a part of one, themselves or as the fusion or asynchronous call they run.
COPIERS = (
    "copy", "copy-start", "fusion", "fusion-start", "async-start", "dynamic-slice", "dynamic-update-slice",
)  # fmt: skip


def host_copy(program: Program, value: TracedValue) -> HostCopy | None:
    """The copy that an instruction makes to the host's memory or from it; None for other instructions.

    If a slice is written into an array of the host, the slice counts, not the array.
    """
    instruction = value.instruction
    if instruction.opcode not in COPIERS:
        return None
    operands = _operands(instruction, value.place.computation)
    called = called_by(program, instruction)
    body = called[0] if called else None
    root = body.result if body else instruction
    if not root.shapes:
        return None
    result, to_host = root.shapes[0], root.shapes[0].on_host
    if not to_host and not any(shape.on_host for shape in operands):
        return None
    if root.opcode in _UPDATES:
        at = root.operands[_UPDATES[root.opcode]]
        result = (body or value.place.computation).instructions[at].shapes[0]
    elif to_host and all(shape.on_host for shape in operands if shape.dims):
        return None
    return HostCopy(result.num_bytes, to_host)


class HostCopySeconds(NamedTuple):
    """Seconds of a copy to the host's memory or from it."""

    seconds: float
    to_host: bool


class InstructionSeconds:
    """Seconds of one program's instructions on one chip; 0 if unknown."""

    def __init__(self, program: Program, chip: Chip) -> None:
        self.program, self.chip = program, chip
        self.clock = chip.clock_hertz if has_cycles(program) else None

    @property
    def is_known(self) -> bool:
        """Whether the time is known: from cycles and the clock, or from the chip's ratings."""
        has_roofline = self.chip.platform.compiler.rooflines and not has_cycles(self.program)
        return self.clock is not None or has_roofline

    def seconds(self, value: TracedValue) -> float:
        """The time of one run of an instruction, not of a collective or a loop."""
        instruction = value.instruction
        if instruction.opcode in _FREE:
            return 0.0
        if is_attention_kernel(instruction):
            flops = attention_flops(self.program, value) or 0
            head = max((shape.dims[-1] for shape in instruction.shapes if len(shape.dims) > 2), default=128)
            computing = flops / self.chip.attention_flops_per_second("bf16", head)
            read = _Pages.of(value).num_bytes if _reads_pages(instruction) else 0
            reading = read / self.chip.memory_bytes_per_second("bf16")
            return max(computing, reading) + self.chip.step.kernel_seconds
        if self.clock is not None:
            cycles = _CYCLES.search(instruction.attributes.get("backend_config", ""))
            return int(cycles[1]) / self.clock if cycles and int(cycles[1]) < _NO_CYCLES else 0.0
        return self._roofline(value)

    def crossing(self, value: TracedValue) -> HostCopySeconds | None:
        """The copy that an instruction makes to the host's memory or from it; None for other instructions."""
        copy = host_copy(self.program, value)
        return copy and HostCopySeconds(copy.num_bytes / self.chip.host_link_bytes_per_second, copy.to_host)

    def _roofline(self, value: TracedValue) -> float:
        instruction, computation = value.instruction, value.place.computation
        called = called_by(self.program, instruction)
        inside = [(one, c) for c in called for one in c.instructions.values()]
        computing = sum(self._product_seconds(*one) for one in (*inside, (instruction, computation)))
        num_bytes = _touched(instruction, computation, called)
        reading = num_bytes / self.chip.memory_bytes_per_second("bf16")
        return max(computing, reading) + self.chip.step.kernel_seconds

    def _product_seconds(self, instruction: Instruction, computation: Computation) -> float:
        """Seconds of a matrix product at the rate of its operands' type; 0 for other instructions."""
        flops = flops_of(instruction, computation)
        if not flops:
            return 0.0
        dtypes = [of_hlo(shape.dtype) for shape in _operands(instruction, computation)[:2]]
        known = [number_type(name) for name in dtypes if name in NUMBER_TYPES]
        bits = max((one.bits for one in known), default=0)
        # e5m2 has no products with itself, but a unit of fp8 takes it as one operand.
        widest = [one for one in known if one.bits == bits and self._multiplies(one)]
        rates = [self.chip.matmul_flops_per_second(one.name) for one in widest]
        return flops / max(rates, default=self.chip.matmul_flops_per_second("f32"))

    def _multiplies(self, number: NumberType) -> bool:
        """Whether the chip has a matmul rate for this type, or for one that it widens to; int32 has none."""
        units = self.chip.flops_per_second
        return number.name in units or any(number.widens_to(number_type(name)) for name in units)


def _operands(instruction: Instruction, computation: Computation) -> list[ArrayShape]:
    return [shape for name in instruction.operands for shape in computation.instructions[name].shapes]


def _touched(instruction: Instruction, computation: Computation, called: list[Computation]) -> int:
    """Bytes that an instruction reads and writes; of a sliced array only the slice counts."""
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


# Opcodes that write a part of their first operand in place, with the number of the part's operand.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SLICES = ("dynamic-slice", "slice", "gather")


def _read(fused: Computation, parameter: Instruction) -> int:
    """Bytes that a fusion reads of one of its operands: all, or slices if it only slices and updates it."""
    users = list(_users(fused, parameter))
    if not users or not all(user.opcode in (*_SLICES, *_UPDATES) and at == 0 for user, at in users):
        return sum(shape.num_bytes for shape in parameter.shapes)
    return sum(shape.num_bytes for user, _ in users if user.opcode in _SLICES for shape in user.shapes)


def _users(fused: Computation, instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """The readers of an instruction past bitcasts, each with its operand number."""
    for user in fused.users[instruction.name]:
        if user.opcode == "bitcast":
            yield from _users(fused, user)
        else:
            yield user, user.operands.index(instruction.name)
