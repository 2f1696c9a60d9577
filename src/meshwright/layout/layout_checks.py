"""Checks that a Layout fits a model and a batch; errors name layouts that fit."""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from math import gcd, inf

from meshwright.dtypes import number_type, types_for
from meshwright.errors import LayoutError, PlanError
from meshwright.layout.axes import AXES, KV_REPLICAS, TENSOR
from meshwright.layout.axes.expert import check_num_experts, expert_cut
from meshwright.layout.axes.fsdp import MOST_PADDING
from meshwright.layout.layout import Layout
from meshwright.layout.rules import Rules
from meshwright.layout.schedule import REMATS
from meshwright.layout.short import (
    clean_words,
    no_expert_owner,
    parted,
    read_words,
    whole_form,
    with_expert_owner,
)
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions, parameters
from meshwright.notation.array import Axes, ShardedArray, dividing_degrees
from meshwright.notation.mesh import Mesh
from meshwright.optimizers import OPTIMIZERS
from meshwright.units import divisors

# The first chunk may hold only the embedding, and the last only the head.
_CHUNKS_WITHOUT_LAYERS = 2
# Largest share of padding in a dimension, if a planner may pad it to a multiple of its shards.
_MOST_PADDING = {"V": 1.0, "D": MOST_PADDING, "Q": inf, "R": inf}

# Tables of the rules that split weights, and tables that split gradients.
_OF_WEIGHTS, _OF_GRADIENTS = ("stored", "used"), ("updated", "gradients")


def layout_for(config: ModelConfig, text: str, **defaults: object) -> Layout:
    """The layout written `text`; errors on experts suggest only degrees that fit this model.

    defaults: for words that the text leaves out. Whether other dimensions divide is left to `check_fits`.
    """
    check_experts(config, clean_words(defaults) | clean_words(read_words(text)))
    return Layout.parse(text, **defaults)


