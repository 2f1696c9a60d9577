from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import LLAMA_KEYS, PLANNED_POSITIONS

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
)
