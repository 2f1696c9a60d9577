"""The share of a chip's ratings that a step of a program reaches."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.units import dtype_bytes


@dataclass(frozen=True)
class StepEfficiency:
    """The share of a chip's ratings that a step reaches, of training or of inference; defaults are ideal.

    matmul: by dtype, the share of the dense peak that a large matmul reaches. matmul_half_outputs: a product
    with so many elements in its result reaches half of that: its last tiles leave processors idle.
    experts: the share of that rate which the matmuls of several experts reach together: they last as long as
    the fullest expert's, and few tokens leave tiles part empty.
    attention: the share of the compute type's peak that a flash kernel reaches where the head dimension
    fills the matrix units and the sequence is long. attention_half_keys: with so many keys a query it reaches
    half of that, since short sequences leave blocks and processors part empty.
    memory: the share of the HBM bandwidth that memory-bound work reaches. elementwise: the share of that
    which norms, activations and casts reach; their bytes are counted as if perfectly fused (operands and
    results once), which no compiler does. memory_by_dtype: a further factor by dtype. (XLA:CPU widens bf16
    to float32 and back, so half the bytes save no time.)
    links: by kind of link, the share of its bandwidth that the step's collectives reach. network_falloff: how
    that of the cards falls with the domains that a collective joins (`Switch.falloff`). network_latency: a
    factor on the latency of its steps between domains.
    roofline: the share of the shorter time of an operation, of its FLOPs or of its bytes, that passes
    under the longer: 1 (the roofline) where memory is read ahead of matrix units, 0 where the same cores load
    and multiply, so that products of few rows take the sum.
    overlap: the share of a transfer's time that is hidden where as much compute runs beside it; the rest is
    what the transfer takes from that compute.
    waiting: the share of the time of critical transfers (activations of tensor parallelism) for which the
    next matmul waits; the rest is hidden where matmuls start on the blocks that have arrived.
    exchanging: the share of the time of exchanges of tokens between experts for which the next product
    waits.
    prefetch: the share of the time of kernels' fixed costs and of waiting for transfers in which weights of
    the next products are read, as far as these wait for memory (XLA:TPU reads them ahead; a GPU's kernels
    begin when those before them have ended).
    scatter_passes: passes over the links of a reduce-scatter over several dimensions of a torus: 1 where one
    exists that uses all of these links, 2 where the compiler writes an all-reduce instead (XLA:TPU).
    packed: by dtype of products, the share of the HBM bandwidth that weights reach where they are multiplied
    by several rows: XLA:CPU packs them into blocks first, each time.
    cache, widened: a further share of the HBM bandwidth, which attention over a cache reaches, and products
    whose weights are stored narrower than they are multiplied.
    kernel_seconds: fixed time of one kernel. experts_seconds: of a product of several experts, whose tokens
    are sorted and gathered. collective_seconds: of one collective, beside the price of its
    bytes and hops. launch_seconds: fixed time of one compiled program.
    host_seconds, host_collective_seconds: what the host takes to launch an operation and a collective, where
    it launches them one by one: no pass is faster, however little its operations have to do.
    host_node_seconds: what a collective that the next operation waits for loses for every domain beyond the
    first, since hosts that launch operations one by one do not arrive together.
    host_stage_seconds: what each rank of such a collective adds to the hosts' time to launch it, where stages
    of a pipeline lie in several domains.
    host_flush_seconds: what an allocator takes to give all of its free blocks back and to ask for them anew,
    as it does where memory runs short, at least once a microbatch.
    host_request_seconds, host_step_seconds, host_token_seconds: what HTTP takes where the cores that serve it
    are the devices' too: of a request, before it is scheduled, of a step, and of each of its tokens.
    padding: of a row of a server's step that nobody holds, the share of the time of one that somebody does.
    unfused_norms: whether the steps of an RMS norm are kernels of their own.
    gathers_first: whether weights that ZeRO 1 or 2 updated are all gathered before the next forward pass
    begins; else each is gathered ahead of its first use.
    whole_sums: whether gradients are summed whole under ZeRO 1, and not scattered to the optimizer's shards.
    slowdown: measured step over priced step, of a run that anchors the prices (mw plan --anchor).
    sources: where each figure comes from, by key.
    taken_from: the catalog's chip whose figures these are, where a chip's own file has no [step].
    """

    matmul: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_half_outputs: float = 0.0
    experts: float = 1.0
    attention: float = 1.0
    attention_half_keys: float = 0.0
    memory: float = 1.0
    elementwise: float = 1.0
    memory_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    links: Mapping[str, float] = field(default_factory=dict, hash=False)
    network_falloff: float = 0.0
    network_latency: float = 1.0
    roofline: float = 1.0
    overlap: float = 1.0
    waiting: float = 1.0
    exchanging: float = 1.0
    prefetch: float = 0.0
    scatter_passes: int = 1
    kernel_seconds: float = 0.0
    experts_seconds: float = 0.0
    collective_seconds: float = 0.0
    packed: Mapping[str, float] = field(default_factory=dict, hash=False)
    cache: float = 1.0
    widened: float = 1.0
    launch_seconds: float = 0.0
    host_seconds: float = 0.0
    host_collective_seconds: float = 0.0
    host_node_seconds: float = 0.0
    host_stage_seconds: float = 0.0
    host_flush_seconds: float = 0.0
    host_request_seconds: float = 0.0
    host_step_seconds: float = 0.0
    host_token_seconds: float = 0.0
    padding: float = 1.0
    whole_sums: bool = False
    gathers_first: bool = False
    unfused_norms: bool = False
    slowdown: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    taken_from: str | None = None

    def matmul_share(self, dtype: str) -> float:
        """The share of the peak in `dtype`; of a dtype not listed that of the next wider, or the widest.

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
