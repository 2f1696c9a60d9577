from meshwright.models.families.family import Family, needed
from meshwright.models.families.keys import EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "mixtral",
    "Mixtral",
    ("MixtralForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | EXPERTS | {"intermediate_size": needed(("d_ff", "moe.d_ff"))},
    groups=(LocalLayers(), Rope(theta=1e6)),
    tensors=LLAMA_TENSORS | experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2")),
    tool_calls=MISTRAL_CALLS,
    releases=release(
        "Jiang et al. 2024, https://arxiv.org/abs/2401.04088; config.json of mistralai/Mixtral-*-v0.1",
        {
            "mixtral-8x7b": preset(
                "L=32, D=4096, F=14_336, N=32",
                46_702_792_704,
                "12.9B",
                max_seq_len=32_768,
                moe=mixture(8, 2, 14_336),
            ),
            "mixtral-8x22b": preset(
                "L=56, D=6144, F=16_384, N=48",
                140_620_634_112,
                "39.1B",
                max_seq_len=65_536,
                moe=mixture(8, 2, 16_384),
            ),
        },
        shared={"num_kv_heads": 8, "d_head": 128, "vocab_size": 32_000, "rope_theta": 1e6},
    ),
)
