from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "internlm",
    "InternLM 1",
    ("InternLMForCausalLM",),
    keys=LLAMA_KEYS | {"bias": Key(("qkv_bias", "attention_out_bias"), True)},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    is_written=False,
)
