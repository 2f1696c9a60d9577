"""Tokens that go to a node once, for all of the experts that they chose there (`dispatch=once`).

    x[1, n, D], gates[1, n, E]       the tokens of a device
    x[1, p R, D], gates[1, p R, E/p] tokens that arrive at the device's node from p peers, one in each node
    y[1, p R, D]                     the sums of the node's experts for them, which travel back
    y[1, n, D]                       the sums over nodes of each token's rows

Within the node the tokens that arrived are treated as a device's own tokens (nn/experts/dropless.py). No
token is dropped: tokens beyond a node's capacity wait for an extra pass. As with rows, on TPUs and GPUs only
real tokens travel, and on CPUs the whole capacity; gates of the whole capacity travel on all platforms, since
they tell a node which places hold a token.

Source: DeepSeek-V3, 2024, section 3.2.2, and DeepEP.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshwright.layout import Layout
from meshwright.layout.grouped import Crossing, crossing_of
from meshwright.layout.moves.experts import row_routing
from meshwright.models.config_tables import MoE
from meshwright.models.scopes import rows_by_even_load
from meshwright.nn.each_device import each_device, spec_of, with_gradient, zeros_after
from meshwright.nn.experts.dropless import Pieces, ragged_exchange
from meshwright.nn.start.device_mesh import platform


class Crossings(NamedTuple):
    """The tokens that each device sends to nodes.

    num_passes: i32 passes that all tokens take, at least one, equal on all devices. tokens: i32[1, passes,
    p R] tokens for each node in turn; n for padding.
    """

    crossing: Crossing
    num_passes: Array
    tokens: Array


def crossings_of(gates: Array, layout: Layout, moe: MoE, kept: str) -> Crossings:
    """The nodes that the tokens of gates[1, n, E] go to. kept: their name for remat policies."""
    num_tokens, num_nodes = gates.shape[1], _num_peers(layout)
    crossing = Crossing(*map(int, crossing_of(num_tokens, moe, num_nodes, one_pass=layout.spmd_stages)))

    def local(gates: Array) -> tuple[Array, Array]:
        chosen = jnp.reshape(gates[0] > 0, (num_tokens, num_nodes, -1))
        rows = jnp.sum(chosen, axis=2, dtype=jnp.int32)
        goes = rows > 0
        # A token is in the pass of its last row.
        pass_of = jnp.where(goes, (jnp.cumsum(rows, axis=0) - 1) // crossing.capacity, crossing.passes)
        numbers, node = (lax.broadcasted_iota(jnp.int32, rows.shape, dim) for dim in (0, 1))
        before = jnp.sum(pass_of[None] < jnp.arange(crossing.passes)[:, None, None], axis=1, dtype=jnp.int32)
        first = jnp.take_along_axis(before, jnp.minimum(pass_of, crossing.passes - 1), axis=0)
        place = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1 - first
        tokens = jnp.full((crossing.passes, num_nodes, crossing.tokens), num_tokens, jnp.int32)
        tokens = tokens.at[pass_of, node, place].set(numbers, mode="drop")
        last = jnp.max(jnp.where(goes, pass_of, 0)) + 1
        return last[None], jnp.reshape(tokens, (1, crossing.passes, -1))

    first = spec_of(gates).partitions[0]
    taken = PartitionSpec(first), PartitionSpec(first, None, None)
    routed = each_device(local, (spec_of(gates),), taken)(lax.stop_gradient(gates))
    num_passes, tokens = (checkpoint_name(one, kept) for one in routed)
    return Crossings(crossing, checkpoint_name(jnp.max(num_passes), kept), tokens)


class _Route(NamedTuple):
    """The tokens of one pass.

    tokens: i32[1, p R]. sent, received: i32[1, p], how many go to each node, and how many come from it.
    """

    crossing: Crossing
    tokens: Array
    sent: Array
    received: Array


def gates_at_nodes(
    gates: Array, crossings: Crossings, number: Array | int, layout: Layout
) -> tuple[Array, _Route]:
    """[1, p R, E/p] of gates[1, n, E] for the tokens that arrive at a node in a pass, and their route."""
    crossing, spec = crossings.crossing, spec_of(gates)
    rows = PartitionSpec(spec.partitions[0], None)

    def of_pass(tokens: Array, number: Array) -> tuple[Array, Array]:
        tokens = lax.dynamic_index_in_dim(tokens, number, 1, keepdims=False)
        return tokens, _num_in_pieces(tokens < crossing.num_tokens, crossing)

    def by_node(gates: Array, tokens: Array) -> Array:
        gates = jnp.reshape(gates, (crossing.num_tokens, crossing.num_nodes, -1))
        tokens, nodes = jnp.reshape(tokens, (crossing.num_nodes, -1)), jnp.arange(crossing.num_nodes)[:, None]
        at_nodes = gates.at[tokens, nodes].get(mode="fill", fill_value=0)
        return jnp.reshape(at_nodes, (1, -1, at_nodes.shape[-1]))

    def of_tokens_that_came(gates: Array) -> Array:
        return _num_in_pieces(jnp.any(gates > 0, axis=2), crossing)

    number = jnp.asarray(number, jnp.int32)
    find = each_device(of_pass, (spec_of(crossings.tokens), PartitionSpec()), (rows, rows))
    tokens, sent = find(crossings.tokens, number)
    came = _exchanged(with_gradient(by_node, (spec, rows), spec, 1)(gates, tokens), None, layout)
    received = each_device(of_tokens_that_came, (spec,), rows)(lax.stop_gradient(came))
    return came, _Route(crossing, tokens, sent, received)


def _num_in_pieces(is_sent: Array, crossing: Crossing) -> Array:
    """i32[1, p]: the number of true entries of bool[1, p R], by peer."""
    return jnp.sum(jnp.reshape(is_sent, (1, crossing.num_nodes, -1)), axis=2, dtype=jnp.int32)


def rows_at_nodes(rows: Array, route: _Route, layout: Layout) -> Array:
    """[1, p R, D]: the tokens that arrive at a node, from rows[1, p R, D] that each device sends."""
    return _exchanged(rows, route, layout)


def rows_from_nodes(rows: Array, route: _Route, layout: Layout) -> Array:
    """The way back of `rows_at_nodes`."""
    return _exchanged(rows, route._replace(sent=route.received, received=route.sent), layout)


def sums_of_nodes(rows: Array, route: _Route) -> Array:
    """[1, n, D]: each token's sum over the results of all nodes."""

    def local(rows: Array, tokens: Array) -> Array:
        total = zeros_after((rows,), (route.crossing.num_tokens, rows.shape[-1]), rows.dtype)
        return total.at[tokens[0]].add(rows[0], mode="drop")[None]

    return with_gradient(local, (spec_of(rows), spec_of(route.tokens)), spec_of(rows), 1)(rows, route.tokens)


