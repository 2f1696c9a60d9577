from meshwright.models.families.family import Family, Key
from meshwright.models.families.olmo2 import OLMO_2_SETS, OLMO_2_TENSORS
from meshwright.models.families.olmoe import OLMOE_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import experts

FAMILY = Family(
    "flex_olmo",
    "FlexOlmo",
    ("FlexOlmoForCausalLM",),
    keys=OLMOE_KEYS | {"rms_norm_eps": Key("norm_eps", 1e-6)},
    sets=OLMO_2_SETS,
    groups=(Rope(theta=500_000.0),),
    tensors=OLMO_2_TENSORS | experts(),
)
