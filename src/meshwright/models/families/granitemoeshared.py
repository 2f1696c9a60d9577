from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Part
from meshwright.models.families.granitemoe import GRANITE_MOE_KEYS, GRANITE_MOE_TENSORS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, fused_experts


class _SharedWidth:
    """The width of the shared feed-forward; 0 for none."""

    parts: Mapping[str, Part] = {"shared_intermediate_size": Part(("moe.d_ff_shared",), (int,))}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        width = given.get("shared_intermediate_size") or None
        return {"moe": replace(fields["moe"], num_shared_experts=int(width is not None), d_ff_shared=width)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"shared_intermediate_size": model.moe.d_ff_all_shared if model.moe else 0}


FAMILY = Family(
    "granitemoeshared",
    "Granite 3 (experts, some shared)",
    ("GraniteMoeSharedForCausalLM",),
    keys=GRANITE_MOE_KEYS,
    groups=(Rope(), _SharedWidth()),
    tensors=GRANITE_MOE_TENSORS
    | fused_experts(f"{LAYER}.shared_mlp", "input_linear", "output_linear", "U", "shared"),
)
