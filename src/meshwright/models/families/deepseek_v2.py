from meshwright.models.families.family import Family, fixed, ignored
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS, experts

FAMILY = Family(
    "deepseek_v2",
    "DeepSeek-V2",
    ("DeepseekV2ForCausalLM",),
    keys=SIZES
    | LATENT
    | DEEPSEEK_EXPERTS
    # The weights of a token's experts are not normalized, even if norm_topk_prob is true.
    | fixed(attention_bias=False, scoring_func="softmax", norm_topk_prob=False)
    | ignored("follows from n_group", "topk_method")
    | ignored("its class has no such biases", "mlp_bias"),
    sets={"moe.normalized": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | LATENT_TENSORS | experts(),
)
