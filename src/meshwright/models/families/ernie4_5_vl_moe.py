from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.families.by_layer import ByLayer, matrix
from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS, MTP, PLANNED_POSITIONS, ROUTER


def _first(value: Any, default: Any) -> Any:
    """The text model's number: files list it before the images' number."""
    value = default if value is None else value
    return value[0] if isinstance(value, list) else value


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Each layer with experts has a second set for images; no token of a text uses it."""
    widths = given.get("moe_intermediate_size") or [1536, 512]
    num_experts = _first(given.get("moe_num_experts"), 64)
    first = _first(given.get("moe_layer_start_index"), 1)
    kinds = given.get("mlp_layer_types") or [
        "sparse" if n >= first else "dense" for n in range(fields["num_layers"])
    ]
    feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in kinds)
    letters = {"e": num_experts, "f": widths[-1]}
    of_images = (
        matrix("unused_expert_gate", "eDf", "", **letters),
        matrix("unused_expert_in", "eDf", "", **letters),
        matrix("unused_expert_out", "efD", "", **letters),
        matrix("unused_router", "De", "", e=num_experts),
        matrix("unused_choice_bias", "e", "", e=num_experts),
    )
    dense = tuple(n for n, kind in enumerate(feed_forwards) if kind == "dense")
    moe = replace(fields["moe"], num_experts=num_experts, d_ff=_first(widths, 1536))
    variants = ({"layers": dense, "values": (("extras", ()),)},) if dense else ()
    return {"moe": moe, "feed_forwards": feed_forwards, "extras": of_images, "variants": variants}


_OF_LAYERS = {
    "moe_intermediate_size": ("moe.d_ff", "extras"),
    "moe_num_experts": ("moe.num_experts",),
    "mlp_layer_types": ("feed_forwards",),
    "moe_layer_start_index": ("feed_forwards",),
}

FAMILY = Family(
    "ernie4_5_vl_moe",
    "ERNIE 4.5 VL",
    ("Ernie4_5_VLMoeForConditionalGeneration",),
    model_types=("ernie4_5_vl_moe_text", "ernie4_5_moe_vl"),
    wrappers=("ernie4_5_vl_moe",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | ROUTER
    | PLANNED_POSITIONS
    | MTP
    | {
        "use_bias": Key(("qkv_bias", "attention_out_bias", "mlp_bias"), False),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "moe_k": Key("moe.experts_per_token", 6),
        "moe_num_shared_experts": Key("moe.num_shared_experts", 2),
    }
    | fixed(moe_use_aux_free=True, moe_gate="topk", use_rmsnorm=True, moe_layer_interval=1)
    | ignored("the last layer in every release", "moe_layer_end_index")
    | ignored("keeps a sum from zero", "moe_norm_min")
    | ignored("training only", "moe_capacity")
    | ignored("planned only, and positions change no plan", "freq_allocation")
    | ignored("of its tower", "pixel_hidden_size"),
    sets={
        "moe.num_experts": 64,
        "moe.d_ff": 1536,
        "moe.choice_bias": True,
        "planned_only": "experts of images (ERNIE 4.5 VL)",
    },
    groups=(ByLayer(_read, _OF_LAYERS),),
    tensors={},
    is_written=False,
)
