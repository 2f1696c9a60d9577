"""The share of a chip's ratings that the steps of a program reach."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.dtypes import KNOWN, dtype_bytes

# Metadata of figures that no chip's file states.
UNREAD = {"unread": True}


def _share(default: float) -> Any:
    return field(default=default, metadata={"most": 1.0})


def _shares(keys: tuple[str, ...] = ()) -> Any:
    return field(default_factory=dict, hash=False, metadata={"keys": keys, "most": 1.0})


@dataclass(frozen=True)
class StepEfficiency:
    """The share of a chip's ratings that a step of training or inference reaches; defaults are ideal.

    matmul: by dtype, the share of the dense peak that a large matmul reaches. matmul_half_outputs: number of
    elements in the result of a product that reaches half of that, since its last tiles leave processors idle.
    experts: the share of the matmul rate for products of several experts. They take the time of the fullest
    expert's, and small groups of tokens leave tiles partly empty.
    attention: the share of the compute type's peak that a flash kernel reaches if the head dimension fills
    the matrix units and the sequence is long. attention_half_keys: number of keys a query for half of that
    share, since short sequences leave blocks and processors partly empty.
    memory: the share of the HBM bandwidth that memory-bound work reaches. elementwise: the share of that
    bandwidth for norms, activations and casts, whose bytes are counted as if perfectly fused (operands and
    results once). memory_by_dtype: a further factor by dtype. (XLA:CPU widens bf16 to float32 and back, so
    half the bytes save no time.)
    links: by kind of link, the share of its bandwidth that the step's collectives reach. network_falloff:
    exponent of the fall of the network's share with the number of domains (`Switch.falloff`).
    network_latency: factor on the network's latency.
    roofline: the share of the shorter of an operation's two times (FLOPs, bytes) that passes under the
    longer: 1 (the roofline) if memory is read ahead of matrix units, 0 if the same cores load and multiply,
    so that products with few rows take the sum of both.
    overlap: the share of a transfer's time that simultaneous compute hides; the transfer takes the rest from
    that compute.
    waiting: the share of the time of critical transfers (activations of tensor parallelism) that delays the
    next matmul. The rest is hidden if matmuls start on the blocks that have arrived. exchanging: the same for
    exchanges of tokens between experts.
    prefetch: the share of kernels' fixed costs, and of waits for transfers, that is used to read the next
    products' weights, as far as these products wait for memory. (XLA:TPU reads weights ahead; a GPU's kernels
    begin after the kernels before them have ended.)
    scatter_passes: passes over the links in a reduce-scatter over several dimensions of a torus: 1 if an
    algorithm uses the links of all dimensions, 2 if the compiler writes an all-reduce instead (XLA:TPU).
    packed: by dtype of products, the share of the HBM bandwidth for weights that are multiplied by several
    rows: XLA:CPU packs them into blocks first, each time.
    cache, widened: a further share of the HBM bandwidth for attention over a cache, and for products whose
    weights are stored narrower than they are multiplied.
    kernel_seconds: fixed time of one kernel. experts_seconds: of a product of several experts, whose tokens
    are sorted and gathered. collective_seconds: of one collective, in addition to the price of its bytes and
    hops. exchange_seconds: least time of an exchange of tokens between experts, whose kernels wait for all
    devices. launch_seconds: of one compiled program.
    host_seconds, host_collective_seconds: the host's time to launch an operation and a collective, if it
    launches them one by one. No pass is faster, however small its operations.
    host_node_seconds: loss of a critical collective for each domain beyond the first, since hosts that launch
    operations one by one do not arrive together.
    host_stage_seconds: time that each rank of such a collective adds to its launch, if stages of a pipeline
    are in several domains.
    host_flush_seconds: time of an allocator to release all of its free blocks and to allocate them again,
    which it does at least once a microbatch if memory runs short.
    host_request_seconds, host_step_seconds, host_token_seconds: time of HTTP if the cores that serve it are
    the devices' too: for a request before it is scheduled, for a step, and for each of its tokens.
    padding: time of a padding row in a server's step, relative to a row with a sequence.
    unfused_norms: whether the steps of an RMS norm are separate kernels.
    grouped, adds_shared: `grouped_experts` and `adds_shared` of a serving engine.
    gathers_first: whether all weights that ZeRO 1 or 2 updated are gathered before the next forward pass
    begins; otherwise each is gathered before its first use. sends_by_chunks: whether stages of several chunks
    gather and sum the weights of one chunk while others compute.
    broadcasts: whether each rank of an optimizer's shard group broadcasts its updated weights, one rank after
    the other, instead of an all-gather of all.
    whole_sums: whether gradients are summed whole under ZeRO 1, and not scattered to the optimizer's shards.
    is_roofline: whether a pass takes the longer of its products and its links, as in closed forms: no product
    waits for a transfer, and work between products is fused with them (`Chip.roofline`).
    slowdown: measured step over priced step, of a run that anchors the prices (mw plan --anchor).
    sources: the source of each figure, by key.
    taken_from: the catalog's chip that these figures are from, if a chip's own file has no [step].
    """

    matmul: Mapping[str, float] = _shares(KNOWN)
    matmul_half_outputs: float = 0.0
    experts: float = _share(1.0)
    attention: float = _share(1.0)
    attention_half_keys: float = 0.0
    memory: float = _share(1.0)
    elementwise: float = _share(1.0)
    memory_by_dtype: Mapping[str, float] = _shares(KNOWN)
    links: Mapping[str, float] = _shares()
    network_falloff: float = 0.0
    network_latency: float = 1.0
    roofline: float = _share(1.0)
    overlap: float = _share(1.0)
    waiting: float = _share(1.0)
    exchanging: float = _share(1.0)
    prefetch: float = _share(0.0)
    scatter_passes: int = 1
    kernel_seconds: float = 0.0
    experts_seconds: float = 0.0
    collective_seconds: float = 0.0
    exchange_seconds: float = field(default=0.0, metadata=UNREAD)
    packed: Mapping[str, float] = _shares(KNOWN)
    cache: float = _share(1.0)
    widened: float = _share(1.0)
    launch_seconds: float = 0.0
    host_seconds: float = 0.0
    host_collective_seconds: float = 0.0
    host_node_seconds: float = 0.0
    host_stage_seconds: float = 0.0
    host_flush_seconds: float = 0.0
    host_request_seconds: float = 0.0
    host_step_seconds: float = 0.0
    host_token_seconds: float = 0.0
    padding: float = _share(1.0)
    grouped: bool = field(default=False, metadata=UNREAD)
    adds_shared: bool = field(default=False, metadata=UNREAD)
    whole_sums: bool = field(default=False, metadata=UNREAD)
    gathers_first: bool = field(default=False, metadata=UNREAD)
    sends_by_chunks: bool = field(default=False, metadata=UNREAD)
    broadcasts: bool = field(default=False, metadata=UNREAD)
    unfused_norms: bool = field(default=False, metadata=UNREAD)
    is_roofline: bool = field(default=False, metadata=UNREAD)
    slowdown: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    taken_from: str | None = field(default=None, metadata=UNREAD)

    def matmul_share(self, dtype: str) -> float:
        """The share of the peak in `dtype`; for a dtype not listed, the next wider one's or the widest's.

        >>> StepEfficiency(matmul={"bf16": 0.75, "fp8": 0.5}).matmul_share("fp4")
        0.5
        """
        if dtype in self.matmul or not self.matmul:
            return self.matmul.get(dtype, 1.0)
        wider = [known for known in self.matmul if dtype_bytes(known) >= dtype_bytes(dtype)]
        return self.matmul[min(wider, key=dtype_bytes) if wider else max(self.matmul, key=dtype_bytes)]

    def memory_share(self, dtype: str) -> float:
        """The share of the HBM bandwidth that memory-bound work in `dtype` reaches."""
        return self.memory * self.memory_by_dtype.get(dtype, 1.0)
