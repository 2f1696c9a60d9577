from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, linear

_BIASES = ("qkv_bias", "attention_out_bias", "mlp_bias")

FAMILY = Family(
    "starcoder2",
    "StarCoder 2",
    ("Starcoder2ForCausalLM",),
    keys=without(LLAMA_KEYS, "rms_norm_eps")
    | {
        "norm_epsilon": Key("norm_eps", 1e-5),
        "use_bias": Key(_BIASES, True),
        "hidden_act": Key("activation", "gelu_pytorch_tanh", form=ACTIVATION),
        "tie_word_embeddings": Key("tied_embeddings", True),
    }
    | ignored("its class has one kind of norm and feed-forward", "norm_type", "mlp_type")
    | ignored("training only", "residual_dropout", "embedding_dropout"),
    sets={"norm": "layer", "norm_bias": True, "gated": False},
    groups=(LocalLayers(), Rope()),
    tensors=LLAMA_TENSORS
    | linear("w_in", f"{LAYER}.mlp.c_fc", "F", "D")
    | linear("w_out", f"{LAYER}.mlp.c_proj", "D", "F"),
)
