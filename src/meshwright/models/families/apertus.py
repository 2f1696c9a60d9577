from meshwright.models.families.family import Family, Tensor, fixed, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, activation
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
)
