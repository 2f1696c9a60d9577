"""For reference/layouts.md: every word of the short form of a Layout, with its values; the schedules."""

from meshwright.dtypes import number_type, types_for
from meshwright.layout.axes import AXES
from meshwright.layout.layout import Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.precision import FITS
from meshwright.layout.schedule import DISPATCHES, REMATS
from meshwright.layout.short import OPTIONS, WORDS
from meshwright.optimizers import OPTIMIZERS

_SCALED = " and ".join(name for name in types_for("operands") if number_type(name).has_line_scales)
MEANINGS = {
    "data": "Data parallelism: groups of devices with the same weights take different sequences and sum "
    "gradients.",
    "fsdp": "Fully sharded data parallelism (ZeRO-3): weights are sharded, all-gathered before use, and "
    "their gradients reduce-scattered.",
    "tensor": "Tensor parallelism: devices split heads, feed-forward width and vocabulary for the same "
    "tokens.",
    "tensor2": "A second tensor axis, which splits the model dimension (2D tensor parallelism).",
    "context": "Context parallelism: devices split each sequence by position; in generation each has "
    "sequences of its own.",
    "expert": "Expert parallelism: experts are divided over these devices, which are part of the data ranks.",
    "expert_nodes": "The nodes on which the devices of an expert group lie, for `dispatch=once`; part of "
    "`expert`.",
    "fold": "Whether an expert group takes the devices of `tensor` and `context` first, which are near, so "
    "that its experts are whole (Megatron-Core's parallel folding).",
    "pipe": "Pipeline stages.",
    "kv_replicas": "Tensor parallelism beyond the number of KV heads: devices hold the same KV head and "
    "split its queries.",
    "zero": "What is sharded over `data`: 1 the optimizer's state, 2 the gradients too, 3 the weights too "
    "(as `fsdp`).",
    "zero_context": "Whether ZeRO also shards over `context`.",
    "inner": "`fsdp`: the devices of `fsdp` are neighbours, within one host; by default those of `tensor` or "
    "`context` are.",
    "context_method": "How attention gets its keys and values: all-gathered, round a ring, or by splitting "
    "heads (Ulysses).",
    "sequence_parallel": "Whether activations between blocks are split by position over `tensor`.",
    "cache": "How the cache is stored over `kv_replicas`: copied, split by batch, or split by position.",
    "microbatches": "Parts of the batch that run one after another; their gradients accumulate.",
    "schedule": "The order of forward and backward passes over the stages.",
    "interleave": "Chunks of layers per stage.",
    "remat": "What the backward pass recomputes: nothing, attention's scores, everything except matmuls, "
    "also every second matmul, or the whole layer.",
    "offload": "Whether saved activations are kept in the host's memory.",
    "offload_optimizer": "Whether the optimizer's state and float32 weights are kept in the host's memory.",
    "capacity": "The most tokens per expert, relative to an even share; by default no token is dropped.",
    "grouped": "Whether devices of an expert group all-gather its tokens instead of exchanging rows.",
    "dispatch": "Whether each row crosses the network by itself, or a token's rows for one node only once; "
    "`once` runs with `expert_nodes`.",
    "weights_dtype": "Dtype of stored weights; narrower than bf16 only in inference.",
    "experts_dtype": "Dtype of the weights of experts in inference, if not `weights_dtype`.",
    "tables_dtype": "Dtype of the embedding and the output projection in inference, if not `weights_dtype`.",
    "compute_dtype": "Dtype of activations and of gathered weights.",
    "matmul_dtype": "Dtype of matmul operands, if not `compute_dtype`. [Number types](#number-types) lists "
    "scales, and chips that emulate products. In inference `weights_dtype` must be the same.",
    "matmul_scales": f"The numbers of {_SCALED} operands that share a scale in training: a row or column of "
    "a device's block, or a tile (128 elements of an activation, 128 x 128 of a weight, as in DeepSeek-V3). "
    "Plans price both the same.",
    "saved_dtype": "Dtype in which inputs of matmuls and gates are kept for the backward pass in training, "
    "with scales as `matmul_scales` says; needs the same `matmul_dtype`. What attention makes stays as it "
    "is, since its own backward pass reads it.",
    "gradients_dtype": "Dtype in which gradients are summed over devices and microbatches; by default "
    "`compute_dtype` over devices and `weights_dtype` over microbatches.",
    "optimizer": "The optimizer. It keeps "
    + "; ".join(f"`{name}`: {one.words}" for name, one in OPTIMIZERS.items())
    + ".",
    "optimizer_dtype": "Dtype of the optimizer's state, such as Adam's two moments. Types of 8 bits have a "
    "float32 scale for each block of at most 128 numbers of a row; not with `optimizer=adafactor`.",
    "master_weights": "Whether there is a float32 copy of the weights.",
    "kv_dtype": "Dtype of the KV cache in inference.",
}
_FREE = {"microbatches": "1, 2, ...", "interleave": "1, 2, ...", "capacity": "a number above 0, such as 1.25"}
_FLAGS = {"offload", "offload_optimizer", "grouped", "master_weights"}


def text() -> str:
    """A table of all words."""
    rows = [f"| `{word}` | {_values(word)} | {MEANINGS.get(word, '')} |" for word in WORDS]
    return "\n".join(["| option | values, default first | meaning |", "|---|---|---|", *rows])


def schedules() -> str:
    """A table of the pipeline schedules."""
    rows = [
        f"| `{name}` | {one.words} | {'any number' if one.spmd else 'one'} |"
        for name, one in SCHEDULES.items()
    ]
    return "\n".join(["| `schedule=` | order of passes | runs on hosts |", "|---|---|---|", *rows])


def _values(word: str) -> str:
    plain = Layout.parse("data=1")
    if word in {axis.name for axis in AXES}:
        return "1, 2, ..."
    if word in OPTIONS:
        return _listed([value for value in OPTIONS[word].fits if value is not None])
    if word == "schedule":
        return _listed(
            [plain.schedule.pipeline, *(name for name in SCHEDULES if name != plain.schedule.pipeline)]
        )
    if word == "remat":
        return _listed(REMATS)
    if word == "dispatch":
        return _listed(DISPATCHES)
    if word in _FLAGS:
        return _listed([False, True])
    return _FREE[word] if word in _FREE else _listed(FITS.get(word, ()))


def _listed(values: object) -> str:
    assert isinstance(values, list | tuple | dict)
    return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
