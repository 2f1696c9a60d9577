from meshwright.models.families.family import Family, Key
from meshwright.models.families.gemma_keys import GEMMA_KEYS, GEMMA_SETS
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "gemma",
    "Gemma 1",
    ("GemmaForCausalLM",),
    # Its first files had "gelu" for the tanh form; later ones correct it by hidden_activation.
    keys=GEMMA_KEYS | {"hidden_activation": Key("activation", "gelu_pytorch_tanh", form=ACTIVATION)},
    sets=GEMMA_SETS,
    class_defaults={
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
