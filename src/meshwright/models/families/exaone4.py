from meshwright.models.families.family import Family, Rule
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS_ONLY

EXAONE_4_KEYS: dict[str, Rule] = LLAMA_KEYS | EPS_1E_5

FAMILY = Family(
    "exaone4",
    "EXAONE 4",
    ("Exaone4ForCausalLM",),
    keys=EXAONE_4_KEYS,
    sets={"pre_norms": False, "post_norms": True, "qk_norm": True},
    groups=(
        LocalLayers(window=4096, global_every=4, pattern=("sliding_window_pattern",), unturned=True),
        Rope(),
    ),
    tensors=LLAMA_TENSORS | POST_NORMS_ONLY,
)
