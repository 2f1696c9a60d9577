from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer
from meshwright.models.families.family import Family, Key, Tensor, ignored, without
from meshwright.models.families.gpt_neox import neox_tensors
from meshwright.models.families.keys import LAYER_NORM_EPS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    # Only the last layer's attention has a bias.
    last = fields["num_layers"] - 1
    layers = by_layer([{"attention_out_bias": number == last} for number in range(last + 1)])
    return layers | {"d_ff": given.get("intermediate_multiple_size", 4) * fields["d_model"]}


_NOT_READ = ("rms_norm_eps", "num_key_value_heads", "intermediate_size")

FAMILY = Family(
    "gpt_neox_japanese",
    "GPT-NeoX Japanese",
    ("GPTNeoXJapaneseForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | LAYER_NORM_EPS
    | activation("gelu")
    | {"tie_word_embeddings": Key("tied_embeddings", True)}
    | ignored("all heads have keys", "num_key_value_heads")
    | ignored("intermediate_multiple_size says it", "intermediate_size")
    | ignored("training only", "hidden_dropout", "use_cache"),
    sets={"norm": "layer", "norm_bias": True, "gated": False},
    groups=(
        ByLayer(_read, {"intermediate_multiple_size": ("d_ff",)}),
        Rope(share=1.0, share_key="rotary_pct"),
    ),
    tensors=neox_tensors("gpt_neox_japanese")
    | {"wo_bias": Tensor("gpt_neox_japanese.layers.{}.attention.dense_bias", ("D",))},
    is_written=False,
)
