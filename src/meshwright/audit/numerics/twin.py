"""A tiny twin of a plan: the same features and options, in sizes that a laptop runs in seconds."""

from contextlib import suppress
from dataclasses import fields, replace

from meshwright.dtypes import number_type
from meshwright.errors import LayoutError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import why_no_flash, why_no_paged
from meshwright.layout.axes import CONTEXT, DATA, DEGREES, EXPERT, EXPERT_NODES, FSDP, PIPE, TENSOR
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA, Indexer, MoE, RopeScaling, Variant
from meshwright.models.mixers import MIXERS, StateMixer
from meshwright.plan_file import Plan

_SHRUNK = (*DEGREES, "interleave", "microbatches")
_SEQ_LEN, _VOCAB, _D_HEAD, _ROPE_DIM, _LOCAL = 16, 64, 8, 4, 5
# One of the degrees becomes four, so that the direction and the length of its ring show.
_WIDENED = (CONTEXT.name, EXPERT.name, PIPE.name, TENSOR.name, FSDP.name, DATA.name)
_MOST_DEVICES = 32


def tiny_plan(plan: Plan) -> Plan:
    """The plan with a model, a batch and degrees that a laptop runs in seconds, in float32.

    Degrees above one become two, and the first of context, expert, pipe, tensor, fsdp and data that can
    become four does: on two devices a ring has no direction. Stages with programs of their own have no ring;
    with experts there are two, since compiling the programs of four takes minutes.
    """
    degrees = {name: min(2, plan.layout.word(name)) for name in _SHRUNK}
    if plan.layout.degree(EXPERT_NODES.name) > 1:  # two nodes of two devices each
        return _with_degrees(plan, degrees | {FSDP.name: 4, EXPERT.name: 4})
    has_many_programs = plan.layout.stage_programs and plan.model.moe
    for name in _WIDENED:
        if plan.layout.word(name) > 2 and not (name == PIPE.name and has_many_programs):
            more = {}
            if name == EXPERT.name:  # experts are split over devices of the data axes
                wide = [axis for axis in (FSDP.name, DATA.name) if plan.layout.word(axis) > 2]
                more = dict.fromkeys(wide[:1], 4)
            with suppress(LayoutError):
                small = _with_degrees(plan, degrees | {name: 4} | more)
                if small.layout.mesh.num_devices <= _MOST_DEVICES:
                    return small
    return _with_degrees(plan, degrees)


def _with_degrees(plan: Plan, degrees: dict[str, int]) -> Plan:
    """The tiny plan with `degrees`. Raises LayoutError if they do not fit the tiny model."""
    layout, model = in_float32(plan.layout.replace(**degrees)), tiny_model(plan.model)
    if layout.pipe > 1:
        layout, model = _of_stages(plan, layout, model)
    ranks = layout.data * layout.fsdp * layout.schedule.microbatches
    workload = Workload(2 * ranks, _SEQ_LEN, plan.workload.phase)
    return Plan(model, plan.hardware, workload, layout)


def in_float32(layout: Layout) -> Layout:
    """The layout with all numbers in float32."""
    wide = dict.fromkeys(("weights_dtype", "compute_dtype", "optimizer_dtype"), "f32")
    return layout.replace(**wide, **dict.fromkeys(_FOLLOWING))


# Kernels that Pallas interprets on CPUs, and one whose call XLA computes there: jax.nn.dot_product_attention.
CUDNN = "cudnn"
INTERPRETED = ("splash", "ragged", "paged", CUDNN)
_TILE = 128  # positions of a block of splash attention, and elements of a head of ragged attention
_WINDOW_OF_BLOCKS = 100  # less than a block of splash attention, so that a window ends within blocks