def with_microbatches(text: str, workload: Workload) -> list[str]:
    """The texts of a layout, one for each number of microbatches above 1 that a pipeline's step can have.

    Only `text` itself if it names their number, or has no pipeline. With one microbatch all stages but one
    are idle at any time, so that number is left out.
    """
    words = clean_words(read_words(text))
    if int(str(words.get("pipe", 1))) == 1 or "microbatches" in words:
        return [text]
    made = []
    with suppress(LayoutError):  # the caller parses the text, and reports its fault
        shards = Layout.parse(f"{text},microbatches={words['pipe']}").num_batch_shards
        for number in divisors(max(1, workload.num_sequences // shards))[1:]:
            with suppress(LayoutError):  # a schedule may need rounds of microbatches
                Layout.parse(numbered := f"{text},microbatches={number}")
                made.append(numbered)
    return made or [text]


def check_experts(config: ModelConfig, words: Mapping[str, object]) -> None:
    """Raise LayoutError if `expert` fits neither `config` nor the other words (cleaned).

    Every degree and layout that the message names fits the model.
    """
    degrees, _, _ = parted(words)
    form = whole_form(degrees)
    check_num_experts(config, form["expert"])
    if expert_cut(form, form["expert"]) is None:
        # Suggests more data ranks only if the layout then fits the model.
        check_fits(Layout.of(**with_expert_owner(form)), config, padded=True)
        raise LayoutError(no_expert_owner(form, config.moe.num_experts if config.moe else 1))


def check_fits(
    layout: Layout,
    config: ModelConfig,
    num_sequences: int | None = None,
    seq_len: int | None = None,
    *,
    padded: bool = False,
) -> None:
    """Raises LayoutError if dimensions of the model, the batch or the sequence do not divide.

    It also refuses a field of a part that the model lacks, such as experts. padded: V and D may be padded to
    a multiple, as a planner may assume and a run may not.
    """
    check_layout_fields(layout, config)
    check_stages(layout, config)
    check_weights(layout, config, padded=padded)
    check_batch(layout, num_sequences, seq_len)
    if layout.phase == "generate" and num_sequences is not None:
        check_cache(layout, config, num_sequences)


def check_weights(layout: Layout, config: ModelConfig, *, padded: bool) -> None:
    """Raises LayoutError where a dimension of a weight does not divide over its axes."""
    _check_divides(layout, config, _OF_WEIGHTS, padded=padded)


def check_updates(layout: Layout, config: ModelConfig) -> None:
    """Raises LayoutError where a gradient does not divide over what ZeRO 1 and 2 shard it over.

    Part of a run, not of a plan: what flattens its gradients before it shards them has no such limit.
    """
    _check_divides(layout, config, _OF_GRADIENTS, padded=False)


def check_stacks(layout: Layout, config: ModelConfig) -> None:
    """Raises LayoutError if the optimizer cannot update a part of the layers, and stages have parts."""
    if layout.stage_programs:
        OPTIMIZERS[layout.precision.optimizer].check_stages(config)


def _check_divides(layout: Layout, config: ModelConfig, tables: tuple[str, ...], *, padded: bool) -> None:
    splits = _splits(layout.rules, config, tables)
    for (dim, axes, _), (array, size) in splits.items():
        padding = -size % layout.mesh.size(axes)
        if padding > (_MOST_PADDING.get(dim, 0.0) * size if padded else 0):
            others = {
                letter: other
                for letter, over, other in splits
                if over == axes and not (padded and letter in _MOST_PADDING)
            }
            raise LayoutError(_does_not_divide(array, dim, axes, size, layout.mesh, others))


@lru_cache(maxsize=512)
def _splits(
    rules: Rules, config: ModelConfig, tables: tuple[str, ...]
) -> Mapping[tuple[str, Axes, int], tuple[ShardedArray, int]]:
    """Dimensions, the axes that a table splits them over, and their sizes, with an array of each."""
    arrays: dict[tuple[str, Axes, int], tuple[ShardedArray, int]] = {}
    for path, param in parameters(config).items():
        sizes, name = dimensions(config, path), path.rpartition("/")[2]
        for table in tables:
            array = getattr(rules, table).weight(name if table in _OF_WEIGHTS else f"d{name}", param.letters)
            for dim, axes in zip(array.dims, array.axes, strict=True):
                if axes:
                    arrays.setdefault((dim, axes, sizes[dim]), (array, sizes[dim]))
    return arrays


def check_batch(layout: Layout, num_sequences: int | None, seq_len: int | None) -> None:
    """Raises LayoutError where the positions or the sequences do not divide."""
    x = layout.activation("x", "BTD")
    splits = layout.mesh.size(x.axes_of("T"))
    if seq_len is not None and seq_len % splits:
        raise LayoutError(
            f"{x}: {seq_len} positions (T) do not divide over {splits}; "
            f"fits: {-(-seq_len // splits) * splits} positions"
        )
    shards = layout.num_batch_shards * layout.schedule.microbatches
    if num_sequences is not None and num_sequences % shards:
        fit = max(1, round(num_sequences / shards)) * shards
        degrees = [*(layout.mesh.size(axis) for axis in layout.batch_axes), layout.schedule.microbatches]
        raise LayoutError(
            f"{x}: {num_sequences} sequences (B) do not divide over "
            f"{'·'.join([*layout.batch_axes, 'microbatches'])} = {'·'.join(map(str, degrees))} = {shards}; "
            f"fits: {fit} sequences"
        )


def cached_array(layout: Layout, config: ModelConfig) -> ShardedArray:
    """The sharding of one layer's cache of keys, or of latents."""
    return layout.activation("latent", "BSR") if config.mla else layout.activation("k", "BSKH")


def cache_batch_axes(layout: Layout, config: ModelConfig) -> Axes:
    """The axes that split the sequences of a generate step anywhere: its cache has the most."""
    return cached_array(layout, config).axes_of("B")


def check_one_cache(layout: Layout, config: ModelConfig, option: str) -> None:
    """Raises PlanError where prefill and generation of this layout cannot be apart, as `option` asks."""
    if (shards := num_replicas(layout.at("generate"), config)) > 1:
        raise PlanError(
            f"{option} hands over pages of one cache, and {layout} splits its sequences over "
            f"{shards}; fits: a layout without data, fsdp, context and cache=batch"
        )


def num_replicas(layout: Layout, config: ModelConfig) -> int:
    """How many have slots and pages of their own: shards of the batch, and of the cache's sequences."""
    axes = cache_batch_axes(layout, config) if layout.phase == "generate" else layout.batch_axes
    return layout.mesh.size(axes)


def check_cache(layout: Layout, config: ModelConfig, num_sequences: int) -> None:
    """Raise LayoutError if the sequences do not divide over the axes of the cache's sequences."""
    cache = cached_array(layout, config)
    axes = cache.axes_of("B")
    if num_sequences % (shards := layout.mesh.size(axes)):
        raise LayoutError(
            f"{cache}: {num_sequences} sequences (B) do not divide over {'·'.join(axes)} = {shards}; "
            f"fits: {max(1, round(num_sequences / shards)) * shards} sequences"
        )


def remats_of(config: ModelConfig) -> tuple[str, ...]:
    """The remat policies that say something of this model: "latents" only of one that has them."""
    return tuple(remat for remat in REMATS if remat != "latents" or config.mla)


def check_layout_fields(layout: Layout, config: ModelConfig) -> None:
    """Raise LayoutError for a field that the model or the rest of the layout makes meaningless."""
    schedule, precision = layout.schedule, layout.precision
    scaled = [name for name in types_for("operands") if number_type(name).has_line_scales]
    if precision.matmul_scales and precision.matmul_dtype not in scaled:
        raise LayoutError(
            f"layout: matmul_scales = {precision.matmul_scales} with matmul_dtype = "
            f"{precision.operand_dtype}, which has no scales; "
            f"fits: matmul_dtype in {{{', '.join(scaled)}}}"
        )
    if precision.saved_dtype and precision.matmul_dtype != precision.saved_dtype:
        raise LayoutError(
            f"layout: saved_dtype = {precision.saved_dtype} with matmul_dtype = "
            f"{precision.operand_dtype}, whose operands are not made in it; "
            f"fits: matmul_dtype = {precision.saved_dtype}"
        )
    OPTIMIZERS[precision.optimizer].check_dtype(precision.optimizer_dtype)
    of_experts = {
        "grouped": "true" if schedule.grouped else None,
        "dispatch": schedule.dispatch if schedule.dispatch != "each" else None,
        "capacity": schedule.capacity,
    }
    for name, value in of_experts.items():
        if value is not None and config.moe is None:
            raise LayoutError(f"{config.name} has no experts (E) for {name} = {value}; leave out {name}")
    if schedule.remat not in remats_of(config):
        raise LayoutError(f"{config.name} has no latents (R) for remat = latents; fits: remat = matmuls")


def check_one_program(layout: Layout, who: str) -> None:
    """Raise LayoutError if a step is several programs; who: subject and verb of the message."""
    if layout.stage_programs:
        raise LayoutError(
            f"layout {layout}: {who} one program, and the stages of schedule = "
            f"{layout.schedule.pipeline} run programs of their own; fits: schedule = lanes"
        )


def check_stages(layout: Layout, config: ModelConfig) -> None:
    """Raises LayoutError where there are too few layers, or nothing for an axis to split."""
    layers, pipe, interleave = config.num_layers, layout.pipe, layout.schedule.interleave
    chunks = pipe * interleave
    if chunks > layers + _CHUNKS_WITHOUT_LAYERS:
        fit = (layers + _CHUNKS_WITHOUT_LAYERS) // pipe
        most = f"interleave up to {fit}" if pipe <= layers else f"pipe up to {layers}"
        raise LayoutError(
            f"{config.name}: {layers} layers (L) are fewer than the chunks of pipe·interleave = "
            f"{pipe}·{interleave} = {chunks}; fits: {most}"
        )
    for axis in AXES:
        axis.fit(config, layout.mesh, layout.table, layout.schedule)
    if config.draft_head:
        _check_draft_head(layout, config)


def _check_draft_head(layout: Layout, config: ModelConfig) -> None:
    """Raise LayoutError if the layout splits an array that a draft head reads whole."""
    if layout.pipe > 1:
        raise LayoutError(
            f"{config.name}: draft_head = {config.draft_head} reads the first embedding and the last hidden "
            f"state, which pipe = {layout.pipe} has on different stages; fits: pipe = 1"
        )
    if axes := layout.table.axes_of("D"):
        raise LayoutError(
            f"{config.name}: draft_head = {config.draft_head} joins two arrays over D, which is split over "
            f"{'·'.join(axes)} in activations; fits: D whole"
        )


_LETTER_NAMES = {
    "N": "query heads",
    "K": "KV heads",
    "H": "head dimensions",
    "F": "feed-forward",
    "V": "vocabulary",
    "W": "positions",
    "D": "model dimension",
    "L": "layers",
    "P": "dense layers",
    "Y": "layers that share keys and values",
    "X": "dense layers that share keys and values",
    "E": "experts",
    "M": "an expert's feed-forward",
    "U": "shared feed-forward",
    "Q": "rank of queries",
    "R": "rank of keys and values",
    "J": "head dimensions without positions",
    "A": "rotary head dimensions",
    "O": "head dimensions of values",
    "Z": "rank of adapters",
    "l": "layers with a state",
    "d": "dense layers with a state",
    "a": "blocks of attention",
    "b": "blocks with a state",
    "e": "blocks of experts",
    "f": "dense blocks",
    "g": "groups of heads of a state",
    "u": "heads of a state",
    "i": "channels of the convolution",
    "m": "elements of the experts' latent",
    "I": "layers of draft heads",
    "h": "elements of an embedding and a hidden state",
}


def _does_not_divide(
    array: ShardedArray, dim: str, axes: tuple[str, ...], size: int, mesh: Mesh, others: Mapping[str, int]
) -> str:
    """The message for a dimension that does not divide.

    others: the sizes of all dimensions over these axes, so that each degree that is named fits all of them.
    """
    axis, degree = "·".join(axes), mesh.size(axes)
    whole = array.replace(axes={dim: ()})
    common = gcd(size, *others.values())
    fits = ", ".join(map(str, dividing_degrees(common, common)))
    is_shared = dim == "K" and axes == (TENSOR.name,)
    shares_heads = is_shared and all(other % degree == 0 for letter, other in others.items() if letter != "K")
    copies = (
        f", or {axis}={size},{KV_REPLICAS.name}={degree // size}"
        if shares_heads and degree % size == 0
        else ""
    )
    return (
        f"{array}: {size} {_LETTER_NAMES[dim]} ({dim}) do not divide over {axis} = {degree}; "
        f"fits: {axis} in {{{fits}}}{copies}, or replicate: {whole}"
    )
