from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "internlm3",
    "InternLM 3",
    ("InternLM3ForCausalLM",),
    keys=LLAMA_KEYS
    | {"bias": Key(("attention_out_bias", "mlp_bias"), False), "qkv_bias": Key("qkv_bias", False)}
    | ignored("how transformers runs it", "attn_implementation"),
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    is_written=False,
)
