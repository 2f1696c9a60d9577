from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import LAYER_NORM_EPS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, fused, linear, norms

_NOT_READ = ("rms_norm_eps", "num_key_value_heads")

FAMILY = Family(
    "persimmon",
    "Persimmon, Fuyu (text)",
    ("PersimmonForCausalLM",),
    wrappers=("fuyu",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | LAYER_NORM_EPS
    | activation("relu2")
    | {"qk_layernorm": Key("qk_norm", True)}
    | ignored("all heads have keys", "num_key_value_heads")
    | ignored("training only", "hidden_dropout"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    groups=(Rope(theta=25_000.0, share=0.5),),
    tensors=LLAMA_TENSORS
    | fused(("wq", "wk", "wv"), f"{LAYER}.self_attn.query_key_value", ("NH", "KH", "KH"), "D", "within")
    | linear("wo", f"{LAYER}.self_attn.dense", "D", "NH")
    | norms("q_norm", f"{LAYER}.self_attn.q_layernorm", "H")
    | norms("k_norm", f"{LAYER}.self_attn.k_layernorm", "H")
    | linear("w_in", f"{LAYER}.mlp.dense_h_to_4h", "F", "D")
    | linear("w_out", f"{LAYER}.mlp.dense_4h_to_h", "D", "F")
    | norms("final_norm", "model.final_layernorm"),
)
