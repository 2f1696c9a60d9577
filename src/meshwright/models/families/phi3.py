from meshwright.models.families.family import Family, fixed, ignored
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, QKV, fused

FAMILY = Family(
    "phi3",
    "Phi-3, 3.5, 4",
    ("Phi3ForCausalLM",),
    model_types=("phi3", "phi4_multimodal"),
    wrappers=("phi3_v",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | fixed(attention_bias=False)
    | ignored("training only", "resid_pdrop", "embd_pdrop"),
    groups=(LocalLayers(), Rope(share=1.0)),
    tensors=LLAMA_TENSORS
    | fused(("wq", "wk", "wv"), f"{LAYER}.self_attn.qkv_proj", QKV)
    | fused(("w_gate", "w_in"), f"{LAYER}.mlp.gate_up_proj", ("F", "F")),
)
