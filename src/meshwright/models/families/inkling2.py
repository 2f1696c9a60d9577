from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, matrix, vector
from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.inkling import (
    ATTENTION_PARTS,
    INKLING_KEYS,
    attention_layers,
    short_convolutions,
)


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    taps, width = given.get("conv_kernel_size") or 4, given.get("d_rel") or 16
    of_all = (
        *short_convolutions(taps),
        matrix("sink_of_query", "DN", "D"),
        vector("query_clip_norm", "NH"),
        vector("distance_clip_norm", "Nn", n=width),
        vector("mlp_sources", "D"),
    )
    # In global layers queries, keys and values each attend to the results of earlier blocks of layers.
    of_global = (
        *(matrix(f"conv_of_{part}_by_token", "DKv", "D", v=taps) for part in ("keys", "values")),
        vector("attention_norm_more", "Dj", j=2),
        vector("attention_sources", "Dk", k=3),
    )
    layers = attention_layers(given, fields)
    for number, layer in enumerate(layers):
        of_local = (vector("attention_sources", "D"),) if number else ()
        layer["extras"] += of_all + (of_local if layer["sliding_window"] else of_global)
    read = by_layer(layers)
    return read | {"extras": read["extras"] + (vector("final_sources", "D", in_layers=False),)}


FAMILY = Family(
    "inkling2",
    "Inkling 2",
    ("Inkling2ForCausalLM",),
    model_types=("inkling2_text",),
    wrappers=("inkling2",),
    keys=INKLING_KEYS
    | {"final_logit_softcapping": Key("logit_softcap", 30.0)}
    | fixed(scoring_func="sigmoid")
    | ignored(
        "planned only: caps of norms and of experts, and the layers that are summed",
        "qk_l2_clip_threshold", "rel_l2_clip_threshold", "mlp_gate_softcap", "mlp_up_softcap",
        "n_layers_per_attn_res_block",
    ),
    sets={
        "embedding_norm": True,
        "attention_gate": True,
        "positions": "none",
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "planned_only": "relative positions, convolutions and residuals of earlier layers (Inkling 2)",
    },
    groups=(ByLayer(_read, ATTENTION_PARTS),),
    tensors={},
    is_written=False,
)  # fmt: skip
