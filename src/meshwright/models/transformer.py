"""The forward pass of a LLaMA-style Transformer, written once against `ops`.

`nn/` implements the operations with JAX and so runs this file; `cost/` implements them in symbols
and so prices it. Training, prefill and generation are the same function, with and without a cache.
The names given here (`wq`, `attention`, `loss`, ...) are the scopes that the audit finds again in
the compiled program.

Letters: B sequences, T query positions, S key positions, D model, F feed-forward, N query heads,
K key-value heads, H head dimension, V vocabulary, L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.models.config import ModelConfig


@dataclass(frozen=True)
class Param:
    """One parameter: its letters (L first if every layer has one) and how it starts.

    init: "ones", or "normal" with standard deviation `fan_in ** -0.5` over the letters `fan_in`.
    """

    letters: str
    init: str = "normal"
    fan_in: str = "D"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.letters)


def dimensions(config: ModelConfig) -> dict[str, int]:
    """The size of every letter that the model fixes."""
    return {
        "L": config.num_layers,
        "D": config.d_model,
        "F": config.d_ff,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "G": config.num_heads // config.num_kv_heads,
        "H": config.d_head,
        "V": config.vocab_size,
    }


def parameters(config: ModelConfig) -> dict[str, Param]:
    """Every parameter by its path; shapes, shardings, arrays and counts all come from here."""
    params = {
        "embed": Param("VD"),
        "layers/attention_norm": Param("LD", init="ones"),
        "layers/wq": Param("LDNH"),
        "layers/wk": Param("LDKH"),
        "layers/wv": Param("LDKH"),
        "layers/wo": Param("LNHD", fan_in="NH"),
        "layers/mlp_norm": Param("LD", init="ones"),
        "layers/w_gate": Param("LDF"),
        "layers/w_in": Param("LDF"),
        "layers/w_out": Param("LFD", fan_in="F"),
        "final_norm": Param("D", init="ones"),
        "unembed": Param("DV"),
    }
    if config.tied_embeddings:
        del params["unembed"]
    return params


def input_of(*names: str) -> str:
    """The name of the input that the contractions with these weights share.

    >>> input_of("wq", "wk", "wv")
    'to_wq+wk+wv'
    """
    return f"to_{'+'.join(names)}"


class Ops(Protocol):
    """What a reader of the forward pass must offer. Values are its own (arrays or symbols)."""

    def embed(self, name: str, tokens: Any, table: Any) -> Any: ...
    def norm(self, name: str, x: Any, scale: Any) -> Any: ...
    def einsums(self, x: Any, weights: Mapping[str, Any], **specs: str) -> tuple[Any, ...]: ...
    def rope(self, name: str, x: Any, positions: Any) -> Any: ...
    def attention(self, name: str, q: Any, k: Any, v: Any, positions: Any, cache: Any) -> tuple[Any, Any]: ...
    def activation(self, name: str, gate: Any, up: Any) -> Any: ...
    def residual(self, name: str, x: Any, y: Any) -> Any: ...
    def layers(
        self, block: Callable, weights: Any, x: Any, positions: Any, cache: Any
    ) -> tuple[Any, Any]: ...
    def last(self, name: str, x: Any, lengths: Any) -> Any: ...
    def loss(self, name: str, logits: Any, targets: Any) -> Any: ...


def block(ops: Ops, w: Mapping[str, Any], x: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
    """One layer: x[B, T, D] -> x[B, T, D], and the layer's cache."""
    h = ops.norm("attention_norm", x, w["attention_norm"])
    q, k, v = ops.einsums(h, w, wq="BTD,DNH->BTNH", wk="BTD,DKH->BTKH", wv="BTD,DKH->BTKH")
    q = ops.rope("rope_q", q, positions)
    k = ops.rope("rope_k", k, positions)
    a, cache = ops.attention("attention", q, k, v, positions, cache)
    (y,) = ops.einsums(a, w, wo="BTNH,NHD->BTD")
    x = ops.residual("attention_residual", x, y)

    h = ops.norm("mlp_norm", x, w["mlp_norm"])
    gate, up = ops.einsums(h, w, w_gate="BTD,DF->BTF", w_in="BTD,DF->BTF")
    h = ops.activation("swiglu", gate, up)
    (y,) = ops.einsums(h, w, w_out="BTF,FD->BTD")
    return ops.residual("mlp_residual", x, y), cache


def hidden(ops: Ops, w: Mapping[str, Any], tokens: Any, positions: Any, cache: Any = None) -> tuple[Any, Any]:
    """The final hidden states x[B, T, D] of tokens[B, T], and the cache."""
    x = ops.embed("embed", tokens, w["embed"])
    x, cache = ops.layers(block, w["layers"], x, positions, cache)
    return ops.norm("final_norm", x, w["final_norm"]), cache


def logits(ops: Ops, w: Mapping[str, Any], x: Any) -> Any:
    """logits[B, T, V] of hidden states x[B, T, D]; a tied model reads its embedding table again."""
    if "unembed" in w:
        (out,) = ops.einsums(x, w, unembed="BTD,DV->BTV")
    else:
        (out,) = ops.einsums(x, w, embed="BTD,VD->BTV")
    return out


def loss(ops: Ops, w: Mapping[str, Any], tokens: Any, targets: Any, positions: Any) -> Any:
    """The mean cross-entropy of targets[B, T], in nats a token."""
    x, _ = hidden(ops, w, tokens, positions)
    return ops.loss("loss", logits(ops, w, x), targets)


def next_token_logits(
    ops: Ops, w: Mapping[str, Any], tokens: Any, positions: Any, lengths: Any, cache: Any
) -> tuple[Any, Any]:
    """logits[B, 1, V] after the last of `lengths` tokens, and the cache: prefill and generate alike."""
    x, cache = hidden(ops, w, tokens, positions, cache)
    return logits(ops, w, ops.last("last", x, lengths)), cache
