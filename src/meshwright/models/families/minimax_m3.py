from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import Indexer, Variant
from meshwright.models.families.family import (
    Family,
    Fixed,
    Key,
    Part,
    Rule,
    Tensor,
    fixed,
    ignored,
    needed,
    without,
)
from meshwright.models.families.keys import LLAMA_KEYS, MTP, ROUTER
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, PROJECTIONS, experts, feed_forward

# Names of the indexer's sizes in transformers, and in the table of older files.
_INDEX = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
_SPARSE, _DENSE = "minimax_m3_sparse", "full_attention"


@dataclass(frozen=True)
class SparseLayers:
    """The layers whose attention reads chosen blocks of keys, and the layers that have experts."""

    @property
    def parts(self) -> Mapping[str, Part]:
        return {
            "layer_types": Part(("indexer",), (list,)),
            "sparse_attention_config": Part(("indexer",), (dict,)),
            "mlp_layer_types": Part(("feed_forwards",), (list,)),
            "moe_layer_freq": Part(("feed_forwards",), (list,)),
            **{key: Part(("indexer",), (int,)) for key in _INDEX},
        }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        num_layers, table = fields["num_layers"], given.get("sparse_attention_config") or {}
        heads, width, block, num_blocks, local = (
            table.get(older, given.get(key, default)) for key, (older, default) in _INDEX.items()
        )
        kinds = given.get("layer_types")
        if kinds is None and table.get("use_sparse_attention", True):
            frequencies = table.get("sparse_attention_freq") or ()
            kinds = [_SPARSE if is_sparse else _DENSE for is_sparse in frequencies]
        kinds = (kinds or [_DENSE] * num_layers)[:num_layers]
        if unknown := {*kinds} - {_SPARSE, _DENSE}:
            raise ModelError(f"{name}: layer_types has {min(unknown)!r}; fits: {_DENSE!r} and {_SPARSE!r}")
        mlps = given.get("mlp_layer_types") or [
            "sparse" if has_experts else "dense"
            for has_experts in given.get("moe_layer_freq") or [1] * num_layers
        ]
        feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in mlps)[:num_layers]
        indexer = Indexer(
            heads,
            width,
            top_k=block * num_blocks,
            weighted=False,
            normed="both",
            norm_eps=fields["norm_eps"],
            block=block,
            local_blocks=local,
        )
        dense = tuple(number for number, kind in enumerate(kinds) if kind == _DENSE)
        if len(dense) == num_layers:
            return {"feed_forwards": feed_forwards}
        variants = (Variant(dense, (("indexer", None),)),) if dense else ()
        return {"feed_forwards": feed_forwards, "indexer": indexer, "variants": variants}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


_KEYS: dict[str, Rule] = without(LLAMA_KEYS, "hidden_act", "intermediate_size")
_MOE, _ATTENTION = f"{LAYER}.block_sparse_moe", f"{LAYER}.self_attn"

FAMILY = Family(
    "minimax_m3",
    "MiniMax-M3",
    ("MiniMaxM3VLForCausalLM", "MiniMaxM3ForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
    model_types=("minimax_m3_vl_text", "minimax_m3"),
    wrappers=("minimax_m3_vl",),
    keys=_KEYS
    | ROUTER
    | MTP
    | {
        "dense_intermediate_size": Key("d_ff", 12_288),
        "intermediate_size": needed("moe.d_ff", "moe_intermediate_size"),
        "shared_intermediate_size": Key("moe.d_ff_shared", 3072),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "num_local_experts": needed("moe.num_experts", "num_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
        "routed_scaling_factor": Key("moe.scaling", 2.0),
        "attention_output_gate": Fixed((False,)),
    }
    | fixed(
        use_qk_norm=True, qk_norm_type="per_head", use_routing_bias=True, scoring_func="sigmoid",
        use_gemma_norm=True, swiglu_alpha=1.702, swiglu_limit=7.0,
    )
    | ignored("its class has an activation of its own", "hidden_act")
    | ignored("as its lists of layers say", "first_k_dense_replace", "moe_intermediate_size")
    | ignored("num_nextn_predict_layers counts", "num_mtp_modules"),
    sets={
        "qk_norm": True,
        "norm_offset": True,
        "activation": "clamped_silu",
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
    },
    groups=(SparseLayers(), Rope(theta=5e6, share=1.0)),
    tensors=LLAMA_TENSORS
    | experts(_MOE, ("w1", "w3", "w2"))
    | feed_forward("shared", f"{_MOE}.shared_experts", "U", PROJECTIONS)
    | {
        "router_choice_bias": Tensor(f"{_MOE}.e_score_correction_bias", ("E",)),
        "index_q": Tensor(f"{_ATTENTION}.index_q_proj.weight", ("Ky", "D")),
        "index_k": Tensor(f"{_ATTENTION}.index_k_proj.weight", ("y", "D")),
        "index_q_norm": Tensor(f"{_ATTENTION}.index_q_norm.weight", ("y",)),
        "index_norm": Tensor(f"{_ATTENTION}.index_k_norm.weight", ("y",)),
    },
    more_layers=True,
    is_written=False,  # transformers renames these tensors only in the model with a vision tower
)  # fmt: skip
