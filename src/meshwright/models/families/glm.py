from meshwright.models.families.family import Family, Key, Rule
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import HEAD, LAYER, LLAMA_TENSORS, fused, in_pairs

GLM_KEYS: dict[str, Rule] = LLAMA_KEYS | {
    "attention_bias": Key("qkv_bias", True),
    "head_dim": Key("d_head", 128),
    "rms_norm_eps": Key("norm_eps", 0.00000015625),
}
GLM_TENSORS = (
    LLAMA_TENSORS
    | in_pairs(LLAMA_TENSORS, "wq", "wk", "wq_bias", "wk_bias")
    | fused(("w_gate", "w_in"), f"{LAYER}.mlp.gate_up_proj", ("F", "F"))
    | HEAD
)

FAMILY = Family(
    "glm",
    "GLM-4 9B",
    ("GlmForCausalLM",),
    keys=GLM_KEYS,
    groups=(Rope(share=0.5),),
    tensors=GLM_TENSORS,
)
