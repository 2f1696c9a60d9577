from meshwright.models.families.family import Family, Rule
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS_ONLY, WIDE_QK_NORMS

OLMO_2_KEYS: dict[str, Rule] = LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS
OLMO_2_SETS = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "width"}
OLMO_2_TENSORS = LLAMA_TENSORS | POST_NORMS_ONLY | WIDE_QK_NORMS

FAMILY = Family(
    "olmo2",
    "OLMo 2",
    ("Olmo2ForCausalLM",),
    keys=OLMO_2_KEYS,
    sets=OLMO_2_SETS,
    groups=(Rope(),),
    tensors=OLMO_2_TENSORS,
    releases=release(
        "OLMo Team 2025, https://arxiv.org/abs/2501.00656; config.json of allenai/OLMo-2-*",
        {
            "olmo-2-7b": preset("L=32, D=4096, F=11_008, N=32", "7.3B"),
            "olmo-2-13b": preset("L=40, D=5120, F=13_824, N=40", "13.7B"),
            "olmo-2-32b": preset("L=64, D=5120, F=27_648, N=40, K=8", "32.2B"),
        },
        shared={"vocab_size": 100_352, "max_seq_len": 4096, "norm_eps": 1e-6, "rope_theta": 500_000.0},
    ),
)
