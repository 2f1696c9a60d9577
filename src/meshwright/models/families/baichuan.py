from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, QKV, fused

# The vocabulary of Baichuan 2. It identifies the files with a head of normed rows, since no key does.
_BAICHUAN_2 = 125_696


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    # Files of 7B have this key, and rotary positions; files of 13B have neither, but ALiBi.
    is_rotary = given.get("max_position_embeddings") is not None
    read: dict[str, Any] = {"positions": "rope" if is_rotary else "alibi"}
    if fields["vocab_size"] == _BAICHUAN_2:
        read["planned_only"] = "a head of normed weights (Baichuan 2)"
    return read


FAMILY = Family(
    "baichuan",
    "Baichuan 1, 2",
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    keys=without(LLAMA_KEYS, "max_position_embeddings")
    | {"max_position_embeddings": Key("max_seq_len", 4096, also=("model_max_length",))}
    | ignored("training only", "z_loss_weight", "gradient_checkpointing")
    | ignored("of the tokenizer", "_from_model_config"),
    groups=(
        Rope(),
        ByLayer(_read, {"max_position_embeddings": ("positions",), "vocab_size": ("planned_only",)}),
    ),
    tensors=LLAMA_TENSORS | fused(("wq", "wk", "wv"), f"{LAYER}.self_attn.W_pack", QKV),
    is_written=False,
)
