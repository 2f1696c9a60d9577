from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "cwm",
    "Code World Model",
    ("CwmForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | {"head_dim": Key("d_head", 128), "mlp_bias": Key("mlp_bias", False)}
    | fixed(attention_bias=False)
    | ignored("its list of layers counts", "window_pattern"),
    groups=(LocalLayers(window=8192, global_every=4), Rope(theta=1e6)),
    tensors=LLAMA_TENSORS,
)
