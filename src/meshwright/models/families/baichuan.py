from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import LLAMA_KEYS, PLANNED_POSITIONS

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
)
