from meshwright.models.families.family import Family
from meshwright.models.families.gemma_keys import GEMMA_2_KEYS, GEMMA_SETS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, norms

FAMILY = Family(
    "vaultgemma",
    "VaultGemma",
    ("VaultGemmaForCausalLM",),
    keys=GEMMA_2_KEYS,
    sets=GEMMA_SETS,
    groups=(LocalLayers(window=4096, global_every=2), Rope()),
    tensors=LLAMA_TENSORS | norms("mlp_norm", f"{LAYER}.pre_feedforward_layernorm"),
)
