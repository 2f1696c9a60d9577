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
    | {
        "bias": Key(("attention_out_bias", "mlp_bias"), False),
        "qkv_bias": Key("qkv_bias", False),
    }
    | ignored("how transformers runs it", "attn_implementation"),
    sets={"planned_only": "a file's weights in one array by KV head (InternLM 2)"},
    tensors={},
    groups=(),
    is_written=False,
    releases=release(
        "config.json of internlm/internlm2_5-7b and internlm3-8b-instruct",
        {
            "internlm2.5-7b": published(
                "7.74B",
                num_hidden_layers=32,
                hidden_size=4096,
                intermediate_size=14_336,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=92_544,
                max_position_embeddings=32_768,
            ),
            "internlm3-8b": published(
                "8.80B",
                num_hidden_layers=48,
                hidden_size=4096,
                intermediate_size=10_240,
                num_attention_heads=32,
                num_key_value_heads=2,
                head_dim=128,
                vocab_size=128_512,
                max_position_embeddings=32_768,
            ),
        },
    ),
)
