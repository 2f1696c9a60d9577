from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, ignored
from meshwright.models.families.gptj import GPTJ_KEYS, GPTJ_SETS, GPTJ_TENSORS
from meshwright.models.families.tensors import fused, in_pairs

# Files have queries, values and keys of a quarter of the heads, then those of the next quarter, from
# training on four devices.
_NUM_GROUPS = 4
_HEADS = {
    name: replace(tensor, groups=_NUM_GROUPS)
    for name, tensor in fused(
        ("wq", "wv", "wk"), "transformer.h.{}.attn.qkv_proj", ("NH", "KH", "KH"), arranged="within"
    ).items()
}


def _checked(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    if fields["num_heads"] % _NUM_GROUPS:
        raise ModelError(
            f"{name}: n_head = {fields['num_heads']} does not divide into the {_NUM_GROUPS} groups of heads "
            f"that files of CodeGen have; fits: a multiple of {_NUM_GROUPS}"
        )
    return {}


FAMILY = Family(
    "codegen",
    "CodeGen",
    ("CodeGenForCausalLM",),
    keys=GPTJ_KEYS | ignored("as its class computes it", "scale_attn_weights"),
    sets=GPTJ_SETS,
    groups=(ByLayer(_checked, {}),),
    prefix="transformer.",
    tensors=GPTJ_TENSORS | in_pairs(_HEADS, "wq", "wk") | {"wv": _HEADS["wv"]},
)
