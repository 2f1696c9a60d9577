from meshwright.models.families.family import Family, ignored
from meshwright.models.families.gptj import GPTJ_KEYS, GPTJ_SETS

FAMILY = Family(
    "codegen",
    "CodeGen",
    ("CodeGenForCausalLM",),
    keys=GPTJ_KEYS | ignored("as its class computes it", "scale_attn_weights"),
    sets={**GPTJ_SETS, "planned_only": "queries, keys and values in four parts (CodeGen)"},
    groups=(),
    tensors={},
    is_written=False,
)
