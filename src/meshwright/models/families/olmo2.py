from meshwright.models.families.common import (
    ATTENTION_BIAS,
    EPS_1E_5,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    POST_NORMS_ONLY,
    WIDE_QK_NORMS,
)
from meshwright.models.families.family import Family, Release, Rule, preset
from meshwright.models.families.rope import Rope

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
    releases=(
        Release(
            "OLMo Team 2025, https://arxiv.org/abs/2501.00656; config.json of allenai/OLMo-2-*",
            {
                "olmo-2-7b": preset("7.3B", L=32, D=4096, F=11_008, N=32),
                "olmo-2-13b": preset("13.7B", L=40, D=5120, F=13_824, N=40),
                "olmo-2-32b": preset("32.2B", L=64, D=5120, F=27_648, N=40, K=8),
            },
            shared={"vocab_size": 100_352, "max_seq_len": 4096, "norm_eps": 1e-6, "rope_theta": 500_000.0},
        ),
    ),
)
