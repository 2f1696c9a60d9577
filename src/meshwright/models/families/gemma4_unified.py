from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family
from meshwright.models.families.gemma4 import GEMMA_4_KEYS, GEMMA_4_SETS, LAYER_KEYS, read_layers

_LAYER_KEYS = {key: fields for key, fields in LAYER_KEYS.items() if "per_layer_input" not in key}

FAMILY = Family(
    "gemma4_unified",
    "Gemma 4 (unified, text)",
    ("Gemma4UnifiedForCausalLM",),
    model_types=("gemma4_unified_text",),
    wrappers=("gemma4_unified",),
    keys=GEMMA_4_KEYS,
    sets=GEMMA_4_SETS,
    groups=(ByLayer(read_layers, _LAYER_KEYS),),
    tensors={},
    is_written=False,
)
