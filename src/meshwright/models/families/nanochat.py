from dataclasses import replace

from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, linear

FAMILY = Family(
    "nanochat",
    "nanochat",
    ("NanoChatForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | activation("relu2")
    | {"final_logit_softcapping": Key("logit_softcap", 15.0, null_is_none=True)},
    sets={"norm_scale": False, "embedding_norm": True, "turned_norm": True, "gated": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS
    | {name: replace(LLAMA_TENSORS[name], swapped="H") for name in ("wq", "wk", "wq_bias", "wk_bias")}
    | linear("w_in", f"{LAYER}.mlp.fc1", "F", "D")
    | linear("w_out", f"{LAYER}.mlp.fc2", "D", "F"),
)
