"""The place in a forward pass at which a layer's operations run: its tokens, its cache and its kind."""

from typing import Any, NamedTuple

# A LayerKind; an implementation that runs several kinds at once passes a record of its own with `stack`.
Kind = Any
# Keys, values and states of earlier positions; None in training.
Cache = Any


class Places(NamedTuple):
    """The position of each token of [B, T], and the segment (document) that it is part of.

    A query sees the keys of its own segment up to its own position. segments: None if each row is one
    segment. Positions must be given whole over T: every operation takes its own share of them. tokens: the
    ids of the tokens, if a table lists their experts.
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
        """The same without a cache, as in training: tokens see only each other."""
        return self._replace(cache=None)
