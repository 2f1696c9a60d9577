from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.layers import UnturnedLayers
from meshwright.models.families.releases import preset, release
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
    releases=release(
        "config.json of HuggingFaceTB/SmolLM3-3B",
        {"smollm3-3b": preset("L=36, D=2048, F=11_008, N=16, K=4, V=128_256", 3_075_098_624)},
        shared={
            "max_seq_len": 65_536,
            "norm_eps": 1e-6,
            "rope_theta": 5e6,
            "tied_embeddings": True,
            "nope_every": 4,
        },
    ),
)
