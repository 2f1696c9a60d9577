from meshwright.models.families.family import Family, Rule
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS_ONLY, WIDE_QK_NORMS

OLMO_2_KEYS: dict[str, Rule] = LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS
OLMO_2_SETS = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "width"}
OLMO_2_TENSORS = LLAMA_TENSORS | POST_NORMS_ONLY | WIDE_QK_NORMS

FAMILY = Family(
    "olmo2",
    "OLMo 2",
    ("Olmo2ForCausalLM",),
    keys=OLMO_2_KEYS,
    sets=OLMO_2_SETS,
    groups=(Rope(),),
    tensors=OLMO_2_TENSORS,
)
