"""Kinds of layers: their mixers, their windows, and the stacks of their weights."""

from typing import Any, Literal, NamedTuple

# The part of a layer that mixes positions: attention, the model's mixer with a state, or both on one input.
Mixer = Literal["attention", "state", "both", "none"]
FeedForward = Literal["dense", "experts", "none"]
# Layers with the same parameters share a stack. A mixture's dense layers have a stack of their own, and so
# have layers that read the keys and values of an earlier layer, and layers of each mixer. A block is a layer
# with only a mixer or only a feed-forward.
# The names are in `parameters.STACK_LETTERS`; layers of a variant have their stack's name and its number, as
# in "layers.1".
Stack = str
KV_SHARED: tuple[Stack, ...] = ("kv_shared_layers", "dense_kv_shared_layers")
# The layer of a head that predicts the token after the next one.
DRAFT_LAYERS: Stack = "draft_layers"


class Window(NamedTuple):
    """The positions that a query of a local layer sees: the last `size`, its own included.

    chunked: only positions of the query's own chunk of `size` positions, counted from 0 (Llama 4).
    compressed: in addition, one entry for each of this number of earlier positions; 0: none. A query reads at
    most top_k entries; 0: all (DeepSeek-V4).
    """

    size: int
    chunked: bool = False
    compressed: int = 0
    top_k: int = 0

    def entries(self, seq_len: int) -> int:
        """Entries of a sequence for compressed positions.

        >>> Window(128, compressed=4).entries(4096), Window(128).entries(4096)
        (1024, 0)
        """
        return seq_len // self.compressed if self.compressed else 0

    def read_entries(self, seq_len: int) -> int:
        """Compressed entries that the last query of a sequence reads."""
        return min(self.entries(seq_len), self.top_k or seq_len)

    def first(self, position: Any) -> Any:
        """The first position that a query sees, a number or an array of them; before the first one: below 0.

        >>> Window(4).first(5), Window(4, chunked=True).first(5)
        (2, 4)
        """
        return position // self.size * self.size if self.chunked else position - self.size + 1

    def last(self, position: int) -> int:
        """The last position whose query sees this one.

        >>> Window(4).last(5), Window(4, chunked=True).last(5)
        (8, 7)
        """
        return (position // self.size + 1) * self.size - 1 if self.chunked else position + self.size - 1


class LayerKind(NamedTuple):
    """The properties that differ between layers: the stack of their weights, their window, their positions.

    window: None if a layer sees all positions. turned: whether positions turn its queries and keys. mixer:
    attention, a state, both or none. variant: number of the layer's variant, from 1; 0 for none. slope: the
    factor of decays that are fixed and differ from layer to layer.
    """

    stack: Stack
    window: Window | None = None
    turned: bool = True
    mixer: Mixer = "attention"
    variant: int = 0
    slope: float = 1.0

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.mixer in ("attention", "both")

    @property
    def has_state(self) -> bool:
        """Whether it keeps a state for each sequence."""
        return self.mixer in ("state", "both")

    @property
    def shares_kv(self) -> bool:
        """Whether it reads the keys and values of an earlier layer."""
        return base_stack(self.stack) in KV_SHARED


def base_stack(stack: Stack) -> Stack:
    """The name of a stack without the number of its variant.

    >>> base_stack("dense_layers.2"), base_stack("layers")
    ('dense_layers', 'layers')
    """
    return stack.partition(".")[0]


class Layer(NamedTuple):
    """One layer: its weights are row `row` of its stack, its keys and values are in cache `cache`.

    cache, state: numbers among the caches and states of the model; -1 for none. chooser: number of
    the layer whose indexer chooses its keys, if layers share choices; otherwise -1.
    """

    kind: LayerKind
    row: int
    cache: int
    state: int = -1
    chooser: int = -1


# By (is_dense, shares) of `stack_of`.
_STACKS: dict[tuple[bool, bool], Stack] = {
    (False, False): "layers",
    (True, False): "dense_layers",
    (False, True): "kv_shared_layers",
    (True, True): "dense_kv_shared_layers",
}


def stack_of(mixer: Mixer, after: FeedForward, *, is_dense: bool, shares: bool) -> Stack:
    """The stack of layers with this mixer and feed-forward.

    is_dense: in a model whose other layers have experts. shares: it reads another layer's keys and values.
    """
    if mixer == "none":
        return "expert_blocks" if after == "experts" else "dense_blocks"
    if after == "none":
        return "state_blocks" if mixer == "state" else "attention_blocks"
    if mixer == "state":
        return "dense_state_layers" if is_dense else "state_layers"
    return _STACKS[is_dense, shares]
