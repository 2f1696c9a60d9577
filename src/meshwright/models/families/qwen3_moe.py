from meshwright.models.families.family import Family, Key, fixed, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EXPERTS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen3_moe",
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
    wrappers=("qwen3_vl_moe",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | ignored("of models that also see", "use_mrope")
    | EXPERTS
    | fixed(mlp_only_layers=[], use_qk_norm=True, shared_expert_intermediate_size=0, qkv_bias=False)
    | ignored("of the tokenizer", "mask_token_id")
    | {
        "moe_intermediate_size": needed("moe.d_ff"),
        "decoder_sparse_step": Key("moe.every", 1),
        "norm_topk_prob": Key("moe.normalized", False),
    },
    sets={"qk_norm": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | experts(),
    tool_calls=HERMES,
)
