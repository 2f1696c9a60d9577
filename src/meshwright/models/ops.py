"""The operations of the forward pass, on values of any kind: arrays in `nn/`, symbols in `cost/`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol

from meshwright.models.at_layer import AtLayer, Cache, CommonOps, Kind, Places, V
from meshwright.models.layer_kinds import Layer
from meshwright.models.mixers.mixer import StateOps
from meshwright.models.streams import StreamOps


class Entries(NamedTuple, Generic[V]):
    """Compressed keys and values [B, S, H] of earlier positions, and their first positions."""

    values: V
    places: Places


class Scoring(NamedTuple, Generic[V]):
    """How queries score the keys of a layer, and which keys they read.

    softcap: c in c tanh(x / c). scale: of q . k, H ** -0.5 if None. sinks[N]: a logit more for each head.
    chosen: the keys, among those of the layer's window, that `index` chose; with `entries`, of these.
    entries: compressed keys of earlier positions that are read too, in the window or not.
    """

    softcap: float | None = None
    scale: float | None = None
    sinks: V | None = None
    chosen: V | None = None
    entries: Entries[V] | None = None


class LatentOps(CommonOps[V], Protocol[V]):
    """The operations of latent attention.

    join_rope: k[B,T,N,J] and rope[B,T,A], the same in all heads, to [B,T,N,H]. latent_attention: a[B,T,N,O]
    of q[B,T,N,H] over the cached latent[B,S,R] and rope[B,S,A]; w has wk_up and wv_up. index: the keys that
    each query reads, chosen by the scores of q[B,T,x,y] over k[B,S,y], weighed by [B,T,x], and the cache; or
    the blocks of keys that the queries of each KV head read, by q[B,T,K,y] without weights. entries: the
    first positions of compressed keys.
    """

    def index(
        self, name: str, q: V, k: V, weights: V | None, at: AtLayer, entries: Places | None = None
    ) -> tuple[V, AtLayer]: ...

    def join_rope(self, name: str, k: V, rope: V) -> V: ...
    def latent_attention(
        self,
        name: str,
        q: V,
        latent: V,
        rope: V,
        w: Mapping[str, V],
        at: AtLayer,
        scoring: Scoring[V],
    ) -> tuple[V, AtLayer]: ...


class CompressionOps(CommonOps[V], Protocol[V]):
    """The operations of attention with compressed keys.

    compressed: an entry for each w consecutive positions of a segment, the sum of values[B,T,c,H] weighed by
    a softmax of gates[B,T,c,H] plus bias[w,c,H]. With two series an entry sums the second series of its own
    positions and the first series of the w positions before. grouped: a[B,T,N,H] as [B,T,g,u,H].
    """

    def compressed(
        self, name: str, values: V, gates: V, bias: V, at: AtLayer
    ) -> tuple[Entries[V], AtLayer]: ...
    def grouped(self, name: str, a: V) -> V: ...


class ExpertOps(CommonOps[V], Protocol[V]):
    """The operations of a mixture of experts.

    router: gates[B, T, E], the weight of each expert in a token's result, zero except for its k experts;
    choice[E] is added to the scores to choose them. table[t, r]: the experts of each token id, in place of a
    choice. experts: y[B, T, D] of x[B, T, D]. Tokens are dispatched as rows d[E, C, D], block(ops, w, d)
    computes rows of the same shape, and these are combined: weighted by the gates, or only summed if the
    gates scaled the rows before. In one pass or several. add_shared_experts: the result of the chosen experts
    plus that of the shared ones, times a sigmoid of gate[B, T] if there is one.
    """

    def router(
        self,
        name: str,
        x: V,
        w: V,
        b: V | None = None,
        choice: V | None = None,
        *,
        table: V | None = None,
        places: Places | None = None,
    ) -> V: ...
    def experts(
        self, block: "Callable[[Ops[V], Mapping[str, V], V], V]", w: Mapping[str, V], x: V, gates: V
    ) -> V: ...
    def add_shared_experts(self, name: str, chosen: V, shared: V, gate: V | None) -> V: ...


class Ops(LatentOps[V], CompressionOps[V], ExpertOps[V], StateOps[V], StreamOps[V], Protocol[V]):
    """All operations of a forward pass.

    rope: turns all of H, or `rotary_dim` elements; with latent attention the last A, or with `leading` the
      first A. Leaves x as it is in layers without rotary positions. back: turns it the other way.
    turned_norm: over H, without weights, in layers with rotary positions.
    temperature: of queries, in layers without rotary positions.
    attention: of q[B,T,N,H] over k[B,S,K,H], v[B,S,K,H or O]; a query sees its own position and the earlier
      ones in its layer's window, and of these what `scoring` says.
    dot: [B, T] of x[B, T, D] and w[D]. clip: x cut off at +- limit. gated: y times a sigmoid of `gate`, which
      has the first letters of y.
    activation: `up` is None if the feed-forward is not gated; slopes: of xIELU, a number each.
    layers: runs `block(ops, w, x, at, shared)` for each of `layers`, in order. shared: the keys and values,
      or chosen keys, that the last layer with its own returned; None before the first.
    take: x[B, n, D] at indices[B, n] into T.
    join: x[B, T, h] of two x[B, T, D], one after the other. detached: x without a gradient for its readers.
    undifferentiated: the result of block(*inputs), through which no gradient passes.
    with_draft_loss: the result of `layers`, and the loss of a draft head, which is weighed as it is.
    loss: mean cross-entropy of targets[B, T], in nats per token; the last of each row may be missing
      (`has_last`). The logits are the product of x[B, T, D] with the weight in `head`, plus `unembed_bias` if
      there is one, capped if there is a cap.
    """

    def embed(self, name: str, tokens: V, table: V) -> V: ...
    def add_positions(self, name: str, x: V, places: Places, table: V) -> V: ...
    def scale(self, name: str, x: V, factor: float) -> V: ...
    def dot(self, name: str, x: V, w: V) -> V: ...
    def clip(self, name: str, x: V, limit: float) -> V: ...
    def gated(self, name: str, y: V, gate: V) -> V: ...
    def rope(self, name: str, x: V, at: AtLayer, *, leading: bool = False, back: bool = False) -> V: ...
    def turned_norm(self, name: str, x: V, kind: Kind) -> V: ...
    def temperature(self, name: str, q: V, at: AtLayer) -> V: ...
    def for_layers(self, name: str, x: V) -> V: ...
    def attention(
        self,
        name: str,
        q: V,
        k: V,
        v: V,
        at: AtLayer,
        scoring: Scoring[V],
    ) -> tuple[V, AtLayer]: ...
    def activation(
        self, name: str, gate: V, up: V | None, kind: str, slopes: tuple[V, V] | None = None
    ) -> V: ...
    def residual(self, name: str, x: V, y: V) -> V: ...
    def layers(
        self,
        block: Callable,
        weights: Mapping[str, V],
        x: V,
        places: Places,
        cache: Cache,
        layers: Sequence[Layer],
    ) -> tuple[V, Cache]: ...
    def take(self, name: str, x: V, indices: V) -> V: ...
    def join(self, name: str, x: V, y: V) -> V: ...
    def detached(self, x: V) -> V: ...
    def undifferentiated(self, block: Callable[..., Any], *inputs: object) -> Any: ...
    def with_draft_loss(self, handed_on: object, loss: V) -> object: ...
    def softcap(self, name: str, logits: V, cap: float) -> V: ...
    def loss(
        self,
        name: str,
        x: V,
        weights: Mapping[str, V],
        targets: V,
        cap: float | None = None,
        *,
        has_last: bool = True,
        **head: str,
    ) -> V: ...
