from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import LLAMA_KEYS, NO_LOCAL_LAYERS, NUM_EXPERTS
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import (
    DELTA_KEYS,
    FUSED_DELTA_TENSORS,
    GATED_QUERIES,
    StateLayers,
)
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, QWEN_DRAFTS, experts
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen3_next",
    "Qwen3-Next",
    ("Qwen3NextForCausalLM",),
    keys=LLAMA_KEYS
    | NO_LOCAL_LAYERS
    | NUM_EXPERTS
    | DELTA_KEYS
    | fixed(mlp_only_layers=[], attention_bias=False)
    | ignored("of the module that predicts a second token", "num_nextn_predict_layers")
    | {
        "head_dim": Key("d_head", 256),
        "moe_intermediate_size": needed("moe.d_ff"),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
        "decoder_sparse_step": Key("moe.every", 1),
        "norm_topk_prob": Key("moe.normalized", True),
    },
    sets={
        "qk_norm": True,
        "norm_offset": True,
        "attention_gate": True,
        "moe.num_shared_experts": 1,
        "moe.shared_gate": True,
    },
    groups=(StateLayers(every=4), Rope(share=0.25)),
    tensors=LLAMA_TENSORS
    | GATED_QUERIES
    | FUSED_DELTA_TENSORS
    | experts(shared="shared_expert")
    | {"shared_router": Tensor(f"{LAYER}.mlp.shared_expert_gate.weight", ("", "D"))},
    drafts=QWEN_DRAFTS,
    tool_calls=HERMES,
)
