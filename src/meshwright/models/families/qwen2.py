from meshwright.models.families.family import DraftNames, Family, fixed, ignored
from meshwright.models.families.keys import LLAMA_KEYS, MTP, NO_LOCAL_LAYERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen2",
    "Qwen 2, 2.5",
    ("Qwen2ForCausalLM", "MiMoForCausalLM"),
    model_types=("qwen2", "mimo", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    wrappers=("qwen2_vl", "qwen2_5_vl", "got_ocr2", "dots_ocr"),
    keys=LLAMA_KEYS
    | NO_LOCAL_LAYERS
    | fixed(attention_bias=True)
    | ignored("of models that also see", "use_mrope")
    | MTP,
    sets={"qkv_bias": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    more_layers=True,
    # MiMo's.
    drafts=DraftNames(
        "model.mtp_layers.{}",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        counted_apart=True,
        hidden_first=True,
    ),
    tool_calls=HERMES,
)
