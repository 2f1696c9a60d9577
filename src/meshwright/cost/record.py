"""The graphs of a training step's forward pass, as the software of the hardware runs it."""

from dataclasses import replace
from math import prod
from typing import Any

from meshwright.cost.graph import Graph, Segment
from meshwright.cost.ops.symbolic import SymbolicOps
from meshwright.cost.recorder import FLASH, Lowering, MeshSizes, PassShape
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import lacks_flash
from meshwright.layout.runnable import has_static_rows
from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.models.parameters import parameters
from meshwright.models.transformer import Ahead
from meshwright.notation.mesh import Degrees
from meshwright.units import whole


def record_loss(
    config: ModelConfig,
    layout: Layout,
    shape: PassShape,
    lowering: Lowering = FLASH,
    many: MeshSizes | None = None,
) -> Graph:
    """The graph of one microbatch's loss; see SymbolicOps."""
    ops = SymbolicOps(config, layout, shape, lowering, many)
    weights = symbolic_weights(config, ops)
    tokens, places = ops.tokens("tokens"), Places(ops.tokens("positions"))
    transformer.losses(config, ops, weights, tokens, tokens, places, Ahead(tokens, tokens))
    return ops.graph()


def record_training(
    config: ModelConfig,
    hardware: Hardware,
    layout: Layout,
    shape: PassShape,
    many: MeshSizes | None = None,
    *,
    has_kernel: bool | None = None,
) -> Graph:
    """The graph of one microbatch's loss as the hardware's software runs it.

    has_kernel: whether a flash kernel takes attention; None: as on the hardware's chips (`lacks_flash`).
    """
    if has_kernel is None:
        has_kernel = lacks_flash(config, hardware, layout, shape.key_len) is None
    platform, software = hardware.chip.platform, hardware.software
    flash = software.has_flash(config.d_head, hardware.chip.compute_capability)
    kernel = platform.flash if flash and has_kernel else None
    lowering = Lowering(
        flash_attention=flash,
        by_blocks=flash and not has_kernel,
        kernel=kernel,
        head_tile=kernel.head_tile if kernel else 1,
        scores_dtype=layout.precision.compute_dtype if platform.fused_softmax else "f32",
        wide_logits=platform.wide_logits and software.is_ours,
        caps_apart=platform.caps_apart and software.is_ours,
        head_tokens=platform.head_tokens,
        static_blocks=platform.expert_blocks if has_static_rows(hardware, layout) else None,
        solves_by_products=platform.solve_blocks,
        loops_over_chunks=software.is_ours and not hardware.chip.step.is_roofline,
        lanes=platform.lanes if software.is_ours else 1,
        casts_weights=software.casts_weights,
    )
    graph = replace(
        record_loss(config, layout, shape, lowering, many),
        head_waits=platform.head_waits,
        gathers_ahead=platform.gathers_ahead,
        asynchronous=platform.compiler.asynchronous,
        copies_experts=platform.expert_blocks.copied and software.is_ours,
    )
    if platform.whole_sums:
        graph = _with_whole_sums(graph, many.mesh if many else layout.mesh, prod(hardware.dims))
    graph = _with_early_layers(graph) if platform.early_recompute else graph
    if not hardware.software.counts_head:
        return graph
    params = count_params(config)
    of_a_layer = (params.total - params.vocab) / config.num_layers
    return replace(graph, head_layers=config.d_model * config.vocab_size / of_a_layer)


def _with_whole_sums(graph: Graph, mesh: Degrees, num_devices: int) -> Graph:
    """The graph with `whole_sums`: XLA for TPUs reduces over a whole slice of `num_devices` by all-reduces.

    In a loop each device takes its shard at once. Outside of loops the update takes it, so the whole array
    stays until then. Kimi Linear's 4 layers on 8 v5p have a stack of one layer, whose experts leave three
    arrays of 1.2 GB.
    """

    def bytes_of(segment: Segment) -> Any:
        summed = (
            (transfer.gathered_bytes, mesh.size(transfer.axes))
            for node in segment.nodes
            for transfer in node.backward_transfers
            if transfer.what == "gradients" and transfer.op == "reduce_scatter" and not transfer.once
        )
        return whole(sum((size == num_devices) * num_bytes * (1 - 1 / size) for num_bytes, size in summed))

    segments = (
        replace(segment, whole_sums=bytes_of(segment)) if number in graph.unlooped else segment
        for number, segment in enumerate(graph.segments)
    )
    return replace(graph, segments=tuple(segments))


def _with_early_layers(graph: Graph) -> Graph:
    """The graph as XLA for CPU runs it, without barriers before recomputation.

    A stack of several layers is a loop, which ties recomputation to its backward pass; nothing does so for a
    stack of one layer.
    """
    segments = (replace(one, recomputed_early=i in graph.unlooped) for i, one in enumerate(graph.segments))
    return replace(graph, segments=tuple(segments))


def symbolic_weights(config: ModelConfig, ops: SymbolicOps) -> dict:
    """Every parameter as a stored value; parameters of layers without their L or P."""
    tree: dict = {}
    for path, param in parameters(config).items():
        group, _, name = path.rpartition("/")
        node = tree.setdefault(group, {}) if group else tree
        node[name] = ops.weight(path, param)
    if config.tower_params:
        ops.store_tower(config.tower_params)
    return tree
