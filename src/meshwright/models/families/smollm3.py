from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.layers import UnturnedLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "smollm3",
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | {"mlp_bias": Key("mlp_bias", False), "tie_word_embeddings": Key("tied_embeddings", True)},
    groups=(UnturnedLayers(every=4), Rope(theta=2e6)),
    tensors=LLAMA_TENSORS,
    tool_calls=HERMES,
)
