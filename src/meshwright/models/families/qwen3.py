from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen3",
    "Qwen 3",
    ("Qwen3ForCausalLM",),
    model_types=("qwen3", "qwen3_vl_text"),
    wrappers=("qwen3_vl",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | ignored("of models that also see", "use_mrope")
    | {"head_dim": Key("d_head", 128)},
    sets={"qk_norm": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    tool_calls=HERMES,
)