def kernel_plan(plan: Plan) -> Plan | None:
    """The tiny plan that runs the attention kernel of the plan's chips; None if none takes the plan.

    It has one device, or two of `context` in training. Training has lengths, and inference heads, that fill
    the kernel's tiles. Experts are left out, unless the model lists which layers have them.
    """
    chip, layout = load(plan.hardware).chip, plan.layout
    platform = chip.platform
    is_trained = plan.workload.phase == "train"
    kernel = platform.flash if is_trained else platform.paged
    has_attention = any(layer.kind.attends for layer in plan.model.layers)
    if kernel is None or kernel.name not in INTERPRETED or not has_attention:
        return None
    if is_trained:
        refusal = why_no_flash(platform, chip.compute_capability, plan.model, layout, plan.workload.seq_len)
    else:
        refusal = why_no_paged(platform, plan.model, layout.at("generate"))
    if refusal:
        return None
    degrees = {CONTEXT.name: min(2, layout.degree(CONTEXT.name))} if is_trained else {}
    length = 2 * _TILE * degrees.get(CONTEXT.name, 1)
    model = tiny_model(
        replace(plan.model, global_every=min(2, plan.model.global_every)), _D_HEAD if is_trained else _TILE
    )
    needs_experts = model.feed_forwards or model.variants
    model = replace(
        model,
        moe=model.moe if needs_experts else None,
        max_seq_len=4 * length,
        # Prompts of inference are longer than _LOCAL.
        sliding_window=plan.model.sliding_window and (_WINDOW_OF_BLOCKS if is_trained else _LOCAL),
        attention_chunk=plan.model.attention_chunk and (_WINDOW_OF_BLOCKS if is_trained else _LOCAL),
    )
    workload = Workload(1 if is_trained else 4, length, plan.workload.phase)
    return Plan(model, plan.hardware, workload, in_float32(Layout.of(**degrees)))


# Types that follow the types of other words if they are None.
_FOLLOWING = (
    "matmul_dtype", "gradients_dtype", "kv_dtype", "saved_dtype", "matmul_scales", "experts_dtype",
    "tables_dtype",
)  # fmt: skip


def in_narrow_types(plan: Plan, small: Plan) -> Plan | None:
    """The tiny plan with the plan's types of less than 16 bits; None if it has none.

    In training, weights in such types are frozen: they are read as wide weights of the same values.
    """
    precision, kept = plan.layout.precision, {}
    for name in ("weights_dtype", "optimizer_dtype", *_FOLLOWING):
        value = getattr(precision, name)
        if name == "weights_dtype" and plan.workload.phase == "train":
            continue
        if value is not None and (name == "matmul_scales" or number_type(value).bits < 16):
            kept[name] = value
    narrow = small.layout.replace(**kept)
    return replace(small, layout=narrow) if narrow != small.layout else None


def _of_stages(plan: Plan, layout: Layout, model: ModelConfig) -> tuple[Layout, ModelConfig]:
    """The fewest microbatches and layers that the schedule and all stages accept.

    Both unchanged if no numbers up to the plan's do; the step then raises the reason.
    """
    for microbatches in range(layout.schedule.microbatches, plan.layout.schedule.microbatches + 1):
        for num_layers in range(model.num_layers, plan.model.num_layers + 1):
            candidate = layout.replace(microbatches=microbatches), replace(model, num_layers=num_layers)
            with suppress(LayoutError):
                check_fits(candidate[0], candidate[1])
                return candidate
    return layout, model


