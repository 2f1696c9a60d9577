from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config_tables import Indexer
from meshwright.models.families.by_layer import ByLayer, by_layer
from meshwright.models.families.family import (
    Family,
    Fixed,
    Key,
    Rule,
    Tensor,
    fixed,
    ignored,
    needed,
    without,
)
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LLAMA_KEYS, MTP
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import experts, feed_forward, norms
from meshwright.models.streams import HyperConnections

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_PLAIN = "sliding_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}
# Defaults of transformers' DeepseekV4Config: the share of a head's elements that positions turn, and the
# rotary bases of layers without and with compressed keys.
_SHARE, _THETA, _COMPRESSED_THETA = 0.125, 10_000.0, 160_000.0
_LAYER = "model.layers.{}"
_ATTENTION, _EXPERTS = f"{_LAYER}.attn", f"{_LAYER}.ffn"
_COMPRESSOR, _INDEXER = f"{_ATTENTION}.compressor", f"{_ATTENTION}.indexer"
_MATRICES = ("w1", "w3", "w2")


def _compressions(given: Mapping[str, Any], num_layers: int, name: str) -> list[tuple[int, bool]]:
    """For each layer the positions of an entry, 0 for none, and whether an indexer chooses entries."""
    rates = _RATES | {
        kind: rate
        for kind, rate in (
            *(given.get("compress_rates") or {}).items(),
            (_SPARSE, given.get("compress_rate_csa")),
            (_HEAVY, given.get("compress_rate_hca")),
        )
        if rate
    }
    if ratios := given.get("compress_ratios"):
        of_rates = {0: _PLAIN} | {rate: kind for kind, rate in _RATES.items()}
        if unknown := [ratio for ratio in ratios if ratio not in of_rates]:
            raise ModelError(
                f"{name}: compress_ratios has {unknown[0]!r}; fits: {', '.join(map(str, of_rates))}"
            )
        kinds = [of_rates[ratio] for ratio in ratios]
    else:
        kinds = given.get("layer_types") or [
            _SPARSE if n > 1 and n % 2 else _HEAVY for n in range(num_layers)
        ]
    known = _PLAIN, *rates
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(f"{name}: layer_types has {unknown[0]!r}; fits: {', '.join(known)}")
    if len(kinds) < num_layers:
        raise ModelError(
            f"{name}: {len(kinds)} kinds of attention for {num_layers} layers; fits: {num_layers}"
        )
    return [(rates.get(kind, 0), kind == _SPARSE) for kind in kinds][:num_layers]


