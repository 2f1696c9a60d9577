from meshwright.models.families.family import Family, Rule
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS_ONLY

EXAONE_4_KEYS: dict[str, Rule] = LLAMA_KEYS | EPS_1E_5

FAMILY = Family(
    "exaone4",
    "EXAONE 4",
    ("Exaone4ForCausalLM",),
    keys=EXAONE_4_KEYS,
    sets={"pre_norms": False, "post_norms": True, "qk_norm": True},
    groups=(
        LocalLayers(window=4096, global_every=4, pattern=("sliding_window_pattern",), unturned=True),
        Rope(),
    ),
    tensors=LLAMA_TENSORS | POST_NORMS_ONLY,
    releases=release(
        "LG AI Research 2025, https://arxiv.org/abs/2507.11407; config.json of LGAI-EXAONE/EXAONE-4.0-*",
        {
            "exaone-4.0-32b": preset(
                "L=64, D=5120, F=27_392, N=40",
                "32.0B",
                max_seq_len=131_072,
                sliding_window=4096,
                global_every=4,
                nope_every=4,
                rope_scaling={
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_seq_len": 8192,
                },
            )
        },
        shared={"num_kv_heads": 8, "vocab_size": 102_400, "rope_theta": 1e6},
    ),
)
