"""Reshards of attention: keys gathered, heads exchanged for positions, and the tokens of a device."""

from dataclasses import replace
from functools import lru_cache

from meshwright.layout.layout import Layout
from meshwright.layout.rules import AxisTable, Rules
from meshwright.models.config_tables import Indexer
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Reshard, cotangent, mirrored


def uses_ring(layout: Layout) -> bool:
    """Whether keys and values stay split by position, S, and pass round a ring (otherwise gathered)."""
    return bool(layout.table.axes_of("S"))


def attention_layout(layout: Layout) -> Layout:
    """The layout of scores and sums of values: `layout`, unless heads are exchanged for positions."""
    if layout.table.attending is None:
        return layout
    return replace(layout, rules=_attending_rules(layout.rules, layout.phase))


@lru_cache(maxsize=512)
def _attending_rules(rules: Rules, phase: str) -> Rules:
    return replace(rules, activations=rules.in_phase(phase).attending, by_phase=())


def to_heads(layout: Layout, name: str, letters: str) -> Reshard:
    """The reshard of an array as projected to the layout of attention: T_context to N_context.

    >>> layout = Layout.of(context=4, context_method="ulysses")
    >>> print(*to_heads(layout, "q", "BTNH").forward)
    AllToAll_{context} q[B, T_context, N, H] -> q[B, T, N_context, H]
    """
    return mirrored(layout.activation(name, letters), attention_layout(layout).activation(name, letters))


def from_heads(layout: Layout, name: str, letters: str) -> Reshard:
    """The reverse of `to_heads`."""
    return mirrored(attention_layout(layout).activation(name, letters), layout.activation(name, letters))


def gathered_keys(layout: Layout, name: str, letters: str = "BTKH") -> Reshard:
    """The reshard of keys (or values) from k[B, T_context, K, H], as projected, to T whole.

    Every shard of the queries adds to their cotangents.
    """
    return _gathered_positions(layout.table, name, letters)


@lru_cache(maxsize=8192)
def _gathered_positions(activations: AxisTable, name: str, letters: str) -> Reshard:
    """Split queries by position, and by axes of N without K: their devices share KV heads."""
    projected = activations.split(name, letters)
    whole = projected.replace(axes={"T": ()})
    queries = activations.split("q", "BTNH")
    shared = dict.fromkeys((*projected.axes_of("T"), *queries.axes_of("N")))
    partial = tuple(axis for axis in shared if axis not in whole.sharded_axes)
    return Reshard(projected, whole, cotangent(whole).replace(unreduced=partial))


def gathered_index(layout: Layout) -> Reshard:
    """The reshard of an indexer's keys from index_k[B, T_context, y] to T whole."""
    projected = layout.activation("index_k", "BTy")
    return mirrored(projected, projected.replace(axes={"T": ()}))


def gathered_series(layout: Layout, name: str, letters: str) -> Reshard:
    """The gather over T of the values or gates [B, T_context, c, H] that are summed to entries."""
    projected = layout.activation(name, letters)
    return mirrored(projected, projected.replace(axes={"T": ()}))


def shared_entries(layout: Layout) -> Reshard:
    """Compressed keys, whole on every device; devices with different queries or heads add up cotangents."""
    whole = layout.activation("entries", "BqKH")
    queries = layout.activation("q", "BTNH")
    shared = dict.fromkeys((*queries.axes_of("T"), *queries.axes_of("N")))
    partial = tuple(axis for axis in shared if axis not in whole.sharded_axes)
    return Reshard(whole, whole, cotangent(whole).replace(unreduced=partial))


def chosen_keys(layout: Layout, indexer: Indexer) -> Reshard:
    """The reshard of chosen[B, T, S] from the devices of an indexer's queries to attention's.

    If the indexer chooses blocks, the array is chosen[B, T, K, S], and S counts blocks.

    >>> layout, indexer = Layout.of(tensor=4, sequence_parallel=True), Indexer(64, 128, 2048)
    >>> print(*chosen_keys(layout, indexer).forward)
    AllGather_{tensor} chosen[B, T_tensor, S] -> chosen[B, T, S]
    """
    letters = "BTKS" if indexer.block else "BTS"
    made = layout.activation("chosen", letters).replace(axes={"S": ()})
    return mirrored(made, made.replace(axes={"T": token_sharding(layout, "chosen").axes_of("T")}))


def shared_by_heads(layout: Layout, name: str, letters: str = "BTA", head: str = "N") -> Reshard:
    """The reshard of rope[B, T, A], which all heads share, from its projection to the devices of the heads.

    Every head adds to its cotangent. head: the letter of the heads, u for a mixer with a state.
    """
    return _shared_by_heads(layout.table, name, letters, head)


@lru_cache(maxsize=4096)
def _shared_by_heads(activations: AxisTable, name: str, letters: str, head: str) -> Reshard:
    projected = activations.split(name, letters)
    heads = activations.split(name, f"{letters[:2]}{head}{letters[2:]}")
    used = projected.replace(axes={"T": heads.axes_of("T")})
    if head != "N":  # a convolution before has gathered the positions that axes of heads split
        projected = used
    partial = tuple(axis for axis in heads.axes_of(head) if axis not in used.sharded_axes)
    return Reshard(projected, used, cotangent(used).replace(unreduced=partial))


def token_sharding(layout: Layout, name: str) -> ShardedArray:
    """The sharding of token ids, targets and positions [B, T]: whole over axes that split heads."""
    array = layout.activation(name, "BT")
    return array.replace(axes={"T": layout.activation(name, "BTN").axes_of("T")})


def single_tokens(layout: Layout) -> Layout:
    """The layout of single tokens, such as the last tokens for logits: T is not split."""
    if not layout.table.axes_of("T"):
        return layout
    return replace(layout, rules=_single_token_rules(layout.rules, layout.phase), phase="prefill")


@lru_cache(maxsize=512)
def _single_token_rules(rules: Rules, phase: str) -> Rules:
    letters = tuple(row for row in rules.in_phase(phase).letters if row[0] not in "TS")
    phases = (("generate", rules.in_phase("generate")),)
    return replace(rules, activations=AxisTable(letters), by_phase=phases)
