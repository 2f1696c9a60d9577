from meshwright.models.families.family import Family, Tensor, fixed, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, activation
from meshwright.models.families.releases import by_letter, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, norms

FAMILY = Family(
    "apertus",
    "Apertus",
    ("ApertusForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | activation("xielu")
    | fixed(mlp_bias=False, post_norm=False, qk_norm=True)
    | ignored("training only", "hidden_dropout"),
    sets={"gated": False, "qk_norm": True},
    groups=(Rope(theta=12_000_000.0),),
    tensors=LLAMA_TENSORS
    | norms("attention_norm", f"{LAYER}.attention_layernorm")
    | norms("mlp_norm", f"{LAYER}.feedforward_layernorm")
    | {
        "w_slope_up": Tensor(f"{LAYER}.mlp.act_fn.alpha_p", ("",)),
        "w_slope_down": Tensor(f"{LAYER}.mlp.act_fn.alpha_n", ("",)),
    },
    constants={f"{LAYER}.mlp.act_fn.beta": 0.5, f"{LAYER}.mlp.act_fn.eps": -1e-6},
    releases=release(
        "Swiss AI 2025, https://arxiv.org/abs/2509.14233; config.json of swiss-ai/Apertus-*-2509",
        {
            "apertus-8b": preset("L=32, D=4096, F=21_504, N=32", "8.1B"),
            "apertus-70b": preset("L=80, D=8192, F=43_008, N=64", "70.6B"),
        },
        shared=by_letter("K=8, V=131_072")
        | {
            "max_seq_len": 65_536,
            "rope_theta": 12_000_000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_seq_len": 8192,
            },
            "activation": "xielu",
        },
    ),
)
