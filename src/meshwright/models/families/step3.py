from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, ignored, needed, without
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS, PLANNED_POSITIONS


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Layers with experts are listed as text: "4,5,6"."""
    listed = given.get("moe_layers_enum")
    numbers = {int(one) for one in str(listed).split(",") if one.strip().isdigit()} if listed else None
    with_experts = range(1, fields["num_layers"]) if numbers is None else numbers
    kinds = ("experts" if n in with_experts else "dense" for n in range(fields["num_layers"]))
    return {"feed_forwards": tuple(kinds)}


_NOT_READ = ("num_key_value_heads", "max_position_embeddings")

FAMILY = Family(
    "step3",
    "Step-3",
    ("Step3TextForCausalLM", "Step3VLForConditionalGeneration"),
    model_types=("step3_text",),
    wrappers=("step3_vl",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | EPS_1E_5
    | PLANNED_POSITIONS
    | {
        "head_dim": Key("d_head", 256),
        "num_attention_groups": Key("num_kv_heads", 1),
        "share_q_dim": needed("q_rank"),
        "moe_num_experts": needed("moe.num_experts"),
        "moe_top_k": needed("moe.experts_per_token"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "share_expert_dim": Key("moe.d_ff_shared"),
        "norm_expert_weight": Key("moe.normalized", False),
        "max_position_embedding": Key("max_seq_len", 65_536, also=("max_position_embeddings", "max_seq_len")),
    }
    | ignored("how transformers runs it", "use_moe"),
    sets={"moe.num_shared_experts": 1, "planned_only": "factorised queries (Step-3)"},
    groups=(ByLayer(_read, {"moe_layers_enum": ("feed_forwards",)}),),
    tensors={},
    is_written=False,
)
