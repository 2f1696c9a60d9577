from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, MTP, SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS, NEXT_LAYER, experts

FAMILY = Family(
    "deepseek_v3",
    "DeepSeek-V3, R1, Kimi K2",
    ("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    wrappers=("kimi_k25",),
    keys=SIZES
    | LATENT
    | DEEPSEEK_EXPERTS
    | {"norm_topk_prob": Key("moe.normalized", True), "routed_scaling_factor": Key("moe.scaling", 2.5)}
    | fixed(attention_bias=False, scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    | ignored("its class has no such biases", "mlp_bias")
    | ignored("of DeepSeek-VL2's class", "lm_head", "rm_head", "use_mla")
    | MTP,
    sets={"moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | LATENT_TENSORS | experts(),
    more_layers=True,
    drafts=NEXT_LAYER,
)
