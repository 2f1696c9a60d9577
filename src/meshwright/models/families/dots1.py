from meshwright.models.families.family import Family, Fixed, Key, fixed
from meshwright.models.families.keys import ATTENTION_BIAS, DEEPSEEK_EXPERTS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts

FAMILY = Family(
    "dots1",
    "dots.llm1",
    ("Dots1ForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | DEEPSEEK_EXPERTS
    | {"norm_topk_prob": Key("moe.normalized", False)}
    | fixed(topk_method="noaux_tc")
    | {"scoring_func": Fixed(("sigmoid", "noaux_tc"))},
    sets={"qk_norm": True, "moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | experts(),
)
