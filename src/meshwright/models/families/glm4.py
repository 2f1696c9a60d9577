from meshwright.models.families.family import Family
from meshwright.models.families.glm import GLM_KEYS, GLM_TENSORS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, norms

FAMILY = Family(
    "glm4",
    "GLM-4 0414, GLM-Z1",
    ("Glm4ForCausalLM",),
    model_types=("glm4", "glm4v_text"),
    wrappers=("glm4v", "glm46v", "glmga", "glm_ocr"),
    keys=GLM_KEYS,
    sets={"post_norms": True},
    groups=(Rope(share=0.5),),
    tensors=GLM_TENSORS
    | norms("attention_post_norm", f"{LAYER}.post_self_attn_layernorm")
    | norms("mlp_post_norm", f"{LAYER}.post_mlp_layernorm"),
)
