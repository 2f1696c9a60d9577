from meshwright.models.families.by_layer import ByLayer, vector
from meshwright.models.families.family import Family, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, PLANNED_POSITIONS

FAMILY = Family(
    "diffllama",
    "DiffLlama",
    ("DiffLlamaForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | PLANNED_POSITIONS
    | ignored("how weights start", "lambda_std_dev"),
    sets={"planned_only": "the difference of two attentions (DiffLlama)"},
    groups=(
        ByLayer(
            lambda given, fields, name: {
                "extras": tuple(vector(f"attention_share_{n}", "H") for n in ("q1", "k1", "q2", "k2"))
            },
            {},
        ),
    ),
    tensors={},
    is_written=False,
)
