from collections.abc import Mapping
from math import isqrt
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config_tables import Extra, Indexer
from meshwright.models.families.by_layer import ByLayer, by_layer, matrix, vector
from meshwright.models.families.family import Family, Key, fixed, ignored, needed, without
from meshwright.models.families.keys import LLAMA_KEYS, NUM_EXPERTS, PLANNED_POSITIONS
from meshwright.models.families.state_layers import DELTA_KEYS

_KINDS = {"linear_attention": "state", "indexed_attention": "attention", "full_attention": "attention"}


def _streams(streams: int, rank: int) -> tuple[Extra, ...]:
    """The weights of hyper-connections: mix residual streams before attention and MLP, add the results."""
    return tuple(
        extra
        for part in ("attention", "mlp")
        for extra in (
            vector(f"{part}_streams_norm", "oD", o=streams),
            *(matrix(f"{part}_streams_{way}", "Dok", "D", o=streams, k=rank) for way in ("down", "up")),
            matrix(f"{part}_streams_added", "Doz", "D", o=streams, z=streams),
        )
    )


def _primes(start: int, count: int) -> list[int]:
    """The first `count` primes from `start` on. start: above 2.

    >>> _primes(20, 3)
    [23, 29, 31]
    """
    primes: list[int] = []
    number = start | 1
    while len(primes) < count:
        if all(number % divisor for divisor in range(3, isqrt(number) + 1, 2)):
            primes.append(number)
        number += 2
    return primes


def _ngrams(given: Mapping[str, Any], fields: Mapping[str, Any], number: int) -> tuple[Extra, ...]:
    """The weights of the embedding of n-grams (the last tokens together) in a layer.

    number: place of the layer among the layers with such an embedding. One table has the rows of all hashes
    of a layer; the number of rows of each hash is a different prime.
    """
    width, streams = given.get("ple_embed_dim") or fields["d_model"], given.get("hc_count", 4)
    heads = (given.get("ngram_size", 3) - 1) * given.get("heads_per_ngram", 8)
    sizes = _primes(given.get("ngram_vocab_size_base", 20_000_000), heads * (number + 1))[-heads:]
    padded = given.get("make_ngram_vocab_size_divisible_by", 128)
    norms = tuple(vector(f"ngrams_{part}_norm", "oD", o=streams) for part in ("key", "query", "result"))
    return (
        vector("table_ngrams", "qv", q=-(-sum(sizes) // padded) * padded, v=width // heads),
        matrix("ngrams_key", "Doe", "D", o=streams, e=width),
        matrix("ngrams_value", "De", "D", e=width),
        *norms,
        vector("ngrams_conv", "oDw", o=streams, w=given.get("ple_conv_kernel_size", 4)),
    )


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers = fields["num_layers"]
    every = given.get("full_attention_interval") or 4
    kinds = given.get("layer_types") or [
        "linear_attention" if (n + 1) % every else "indexed_attention" for n in range(num_layers)
    ]
    if unknown := {*kinds} - {*_KINDS}:
        raise ModelError(f"{name}: layer_types has {min(unknown)!r}; fits: {', '.join(_KINDS)}")
    streams, rank = given.get("hc_count", 4), given.get("hc_lowrank", 320)
    embedded = [number - 1 for number in sorted({*(given.get("ple_layer_ids") or ())})]
    of_streams = _streams(streams, rank)
    layers = [
        {"extras": of_streams + (_ngrams(given, fields, embedded.index(n)) if n in embedded else ())}
        for n in range(num_layers)
    ]
    read = by_layer(layers)
    of_head = (
        # The model's final norm counts the scale of the first stream.
        vector("streams_head_norm", "Df", in_layers=False, f=streams - 1),
        *(
            matrix(f"streams_head_{way}", "Dok", "D", in_layers=False, o=streams, k=rank)
            for way in ("down", "up")
        ),
    )
    if heads := given.get("indexer_n_heads"):
        width, budget = given["indexer_head_dim"], given["indexer_budget"]
        read["indexer"] = Indexer(heads, width, budget, weighted=False, normed="both")
    return read | {"extras": read["extras"] + of_head, "mixers": tuple(_KINDS[kind] for kind in kinds)}


FAMILY = Family(
    "qwen4_exp",
    "Qwen4-Exp",
    ("Qwen4ExpForCausalLM",),
    model_types=("qwen4_exp_text",),
    wrappers=("qwen4_exp",),
    keys=without(LLAMA_KEYS, "intermediate_size")
    | NUM_EXPERTS
    | DELTA_KEYS
    | PLANNED_POSITIONS
    | fixed(attention_bias=False)
    | {
        "head_dim": Key("d_head", 256),
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
        "norm_topk_prob": Key("moe.normalized", True),
    }
    | ignored("planned only: of gates and of hashes", "output_gate_type", "seed")
    | ignored("how files are divided", "split_ngram_parts")
    | ignored("how transformers runs it", "number_of_conv_states")
    | ignored("one key for all heads of the index", "indexer_kv_heads"),
    sets={
        "pre_norms": False,
        "qk_norm": True,
        "attention_gate": True,
        "moe.num_shared_experts": 1,
        "moe.shared_gate": True,
        "planned_only": "hyper-connections, embeddings of n-grams and an indexer of pooled keys (Qwen4-Exp)",
    },
    groups=(
        ByLayer(
            _read,
            dict.fromkeys(("layer_types", "full_attention_interval"), ("mixers",))
            | dict.fromkeys(("hc_count", "hc_lowrank"), ("extras",))
            | dict.fromkeys(
                (
                    "ple_layer_ids", "ple_embed_dim", "ple_conv_kernel_size", "ngram_size",
                    "heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by",
                ),
                ("extras",),
            )
            | {"indexer_n_heads": ("indexer.num_heads",), "indexer_head_dim": ("indexer.head_dim",)}
            | dict.fromkeys(("indexer_budget", "indexer_compress_ratio"), ("indexer.top_k",)),
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
