from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.families.releases import published, release

FAMILY = Family(
    "internlm2",
    "InternLM 2, 2.5, 3",
    ("InternLM2ForCausalLM", "InternLM3ForCausalLM"),
    model_types=("internlm2", "internlm3", "internlm"),
    keys=LLAMA_KEYS
    | PLANNED_POSITIONS
    | {"bias": Key(("attention_out_bias", "mlp_bias"), False), "qkv_bias": Key("qkv_bias", False)}
    | ignored("how transformers runs it", "attn_implementation"),
    sets={"planned_only": "a file's weights in one array by KV head (InternLM 2)"},
    tensors={},
    groups=(),
    is_written=False,
    releases=release(
        "config.json of internlm/internlm2_5-7b and internlm3-8b-instruct",
        {
            "internlm2.5-7b": published(
                "L=32, D=4096, F=14_336, N=32, K=8, V=92_544", "7.74B", max_position_embeddings=32_768
            ),
            "internlm3-8b": published(
                "L=48, D=4096, F=10_240, N=32, K=2, H=128, V=128_512", "8.80B", max_position_embeddings=32_768
            ),
        },
    ),
)