def _exchanged(rows: Array, route: _Route | None, layout: Layout) -> Array:
    """rows[1, p R, D], R for each node, exchanged. Without a route, padding travels too."""
    nodes, num_peers = row_routing(layout).nodes, _num_peers(layout)

    def local(rows: Array, *counts: Array) -> Array:
        by_node = jnp.reshape(rows, (num_peers, -1, rows.shape[-1]))
        if not route:
            return jnp.reshape(lax.all_to_all(by_node, nodes, 0, 0, tiled=True), rows.shape)
        with jax.named_scope(rows_by_even_load("all_to_all", route.crossing.even)):
            if not platform().ragged_exchange:
                return jnp.reshape(lax.all_to_all(by_node, nodes, 0, 0, tiled=True), rows.shape)
            sent, received = (jnp.reshape(one, (-1, 1)) for one in counts)
            begins = by_node.shape[1] * jnp.arange(num_peers, dtype=jnp.int32)[:, None]
            lands = jnp.full_like(begins, by_node.shape[1] * lax.axis_index(nodes))
            way = Pieces(begins, sent, lands, begins, received)
            return ragged_exchange(rows[0], way, rows.shape[1], axes=nodes)[None]

    counts = (route.sent, route.received) if route else ()
    spec, of_counts = spec_of(rows), [spec_of(one) for one in counts]

    @jax.custom_vjp
    def run(rows: Array, *counts: Array) -> Array:
        return each_device(local, (spec, *of_counts), spec)(rows, *counts)

    def backward(counts: tuple[Array, ...], d: Array) -> tuple[Array | None, ...]:
        return each_device(local, (spec, *of_counts), spec)(d, *reversed(counts)), *[None] * len(counts)

    run.defvjp(lambda rows, *counts: (run(rows, *counts), counts), backward)
    return run(rows, *counts)


def _num_peers(layout: Layout) -> int:
    return layout.mesh.size(row_routing(layout).nodes)
