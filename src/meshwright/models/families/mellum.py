from meshwright.models.families.family import Family, Key, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import ExpertLayers, LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts

FAMILY = Family(
    "mellum",
    "Mellum 2",
    ("MellumForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EXPERTS
    | {
        "head_dim": Key("d_head", 128),
        "moe_intermediate_size": needed("moe.d_ff"),
        "norm_topk_prob": Key("moe.normalized", True),
    }
    | ignored("of the module that predicts a second token", "num_mtp_layers", "num_nextn_predict_layers")
    | ignored("of the module that predicts a second token", "mtp_layer_types", "mtp_mlp_layer_types"),
    sets={"qk_norm": True},
    groups=(LocalLayers(window=1024), ExpertLayers(dense=0), Rope(theta=500_000.0, local_is_plain=True)),
    tensors=LLAMA_TENSORS | experts(),
)
