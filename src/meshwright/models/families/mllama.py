from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, vector
from meshwright.models.families.family import Family, ignored
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS, PLANNED_POSITIONS


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Layers that attend to an image have norms of queries and keys, and two gates; their cache is its."""
    crossing = given.get("cross_attention_layers")
    crossing = range(3, fields["num_layers"], 5) if crossing is None else crossing
    gates = tuple(vector(f"{part}_gate_of_image", "v", v=1) for part in ("attention", "mlp"))
    layers = [
        {"qk_norm": number in crossing, "extras": gates if number in crossing else ()}
        for number in range(fields["num_layers"])
    ]
    read = by_layer(layers)
    # Eight further rows of the table, for tokens of images.
    more = vector("table_of_images", "wD", in_layers=False, w=8)
    return read | {"extras": (*read["extras"], more)}


FAMILY = Family(
    "mllama",
    "Llama 3.2 Vision (text)",
    ("MllamaForCausalLM",),
    model_types=("mllama_text_model",),
    wrappers=("mllama",),
    keys=LLAMA_KEYS | EPS_1E_5 | PLANNED_POSITIONS | ignored("training only", "dropout"),
    sets={"planned_only": "attention to images (Llama 3.2 Vision)"},
    groups=(ByLayer(_read, {"cross_attention_layers": ("qk_norm",)}),),
    tensors={},
    is_written=False,
)
