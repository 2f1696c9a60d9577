from meshwright.models.families.family import Family
from meshwright.models.families.gemma_keys import GEMMA_2_KEYS, GEMMA_2_SETS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS

FAMILY = Family(
    "gemma2",
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    keys=GEMMA_2_KEYS,
    sets=GEMMA_2_SETS,
    class_defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    groups=(LocalLayers(window=4096, global_every=2), Rope()),
    tensors=LLAMA_TENSORS | POST_NORMS,
)
