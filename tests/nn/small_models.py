"""Small models, each with some of the features that families have; tests of layouts compare them."""

from dataclasses import replace

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA, Indexer, MoE, Variant
from meshwright.models.mixers import (
    GatedDelta,
    Lightning,
    LinearUnit,
    Selective,
    ShortConvolution,
    StateSpace,
)
from meshwright.models.streams import HyperConnections

TINY = ModelConfig(
    name="tiny",
    num_layers=2,
    d_model=32,
    d_ff=64,
    num_heads=8,
    num_kv_heads=4,
    d_head=8,
    vocab_size=64,
    max_seq_len=64,
)
TIED = replace(TINY, name="tied", tied_embeddings=True)
# Each second layer sees all: one period of the scan, and one layer more.
LOCAL = replace(
    TIED,
    name="local",
    num_layers=3,
    sliding_window=5,
    global_every=2,
    rope_theta_local=100.0,
    norm_offset=True,
    qk_norm=True,
    post_norms=True,
    scale_embedding=True,
    activation="gelu",
    attention_softcap=2.0,
    logit_softcap=3.0,
    query_scale=0.5,
)
GPT = replace(
    TINY,
    name="gpt",
    norm="layer",
    norm_bias=True,
    positions="learned",
    gated=False,
    activation="gelu",
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
# The gated delta rule and attention with a gate, in turns; and Mamba-2 blocks whose heads share B and C.
DELTA = replace(
    TINY,
    name="delta",
    num_layers=5,
    attention_gate=True,
    delta=GatedDelta(num_key_heads=4, num_value_heads=8, key_dim=6, value_dim=4),
    mixers=("state", "attention"),
)
assert DELTA.delta
# Kimi Linear's: a decay for each element of a key, whose rank is a key's size.
DELTA_BY_ELEMENT = replace(
    DELTA,
    name="delta_by_element",
    num_layers=2,
    delta=replace(DELTA.delta, num_value_heads=4, value_dim=6, rank=6),
)
MAMBA = replace(
    TINY,
    name="mamba",
    num_layers=4,
    positions="none",
    state_space=StateSpace(num_heads=8, head_dim=4, state_dim=6, proj_bias=True),
    mixers=("state", "none", "attention", "both"),
    feed_forwards=("none", "dense", "none", "dense"),
)
SELECTIVE = replace(
    TINY,
    name="selective",
    num_layers=2,
    selective=Selective(16, state_dim=6, step_rank=5, proj_bias=True, norms=True),
    mixers=("state", "attention"),
)
LINEAR_UNIT = replace(
    TINY,
    name="linear_unit",
    num_layers=2,
    linear_unit=LinearUnit(num_blocks=4, block_width=5),
    mixers=("state", "attention"),
    sliding_window=5,
)
LIGHTNING = replace(
    TINY,
    name="lightning",
    num_layers=3,
    lightning=Lightning(num_heads=8, head_dim=4),
    mixers=("state", "state", "attention"),
    residual_inputs=(1.5, 2.0, 0.5),
)
CONVOLUTION = replace(
    TINY,
    name="convolution",
    num_layers=3,
    short_convolution=ShortConvolution(3, bias=True),
    mixers=("state", "state", "attention"),
)
# Experts chosen in groups, by a bias, beside shared ones and a dense layer; and alternating with dense ones.
MIXTURE = replace(
    TINY,
    name="mixture",
    num_layers=3,
    moe=MoE(
        num_experts=8,
        experts_per_token=2,
        d_ff=16,
        num_shared_experts=1,
        num_dense_layers=1,
        score="sigmoid",
        choice_bias=True,
        num_groups=4,
        groups_per_token=2,
        scaling=1.5,
    ),
)
assert MIXTURE.moe
# An indexer chooses five of the keys; its scores are no ties, of twelve heads.
SPARSE = replace(
    TINY,
    name="sparse",
    num_kv_heads=8,
    d_head=12,
    mla=MLA(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, q_rank=24),
    indexer=Indexer(num_heads=12, head_dim=8, top_k=5),
)
assert SPARSE.indexer
# Five layers, of which only two choose: the others read the choice of the last of these (GLM-5.2).
_CHOOSER = replace(SPARSE.indexer, handed_on=True)
SHARED_CHOICE = replace(
    SPARSE,
    name="shared_choice",
    num_layers=5,
    indexer=replace(SPARSE.indexer, shared=True),
    variants=(Variant((0, 3), (("indexer", _CHOOSER),)),),
)
# For each KV head the query's own block of two positions and another one; the first layer reads all keys.
SPARSE_BLOCKS = replace(
    TINY,
    name="sparse_blocks",
    num_layers=3,
    norm_offset=True,
    qk_norm=True,
    rotary_dim=4,
    indexer=Indexer(4, 8, top_k=4, weighted=False, normed="both", block=2, local_blocks=1),
    variants=(Variant((0,), (("indexer", None),)),),
)
# Keys compressed to entries of two positions, two of which an indexer chooses, or to entries of four. The
# first layer reads only its window, and a table has its experts. The residual has three streams.
COMPRESSED = replace(
    TINY,
    name="compressed",
    num_layers=4,
    num_kv_heads=1,
    qk_norm=True,
    q_norm_scale=False,
    rotary_dim=4,
    sliding_window=5,
    attention_sinks=True,
    activation="limited_silu",
    values_are_cached_keys=True,
    q_rank=24,
    out_rank=6,
    out_groups=4,
    streams=HyperConnections(3),
    compressed=2,
    compressed_top_k=2,
    indexer=Indexer(12, 8, top_k=2, normed="rms"),
    moe=MoE(8, 2, 16, num_shared_experts=1, score="sqrtsoftplus", choice_bias=True, scaling=1.5),
)
assert COMPRESSED.moe
_NO_INDEXER = (("compressed_top_k", None), ("indexer", None))
_TABLE = ("moe", replace(COMPRESSED.moe, choice_bias=False, hashed=True))
COMPRESSED = replace(
    COMPRESSED,
    variants=(
        Variant((0,), (("compressed", None), ("rope_theta", 100.0), _TABLE, *_NO_INDEXER)),
        Variant((2,), (("compressed", 4), *_NO_INDEXER)),
    ),
)
# Experts that read a latent of a token.
NARROW_EXPERTS = replace(
    MIXTURE, name="narrow_experts", moe=replace(MIXTURE.moe, latent=16, latent_norm=True, choice_bias=False)
)
OSS = replace(
    TINY,
    name="oss",
    num_layers=4,
    sliding_window=5,
    global_every=2,
    attention_sinks=True,
    activation="clamped_silu",
    qkv_bias=True,
    attention_out_bias=True,
    moe=MoE(num_experts=8, experts_per_token=2, d_ff=16, every=2, router_bias=True, expert_bias=True),
)
# Layers of every kind: chunked and turned or not, with experts or dense.
CHUNKED = replace(
    TINY,
    name="chunked",
    num_layers=4,
    attention_chunk=5,
    global_every=2,
    nope_every=2,
    temperature_floor=3,
    temperature_slope=0.7,
    turned_norm=True,
    moe=MoE(8, 2, 16, 1, every=2, score="sigmoid", normalized=False, scales_input=True),
)
LATENT = replace(
    TINY,
    name="latent",
    num_kv_heads=8,
    d_head=12,
    mla=MLA(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, q_rank=24),
)
# Cross-layer attention: groups of a local and a global layer, with all that keys may have; four layers a
# group; and a mixture whose groups have other stacks each.
SHARED = replace(
    TINY,
    name="shared",
    num_layers=4,
    layers_per_cache=2,
    sliding_window=5,
    global_every=2,
    qk_norm=True,
    qkv_bias=True,
)
SHARED_BY_FOUR = replace(TINY, name="shared_by_four", num_layers=8, layers_per_cache=4)
SHARED_MIXTURE = replace(
    TINY,
    name="shared_mixture",
    num_layers=4,
    layers_per_cache=2,
    moe=MoE(num_experts=8, experts_per_token=2, d_ff=16, num_dense_layers=1),
)
ALIBI = replace(TINY, name="alibi", num_heads=4, positions="alibi", embedding_norm=True)
# Norms after attention and feed-forward, over all heads together, and before output projections.
WIDE = replace(
    TINY,
    name="wide",
    num_layers=3,
    sliding_window=5,
    global_layers=(0,),
    qk_norm=True,
    qk_norm_over="width",
    pre_norms=False,
    post_norms=True,
    inner_norms=True,
    attention_gate=True,
    gated=False,
    activation="xielu",
    residual_scale=0.7,
    embedding_scale=3.0,
    logit_scale=0.5,
)
# Attention and experts of one norm, each head with scales of its own.
PARALLEL = replace(
    TINY,
    name="parallel",
    norm="layer",
    norm_bias=True,
    parallel=True,
    shared_norm=True,
    qk_norm=True,
    qk_norm_over="heads",
    qk_norm_last=True,
    clip_qkv=1.5,
    head_bias=True,
    moe=MoE(8, 2, 16, num_shared_experts=1, shared_gate=True),
)

# (model, path) of parameters without a gradient. A bias of the keys without rotations, or added after them,
# adds the same to all scores of a query, which no softmax sees. No gradient passes a choice of experts or of
# keys.
WITHOUT_GRADIENT = {
    ("gpt", "layers/wk_bias"),
    ("parallel", "layers/k_norm_bias"),
    ("mixture", "layers/router_choice_bias"),
    ("chosen_by_bias", "layers/router_choice_bias"),
    ("compressed", "layers/router_choice_bias"),
    ("compressed", "layers.1/router_table"),
    ("compressed", "layers.2/router_choice_bias"),
    *(
        (model, f"{stack}/index_{name}")
        for model, stack in (("sparse", "layers"), ("shared_choice", "layers.1"), ("sparse_blocks", "layers"))
        for name in ("q", "k", "norm", "norm_bias", "weights", "q_norm")
    ),
    *(("compressed", f"layers/index_{name}") for name in ("q", "kv", "gate", "positions", "norm", "weights")),
}
