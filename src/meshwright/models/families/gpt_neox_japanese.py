from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, vector
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import LAYER_NORM_EPS, LLAMA_KEYS, PLANNED_POSITIONS, activation


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    # Only the last layer's attention has a bias.
    bias = vector("wo_bias_of_last", "D", in_layers=False)
    return {"d_ff": given.get("intermediate_multiple_size", 4) * fields["d_model"], "extras": (bias,)}


_NOT_READ = ("rms_norm_eps", "num_key_value_heads", "intermediate_size")

FAMILY = Family(
    "gpt_neox_japanese",
    "GPT-NeoX Japanese",
    ("GPTNeoXJapaneseForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | LAYER_NORM_EPS
    | PLANNED_POSITIONS
    | activation("gelu")
    | {"tie_word_embeddings": Key("tied_embeddings", True)}
    | ignored("planned only, and positions change no plan", "rotary_pct", "rotary_emb_base")
    | ignored("training only", "hidden_dropout", "use_cache"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "planned_only": "a bias of the last attention (GPT-NeoX Japanese)",
    },
    groups=(ByLayer(_read, {"intermediate_multiple_size": ("d_ff",)}),),
    tensors={},
    is_written=False,
)
