from meshwright.models.families.family import Family, Key, fixed
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import LLAMA_CALLS

FAMILY = Family(
    "llama",
    "LLaMA 1 to 3.3",
    ("LlamaForCausalLM",),
    model_types=("llama", "emu3_text_model", "internlm3", "iquestcoder"),
    wrappers=("emu3", "llava", "llava_next", "idefics3", "smolvlm"),
    keys=LLAMA_KEYS | ATTENTION_BIAS | {"mlp_bias": Key("mlp_bias", False)} | fixed(sliding_window=None),
    class_defaults={
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    tool_calls=LLAMA_CALLS,
)