def tiny_model(config: ModelConfig, d_head: int = _D_HEAD) -> ModelConfig:
    """A model with the features of `config` and small dimensions."""
    num_kv_heads = min(4, config.num_kv_heads)
    num_heads = num_kv_heads * min(2, config.num_heads // config.num_kv_heads)
    mla = config.mla and MLA(
        kv_rank=16,
        nope_dim=d_head - _ROPE_DIM,
        rope_dim=_ROPE_DIM,
        value_dim=d_head,
        q_rank=config.mla.q_rank and 12,
    )
    rotary_dim = config.rotary_dim and d_head // 2
    return replace(
        config,
        num_layers=_fewest_layers(config),
        d_model=32,
        d_ff=64,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_head=d_head,
        rotary_dim=rotary_dim,
        vocab_size=_VOCAB,
        # The model's own, except for tables of positions, since far positions are turned too.
        max_seq_len=4 * _SEQ_LEN if config.positions == "learned" else config.max_seq_len,
        sliding_window=config.sliding_window and _LOCAL,
        attention_chunk=config.attention_chunk and _LOCAL,
        temperature_floor=config.temperature_floor and _LOCAL,
        moe=config.moe and _tiny_experts(config.moe),
        mla=mla,
        indexer=config.indexer and _tiny_indexer(config.indexer, num_kv_heads, d_head),
        variants=tuple(_tiny_variant(variant, num_kv_heads, d_head) for variant in config.variants),
        **_tiny_mixer(config),
        rope_scaling=config.rope_scaling
        and _first_factors(config.rope_scaling, (rotary_dim or (_ROPE_DIM if mla else d_head)) // 2),
    )


def _tiny_indexer(indexer: Indexer, num_kv_heads: int, d_head: int) -> Indexer:
    if not indexer.block:
        return replace(indexer, num_heads=8, head_dim=8, top_k=_LOCAL)
    return replace(indexer, num_heads=num_kv_heads, head_dim=d_head, top_k=_LOCAL - 1, block=2)


def _tiny_variant(variant: Variant, num_kv_heads: int, d_head: int) -> Variant:
    """Layers that differ from the others in their indexer, the only variants that run."""
    values = (
        (name, value and _tiny_indexer(value, num_kv_heads, d_head) if name == "indexer" else value)
        for name, value in variant.values
    )
    return replace(variant, values=tuple(values))


def _fewest_layers(config: ModelConfig) -> int:
    """Number of the model's first layers that include every kind."""
    of_experts = min(1, config.moe.num_dense_layers) + 2 * config.moe.every if config.moe else 2
    each = config.layers_per_cache
    periods = (config.global_every + 1, config.nope_every + 1, 2 * each if each > 1 else 2)
    of_kinds = _first_of_all_kinds(replace(config, moe=config.moe and _tiny_experts(config.moe)))
    fewest = max(of_experts, *periods, of_kinds if config.mixers or config.variants else 1)
    return min(config.num_layers, -(-fewest // each) * each)


def _first_of_all_kinds(config: ModelConfig) -> int:
    """The fewest first layers with every kind of mixer and feed-forward."""
    kinds = [layer.kind._replace(slope=1.0) for layer in config.layers]
    return 1 + max(map(kinds.index, set(kinds)))


def _tiny_mixer(config: ModelConfig) -> dict[str, StateMixer]:
    """The field of a model's mixer with a state, with few heads of few dimensions."""
    mixer = config.state_mixer
    if mixer is None:
        return {}
    few = {"num_key_heads": 2, "num_value_heads": 4, "num_heads": 4, "num_groups": 2, "num_blocks": 4}
    few |= dict.fromkeys(
        ("key_dim", "value_dim", "head_dim", "state_dim", "rank", "step_rank", "block_width"), 8
    )
    few["width"] = 64
    sizes = {one.name: few[one.name] for one in fields(mixer) if one.name in few}
    kept = {name: min(size, getattr(mixer, name)) for name, size in sizes.items() if getattr(mixer, name)}
    return {name: replace(mixer, **kept) for name in MIXERS if getattr(config, name) is mixer}


def _tiny_experts(moe: MoE) -> MoE:
    """At most eight experts, in groups of at least two, after at most one dense layer."""
    return replace(
        moe,
        num_experts=min(8, moe.num_experts),
        experts_per_token=min(2, moe.experts_per_token),
        d_ff=16,
        d_ff_shared=moe.d_ff_shared and 16,
        latent=moe.latent and 16,
        num_dense_layers=min(1, moe.num_dense_layers),
        num_groups=min(4, moe.num_groups),
        groups_per_token=min(2, moe.groups_per_token),
    )


def _first_factors(scaling: RopeScaling, num_pairs: int) -> RopeScaling:
    """LongRoPE's first `num_pairs` factors, of the pairs that turn fastest."""
    return replace(
        scaling,
        short_factor=scaling.short_factor and scaling.short_factor[:num_pairs],
        long_factor=scaling.long_factor and scaling.long_factor[:num_pairs],
    )
