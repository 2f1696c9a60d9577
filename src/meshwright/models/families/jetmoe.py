from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, matrix, vector
from meshwright.models.families.family import Family, Key, ignored, needed, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS, PLANNED_POSITIONS

_NOT_READ = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "intermediate_size")


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A token's query heads belong to its experts of attention; other experts' weights are extras."""
    moe = fields["moe"]
    return {
        "num_heads": fields["num_kv_heads"] * moe.experts_per_token,
        "extras": (
            vector("unused_heads", "vDKH", v=2 * (moe.num_experts - moe.experts_per_token)),
            matrix("router_of_heads", "DE", "D"),
            vector("wo_bias_of_heads", "D"),
            vector("w_bias_of_experts", "D"),
        ),
    }


FAMILY = Family(
    "jetmoe",
    "JetMoE",
    ("JetMoeForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | PLANNED_POSITIONS
    | {
        "intermediate_size": needed(("moe.d_ff", "d_ff"), "ffn_hidden_size"),
        "num_key_value_heads": needed(("num_kv_heads", "num_heads")),
        "kv_channels": Key("d_head", 128, also=("head_dim",)),
        "num_local_experts": Key("moe.num_experts", 8, also=("moe_num_experts", "num_experts")),
        "num_experts_per_tok": Key("moe.experts_per_token", 2, also=("moe_top_k",)),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "activation_function": Key("activation", "silu", form=ACTIVATION),
    }
    | ignored("follows from the experts of a token", "num_attention_heads")
    | ignored("training only", "aux_loss_coef", "output_router_logits"),
    sets={"planned_only": "experts of attention (JetMoE)"},
    groups=(ByLayer(_read, {}),),
    tensors={},
    is_written=False,
)
