from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, in_pairs

FAMILY = Family(
    "ernie4_5",
    "ERNIE 4.5 (dense)",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    model_types=("ernie4_5", "paddleocr_vl_text"),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | {
        "use_bias": Key(("qkv_bias", "attention_out_bias", "mlp_bias"), False),
        "head_dim": Key("d_head", 128),
        "tie_word_embeddings": Key("tied_embeddings", True),
    },
    groups=(Rope(theta=500_000.0),),
    tensors=LLAMA_TENSORS | in_pairs(LLAMA_TENSORS, "wq", "wk", "wq_bias", "wk_bias"),
)
