from collections.abc import Mapping
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, ignored, needed
from meshwright.models.families.tensors import HEAD, LLAMA_TENSORS, fused, linear, norms


class _Theta:
    """The base of rotary positions once more, where transformers 5 reads it."""

    parts: Mapping[str, Part] = {"rope_theta": Part(("rope_theta",), (int, float))}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"rope_theta": model.rope_theta}


_BLOCK = "transformer.blocks.{}"

FAMILY = Family(
    "dbrx",
    "DBRX",
    ("DbrxForCausalLM",),
    keys={
        "n_layers": needed("num_layers", "num_hidden_layers"),
        "d_model": needed("d_model", "hidden_size"),
        "n_heads": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "max_seq_len": needed("max_seq_len", "max_position_embeddings"),
        "tie_word_embeddings": Key("tied_embeddings", False),
        "attn_config.kv_n_heads": Key("num_kv_heads", 1),
        "attn_config.clip_qkv": Key("clip_qkv"),
        "attn_config.rope_theta": Key("rope_theta", 10_000.0),
        "ffn_config.ffn_hidden_size": Key(("d_ff", "moe.d_ff"), 3584),
        "ffn_config.moe_num_experts": Key("moe.num_experts", 4),
        "ffn_config.moe_top_k": Key("moe.experts_per_token", 1),
    }
    | ignored("training only", "attn_config.attn_pdrop", "emb_pdrop", "resid_pdrop", "router_aux_loss_coef")
    | ignored(
        "training only", "ffn_config.moe_jitter_eps", "ffn_config.moe_loss_weight", "output_router_logits"
    )
    | ignored("training only", "ffn_config.uniform_expert_assignment")
    | ignored("as its class computes it", "ffn_config.ffn_act_fn", "ffn_config.moe_normalize_expert_weights")
    | ignored("as its class computes it", "ffn_config.hidden_size", "attn_config.model_type")
    | ignored("as its class computes it", "ffn_config.model_type", "num_key_value_heads", "rope_parameters"),
    sets={"norm": "layer"},
    groups=(_Theta(),),
    tensors=LLAMA_TENSORS
    | {
        "embed": Tensor("transformer.wte.weight", ("V", "D")),
        **norms("attention_norm", f"{_BLOCK}.norm_attn_norm.norm_1"),
        **fused(("wq", "wk", "wv"), f"{_BLOCK}.norm_attn_norm.attn.Wqkv", ("NH", "KH", "KH")),
        **linear("wo", f"{_BLOCK}.norm_attn_norm.attn.out_proj", "D", "NH"),
        **norms("mlp_norm", f"{_BLOCK}.norm_attn_norm.norm_2"),
        "router": Tensor(f"{_BLOCK}.ffn.router.layer.weight", ("E", "D")),
        "expert_gate": Tensor(f"{_BLOCK}.ffn.experts.mlp.w1", ("EM", "D")),
        "expert_in": Tensor(f"{_BLOCK}.ffn.experts.mlp.v1", ("EM", "D")),
        "expert_out": Tensor(f"{_BLOCK}.ffn.experts.mlp.w2", ("EM", "D")),
        **norms("final_norm", "transformer.norm_f"),
        **HEAD,
    },
)
