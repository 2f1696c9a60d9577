from meshwright.models.families.common import (
    ATTENTION_BIAS,
    EPS_1E_5,
    EXPERTS,
    LAYER,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    gate_up,
    linear,
)
from meshwright.models.families.family import Family, Release, Tensor, fixed, ignored, mixture, needed, preset
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "gpt_oss",
    "gpt-oss",
    ("GptOssForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EPS_1E_5
    | EXPERTS
    | {"intermediate_size": needed(("d_ff", "moe.d_ff"))}
    | fixed(swiglu_alpha=1.702, swiglu_limit=7.0)
    | ignored("its class has an activation of its own", "hidden_act")
    | ignored("rope_scaling counts", "initial_context_length"),
    sets={
        "attention_sinks": True,
        "activation": "clamped_silu",
        "moe.router_bias": True,
        "moe.expert_bias": True,
    },
    groups=(LocalLayers(window=128, global_every=2), Rope(theta=150_000.0)),
    tensors=LLAMA_TENSORS
    | {"sinks": Tensor(f"{LAYER}.self_attn.sinks", ("N",))}
    | linear("router", f"{LAYER}.mlp.router", "E", "D")
    | gate_up(f"{LAYER}.mlp.experts", "alternate"),
    releases=(
        Release(
            "OpenAI 2025, https://arxiv.org/abs/2508.10925; config.json of openai/gpt-oss-*",
            {
                "gpt-oss-20b": preset(20_914_757_184, L=24, moe=mixture(32, 4, 2880)),
                "gpt-oss-120b": preset(116_829_156_672, L=36, moe=mixture(128, 4, 2880)),
            },
            shared={
                "stored_dtype": "mxfp4",
                "d_model": 2880,
                "d_ff": 2880,
                "num_heads": 64,
                "num_kv_heads": 8,
                "d_head": 64,
                "vocab_size": 201_088,
                "max_seq_len": 131_072,
                "rope_theta": 150_000.0,
                "rope_scaling": {
                    "kind": "yarn",
                    "factor": 32.0,
                    "original_max_seq_len": 4096,
                    "truncate": False,
                },
                "qkv_bias": True,
                "attention_out_bias": True,
                "sliding_window": 128,
                "global_every": 2,
            },
        ),
    ),
)
