from meshwright.models.families.common import LAYER, ROUTER, experts
from meshwright.models.families.family import Family, Tensor, needed
from meshwright.models.families.hunyuan_v1_dense import HUNYUAN_KEYS, HUNYUAN_SETS, HUNYUAN_TENSORS
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "hunyuan_v1_moe",
    "Hunyuan A13B",
    ("HunYuanMoEV1ForCausalLM",),
    keys=HUNYUAN_KEYS
    | ROUTER
    | {
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "moe_topk": needed("moe.experts_per_token", "num_experts_per_tok"),
    },
    sets=HUNYUAN_SETS | {"moe.num_shared_experts": 1},
    groups=(Rope(),),
    tensors=HUNYUAN_TENSORS
    | experts(shared="shared_mlp")
    | {"router": Tensor(f"{LAYER}.mlp.gate.wg.weight", ("E", "D"))},
)
