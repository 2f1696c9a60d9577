from meshwright.models.families.family import Family, fixed, ignored, without
from meshwright.models.families.keys import LAYER_NORM_EPS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, linear, norms

FAMILY = Family(
    "phi",
    "Phi 1, 1.5, 2",
    ("PhiForCausalLM",),
    keys=without(LLAMA_KEYS, "rms_norm_eps")
    | LAYER_NORM_EPS
    | activation("gelu_new")
    | fixed(qk_layernorm=False)
    | ignored("training only", "resid_pdrop", "embd_pdrop"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "parallel": True,
        "shared_norm": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    },
    groups=(Rope(share=0.5),),
    tensors=LLAMA_TENSORS
    | linear("wo", f"{LAYER}.self_attn.dense", "D", "NH")
    | linear("w_in", f"{LAYER}.mlp.fc1", "F", "D")
    | linear("w_out", f"{LAYER}.mlp.fc2", "D", "F")
    | norms("final_norm", "model.final_layernorm")
    | linear("unembed", "lm_head", "V", "D"),
)
