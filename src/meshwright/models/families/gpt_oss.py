from meshwright.models.families.family import Family, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, gate_up, linear

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
)
