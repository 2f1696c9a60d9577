from meshwright.models.families.cohere import COHERE_KEYS, COHERE_SETS
from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import PLANNED_POSITIONS
from meshwright.models.families.layers import LocalLayers

FAMILY = Family(
    "cohere_compass",
    "North Compass (text)",
    ("CohereCompassForCausalLM",),
    model_types=("cohere_compass_text",),
    keys=COHERE_KEYS
    | {"logit_scale": Key("logit_scale")}
    | PLANNED_POSITIONS
    | ignored("of embedding models", "pooling"),
    sets={**COHERE_SETS, "planned_only": "positions by kind of layer (North Compass)"},
    groups=(LocalLayers(window=4096, pattern=("sliding_window_pattern", "_sliding_window_pattern")),),
    tensors={},
    is_written=False,
)
