"""Whether a Layout fits a model and a batch; what would, where it does not."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.errors import LayoutError
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions, parameters
from meshwright.notation.array import ShardedArray, dividing_degrees
from meshwright.notation.mesh import Mesh

if TYPE_CHECKING:
    from meshwright.layout.layout import Layout

# The first chunk may hold the embedding alone, and the last the head.
_CHUNKS_WITHOUT_LAYERS = 2


def check_weights(layout: "Layout", config: ModelConfig, *, pad_vocabulary: bool) -> None:
    """Raises LayoutError where a dimension of a weight does not divide over its axes."""
    sizes = dimensions(config)
    for path, param in parameters(config).items():
        _check_divides(layout, layout.weight(path.rpartition("/")[2], param.letters), sizes, pad_vocabulary)


def check_updates(layout: "Layout", config: ModelConfig) -> None:
    """Raises LayoutError where a gradient does not divide over what ZeRO 1 and 2 shard it over.

    Part of a run, not of a plan: what flattens its gradients before it shards them has no such limit.
    """
    sizes = dimensions(config)
    for path, param in parameters(config).items():
        name = path.rpartition("/")[2]
        _check_divides(layout, layout.gradient(f"d{name}", param.letters), sizes, pad_vocabulary=False)


def _check_divides(
    layout: "Layout", array: ShardedArray, sizes: Mapping[str, int], pad_vocabulary: bool
) -> None:
    for dim, axes in zip(array.dims, array.axes, strict=True):
        if sizes[dim] % layout.mesh.size(axes) and not (dim == "V" and pad_vocabulary):
            raise LayoutError(_does_not_divide(array, dim, axes, sizes[dim], layout.mesh))


def check_batch(layout: "Layout", num_sequences: int | None, seq_len: int | None) -> None:
    """Raises LayoutError where the positions or the sequences do not divide."""
    splits = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    if seq_len is not None and seq_len % splits:
        raise LayoutError(
            f"{layout.activation('x', 'BTD')}: {seq_len} positions (T) do not divide over {splits}; "
            f"fits: {-(-seq_len // splits) * splits} positions"
        )
    shards = layout.num_batch_shards * layout.microbatches
    if num_sequences is not None and num_sequences % shards:
        fit = max(1, round(num_sequences / shards)) * shards
        raise LayoutError(
            f"x[B_{{data,fsdp}}, T, D]: {num_sequences} sequences (B) do not divide over "
            f"data·fsdp·microbatches = {layout.data}·{layout.fsdp}·{layout.microbatches} = {shards}; "
            f"fits: {fit} sequences"
        )


def check_stages(layout: "Layout", config: ModelConfig) -> None:
    """Raises LayoutError where there are too few layers, or experts that do not divide."""
    layers, chunks = config.num_layers, layout.pipe * layout.interleave
    if chunks > layers + _CHUNKS_WITHOUT_LAYERS:
        fit = (layers + _CHUNKS_WITHOUT_LAYERS) // layout.pipe
        most = f"interleave up to {fit}" if layout.pipe <= layers else f"pipe up to {layers}"
        raise LayoutError(
            f"{config.name}: {layers} layers (L) are fewer than the chunks of pipe·interleave = "
            f"{layout.pipe}·{layout.interleave} = {chunks}; fits: {most}"
        )
    experts = dimensions(config).get("E", 1)
    if experts == 1 and layout.expert > 1:
        raise LayoutError(
            f"{config.name} has no experts (E) for expert = {layout.expert}; fits: expert in {{1}}"
        )
    if experts % layout.expert:
        fits = ", ".join(map(str, dividing_degrees(experts, experts)))
        raise LayoutError(
            f"{config.name}: {experts} experts (E) do not divide over expert = {layout.expert}; "
            f"fits: expert in {{{fits}}}"
        )


_LETTER_NAMES = {
    "N": "query heads",
    "K": "KV heads",
    "F": "feed-forward",
    "V": "vocabulary",
    "D": "model dimension",
    "E": "experts",
    "M": "an expert's feed-forward",
    "U": "shared feed-forward",
}


def _does_not_divide(array: ShardedArray, dim: str, axes: tuple[str, ...], size: int, mesh: Mesh) -> str:
    axis = "·".join(axes)
    whole = array.replace(axes={dim: ()})
    fits = ", ".join(map(str, dividing_degrees(size, size)))
    return (
        f"{array}: {size} {_LETTER_NAMES[dim]} ({dim}) do not divide over {axis} = {mesh.size(axes)}; "
        f"fits: {axis} in {{{fits}}}, or replicate: {whole}"
    )
