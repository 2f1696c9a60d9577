from meshwright.models.families.family import Family, Key, fixed, ignored, without
from meshwright.models.families.keys import SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "stablelm",
    "StableLM",
    ("StableLmForCausalLM",),
    keys=without(SIZES, "rms_norm_eps")
    | {"layer_norm_eps": Key("norm_eps", 1e-5), "use_qkv_bias": Key("qkv_bias", False)}
    | fixed(qk_layernorm=False, use_parallel_residual=False)
    | ignored("hidden_size over num_attention_heads counts", "head_dim")
    | ignored("training only", "hidden_dropout"),
    sets={"norm": "layer", "norm_bias": True},
    groups=(Rope(share=0.25),),
    tensors=LLAMA_TENSORS,
)
