from meshwright.models.families.family import Family, Key, Tensor, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import ExpertLayers, LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts

FAMILY = Family(
    "flint",
    "Flint",
    ("FlintForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EXPERTS
    | {
        "head_dim": Key("d_head", 128),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
        "decoder_sparse_step": Key("moe.every", 1),
        "norm_topk_prob": Key("moe.normalized", True),
    },
    sets={"qk_norm": True, "moe.num_shared_experts": 1, "moe.score": "sigmoid", "attention_sinks": True},
    groups=(LocalLayers(window=513, unturned=True), ExpertLayers(dense=2), Rope()),
    tensors=LLAMA_TENSORS
    | experts(shared="shared_expert")
    | {"sinks": Tensor(f"{LAYER}.self_attn.softmax_offset", ("N",))},
)
