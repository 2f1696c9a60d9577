from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, matrix
from meshwright.models.families.deepseek_v32 import FAMILY as V32
from meshwright.models.families.family import Family, Key, without
from meshwright.models.families.keys import PLANNED_POSITIONS
from meshwright.models.families.layers import ExpertLayers


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    rank, num_dense = given.get("gated_norm_rank", 16), fields["moe"].num_dense_layers

    def of_norm(part: str) -> tuple[Any, ...]:
        return (matrix(f"{part}_scale_in", "Dk", "D", k=rank), matrix(f"{part}_scale_out", "kD", "k", k=rank))

    # Queries and the gate of attention's result come from the latent, before and after its norm.
    of_latent = (matrix("wq_up_more", "QNH", "Q"), *(matrix(f"wg_up_{n}", "QNO", "Q") for n in ("a", "b")))
    in_all, of_experts = of_latent + of_norm("attention"), of_norm("mlp")
    numbers = range(fields["num_layers"])
    return by_layer([{"extras": in_all if n < num_dense else in_all + of_experts} for n in numbers])


_NOT_READ = ("first_k_dense_replace", "moe_layer_freq", "rope_interleave", "mlp_layer_types")

FAMILY = Family(
    "axk2",
    "A.X K2",
    ("AXK2ForCausalLM",),
    keys=without(V32.keys, *_NOT_READ)
    | PLANNED_POSITIONS
    | {"n_group": Key("moe.num_groups", 1), "n_shared_experts": Key("moe.num_shared_experts", 1)},
    sets={**V32.sets, "planned_only": "gated norms (A.X K2)"},
    groups=(ExpertLayers(dense=1), ByLayer(_read, {"gated_norm_rank": ("extras",)})),
    tensors={},
    is_written=False,
)
