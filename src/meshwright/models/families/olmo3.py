from meshwright.models.families.family import Family
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.olmo2 import OLMO_2_KEYS, OLMO_2_SETS, OLMO_2_TENSORS
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "olmo3",
    "OLMo 3",
    ("Olmo3ForCausalLM",),
    keys=OLMO_2_KEYS,
    sets=OLMO_2_SETS,
    # Only global layers are stretched.
    groups=(LocalLayers(window=4096, global_every=4), Rope(local_is_plain=True)),
    tensors=OLMO_2_TENSORS,
    releases=release(
        "OLMo Team 2025, https://arxiv.org/abs/2512.13961; config.json of allenai/Olmo-3-*",
        {
            "olmo-3-7b": preset("L=32, D=4096, F=11_008, N=32", "7.3B"),
            "olmo-3-32b": preset("L=64, D=5120, F=27_648, N=40, K=8", "32.2B"),
        },
        shared={
            "vocab_size": 100_278,
            "max_seq_len": 65_536,
            "norm_eps": 1e-6,
            "rope_theta": 500_000.0,
            "rope_theta_local": 500_000.0,
            "sliding_window": 4096,
            "global_every": 4,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 8.0,
                "original_max_seq_len": 8192,
                "attention_factor": 1.2079441541679836,
            },
        },
    ),
)
