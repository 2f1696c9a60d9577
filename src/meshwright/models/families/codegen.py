from dataclasses import replace

from meshwright.models.families.family import Family, ignored
from meshwright.models.families.gptj import GPTJ_KEYS, GPTJ_SETS, GPTJ_TENSORS
from meshwright.models.families.tensors import fused, in_pairs

# As on the four devices of its training: queries, values and keys of a quarter of the heads, then the next.
_HEADS = {
    name: replace(tensor, groups=4)
    for name, tensor in fused(
        ("wq", "wv", "wk"), "transformer.h.{}.attn.qkv_proj", ("NH", "KH", "KH"), arranged="within"
    ).items()
}

FAMILY = Family(
    "codegen",
    "CodeGen",
    ("CodeGenForCausalLM",),
    keys=GPTJ_KEYS | ignored("as its class computes it", "scale_attn_weights"),
    sets=GPTJ_SETS,
    groups=(),
    prefix="transformer.",
    tensors=GPTJ_TENSORS | in_pairs(_HEADS, "wq", "wk") | {"wv": _HEADS["wv"]},
)
