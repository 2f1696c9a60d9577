"""For reference/layouts.md: every word of the short form of a Layout, with its values; the schedules."""

from meshwright.layout.axes import AXES
from meshwright.layout.layout import Layout
from meshwright.layout.pipeline import SCHEDULES
from meshwright.layout.precision import FITS
from meshwright.layout.schedule import DISPATCHES, REMATS
from meshwright.layout.short import OPTIONS, WORDS

MEANINGS = {
    "data": "Groups of devices with the same weights, which take different sequences and sum gradients.",
    "fsdp": "Devices that share every weight, gather it before use and reduce-scatter its gradient (ZeRO-3).",
    "tensor": "Devices that split heads, feed-forward width and vocabulary of the same tokens.",
    "tensor2": "A second tensor axis, which splits the model dimension (2D tensor parallelism).",
    "context": "Devices that split each sequence by position.",
    "expert": "Devices that share out the experts of a mixture; cut out of the data ranks.",
    "pipe": "Stages of layers, one after another.",
    "kv_replicas": "Devices that share one KV head and split its queries: tensor parallelism past KV heads.",
    "zero": "What `data` shards: 1 the optimizer, 2 the gradients too, 3 the weights (that is `fsdp`).",
    "zero_context": "Whether weights are sharded over `context` as well.",
    "inner": "`fsdp`: its devices are neighbours, of one host; else those of `tensor`, or of `context`, are.",
    "context_method": "Keys and values are gathered or pass round a ring; or heads are split, not positions.",
    "sequence_parallel": "Whether activations between blocks are split by position over `tensor`.",
    "cache": "What `kv_replicas` does to the cache: copies, or a split by batch or by sequence.",
    "microbatches": "Parts of the batch that follow each other; gradients accumulate.",
    "schedule": "The order of forward and backward passes over the stages.",
    "interleave": "Chunks of layers a stage holds.",
    "remat": "What the backward pass recomputes: nothing, attention's scores, all but matmuls, every second "
    "matmul too, or the whole block.",
    "offload": "Whether saved activations wait in the host's memory.",
    "offload_optimizer": "Whether the optimizer's state and float32 weights wait in the host's memory.",
    "capacity": "The most tokens of an expert, in times its even share; without it, all that choose it.",
    "grouped": "Whether the devices of a group of experts gather its tokens, where else rows are exchanged.",
    "dispatch": "Whether each row crosses the network for itself, or those of one token for one node once.",
    "weights_dtype": "Stored weights; narrower than bf16 only in inference.",
    "compute_dtype": "Activations and gathers.",
    "matmul_dtype": "Operands of matmuls, where they differ from `compute_dtype`. Training has fp8 and int8, "
    "with scales; CPUs emulate fp8.",
    "matmul_scales": "What a scale of fp8 and int8 operands is of, in training: a row or column of a "
    "device's block, or a tile of 128 numbers of an activation and of 128 x 128 of a weight, as DeepSeek-V3 "
    "was trained. Plans price both alike.",
    "saved_dtype": "What products and gates read, as it is kept for the backward pass; planned alone.",
    "gradients_dtype": "Gradients as they are summed over devices and microbatches; by default the sums over "
    "devices are in `compute_dtype`, those over microbatches in `weights_dtype`.",
    "optimizer": "The rule that updates the weights.",
    "optimizer_dtype": "The optimizer's state, such as Adam's two moments.",
    "master_weights": "Whether a float32 copy lies beside the weights.",
    "kv_dtype": "The cache of keys and values in inference.",
}
_FREE = {"microbatches": "1, 2, ...", "interleave": "1, 2, ...", "capacity": "a number above 0, such as 1.25"}
_FLAGS = {"offload", "offload_optimizer", "grouped", "master_weights"}


def text() -> str:
    """A table of all words."""
    rows = [f"| `{word}` | {_values(word)} | {MEANINGS.get(word, '')} |" for word in WORDS]
    return "\n".join(["| word | values, the default first | meaning |", "|---|---|---|", *rows])


def schedules() -> str:
    """A table of the pipeline schedules."""
    rows = [f"| `{name}` | {one.words} | {'yes' if one.runs else 'no'} |" for name, one in SCHEDULES.items()]
    return "\n".join(["| `schedule=` | order of passes | `mw train` runs it |", "|---|---|---|", *rows])


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
