from typing import Any

from meshwright.models.families.family import Family, Form, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.hunyuan_v1_dense import HUNYUAN_KEYS, HUNYUAN_SETS, HUNYUAN_TENSORS
from meshwright.models.families.keys import ROUTER
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, experts


def _read_same(value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if len(set(values)) > 1:
        raise ValueError("the same number in all layers")
    return values[0]


# A number, or a list with the same number for each layer.
_SAME = Form(_read_same)

FAMILY = Family(
    "hunyuan_v1_moe",
    "Hunyuan A13B",
    ("HunYuanMoEV1ForCausalLM",),
    keys=HUNYUAN_KEYS
    | ROUTER
    | {
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "moe_topk": Key("moe.experts_per_token", needed=True, also=("num_experts_per_tok",), form=_SAME),
    }
    | {"num_shared_expert": Key("moe.num_shared_experts", 1, form=_SAME)}
    | fixed(moe_layer_num_skipped=0, use_mixed_mlp_moe=True)
    | ignored("its experts are as wide as intermediate_size", "moe_intermediate_size")
    | ignored("training only", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
    sets=HUNYUAN_SETS,
    groups=(Rope(),),
    tensors=HUNYUAN_TENSORS
    | experts(shared="shared_mlp")
    | {"router": Tensor(f"{LAYER}.mlp.gate.wg.weight", ("E", "D"))},
)
