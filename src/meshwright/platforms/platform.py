"""The record of a platform: its kernels, the forms of its programs, and the behaviour of its compiler."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.dtypes import number_type

Options = Mapping[str, bool | int | str]
# Queries of one row of a prompt.
PROMPT_ROWS = 64


@dataclass(frozen=True)
class Attention:
    """Properties of a model's attention under a layout that kernels check.

    head_dim: width of queries and keys. num_kv_heads: KV heads of one device. split: mesh axes that divide
    the positions of queries (flash kernels) or of the cache (paged kernels). piece: consecutive positions of
    a device. ring: keys pass from device to device. indexed: an indexer chooses the keys of each query.
    chunk: positions of a layer's chunks, if shorter than the sequence. queries: per row of a paged kernel.
    capability: compute capability of an NVIDIA GPU.
    """

    head_dim: int
    compute_dtype: str
    kv_dtype: str
    num_kv_heads: int = 1
    alibi: bool = False
    sinks: bool = False
    softcap: bool = False
    latents: bool = False
    indexed: bool = False
    windows: bool = False
    chunk: int | None = None
    split: tuple[str, ...] = ()
    piece: int = 1
    ring: bool = False
    queries: int = 1
    capability: float | None = None


class ExpertBlocks(NamedTuple):
    """The sizes of blocks of experts' rows.

    share: number of blocks that an expert's even share of rows fills at most; more only if blocks have the
    maximum number of rows. A block reads its expert's weights from memory in the time of multiplying 160 rows
    (v5p) to 560 (v6e), so blocks are as large as possible. whole_tokens: in generation with
    up to this number of tokens on a device, every expert has one block with a row for each token. copied:
    whether a loop over blocks copies weights out of their stack before a product, and a product's result
    before it is added to the weight's gradient.
    """

    share: int = 2
    whole_tokens: int = 0
    copied: bool = False


_TWO_BLOCKS = ExpertBlocks()


@dataclass(frozen=True)
class Kernel:
    """An attention kernel, by its name in `nn/attention/`."""

    name: str
    # Reasons to refuse an attention, in the order that they are reported; True if one holds.
    refusals: Callable[[Attention], Mapping[str, bool]]
    documents: bool = False  # takes several documents packed into one sequence
    whole_blocks: bool = False  # computes all of a block of keys that a window touches
    wide_values: bool = False  # pads values to the width of keys
    head_tile: int = 1  # pads heads to a multiple of this
    joined_heads: bool = False  # reads a cache with the key and the value of a head next to each other

    def why_not(self, attention: Attention) -> str | None:
        """The first reason why the kernel refuses; None if it takes this attention."""
        return next((reason for reason, holds in self.refusals(attention).items() if holds), None)


@dataclass(frozen=True)
class Compiler:
    """XLA for a platform: how it is reached, and how its programs differ from others."""

    lowering: str  # JAX's name in lowering_platforms
    title: str = ""  # in sentences
    packages: tuple[str, ...] = ()  # one of them contains it; none: jaxlib does
    extra: str = ""  # extra of meshwright that installs it
    # Bytes of machine code: of a server's step without its layers, of each layer, and of a program that
    # chooses tokens. None if they are not known.
    step_code_bytes: float | None = None
    layer_code_bytes: float = 0.0
    sampler_code_bytes: float | None = None

    # Compiling without chips.
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    exclusive: bool = False  # one process of a machine at a time

    # Options beyond the defaults: of every training step, of steps with several microbatches in addition, and
    # the changes that `mw tune` tries.
    train_options: Options = field(default_factory=dict)
    microbatch_options: Options = field(default_factory=dict)
    tuned_options: Sequence[Options] = ()

    # Its text: marks that no other compiler writes in a layout, or in a backend_config.
    layout_mark: re.Pattern[str] | None = None
    config_mark: re.Pattern[str] | None = None
    rooflines: bool = False  # it prints no seconds; audits use a roofline of the chip's ratings

    # Its programs.
    reduce_scatter: bool = True  # otherwise an all-reduce; each device keeps a slice
    asynchronous: bool = True  # collectives run during compute
    widens: bool = False  # computes and sends bf16 as f32
    as_traced: bool = False  # stores the values that JAX saves for the backward pass, and keeps all names
    peak_only: bool = False  # the temporaries follow from its peak, which others give without them
    # Accepted differences from a plan: of memory in all, and the share of arithmetic without a planned name.
    total_tolerance: float = 0.35  # of arrays other than state, whose number depends on the schedule
    unplanned_share: float = 1.0


@dataclass(frozen=True, eq=False)
class Platform:
    """A kind of device, by JAX's name of its backend. `links`: the kinds of its links, inner ones first."""

    name: str
    plural: str  # in sentences
    network: str  # form of the network: "torus", "switch" or "host"
    links: tuple[str, ...]
    compiler: Compiler

    # Devices.
    resources: Mapping[str, str] = field(default_factory=dict)  # words for bounds of a step, if particular
    host_memory: bool = False  # device memory is the host's
    driver_reports: bool = False  # `hbm_usable_bytes` is a share of the driver's figure
    engine: str = "meshwright"  # the usual serving engine, a record of engines/
    virtual: bool = False  # devices are shares of one host, counted by XLA_FLAGS
    in_turn: bool = False  # a program must end before the next begins
    torus_mesh: bool = False  # a mesh of all devices follows their torus

    # Processes and clusters.
    jax_settings: Mapping[str, str] = field(default_factory=dict)  # of JAX, for several processes
    device_per_process: bool = False  # a launcher may give each process one device of its node
    self_joining: bool = False  # on Kubernetes JAX finds the other processes by itself
    slurm: bool = False
    node_labels: Sequence[str] = ()  # of Kubernetes nodes: the accelerator, then the topology, if any
    node_resource: str = ""  # name of a chip in a pod's limits
    ray_resources: Callable[[int], dict[str, object]] = lambda num_devices: {"num_cpus": 1}

    # Arrays.
    lanes: int = 1  # columns of the tiles in which arrays are stored

    # Number types.
    dtype: str = "bf16"  # default of weights and products
    compute_dtypes: tuple[str, ...] | None = ("bf16",)  # searched by default; None: a chip's list
    cache_as_bits: bool = False  # a bf16 cache is stored as uint16, the bits of its numbers
    packs_int4: bool = False  # two numbers in a byte
    fuses_casts: bool = False  # operands of products are cast as they are read
    scaled_matmul: bool = False  # cuDNN multiplies blocks with scales, on chips with units for their type

    # Attention.
    flash: Kernel | None = None  # over whole sequences
    paged: Kernel | None = None  # over a cache of pages
    prompt_rows: int = PROMPT_ROWS
    page_by_page: bool = False  # without tables and without programs for whole prompts
    fused_softmax: bool = False  # scores of attention without a flash kernel have the type of activations
    ordered_caches: bool = False  # a layer's new pages are written before the next layer begins
    ordered_states: bool = False  # a layer's states are read and written before the next layer begins
    ordered_gathers: bool = False  # in inference, a layer's weights are gathered after the layer before

    # Products.
    wide_products: bool = False  # a product that is rounded to bf16 is computed in f32
    pairs_rows: bool = False  # a single row of bf16 or int8 is multiplied as two
    joins_weights: bool = False  # weights that read the same input are stored as one array
    solve_blocks: bool = False  # a batched triangular solve waits for threads of the pool that runs it
    tile_rows: int = 128  # of products whose rows do not depend on the batch
    native: bool = False  # has the extension in C++
    head_tokens: int | None = None  # tokens of a device in a chunk of the head; None: no chunks
    wide_logits: bool = False  # keeps logits in float32, too, if they are capped or made of narrow operands
    caps_apart: bool = False  # the gradient of capped logits is an array of its own, which both products read
    one_sampler: bool = False  # one program chooses tokens, for rows with any options
    joins_inputs: bool = False  # a step of the server takes its small arrays as one

    # Experts.
    expert_blocks: ExpertBlocks = _TWO_BLOCKS
    ragged_exchange: bool = True  # only rows that exist are exchanged
    unnamed_exchange: bool = False  # XLA gives its instruction for such an exchange no name
    # Arrays that an exchange or a loop over blocks writes into are allocated, and not filled with zeros.
    unfilled: bool = False

    # Steps.
    # A layer's weights are gathered during the layer before, and the loop leaves out one layer.
    gathers_ahead: bool = False
    head_waits: bool = True  # the head's gradient may be delayed until the layers' backward passes are done
    # A reduce-scatter over a whole slice compiles to an all-reduce, from which each reader takes its shard.
    whole_sums: bool = False
    early_recompute: bool = False  # a stack of a single layer is recomputed before its backward pass
    hides_offload: bool = False  # transfers to the host's memory are hidden, so that a search offers them
    lanes_offload: bool = True  # runs offload=true with schedule=lanes

    def emulates(self, dtype: str) -> bool:
        """Whether programs multiply a type in a wider one, on chips without units for it."""
        return self.name in number_type(dtype).emulated_on

    def served_operands(self, weights_dtype: str) -> str | None:
        """The type of operands in inference with weights of a type; None for compute_dtype."""
        record = number_type(weights_dtype)
        return record.served_operands if self.name in record.operands_on else None
