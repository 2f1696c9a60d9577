from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, MULTIPLIERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "granite",
    "Granite 3",
    ("GraniteForCausalLM",),
    model_types=("granite", "granite4_vision_text", "granite_docling_text"),
    keys=LLAMA_KEYS | ATTENTION_BIAS | MULTIPLIERS | {"mlp_bias": Key("mlp_bias", False)},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
