from meshwright.models.families.family import Family, Ignored, Tensor, needed
from meshwright.models.families.keys import NUM_EXPERTS
from meshwright.models.families.qwen3_5 import QWEN3_5_GROUPS, QWEN3_5_KEYS, QWEN3_5_SETS
from meshwright.models.families.releases import by_letter, mixture, preset, release
from meshwright.models.families.state_layers import GATED_QUERIES, SPLIT_DELTA_TENSORS
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import HERMES


def _delta(num_value_heads: int) -> dict[str, int]:
    return {"num_key_heads": 16, "num_value_heads": num_value_heads, "key_dim": 128, "value_dim": 128}


FAMILY = Family(
    "qwen3_5_moe",
    "Qwen3.5-MoE (text)",
    ("Qwen3_5MoeForCausalLM",),
    model_types=("qwen3_5_moe_text",),
    wrappers=("qwen3_5_moe",),
    keys=QWEN3_5_KEYS
    | NUM_EXPERTS
    | {
        "intermediate_size": Ignored("its layers all have experts"),
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
    },
    sets=QWEN3_5_SETS | {"moe.num_shared_experts": 1, "moe.shared_gate": True},
    groups=QWEN3_5_GROUPS,
    tensors=LLAMA_TENSORS
    | GATED_QUERIES
    | SPLIT_DELTA_TENSORS
    | experts(shared="shared_expert")
    | {"shared_router": Tensor(f"{LAYER}.mlp.shared_expert_gate.weight", ("", "D"))},
    more_layers=True,
    tool_calls=HERMES,
    releases=release(
        # Without the vision tower and the module that predicts a second token.
        "config.json of Qwen/Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B",
        {
            "qwen3.5-35b-a3b": preset(
                "L=40, D=2048, F=512, N=16",
                "34.7B",
                moe=mixture(256, 8, 512, d_ff_shared=512),
                delta=_delta(32),
            ),
            "qwen3.5-122b-a10b": preset(
                "L=48, D=3072, F=1024, N=32",
                "122B",
                "10B",
                moe=mixture(256, 8, 1024, d_ff_shared=1024),
                delta=_delta(64),
            ),
            "qwen3.5-397b-a17b": preset(
                "L=60, D=4096, F=1024, N=32",
                "396B",
                "17B",
                moe=mixture(512, 10, 1024, d_ff_shared=1024),
                delta=_delta(64),
            ),
        },
        shared=by_letter("K=2, H=256, V=248_320")
        | {
            "max_seq_len": 262_144,
            "norm_eps": 1e-6,
            "rope_theta": 1e7,
            "rotary_dim": 64,
            "mixers": ("state", "state", "state", "attention"),
        },
    ),
)
