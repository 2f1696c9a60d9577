from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import by_letter, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "ministral3",
    "Ministral 3",
    ("Ministral3ForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | {"head_dim": Key("d_head", 128)},
    groups=(LocalLayers(), Rope(theta=1e6, temperature=True)),
    tensors=LLAMA_TENSORS,
    tool_calls=MISTRAL_CALLS,
    releases=release(
        "config.json of mistralai/Ministral-3-*-Base-2512",
        {
            "ministral-3-3b": preset("L=26, D=3072, F=9216, N=32", tied_embeddings=True),
            "ministral-3-8b": preset("L=34, D=4096, F=14_336, N=32"),
            "ministral-3-14b": preset("L=40, D=5120, F=16_384, N=32"),
        },
        shared=by_letter("K=8, H=128, V=131_072")
        | {
            "max_seq_len": 262_144,
            "rope_theta": 1e6,
            "temperature_floor": 16_384,
            "temperature_slope": 0.1,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 16.0,
                "original_max_seq_len": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
)
