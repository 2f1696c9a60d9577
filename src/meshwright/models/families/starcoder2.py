from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import preset, release
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
    releases=release(
        "Lozhkov et al. 2024, https://arxiv.org/abs/2402.19173; config.json of bigcode/starcoder2-*",
        {
            "starcoder2-3b": preset(
                "L=30, D=3072, F=12_288, N=24, K=2", 3_030_371_328, rope_theta=999_999.4420358813
            ),
            "starcoder2-7b": preset("L=32, D=4608, F=18_432, N=36, K=4", 7_173_923_840, rope_theta=1e6),
            "starcoder2-15b": preset(
                "L=40, D=6144, F=24_576, N=48, K=4", 15_957_889_024, rope_theta=1e5, tied_embeddings=False
            ),
        },
        shared={
            "vocab_size": 49_152,
            "max_seq_len": 16_384,
            "sliding_window": 4096,
            "activation": "gelu",
            "tied_embeddings": True,
            **dict.fromkeys(_BIASES, True),
        },
    ),
)
