from meshwright.models.families.family import Family
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, norms

FAMILY = Family(
    "bitnet",
    "BitNet b1.58",
    ("BitNetForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS | activation("relu2"),
    sets={"inner_norms": True},
    groups=(Rope(theta=500_000.0),),
    tensors=LLAMA_TENSORS
    | norms("attention_inner_norm", f"{LAYER}.self_attn.attn_sub_norm", "NH")
    | norms("mlp_inner_norm", f"{LAYER}.mlp.ffn_sub_norm", "F"),
)
