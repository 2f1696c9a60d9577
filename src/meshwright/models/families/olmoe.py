from meshwright.models.families.family import Family, Key, Rule, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, WIDE_QK_NORMS, experts

OLMOE_KEYS: dict[str, Rule] = (
    LLAMA_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | EXPERTS
    | {"intermediate_size": needed(("d_ff", "moe.d_ff")), "norm_topk_prob": Key("moe.normalized", False)}
)

FAMILY = Family(
    "olmoe",
    "OLMoE",
    ("OlmoeForCausalLM",),
    keys=OLMOE_KEYS | {"clip_qkv": Key("clip_qkv")},
    sets={"qk_norm": True, "qk_norm_over": "width"},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | WIDE_QK_NORMS | experts(),
)