def _positions(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    """The rotary fields of layers without compressed keys, and of layers with them.

    A file has a table for each, `main` and `compress`, or only the second.
    """
    table = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if "compress" in table:
        main, compressed = table.get("main") or {}, table["compress"]
    else:
        main, compressed = {}, {key: value for key, value in table.items() if key != "rope_theta"}
    share = given.get("partial_rotary_factor")
    if share is None:
        width = given.get("qk_rope_head_dim")
        share = _SHARE if width is None else width / fields["d_head"]
    if compressed.get("rope_type", compressed.get("type")) == "yarn":
        # transformers' model does not scale cosines and sines by YaRN's factor.
        compressed = {"attention_factor": 1.0} | compressed
    tables = (
        {"rope_theta": given.get("rope_theta", _THETA)} | main,
        {"rope_theta": given.get("compress_rope_theta", _COMPRESSED_THETA)} | compressed,
    )
    rope = Rope(share=_SHARE)
    shared = {"partial_rotary_factor": share}
    return tuple(rope.read({"rope_parameters": shared | each}, fields, name) for each in tables)


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, moe = fields["num_layers"], fields["moe"]
    num_hashed = given.get("num_hash_layers", 3)
    kinds = given.get("mlp_layer_types") or [
        "hash_moe" if n < num_hashed else "moe" for n in range(num_layers)
    ]
    if len(kinds) < num_layers:
        raise ModelError(f"{name}: mlp_layer_types has {len(kinds)} kinds; fits: {num_layers}")
    kinds = kinds[:num_layers]
    indexer = Indexer(
        given.get("index_n_heads", 64),
        given.get("index_head_dim", 128),
        given.get("index_topk", 512),
        normed="rms",
        norm_eps=fields["norm_eps"],
    )
    plain, of_entries = _positions(given, fields, name)
    layers = []
    for (rate, is_sparse), kind in zip(_compressions(given, num_layers, name), kinds, strict=True):
        is_hashed = kind == "hash_moe"
        positions = of_entries if rate else plain
        layers.append(
            {
                "compressed": rate or None,
                "compressed_top_k": indexer.top_k if is_sparse else None,
                "indexer": indexer if is_sparse else None,
                "moe": replace(moe, choice_bias=not is_hashed, hashed=is_hashed),
                "rope_theta": positions["rope_theta"],
                "rope_scaling": positions["rope_scaling"],
            }
        )
    streams = HyperConnections(
        given.get("hc_mult", 4), given.get("hc_sinkhorn_iters", 20), given.get("hc_eps", 1e-6)
    )
    return by_layer(layers) | {"streams": streams, "rotary_dim": plain.get("rotary_dim")}


def _compressor(name: str, module: str, letter: str) -> dict[str, Tensor]:
    """The tensors of a compressor."""
    return {
        f"{name}_kv": _turned(f"{module}.wkv.weight", (f"c{letter}", "D"), letter),
        f"{name}_gate": _turned(f"{module}.wgate.weight", (f"c{letter}", "D"), letter),
        f"{name}_positions": _turned(f"{module}.ape", ("w", f"c{letter}"), letter),
        f"{name}_norm": _turned(f"{module}.norm.weight", (letter,), letter),
    }


def _turned(name: str, dims: tuple[str, ...], letter: str = "H") -> Tensor:
    """A tensor whose heads have the elements that positions turn last."""
    return Tensor(name, dims, pairs=letter, pairs_last=True)


def _streams(part: str, module: str) -> dict[str, Tensor]:
    return {
        f"{part}_streams": Tensor(f"{_LAYER}.hc_{module}_fn", ("k", "oD")),
        f"{part}_streams_bias": Tensor(f"{_LAYER}.hc_{module}_base", ("k",)),
        f"{part}_streams_scale": Tensor(f"{_LAYER}.hc_{module}_scale", ("v",)),
    }


_KEYS: dict[str, Rule] = without(
    LLAMA_KEYS | DEEPSEEK_EXPERTS,
    "intermediate_size",
    "hidden_act",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
)

FAMILY = Family(
    "deepseek_v4",
    "DeepSeek-V4",
    ("DeepseekV4ForCausalLM",),
    keys=_KEYS
    | MTP
    | {
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "q_lora_rank": needed("q_rank"),
        "o_lora_rank": Key("out_rank", 1024),
        "o_groups": Key("out_groups", 8),
        "sliding_window": Key("sliding_window", 128),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "routed_scaling_factor": Key("moe.scaling", 1.5),
        "attention_bias": Fixed((False,)),
        "mlp_bias": Fixed((False,)),
        "norm_topk_prob": Fixed((True,)),
        "topk_method": Fixed(("noaux_tc",)),
    }
    | fixed(hidden_act="silu", scoring_func="sqrtsoftplus", swiglu_limit=10.0)
    | ignored("other names of moe_intermediate_size and n_routed_experts", "intermediate_size",
              "num_local_experts")
    | ignored("how weights are stored", "expert_dtype"),
    sets={
        "activation": "limited_silu",
        "qk_norm": True,
        "q_norm_scale": False,
        "moe.score": "sqrtsoftplus",
        "moe.choice_bias": True,
        "attention_sinks": True,
        "values_are_cached_keys": True,
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("compressed",),
                "compress_ratios": ("compressed",),
                "compress_rates": ("compressed",),
                "compress_rate_csa": ("compressed",),
                "compress_rate_hca": ("compressed",),
                "mlp_layer_types": ("moe.hashed",),
                "num_hash_layers": ("moe.hashed",),
                "index_n_heads": ("indexer.num_heads",),
                "index_head_dim": ("indexer.head_dim",),
                "index_topk": ("indexer.top_k", "compressed_top_k"),
                "hc_mult": ("streams.num_streams",),
                "hc_sinkhorn_iters": ("streams.iterations",),
                "hc_eps": ("streams.eps",),
                "rope_theta": ("rope_theta",),
                "compress_rope_theta": ("rope_theta",),
                "rope_parameters": ("rope_theta", "rope_scaling"),
                "rope_scaling": ("rope_scaling",),
                "qk_rope_head_dim": ("rotary_dim",),
                "partial_rotary_factor": ("rotary_dim",),
            },
        ),
    ),
    tensors={
        "embed": Tensor("model.embed_tokens.weight", ("V", "D"), also="model.embed.weight"),
        "unembed": Tensor("head.weight", ("V", "D")),
        "streams_head": Tensor("model.hc_head.hc_fn", ("n", "oD"), also="model.hc_head_fn"),
        "streams_head_bias": Tensor("model.hc_head.hc_base", ("n",), also="model.hc_head_base"),
        "streams_head_scale": Tensor("model.hc_head.hc_scale", ("z",), also="model.hc_head_scale"),
        "wq_down": Tensor(f"{_ATTENTION}.wq_a.weight", ("Q", "D")),
        "wq_up": _turned(f"{_ATTENTION}.wq_b.weight", ("NH", "Q")),
        "wk": _turned(f"{_ATTENTION}.wkv.weight", ("KH", "D")),
        "k_norm": replace(
            _turned(f"{_ATTENTION}.norm.weight", ("H",)), also=f"{_ATTENTION}.kv_norm.weight"
        ),
        "wo_down": _turned(f"{_ATTENTION}.wo_a.weight", ("gj", "uH")),
        "wo": Tensor(f"{_ATTENTION}.wo_b.weight", ("D", "gj")),
        "sinks": Tensor(f"{_ATTENTION}.attn_sink", ("N",)),
        "index_q": _turned(f"{_INDEXER}.wq_b.weight", ("xy", "Q"), "y"),
        "index_weights": Tensor(f"{_INDEXER}.weights_proj.weight", ("x", "D")),
        "router_table": Tensor(f"{_EXPERTS}.gate.tid2eid", ("t", "r"), centred="E"),
    }
    | norms("q_latent_norm", f"{_ATTENTION}.q_norm", "Q")
    | norms("final_norm", "model.norm")
    | norms("attention_norm", f"{_LAYER}.attn_norm")
    | norms("mlp_norm", f"{_LAYER}.ffn_norm")
    | _compressor("compressor", _COMPRESSOR, "H")
    | _compressor("index", f"{_INDEXER}.compressor", "y")
    | _streams("attention", "attn")
    | _streams("mlp", "ffn")
    | experts(_EXPERTS, _MATRICES)
    | {"router_choice_bias": Tensor(f"{_EXPERTS}.gate.bias", ("E",))}
    | feed_forward("shared", f"{_EXPERTS}.shared_experts", "U", _MATRICES),
    prefix="model.",
    unread=("mtp.",),
    is_written=False,
)  # fmt: skip
