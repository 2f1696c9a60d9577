from meshwright.models.families.family import Family, Key, fixed, ignored, without
from meshwright.models.families.keys import SIZES
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "stablelm",
    "StableLM",
    ("StableLmForCausalLM",),
    keys=without(SIZES, "rms_norm_eps")
    | {"layer_norm_eps": Key("norm_eps", 1e-5), "use_qkv_bias": Key("qkv_bias", False)}
    | fixed(qk_layernorm=False, use_parallel_residual=False)
    | ignored("hidden_size over num_attention_heads counts", "head_dim")
    | ignored("training only", "hidden_dropout"),
    sets={"norm": "layer", "norm_bias": True},
    groups=(Rope(share=0.25),),
    tensors=LLAMA_TENSORS,
    releases=release(
        # stablelm-2-12b is another model: it norms queries and keys, and runs MLPs parallel to attention.
        "config.json of stabilityai/stablelm-3b-4e1t and stablelm-2-1_6b",
        {
            "stablelm-3b-4e1t": preset("L=32, D=2560, F=6912, N=32, V=50_304", 2_795_443_200, rotary_dim=20),
            "stablelm-2-1.6b": preset(
                "L=24, D=2048, F=5632, N=32, V=100_352", 1_644_515_328, rotary_dim=16, qkv_bias=True
            ),
        },
        shared={"max_seq_len": 4096},
    ),
)
