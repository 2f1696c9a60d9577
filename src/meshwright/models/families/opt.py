from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, fixed, ignored, needed, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS
from meshwright.models.families.releases import preset, release
from meshwright.models.families.tensors import HEAD, linear, norms

_LAYER = "model.decoder.layers.{}"
_NOT_READ = ("rms_norm_eps", "num_key_value_heads", "head_dim", "hidden_act", "intermediate_size")


class _NoProjection:
    """Embeddings are as wide as the model."""

    parts: Mapping[str, Part] = {"word_embed_proj_dim": Part(("d_model",), (int,))}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        if given.get("word_embed_proj_dim") not in (None, fields["d_model"]):
            raise ModelError(
                f"{name}: word_embed_proj_dim = {given['word_embed_proj_dim']} is not supported; fits: "
                f"{fields['d_model']}, the hidden_size"
            )
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"word_embed_proj_dim": model.d_model}


FAMILY = Family(
    "opt",
    "OPT",
    ("OPTForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | {
        "ffn_dim": needed("d_ff"),
        "activation_function": Key("activation", "relu", form=ACTIVATION),
        "enable_bias": Key(("qkv_bias", "attention_out_bias", "mlp_bias"), True),
        "tie_word_embeddings": Key("tied_embeddings", True),
    }
    | fixed(do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True)
    | ignored("training only", "dropout", "activation_dropout", "layerdrop", "init_std")
    | ignored("all heads have keys, D / N wide", "head_dim", "num_key_value_heads")
    | ignored("ffn_dim counts", "intermediate_size")
    | ignored("of the tokenizer", "prefix"),
    sets={"norm": "layer", "norm_bias": True, "positions": "learned", "position_offset": 2, "gated": False},
    groups=(_NoProjection(),),
    tensors={
        "embed": Tensor("model.decoder.embed_tokens.weight", ("V", "D")),
        "positions": Tensor("model.decoder.embed_positions.weight", ("W", "D")),
        **norms("attention_norm", f"{_LAYER}.self_attn_layer_norm"),
        **linear("wq", f"{_LAYER}.self_attn.q_proj", "NH", "D"),
        **linear("wk", f"{_LAYER}.self_attn.k_proj", "KH", "D"),
        **linear("wv", f"{_LAYER}.self_attn.v_proj", "KH", "D"),
        **linear("wo", f"{_LAYER}.self_attn.out_proj", "D", "NH"),
        **norms("mlp_norm", f"{_LAYER}.final_layer_norm"),
        **linear("w_in", f"{_LAYER}.fc1", "F", "D"),
        **linear("w_out", f"{_LAYER}.fc2", "D", "F"),
        **norms("final_norm", "model.decoder.final_layer_norm"),
        **HEAD,
    },
    releases=release(
        # OPT-350M differs: its norms come after the residuals, and its embeddings are projected.
        "Zhang et al. 2022, https://arxiv.org/abs/2205.01068, table 1; config.json of facebook/opt-*",
        {
            "opt-125m": preset("L=12, D=768, F=3072, N=12", 125_239_296),
            "opt-1.3b": preset("L=24, D=2048, F=8192, N=32", 1_315_758_080),
            "opt-2.7b": preset("L=32, D=2560, F=10_240, N=32", 2_651_596_800),
            "opt-6.7b": preset("L=32, D=4096, F=16_384, N=32", 6_658_473_984),
            "opt-13b": preset("L=40, D=5120, F=20_480, N=40", 12_853_473_280),
            "opt-30b": preset("L=48, D=7168, F=28_672, N=56", 29_974_540_288),
            "opt-66b": preset("L=64, D=9216, F=36_864, N=72", "65.7B"),
            "opt-175b": preset("L=96, D=12_288, F=49_152, N=96", "175B"),
        },
        shared={
            "vocab_size": 50_272,
            "max_seq_len": 2048,
            "tied_embeddings": True,
            "activation": "relu",
            "qkv_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
    ),
)
