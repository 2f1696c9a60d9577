from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, fixed, ignored, needed, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS
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
)
