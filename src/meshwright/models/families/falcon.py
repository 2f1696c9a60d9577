from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import HEAD, fused, linear, norms

_H = "transformer.h.{}"
_TWO_NORMS = norms("attention_norm", f"{_H}.ln_attn") | norms("mlp_norm", f"{_H}.ln_mlp")


class _Heads:
    """KV heads: a number in new files, one with `multi_query`, otherwise all; and the norms of a layer."""

    parts: Mapping[str, Part] = {
        "new_decoder_architecture": Part(("num_kv_heads", "shared_norm"), (bool,)),
        "multi_query": Part(("num_kv_heads",), (bool,)),
        "num_kv_heads": Part(("num_kv_heads",), (int,)),
        "n_head_kv": Part(("num_kv_heads",), (int,)),
        "num_ln_in_parallel_attn": Part(("shared_norm",), (int,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        is_new = given.get("new_decoder_architecture") or False
        if is_new and not fields["parallel"]:
            raise ModelError(f"{name}: new_decoder_architecture needs parallel_attn = True")
        one_norm = given.get("num_ln_in_parallel_attn") == 1 if is_new else fields["parallel"]
        number = given.get("num_kv_heads", given.get("n_head_kv")) if is_new else None
        if not is_new and given.get("multi_query", True):
            number = 1
        return {"num_kv_heads": number or fields["num_heads"], "shared_norm": bool(one_norm)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        is_new = model.parallel and (not model.shared_norm or model.num_kv_heads > 1)
        return {
            "new_decoder_architecture": is_new,
            "multi_query": model.num_kv_heads == 1,
            "num_kv_heads": model.num_kv_heads,
            "num_ln_in_parallel_attn": 1 if model.shared_norm else 2,
        }


FAMILY = Family(
    "falcon",
    "Falcon",
    ("FalconForCausalLM",),
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    keys={
        "num_hidden_layers": needed("num_layers", "n_layer"),
        "hidden_size": needed("d_model"),
        "ffn_hidden_size": Key("d_ff"),
        "num_attention_heads": needed("num_heads", "n_head"),
        "vocab_size": needed("vocab_size"),
        "max_position_embeddings": Key("max_seq_len", 2048),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "activation": Key("activation", "gelu", form=ACTIVATION),
        "bias": Key(("qkv_bias", "attention_out_bias", "mlp_bias"), False),
        "parallel_attn": Key("parallel", True),
    }
    | fixed(alibi=False, apply_residual_connection_post_layernorm=False)
    | ignored("training only", "hidden_dropout"),
    sets={"norm": "layer", "norm_bias": True, "gated": False},
    groups=(_Heads(), Rope()),
    prefix="transformer.",
    tensors={
        "embed": Tensor("transformer.word_embeddings.weight", ("V", "D")),
        **norms("attention_norm", f"{_H}.input_layernorm"),
        **fused(
            ("wq", "wk", "wv"), f"{_H}.self_attention.query_key_value", ("KGH", "KH", "KH"), "D", "within"
        ),
        **linear("wo", f"{_H}.self_attention.dense", "D", "NH"),
        **norms("mlp_norm", f"{_H}.post_attention_layernorm"),
        **linear("w_in", f"{_H}.mlp.dense_h_to_4h", "F", "D"),
        **linear("w_out", f"{_H}.mlp.dense_4h_to_h", "D", "F"),
        **norms("final_norm", "transformer.ln_f"),
        **HEAD,
    },
    variants=lambda model: {} if model.shared_norm or not model.parallel else _TWO_NORMS,
)
