from meshwright.models.families.family import Family
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "mistral",
    "Mistral",
    ("MistralForCausalLM",),
    wrappers=("mistral3",),
    keys=LLAMA_KEYS,
    class_defaults={
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
    },
    groups=(LocalLayers(window=4096), Rope()),
    tensors=LLAMA_TENSORS,
    tool_calls=MISTRAL_CALLS,
)
