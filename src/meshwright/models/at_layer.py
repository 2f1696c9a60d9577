"""The inputs and operations that all parts of a layer share."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

# The operations' values: arrays in `nn/`, recorded values in `cost/`.
V = TypeVar("V")
# A LayerKind, or a record with the same `stack` from an implementation that runs several kinds at once.
Kind = Any
# Keys, values and states of earlier positions; None in training.
Cache = Any


class Places(NamedTuple):
    """The position of each token of [B, T], and the segment (document) that it is part of.

    A query sees the keys of its own segment up to its own position. positions: not sharded over T; every
    operation takes its own part. segments: None if each row is one segment. tokens: the ids of the tokens,
    if a table lists their experts.
    """

    positions: Any
    segments: Any = None
    tokens: Any = None


class AtLayer(NamedTuple):
    """The places of the tokens that a layer reads, its cache and its kind.

    An operation that reads or writes the cache returns the record with the new cache.
    """

    places: Places
    cache: Cache
    kind: Kind

    @property
    def uncached(self) -> "AtLayer":
        """The record without a cache, as in training."""
        return self._replace(cache=None)


class CommonOps(Protocol[V]):
    """The operations of attention, feed-forwards, mixers with a state and streams.

    norm: over the last letter, or the last `num_letters`; scale and bias have the last letters of x; eps: the
      model's if None.
    kept: x, the result of the operation or product of this name, in the type that a backward pass keeps
      it in for `einsums`, `activation`, `router` and `experts`. The result of attention is not narrowed,
      since attention's own backward pass reads it (DeepSeek-V3, arXiv:2412.19437, section 3.3.3, gives it 12
      bits).
    bias: b has the last letters of y, for experts also E.
    """

    def norm(
        self,
        name: str,
        x: V,
        scale: V | None,
        bias: V | None = None,
        *,
        kind: str = "rms",
        num_letters: int = 1,
        eps: float | None = None,
    ) -> V: ...
    def einsums(self, x: V, weights: Mapping[str, V], **specs: str) -> tuple[V, ...]: ...
    def bias(self, name: str, y: V, b: V) -> V: ...
    def kept(self, name: str, x: V) -> V: ...
