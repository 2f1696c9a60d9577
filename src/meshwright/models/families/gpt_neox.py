from meshwright.models.families.family import Family, Key, Tensor, ignored, without
from meshwright.models.families.keys import LAYER_NORM_EPS, LLAMA_KEYS, activation
from meshwright.models.families.releases import Release, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import fused, linear, norms

_LAYER = "gpt_neox.layers.{}"
_NOT_READ = ("rms_norm_eps", "num_key_value_heads")
_SHARED = {"max_seq_len": 2048, "parallel": True, "qkv_bias": True, "attention_out_bias": True}

FAMILY = Family(
    "gpt_neox",
    "GPT-NeoX, Pythia",
    ("GPTNeoXForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | LAYER_NORM_EPS
    | activation("gelu")
    | {
        "use_parallel_residual": Key("parallel", True),
        "attention_bias": Key(("qkv_bias", "attention_out_bias"), True),
    }
    | ignored("all heads have keys", "num_key_value_heads")
    | ignored("training only", "attention_probs_dropout_prob", "hidden_dropout_prob")
    | ignored(
        "training only", "hidden_dropout", "classifier_dropout", "init_method", "output_layer_init_method"
    ),
    sets={"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True},
    groups=(Rope(share=0.25, share_key="rotary_pct"),),
    tensors={
        "embed": Tensor("gpt_neox.embed_in.weight", ("V", "D")),
        **norms("attention_norm", f"{_LAYER}.input_layernorm"),
        **fused(("wq", "wk", "wv"), f"{_LAYER}.attention.query_key_value", ("NH", "KH", "KH"), "D", "within"),
        **linear("wo", f"{_LAYER}.attention.dense", "D", "NH"),
        **norms("mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        **linear("w_in", f"{_LAYER}.mlp.dense_h_to_4h", "F", "D"),
        **linear("w_out", f"{_LAYER}.mlp.dense_4h_to_h", "D", "F"),
        **norms("final_norm", "gpt_neox.final_layer_norm"),
        "unembed": Tensor("embed_out.weight", ("V", "D")),
    },
    releases=(
        Release(
            "Black et al. 2022, https://arxiv.org/abs/2204.06745; config.json of EleutherAI/gpt-neox-20b",
            {"gpt-neox-20b": preset("L=44, D=6144, F=24_576, N=64, V=50_432", 20_554_567_680, rotary_dim=24)},
            shared=_SHARED | {"activation": "gelu"},
        ),
        Release(
            "Biderman et al. 2023, https://arxiv.org/abs/2304.01373; config.json of EleutherAI/pythia-*",
            {
                "pythia-160m": preset("L=12, D=768, F=3072, N=12, V=50_304", 162_322_944, rotary_dim=16),
                "pythia-1.4b": preset("L=24, D=2048, F=8192, N=16, V=50_304", 1_414_647_808, rotary_dim=32),
                "pythia-6.9b": preset("L=32, D=4096, F=16_384, N=32, V=50_432", 6_857_302_016, rotary_dim=32),
                "pythia-12b": preset("L=36, D=5120, F=20_480, N=40, V=50_688", 11_846_072_320, rotary_dim=32),
            },
            shared=_SHARED | {"activation": "gelu_erf"},
        ),
    ),
)
