from collections.abc import Mapping
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Rule, Tensor, ignored, needed, without
from meshwright.models.families.keys import SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import StateLayers
from meshwright.models.families.tensors import EMBEDDING, LAYER, feed_forward, fused, linear, norms


class _Width:
    """The width of feed-forwards: two thirds of the file's, rounded up, if it is to be adjusted."""

    parts: Mapping[str, Part] = {
        "block_auto_adjust_ff_dim": Part(("d_ff",), (bool,)),
        "block_ffn_dim_multiplier": Part(("d_ff",), (int, float)),
        "block_multiple_of": Part(("d_ff",), (int,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        if not given.get("block_auto_adjust_ff_dim", True):
            return {}
        width, each = int(2 * fields["d_ff"] / 3), given.get("block_multiple_of", 256)
        width = int(given.get("block_ffn_dim_multiplier", 1.0) * width)
        return {"d_ff": -(-width // each) * each}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"block_auto_adjust_ff_dim": False}


# Keys and tensors of both LFM2 families.
LFM2_KEYS: dict[str, Rule] = without(SIZES, "rms_norm_eps", "hidden_act") | {
    "head_dim": Key("d_head"),
    "norm_eps": Key("norm_eps", 1e-5),
    "tie_word_embeddings": Key("tied_embeddings", True, also=("tie_embedding",)),
    "conv_L_cache": Key("short_convolution.width", 3),
    "conv_bias": Key("short_convolution.bias", False),
}
_CONV = f"{LAYER}.conv"
_INTO = ("state_b", "state_c", "state_x")
LFM2_TENSORS = (
    EMBEDDING
    | norms("attention_norm", f"{LAYER}.operator_norm")
    | linear("wq", f"{LAYER}.self_attn.q_proj", "NH", "D")
    | linear("wk", f"{LAYER}.self_attn.k_proj", "KH", "D")
    | linear("wv", f"{LAYER}.self_attn.v_proj", "KH", "D")
    | linear("wo", f"{LAYER}.self_attn.out_proj", "D", "NH")
    | norms("q_norm", f"{LAYER}.self_attn.q_layernorm", "H")
    | norms("k_norm", f"{LAYER}.self_attn.k_layernorm", "H")
    | fused(_INTO, f"{_CONV}.in_proj", ("i", "i", "i"))
    | {
        "conv_x": Tensor(f"{_CONV}.conv.weight", ("i", "", "c")),
        "conv_x_bias": Tensor(f"{_CONV}.conv.bias", ("i",)),
    }
    | linear("state_out", f"{_CONV}.out_proj", "D", "i")
    | norms("mlp_norm", f"{LAYER}.ffn_norm")
    | feed_forward("w", f"{LAYER}.feed_forward", "F", ("w1", "w3", "w2"))
    | norms("final_norm", "model.embedding_norm")
    | {"unembed": Tensor("lm_head.weight", ("V", "D"))}
)
LFM2_LAYERS = StateLayers(state="conv", numbers="full_attn_idxs")

FAMILY = Family(
    "lfm2",
    "LFM2",
    ("Lfm2ForCausalLM",),
    keys=LFM2_KEYS
    | {"intermediate_size": needed("d_ff", "block_ff_dim")}
    | ignored(
        "as its class computes it",
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
        "theta", "use_pos_enc",
    ),
    sets={"qk_norm": True},
    groups=(LFM2_LAYERS, _Width(), Rope(theta=1e6)),
    tensors=LFM2_TENSORS,
)  # fmt: skip
