from meshwright.models.families.family import Family
from meshwright.models.families.glm import GLM_KEYS, GLM_TENSORS
from meshwright.models.families.releases import by_letter, preset, release
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
    releases=release(
        "config.json of zai-org/GLM-4-9B-0414, GLM-4-32B-0414",
        {
            "glm-4-9b-0414": preset("L=40, D=4096, F=13_696, N=32", "9.4B", qkv_bias=True),
            "glm-4-32b-0414": preset("L=61, D=6144, F=23_040, N=48", "32.6B"),
        },
        shared=by_letter("K=2, H=128, V=151_552") | {"max_seq_len": 32_768, "rotary_dim": 64},
    ),
)
