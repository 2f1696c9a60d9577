from meshwright.models.families.family import Family, Key, Tensor, ignored, needed, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import HEAD, feed_forward, linear, norms

_LAYER = "transformer.h.{}"
_ATTENTION = f"{_LAYER}.attn.attention"

FAMILY = Family(
    "exaone",
    "EXAONE 3, 3.5, Deep",
    ("ExaoneForCausalLM",),
    keys=without(LLAMA_KEYS, "num_hidden_layers", "hidden_act")
    | {
        "num_layers": needed("num_layers", "num_hidden_layers"),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "rms_norm_eps": Key("norm_eps", 1e-5),
        "activation_function": Key("activation", "silu", form=ACTIVATION),
    }
    | ignored("training only", "embed_dropout"),
    groups=(Rope(),),
    tensors={
        "embed": Tensor("transformer.wte.weight", ("V", "D")),
        **norms("attention_norm", f"{_LAYER}.ln_1"),
        **linear("wq", f"{_ATTENTION}.q_proj", "NH", "D"),
        **linear("wk", f"{_ATTENTION}.k_proj", "KH", "D"),
        **linear("wv", f"{_ATTENTION}.v_proj", "KH", "D"),
        **linear("wo", f"{_ATTENTION}.out_proj", "D", "NH"),
        **norms("mlp_norm", f"{_LAYER}.ln_2"),
        **feed_forward("w", f"{_LAYER}.mlp", "F", ("c_fc_0", "c_fc_1", "c_proj")),
        **norms("final_norm", "transformer.ln_f"),
    }
    | HEAD,
    is_written=False,
)
