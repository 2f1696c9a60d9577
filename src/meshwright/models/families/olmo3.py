from meshwright.models.families.family import Family
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.olmo2 import OLMO_2_KEYS, OLMO_2_SETS, OLMO_2_TENSORS
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "olmo3",
    "OLMo 3",
    ("Olmo3ForCausalLM",),
    keys=OLMO_2_KEYS,
    sets=OLMO_2_SETS,
    # Only global layers are stretched.
    groups=(LocalLayers(window=4096, global_every=4), Rope(local_is_plain=True)),
    tensors=OLMO_2_TENSORS,
)
