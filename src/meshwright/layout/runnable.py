"""Features that run here, for the search, `mw train` and `mw serve`.

Every layout can be planned. This file lists the features that nn/ does not run yet.
"""

from meshwright.dtypes import Phase, number_type, types_for
from meshwright.errors import LayoutError, ModelError
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware
from meshwright.layout.layout import Layout
from meshwright.layout.layout_checks import (
    check_layout_fields,
    check_stacks,
    check_stages,
    check_updates,
    check_weights,
)
from meshwright.layout.moves.attention import uses_ring
from meshwright.layout.moves.experts import row_routing
from meshwright.models.config import ModelConfig
from meshwright.platforms.platform import Platform


def why_not(
    config: ModelConfig, layout: Layout, phase: str = "train", *, hardware: Hardware | None = None
) -> str | None:
    """Why this model under this layout does not run in this phase on a machine, or any; None if it does."""
    return (
        model_lacks(config)
        or _indexer_lacks(config, layout, phase)
        or _streams_lack(config, layout, phase)
        or layout_lacks(layout, phase)
        or (machine_lacks(layout, hardware) if hardware else None)
        or _does_not_divide(config, layout)
    )


def model_lacks(config: ModelConfig) -> str | None:
    """The part of the model that nn/ does not run yet."""
    mixer = config.state_mixer
    return config.planned_only or (mixer.title if mixer and not mixer.runs else None)


def check_model_runs(config: ModelConfig, layout: Layout) -> None:
    """Raises ModelError naming the part of the model that does not run yet, perhaps only in this layout."""
    part = model_lacks(config) or _indexer_lacks(config, layout, layout.phase)
    if part := part or _streams_lack(config, layout, layout.phase):
        raise ModelError(f"{config.name}: {part} can be planned, not yet run")


def _indexer_lacks(config: ModelConfig, layout: Layout, phase: str) -> str | None:
    """The use of an indexer that nn/ does not run yet: a device scores all keys of its queries."""
    if config.indexer is None:
        return None
    if layout.table.attending is not None:
        return "an indexer with heads exchanged for positions (context_method=ulysses)"
    if layout.pipe > 1 and any(config.at(layer.kind.variant).shares_choice for layer in config.layers):
        return "layers that read the choice of an earlier layer's indexer, in a pipeline"
    if layout.pipe > 1 and layout.schedule.is_spmd and config.variants:
        return f"layers that differ in their indexer, in a pipeline with schedule={layout.schedule.pipeline}"
    if phase == "train":
        return None
    generating = layout.at("generate")
    if split := generating.table.axes_of("S"):
        return f"an indexer with the cache's positions split over {'·'.join(split)}"
    of_heads = generating.activation("q", "BTNH").axes_of("N")
    if config.indexer.block and set(generating.activation("k", "BKSH").axes_of("B")) & set(of_heads):
        return "an indexer that chooses blocks, with the cache split by sequences (cache=batch)"
    return None


def _streams_lack(config: ModelConfig, layout: Layout, phase: str) -> str | None:
    """Why nn/ does not yet run a model with residual streams, compressed keys or a table of experts."""
    parts = {
        "streams of the residual": config.streams is not None,
        "compressed keys": any(variant.compressed for variant in config.each_variant),
        "experts by a table of tokens": config.is_hashed,
    }
    if (part := next((part for part, has in parts.items() if has), None)) is None:
        return None
    if parts["compressed keys"] and config.num_kv_heads > 1:
        return f"compressed keys of {config.num_kv_heads} KV heads"
    if phase != "train":
        return _entries_lack(layout)
    if layout.pipe > 1 and layout.schedule.is_spmd:
        return f"{part} in a pipeline with schedule={layout.schedule.pipeline}"
    if uses_ring(layout) or layout.table.attending is not None:
        return f"{part} with context_method={'ring' if uses_ring(layout) else 'ulysses'}"
    if axes := layout.activation("x", "BTD").axes_of("D"):
        return f"{part} with D split over {'·'.join(axes)}"
    return None


def _entries_lack(layout: Layout) -> str | None:
    """The layout of a cache of compressed keys that generation does not run yet."""
    if axes := layout.rules.prompt_axes:
        return f"compressed keys of prompts that {'·'.join(axes)} splits"
    generating = layout.at("generate")
    if axes := generating.table.axes_of("S"):
        return f"compressed keys with the cache's positions split over {'·'.join(axes)}"
    of_heads = generating.activation("q", "BTNH").axes_of("N")
    if set(generating.activation("k", "BKSH").axes_of("B")) & set(of_heads):
        return "compressed keys with the cache split by sequences (cache=batch)"
    return None


def check_runs(layout: Layout, phase: str = "train") -> None:
    """Raises LayoutError naming the first thing that does not run yet."""
    if feature := layout_lacks(layout, phase):
        raise LayoutError(
            f"layout {layout}: {feature} can be planned, not yet run; mw plan train ranks layouts that run"
            if phase == "train"
            else f"layout {layout}: inference splits over data, fsdp, expert, context and tensor; leave out "
            f"{feature}"
        )


