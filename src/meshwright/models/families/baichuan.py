from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.families.releases import published, release

_KEYS = without(LLAMA_KEYS, "max_position_embeddings")

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
            "baichuan2-7b": published("L=32, D=4096, F=11_008, N=32", "7.51B"),
            "baichuan2-13b": published("L=40, D=5120, F=13_696, N=40", "13.90B"),
        },
        shared={"vocab_size": 125_696},
    ),
)
