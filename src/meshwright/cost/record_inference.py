"""The graph of a forward pass with a cache: prefill of B prompts, or the next tokens of B sequences.

A batch may be an array of batches: all figures that depend on it are then arrays too.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from meshwright.cost.cached_ops import BY_KERNEL, CachedOps, CacheReads, attention_form
from meshwright.cost.graph import Graph, Node
from meshwright.cost.record import symbolic_weights
from meshwright.cost.recorder import FLASH, Lowering, PassShape
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import why_no_paged
from meshwright.layout.runnable import has_static_rows
from meshwright.layout.workload import InferencePhase
from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.count import caches as caches_of
from meshwright.models.count import positions_of_arrays
from meshwright.notation.collective import reshard
from meshwright.platforms.platform import ExpertBlocks
from meshwright.units import whole


def record_pass(
    config: ModelConfig,
    layout: Layout,
    shape: PassShape,
    reads: CacheReads = BY_KERNEL,
    lowering: Lowering = FLASH,
) -> Graph:
    """The graph of one step: logits[B, V] after each sequence's last token, whole over V.

    With `reads.verified`, they are after each of its T tokens.
    """
    ops = CachedOps(config, layout, shape, reads, lowering)
    tokens, places = ops.tokens("tokens"), Places(ops.tokens("positions"))
    weights = symbolic_weights(config, ops)
    if config.draft_head == "alone":
        x = transformer.enter_draft(config, ops, weights, tokens, ops.activation_value("x", "BTD"))
        x, _ = transformer.through(config, ops, weights, x, places, None, config.layers)
        logits = transformer.leave(config, ops, weights, x, tokens)
    else:
        logits, _ = transformer.logits(config, ops, weights, tokens, places, indices=tokens)
    whole_logits = logits.array.replace(axes={"V": ()})
    steps = reshard(logits.array, whole_logits)
    gathered = ops.transfers("logits", steps, "logits", logits.dtype, critical=True)
    result = ops.value(whole_logits, "f32")
    ops.add(Node("logits", "move", (logits,), (result,), forward_transfers=gathered))
    # If whole prompts are read from the cache, it holds them regardless of the window.
    reads_prompts = shape.query_len == shape.key_len and reads.form == "pages"
    caches = tuple(
        value
        for cache, count in Counter(caches_of(config)).items()
        for value in ops.cached(
            count,
            positions_of_arrays(config, cache, shape.key_len, is_whole=reads_prompts),
            cache.variant,
        ).values()
    )
    caches += tuple(ops.all_states())
    return replace(ops.graph(), caches=caches, directions=("forward",))


def record_inference(
    config: ModelConfig, hardware: Hardware, layout: Layout, shape: PassShape, *, longest: int | None = None
) -> Graph:
    """The graph of one step in the software of the hardware.

    longest: length of padded prompts; None for the length in `shape`.
    """
    queries, positions = shape.query_len, shape.key_len
    form = attention_form(config, hardware, layout, queries, positions, longest or positions)
    has_kernel = form == "kernel" and layout.phase == "prefill" and hardware.software.is_ours
    lowering = Lowering(
        kernel=hardware.chip.platform.flash if has_kernel else None,
        static_blocks=_static_blocks(hardware) if has_static_rows(hardware, layout) else None,
        solves_by_products=hardware.chip.platform.solve_blocks,
        loops_over_chunks=_loops_over_chunks(hardware),
        adds_shared=_adds_shared(hardware),
    )
    reads = CacheReads(
        form,
        rows=hardware.chip.platform.prompt_rows,
        copied_lanes=_copied_lanes(config, hardware, layout),
        verified=queries > 1 and layout.phase == "generate",
    )
    return record_pass(config, layout, shape, reads, lowering)


def _static_blocks(hardware: Hardware) -> ExpertBlocks | None:
    """`Lowering.static_blocks` of the hardware; None for a roofline, which has no padding rows."""
    chip = hardware.chip
    if chip.step.is_roofline:
        return None
    # A kernel that multiplies all experts reads their weights in place; only loops copy them first.
    has_loop = chip.inference is None or not chip.inference.grouped
    return chip.platform.expert_blocks._replace(copied=chip.platform.expert_blocks.copied and has_loop)


def _copied_lanes(config: ModelConfig, hardware: Hardware, layout: Layout) -> int:
    """Columns of a tile if generation by `mw serve` gathers each layer's pages into a copy; otherwise 0.

    It copies on accelerators without a kernel that reads pages. On CPUs it reads the pages one by one.
    """
    platform, is_roofline = hardware.chip.platform, hardware.chip.step.is_roofline
    if layout.phase != "generate" or not hardware.software.is_ours or is_roofline or platform.page_by_page:
        return 0
    return platform.lanes if why_no_paged(platform, config, layout) else 0


def _loops_over_chunks(hardware: Hardware) -> bool:
    """`Lowering.loops_over_chunks` of the hardware."""
    return hardware.software.is_ours and not hardware.chip.step.is_roofline


def _adds_shared(hardware: Hardware) -> bool:
    """Whether the hardware's engine adds shared experts before the all-reduce (`Lowering.adds_shared`)."""
    inference = hardware.chip.inference
    return inference is not None and inference.adds_shared


def alike_of(hardware: Hardware, phase: InferencePhase) -> tuple[object, ...]:
    """The properties of machines that determine a recorded pass in this phase (`attention_form`)."""
    chip, is_ours = hardware.chip, hardware.software.is_ours
    experts = hardware.software.static_rows and _static_blocks(hardware), _adds_shared(hardware)
    if phase == "generate":
        return is_ours and chip.kind, *experts
    return chip.kind, chip.compute_capability, is_ours, *experts, _loops_over_chunks(hardware)


def cache_bytes(
    config: ModelConfig, layout: Layout, num_sequences: Any, context: int, num_state_entries: Any = None
) -> Any:
    """Bytes on one chip of the caches of `num_sequences` sequences of `context` positions.

    num_state_entries: states of all replicas, with copies; None: one for each sequence.
    """
    ops = CachedOps(config, layout, PassShape(num_sequences, 1, context))
    caches = (
        value.bytes_per_device
        for cache, count in Counter(caches_of(config)).items()
        for value in ops.cached(count, positions_of_arrays(config, cache, context), cache.variant).values()
    )
    entries = num_sequences if num_state_entries is None else num_state_entries
    of_states = CachedOps(config, layout, PassShape(entries, 1, context))
    states = (value.bytes_per_device for value in of_states.all_states())
    return whole((sum(caches) + sum(states)) / layout.pipe)
