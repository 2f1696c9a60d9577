from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.families.family import Family, Key
from meshwright.models.families.mamba import (
    BLOCK_KEYS,
    BLOCK_TENSORS,
    SELECTIVE_KEYS,
    SelectiveBlocks,
    read_blocks,
)


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Blocks whose steps, B and C are normed without scales."""
    read = read_blocks(given, fields, name)
    return read | {"selective": replace(read["selective"], plain_norm_eps=given.get("mixer_rms_eps", 1e-6))}


FAMILY = Family(
    "falcon_mamba",
    "Falcon Mamba",
    ("FalconMambaForCausalLM",),
    keys=BLOCK_KEYS | {"tie_word_embeddings": Key("tied_embeddings", True)},
    sets={"num_heads": 1},
    groups=(SelectiveBlocks(_read, SELECTIVE_KEYS | {"mixer_rms_eps": ("selective.plain_norm_eps",)}),),
    tensors=BLOCK_TENSORS,
)
