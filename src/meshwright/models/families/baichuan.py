from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.families.releases import published, release

_KEYS = {key: rule for key, rule in LLAMA_KEYS.items() if key != "max_position_embeddings"}

FAMILY = Family(
    "baichuan",
    "Baichuan 1, 2",
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    keys=_KEYS
    | PLANNED_POSITIONS
    | {"max_position_embeddings": Key("max_seq_len", 4096, also=("model_max_length",))}
    | ignored("training only", "z_loss_weight", "gradient_checkpointing")
    | ignored("of the tokenizer", "_from_model_config"),
    sets={"planned_only": "a head of normed weights (Baichuan 2)"},
    tensors={},
    groups=(),
    is_written=False,
    releases=release(
        "Baichuan 2023, https://arxiv.org/abs/2309.10305; config.json of baichuan-inc/Baichuan2-*",
        {
            "baichuan2-7b": published(
                "7.51B",
                num_hidden_layers=32,
                hidden_size=4096,
                intermediate_size=11_008,
                num_attention_heads=32,
            ),
            "baichuan2-13b": published(
                "13.90B",
                num_hidden_layers=40,
                hidden_size=5120,
                intermediate_size=13_696,
                num_attention_heads=40,
            ),
        },
        shared={"vocab_size": 125_696},
    ),
)