def layout_lacks(layout: Layout, phase: str = "train") -> str | None:
    """The first word of the layout that nn/ does not run yet, in this phase."""
    if phase != "train" and layout.pipe > 1:
        return f"pipe={layout.pipe}"
    if phase != "train" and (word := _tokens_split(layout)):
        return word
    schedule, precision, is_inference = layout.schedule, layout.precision, phase != "train"
    served: Phase = "serve" if is_inference else "train"
    plain = (None, precision.compute_dtype)
    features = {
        # A program has to know which devices are of a node.
        f"dispatch={schedule.dispatch} without expert_nodes": schedule.dispatch == "once"
        and bool(row_routing(layout).exchanged)
        and not row_routing(layout).nodes,
        "expert over context": "context" in layout.table.axes_of("E"),
        "offload=true": schedule.offload and is_inference,
        "offload_optimizer=true": schedule.offload_optimizer and is_inference,
        f"matmul_dtype={precision.matmul_dtype}": precision.matmul_dtype
        not in (*plain, *types_for("operands", served)),
        # Products are narrow if both operands are. The type of weights determines the type of activations.
        f"matmul_dtype={precision.matmul_dtype} with weights_dtype={precision.weights_dtype}": is_inference
        and precision.matmul_dtype in types_for("operands", served)
        and number_type(precision.weights_dtype).served_operands != precision.matmul_dtype,
        f"matmul_scales={precision.matmul_scales}": precision.matmul_scales is not None and is_inference,
        f"saved_dtype={precision.saved_dtype}": precision.saved_dtype is not None and is_inference,
        f"weights_dtype={precision.weights_dtype}": precision.weights_dtype
        not in (*types_for("weights", served), *types_for("frozen weights", served)),
        f"experts_dtype={precision.experts_dtype}": precision.experts_dtype
        not in (None, *types_for("weights", served)),
        f"weights_dtype={precision.weights_dtype} with pipe={layout.pipe}": layout.pipe > 1
        and number_type(precision.weights_dtype).scales is not None,
        f"kv_dtype={precision.kv_dtype}": precision.kv_dtype not in (*plain, *types_for("cache", served)),
    }
    return next((feature for feature, used in features.items() if used), None)


def emulated(layout: Layout, platform: Platform, chip: Chip | None = None) -> str | None:
    """The note for products that the platform emulates; None if `chip` has units for their type."""
    dtype = layout.precision.matmul_dtype
    if dtype is None or (chip and chip.has_units(dtype)) or not platform.emulates(dtype):
        return None
    chips = platform.plural if platform.virtual else "these chips"
    dtype_of_products = layout.precision.compute_dtype
    how = f"operands are rounded to it and multiplied in {dtype_of_products}, which saves no time"
    return f"{chips} have no products of {dtype}: {how}"


def machine_lacks(layout: Layout, hardware: Hardware) -> str | None:
    """The feature of the layout that does not run on `hardware`, or None."""
    precision, platform = layout.precision, hardware.chip.platform
    weights = number_type(precision.weights_dtype)
    has_two_types = weights.name != precision.matmul_dtype == weights.served_operands
    if has_two_types and platform.served_operands(weights.name) is None:
        # No kernel there multiplies the two types: activations would be rounded, and then widened again.
        return f"matmul_dtype={weights.operands} with weights_dtype={weights.name} on {hardware.chip.name}"
    if layout.spmd_stages and layout.schedule.offload and not platform.lanes_offload:
        return f"offload=true with schedule=lanes on {hardware.chip.name}"
    return hosts_lack(layout, hardware.num_hosts)


def hosts_lack(layout: Layout, num_hosts: int) -> str | None:
    """The feature that does not run on `num_hosts` hosts, each with its own process, or None."""
    if layout.stage_programs and num_hosts > 1:
        return f"schedule={layout.schedule.pipeline} on {num_hosts} hosts"
    return None


def has_static_rows(hardware: Hardware, layout: Layout) -> bool:
    """Whether the rows of experts have a fixed capacity, as in our programs of static shapes.

    Layouts without a program here, such as separate stage programs on several hosts, are priced like other
    software: with the actual number of rows.
    """
    return hardware.software.static_rows and hosts_lack(layout, hardware.num_hosts) is None


def _tokens_split(layout: Layout) -> str | None:
    """The option or rule that splits a sequence's tokens in a way that inference cannot run."""
    prefill, generate = (layout.at(phase).table for phase in ("prefill", "generate"))
    if set(prefill.axes_of("T")) - set(layout.rules.prompt_axes):
        return "sequence_parallel=true"
    if axes := generate.position_axes:
        return f"{', '.join(axes)} of T in [layout.rules.generate], since a token has no positions to split"
    return None


def _does_not_divide(config: ModelConfig, layout: Layout) -> str | None:
    try:
        check_layout_fields(layout, config)
        check_stages(layout, config)
        check_weights(layout, config, padded=False)
        check_updates(layout, config)
        check_stacks(layout, config)
    except LayoutError as error:
        return str(error).partition(";")[0]
    return None
