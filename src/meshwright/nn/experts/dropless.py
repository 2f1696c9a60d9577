"""Dispatch of tokens to their chosen experts, and the combine, for experts without a capacity.

    m[1, n, D], gates      the tokens that a device makes rows of: its own, or all of a group of experts
    r[1, C, D]             a row for each of them and each expert that it chose, sorted by expert
    d[1, C, D]             the rows of a device's own experts, each expert padded to whole blocks with zeros
    y[1, C, D]             the experts' outputs, which travel back the same way
    x[B, T, D]             the sums of each token's rows, which gates weigh here or as they are made

Each device has its own part of these arrays, along a first dimension over all axes of `row_routing`. No token
is dropped: rows beyond the capacity of a pass wait for an extra pass (`over_passes`). On TPUs and GPUs only
real rows travel (`lax.ragged_all_to_all`). XLA for CPU has no such exchange (jax 0.10.2): it sends the whole
capacity.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, get_abstract_mesh

from meshwright.layout import Layout
from meshwright.layout.grouped import Blocks, Crossing, block_sizes, blocks_of
from meshwright.layout.moves.experts import RowRouting, row_routing
from meshwright.models.config_tables import MoE
from meshwright.models.scopes import in_extra_passes, rows_by_even_load
from meshwright.nn.each_device import (
    axes_of,
    each_device,
    of_cotangent,
    spec_of,
    unfilled_after,
    with_gradient,
    zeros_after,
)
from meshwright.nn.start.device_mesh import platform
from meshwright.notation.array import Axes


class Choices(NamedTuple):
    """The rows that each device's tokens chose, for all passes.

    num_passes: i32 passes that all rows take, at least one, equal on all devices. tokens, owners: as in
    `Routes`, of all passes. totals: i32[1, e] rows of a device's own experts. counts: i32[1, s, p, E], if
    rows travel, the rows that each device of a group has for each expert.
    """

    blocks: Blocks
    num_passes: Array
    tokens: Array
    owners: Array
    totals: Array
    counts: Array | None = None


class Routes(NamedTuple):
    """The rows of tokens and experts in one pass, on each device.

    gates: f32[1, n, E] of the tokens that rows are made of, for a device's own experts, or for all if rows
    travel. tokens: i32[1, C] index of each row's token, or n for padding. owners: i32[1, C] index of each
    row's expert in `gates`. counts: a pair of i32[1, s, p, E], if rows travel: the number of rows that each
    device of a group sends to each expert, and their first index among its own rows. experts: i32[1, blocks]
    expert of each block of rows, among a device's own. num_blocks: i32[1] blocks in use. blocks: sizes on a
    device. num_even: rows that a device makes by even load.
    """

    gates: Array
    tokens: Array
    owners: Array
    counts: tuple[Array, Array] | None
    experts: Array
    num_blocks: Array
    blocks: Blocks
    num_even: int


class Pieces(NamedTuple):
    """Pieces of an array, by the device that they go to and the expert: [p, e] each.

    send_at, sizes: a piece's first row on the sender, and its rows. land_at: its first row on the receiver.
    receive_at, received: first rows and sizes of the pieces that arrive here.
    """

    send_at: Array
    sizes: Array
    land_at: Array
    receive_at: Array
    received: Array


# Exchanges of tokens and gates with the devices that make rows


def gathered_tokens(x: Array, layout: Layout, routing: RowRouting) -> Array:
    """m[1, n, D] of x[B, T, D]; each device that holds rows or columns of a token adds to its cotangent.

    routing: the layout's, or its part before tokens cross to nodes, or its part after.
    """
    *_, columns = spec_of(x).partitions
    dispatch, combine = _ways_of_tokens(routing, _local_shape(x))
    return _moved(dispatch, combine, spec_of(x), _of_rows(layout, columns))(x)


def combined_tokens(total: Array, like: Array, routing: RowRouting) -> Array:
    """[B, T, D], like `like`: sums over devices of their parts of the tokens m[1, n, D]."""
    dispatch, combine = _ways_of_tokens(routing, _local_shape(like))
    return _moved(combine, dispatch, spec_of(total), spec_of(like))(total)


def _ways_of_tokens(
    routing: RowRouting, shape: Sequence[int]
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    first, then = _gathered_axes(routing)

    def dispatch(x: Array) -> Array:
        m = jnp.reshape(x, (-1, shape[-1]))[None, None]
        m = lax.all_gather(m, first, axis=0, tiled=True) if first else m
        m = lax.all_gather(m, then, axis=1, tiled=True) if then else m
        return jnp.reshape(m, (1, -1, shape[-1]))

    def combine(m: Array) -> Array:
        sizes = get_abstract_mesh().shape
        parts = [prod(sizes[axis] for axis in axes) for axes in (first, then)]
        m = jnp.reshape(m, (*parts, -1, shape[-1]))
        m = lax.psum(m, routing.repeated) if routing.repeated else m
        m = lax.psum_scatter(m, first, scatter_dimension=0, tiled=True) if first else m
        m = lax.psum_scatter(m, then, scatter_dimension=1, tiled=True) if then else m
        return jnp.reshape(m, shape)

    return dispatch, combine


def gathered_gates(gates: Array, layout: Layout, routing: RowRouting) -> Array:
    """f32[1, n, E] of gates[B, T, E], of a device's own experts unless rows or tokens travel."""
    shape = _local_shape(gates)
    first, then = _gathered_axes(routing)
    sizes = [get_abstract_mesh().shape[axis] for axis in routing.experts]

    def dispatch(gates: Array) -> Array:
        flat = jnp.reshape(gates, (-1, shape[-1]))
        if routing.exchanged or routing.nodes:
            return flat[None]
        # One dimension for each axis of the experts: exchanged if tokens travel over it, otherwise indexed.
        parts = jnp.reshape(flat, (-1, *sizes, shape[-1] // prod(sizes)))
        for place, axis in reversed(list(enumerate(routing.experts))):
            if axis not in first:
                parts = lax.dynamic_index_in_dim(parts, lax.axis_index(axis), place + 1, keepdims=False)
        by_device = jnp.moveaxis(parts, 0, -2)
        by_device = jnp.reshape(by_device, (-1, 1, *by_device.shape[-2:]))
        flat = lax.all_to_all(by_device, first, 0, 0, tiled=True) if first else by_device
        flat = lax.all_gather(flat, then, axis=1, tiled=True) if then else flat
        return jnp.reshape(flat, (1, -1, flat.shape[-1]))

    def combine(d: Array) -> Array:
        pulled = jax.vjp(dispatch, jnp.zeros(shape, d.dtype))[1](d)[0]
        return lax.psum(pulled, routing.repeated) if routing.repeated else pulled

    return _moved(dispatch, combine, spec_of(gates), _of_rows(layout))(gates)


def _gathered_axes(routing: RowRouting) -> tuple[Axes, Axes]:
    """The axes over which tokens are gathered: first axes of experts, which exchange gates."""
    first = tuple(axis for axis in routing.experts if axis in routing.gathered)
    return first, tuple(axis for axis in routing.gathered if axis not in first)


def _moved(
    dispatch: Callable[[Array], Array],
    combine: Callable[[Array], Array],
    given: PartitionSpec,
    taken: PartitionSpec,
) -> Callable[[Array], Array]:
    @jax.custom_vjp
    def run(x: Array) -> Array:
        return each_device(dispatch, (given,), taken)(x)

    def backward(_: None, d: Array) -> tuple[Array]:
        return (each_device(combine, (of_cotangent(taken),), of_cotangent(given))(d),)

    run.defvjp(lambda x: (run(x), None), backward)
    return run


# Rows


def choices_of(
    gates: Array, layout: Layout, moe: MoE, kept: str, crossing: Crossing | None = None
) -> Choices:
    """The rows that the gates of `gathered_gates` choose. kept: their name for remat policies.

    crossing: of the tokens, if they came from other nodes.
    """
    routing, sizes = row_routing(layout).of_node, get_abstract_mesh().shape
    num_tokens = gates.shape[1]
    travelled = prod(sizes[axis] for axis in (*routing.exchanged, *routing.rows))
    num_local = _own_experts(layout, moe)
    num_even, most = num_tokens, num_tokens * moe.experts_per_token
    if crossing:
        num_even, most = (
            num_tokens // crossing.tokens * crossing.num_tokens,
            crossing.num_nodes * crossing.rows,
        )
    sizes_of_blocks = blocks_of(
        num_even * travelled,
        moe,
        num_local,
        block_sizes(platform().expert_blocks, layout),
        one_pass=layout.spmd_stages,
    )
    blocks = Blocks(*map(int, sizes_of_blocks))

    def sorted_rows(chosen: Array, first: Array, num_rows: int) -> tuple[Array, Array]:
        place = first[None, :] + jnp.cumsum(chosen, axis=0, dtype=jnp.int32) - 1
        place = jnp.where(chosen, place, num_rows)
        indices = []
        for dim, none in ((0, num_tokens), (1, chosen.shape[1])):
            numbers = lax.broadcasted_iota(jnp.int32, chosen.shape, dim)
            indices.append(jnp.full(num_rows, none, jnp.int32).at[place].set(numbers, mode="drop"))
        return indices[0], indices[1]

    def num_passes(totals: Array) -> Array:
        """i32[1]: of this device."""
        num_blocks = jnp.sum(blocks.filled(totals))
        return jnp.maximum(-(-num_blocks // blocks.capacity), 1)[None]

    def in_blocks(gates: Array) -> tuple[Array, ...]:
        chosen = gates[0] > 0
        totals = jnp.sum(chosen, axis=0, dtype=jnp.int32)
        num_rows = blocks.passes * blocks.capacity * blocks.rows
        tokens, owners = sorted_rows(chosen, _first_rows(totals, blocks), num_rows)
        return num_passes(totals), tokens[None], owners[None], totals[None]

    def to_travel(gates: Array) -> tuple[Array, ...]:
        chosen = gates[0] > 0
        mine = jnp.sum(chosen, axis=0, dtype=jnp.int32)
        tokens, owners = sorted_rows(chosen, _first_rows(mine), most)
        counts = lax.all_gather(mine, routing.exchanged)
        counts = lax.all_gather(counts, routing.rows) if routing.rows else counts[None]
        totals = jnp.sum(_of_own_experts(counts, routing, num_local), axis=(0, 1))
        return num_passes(totals), tokens[None], owners[None], totals[None], counts[None]

    local = to_travel if routing.exchanged else in_blocks
    dims = (1, 2, 2, 2, 4) if routing.exchanged else (1, 2, 2, 2)
    taken = tuple(_of_rows(layout, dims=num) for num in dims)
    chosen = each_device(local, (spec_of(gates),), taken)(lax.stop_gradient(gates))
    passes_of_each, *chosen = (checkpoint_name(one, kept) for one in chosen)
    return Choices(blocks, checkpoint_name(jnp.max(passes_of_each), kept), *chosen)


def routes_of(choices: Choices, gates: Array, number: Array | int, num_even: int) -> Routes:
    """The rows of pass `number`, given the gates of `choices`. num_even: a device's rows by even load."""
    blocks = choices.blocks
    number = jnp.asarray(number, jnp.int32)

    def blocks_to_run(totals: Array, number: Array) -> tuple[Array, Array]:
        ends, first = jnp.cumsum(blocks.filled(totals[0])), blocks.capacity * number
        numbers = first + jnp.arange(blocks.capacity, dtype=jnp.int32)
        experts = jnp.sum(numbers[:, None] >= ends[None, :], axis=1)
        experts = jnp.minimum(experts, len(ends) - 1).astype(jnp.int32)
        return experts[None], jnp.clip(ends[-1:] - first, 0, blocks.capacity)

    def rows_here(rows: Array, number: Array) -> Array:
        num_rows = blocks.capacity * blocks.rows
        return lax.dynamic_slice_in_dim(rows, num_rows * number, num_rows, axis=1)

    def rows_to_send(counts: Array, totals: Array, number: Array) -> tuple[Array, Array]:
        """The rows of counts[1, s, p, E] in this pass, and their first indices on the senders."""
        num_experts, num_local = counts.shape[-1], totals.shape[-1]
        by_source = jnp.reshape(counts, (-1, num_experts))
        of_devices = jnp.reshape(jnp.sum(by_source, axis=0), (-1, num_local))
        begins = jnp.reshape(_first_rows(of_devices, blocks), -1)
        begins = begins[None] + jnp.cumsum(by_source, axis=0) - by_source
        start = blocks.capacity * blocks.rows * number
        before, until = (
            jnp.clip(at - begins, 0, by_source) for at in (start, start + blocks.capacity * blocks.rows)
        )
        at_home = jnp.cumsum(by_source, axis=1) - by_source + before
        return jnp.reshape(until - before, counts.shape), jnp.reshape(at_home, counts.shape)

    def local(tokens: Array, owners: Array, totals: Array, *rest: Array) -> tuple[Array, ...]:
        *counts, number = rest
        if counts:
            sent = rows_to_send(counts[0], totals, number)
            return tokens, owners, *blocks_to_run(totals, number), *sent
        return rows_here(tokens, number), rows_here(owners, number), *blocks_to_run(totals, number)

    arrays = [choices.tokens, choices.owners, choices.totals]
    arrays += [] if choices.counts is None else [choices.counts]
    specs = [spec_of(one) for one in arrays]
    first = specs[0].partitions[0]
    of_counts = specs[3:] * 2
    taken = (specs[0], specs[1], PartitionSpec(first, None), PartitionSpec(first), *of_counts)
    routed = each_device(local, (*specs, PartitionSpec()), taken)(*arrays, number)
    tokens, owners, experts, num_blocks, *sent = routed
    return Routes(
        gates, tokens, owners, (sent[0], sent[1]) if sent else None, experts, num_blocks, blocks, num_even
    )


def over_passes(run: Callable[..., Array], choices: Any, *arrays: Any) -> Array:
    """The sum over all passes of run(choices, number, *arrays), m[1, n, D] like the first of the arrays.

    Residuals of the first pass are kept. Extra passes, for devices with more rows than the capacity of a
    pass, run again in the backward pass. They come before the first, so that its cotangents of the arrays are
    handed on to them, and they add to them without another sum. choices: Choices or Crossings, whose first
    field gives the passes of the worst load, and whose second gives the passes of this load.
    """
    capacity, *given = choices
    if capacity.passes == 1:
        return run(choices, 0, *arrays)
    of_kind = partial(type(choices), capacity)

    def extra_passes(step: Callable[[Array, Any], Any], given: Sequence[Any], start: Any) -> Any:
        def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
            return state[0] + 1, step(*state)

        with jax.named_scope(in_extra_passes()):
            return lax.while_loop(lambda state: state[0] < given[0], body, (jnp.int32(1), start))[1]

    def on_this_pass(number: Array, arrays: Sequence[Any]) -> Any:
        """The arrays, made to depend on the pass: otherwise XLA gathers them even if no extra pass runs."""
        return jax.tree.map(lambda array: jnp.where(number > 0, array, jnp.zeros_like(array)), tuple(arrays))

    @jax.custom_vjp
    def with_extra_passes(given: Sequence[Any], *arrays: Any) -> tuple[Any, ...]:
        def step(number: Array, total: Array) -> Array:
            return total + run(of_kind(*given), number, *on_this_pass(number, arrays))

        return extra_passes(step, given, jnp.zeros_like(arrays[0])), *arrays

    def backward(saved: tuple[Sequence[Any], tuple[Any, ...]], d: tuple[Any, ...]) -> tuple[Any, ...]:
        (given, arrays), (d_total, *d_arrays) = saved, d

        def step(number: Array, sums: Any) -> Any:
            def of_pass(*arrays: Any) -> Array:
                return run(of_kind(*given), number, *arrays)

            return jax.tree.map(jnp.add, sums, jax.vjp(of_pass, *on_this_pass(number, arrays))[1](d_total))

        return None, *extra_passes(step, given, tuple(d_arrays))

    with_extra_passes.defvjp(
        lambda given, *arrays: (with_extra_passes(given, *arrays), (given, arrays)), backward
    )
    total, *handed_on = with_extra_passes(given, *arrays)
    first = run(choices, 0, *handed_on)
    with jax.named_scope("combine"):
        return total + first


def rows_of_tokens(m: Array, tokens: Array) -> Array:
    """r[1, C, D] of m[1, n, D] and the index of each row's token; padding rows are zero."""

    def local(m: Array, tokens: Array) -> Array:
        return _rows(m, tokens)[None]

    specs = spec_of(m), spec_of(tokens)
    return with_gradient(local, specs, spec_of(m), 1)(m, tokens)


def weighed_rows_of_tokens(m: Array, routes: Routes) -> Array:
    """`rows_of_tokens` for experts that take their inputs by gate."""

    def local(m: Array, gates: Array, tokens: Array, owners: Array) -> Array:
        return _by_gate(_rows(m, tokens), gates, tokens, owners)[None]

    arrays = m, routes.gates, routes.tokens, routes.owners
    return with_gradient(local, [spec_of(one) for one in arrays], spec_of(m), 2)(*arrays)


def _rows(m: Array, tokens: Array) -> Array:
    return m[0].at[tokens[0]].get(mode="fill", fill_value=0)


def sums_of_rows(rows: Array, routes: Routes, moe: MoE) -> Array:
    """m[1, n, D]: sums of each token's rows[1, C, D], by gate unless gates scaled the inputs."""

    def local(rows: Array, gates: Array, tokens: Array, owners: Array) -> Array:
        made = rows[0] if moe.scales_input else _by_gate(rows[0], gates, tokens, owners)
        total = zeros_after((rows,), (gates.shape[1], rows.shape[-1]), rows.dtype)
        return total.at[tokens[0]].add(made, mode="drop")[None]

    arrays = rows, routes.gates, routes.tokens, routes.owners
    num_differentiated = 1 if moe.scales_input else 2
    return with_gradient(local, [spec_of(one) for one in arrays], spec_of(rows), num_differentiated)(*arrays)


def _by_gate(rows: Array, gates: Array, tokens: Array, owners: Array) -> Array:
    """rows[C, D], each times the gate of its token and expert."""
    gate = gates[0].at[tokens[0], owners[0]].get(mode="fill", fill_value=0)
    return rows * gate[:, None].astype(rows.dtype)


def rows_at_experts(rows: Array, routes: Routes, layout: Layout, moe: MoE) -> Array:
    """d[1, C, D] on the experts' devices of r[1, C, D], as the tokens' devices sorted them.

    If an expert's columns are split over tokens' axes, rows are packed, without padding between experts.
    """
    dispatch, combine = _ways_of_rows(routes, layout, moe)[0]
    return _exchanged(dispatch, combine, rows, routes)


def rows_at_tokens(rows: Array, routes: Routes, layout: Layout, moe: MoE) -> Array:
    """The inverse of `rows_at_experts`."""
    dispatch, combine = _ways_of_rows(routes, layout, moe)[0]
    return _exchanged(combine, dispatch, rows, routes)


def rows_at_columns(rows: Array, routes: Routes, layout: Layout, moe: MoE) -> Array:
    """The rows of all devices with columns of the same experts."""
    dispatch, combine = _ways_of_rows(routes, layout, moe)[1]
    return _exchanged(dispatch, combine, rows, routes)


def sums_of_columns(rows: Array, routes: Routes, layout: Layout, moe: MoE) -> Array:
    """The transpose of `rows_at_columns`: sums of the devices' parts of each row."""
    dispatch, combine = _ways_of_rows(routes, layout, moe)[1]
    return _exchanged(combine, dispatch, rows, routes)


_Travel = Callable[[Array, Array, Array], Array]


def _exchanged(dispatch: _Travel, combine: _Travel, rows: Array, routes: Routes) -> Array:
    assert routes.counts is not None, "rows travel where they are counted"
    spec, of_counts = spec_of(rows), [spec_of(one) for one in routes.counts]

    @jax.custom_vjp
    def run(rows: Array, *counts: Array) -> Array:
        return each_device(dispatch, (spec, *of_counts), spec)(rows, *counts)

    def backward(counts: tuple[Array, ...], d: Array) -> tuple[Array, None, None]:
        return each_device(combine, (spec, *of_counts), spec)(d, *counts), None, None

    run.defvjp(lambda rows, *counts: (run(rows, *counts), counts), backward)
    return run(rows, *routes.counts)


def _ways_of_rows(
    routes: Routes, layout: Layout, moe: MoE
) -> tuple[tuple[_Travel, _Travel], tuple[_Travel, _Travel]]:
    """The exchanges with the experts' devices, and with devices of other columns, each in both directions."""
    routing, sizes, blocks = row_routing(layout).of_node, get_abstract_mesh().shape, routes.blocks
    num_peers, num_copies = (prod(sizes[axis] for axis in axes) for axes in (routing.exchanged, routing.rows))
    num_local = _own_experts(layout, moe)
    num_home = routes.tokens.shape[1]
    # Most rows from one device to another, and in all.
    num_in_blocks = blocks.capacity * blocks.rows
    most = min(routes.gates.shape[1] * min(moe.experts_per_token, num_local), num_home, num_in_blocks)
    num_between = min(num_peers * most, num_in_blocks) if routing.rows else num_in_blocks

    def ways(counts: Array, at: Array) -> _Ways:
        return _ways(counts[0], at[0], routing, num_local, blocks, num_between)

    def travel(rows: Array, way: Pieces, num_rows: int) -> Array:
        with jax.named_scope(rows_by_even_load("all_to_all", routes.num_even)):
            if platform().ragged_exchange:
                return ragged_exchange(rows[0], way, num_rows, axes=routing.exchanged)[None]
            sent = _sent(rows[0], way, most)
            return _arrived(lax.all_to_all(sent, routing.exchanged, 0, 0, tiled=True), way, num_rows)[None]

    def spread(op: str, rows: Array, way: Pieces, num_rows: int) -> Array:
        with jax.named_scope(rows_by_even_load(op, routes.num_even * num_copies)):
            if platform().ragged_exchange:
                return ragged_exchange(rows, way, num_rows, axes=routing.rows)
            if op == "all_gather":  # of packed rows
                return _arrived(lax.all_gather(rows, routing.rows), way, num_rows)
            sent = _sent(rows, way, num_between)
            return lax.psum_scatter(sent, routing.rows, scatter_dimension=0)

    def to_experts(rows: Array, *counts: Array) -> Array:
        return travel(rows, ways(*counts).out, num_between)

    def to_tokens(rows: Array, *counts: Array) -> Array:
        return travel(rows, ways(*counts).home, num_home)

    def to_columns(rows: Array, *counts: Array) -> Array:
        return spread("all_gather", rows[0], ways(*counts).copies, num_in_blocks)[None]

    def from_columns(rows: Array, *counts: Array) -> Array:
        parts = spread("reduce_scatter", rows[0], ways(*counts).parts, num_copies * num_between)
        return jnp.sum(jnp.reshape(parts, (1, -1, num_between, parts.shape[-1])), axis=1)

    return (to_experts, to_tokens), (to_columns, from_columns)


class _Ways(NamedTuple):
    """The pieces of rows to the experts' devices and back, and to devices with other columns and back."""

    out: Pieces
    home: Pieces
    copies: Pieces
    parts: Pieces


def _ways(
    counts: Array, at: Array, routing: RowRouting, num_local: int, blocks: Blocks, num_between: int
) -> _Ways:
    """All pieces of one pass. counts[s, p, E]: its rows; at: their first indices on the senders."""
    here = lax.axis_index(routing.exchanged)
    copy = lax.axis_index(routing.rows) if routing.rows else 0
    mine = counts[copy]  # [p, E]
    experts = _experts_of(routing, num_local, counts.shape[1])  # [p, e] of each device
    # Rows of each device's experts, by the device that they come from: [from, p, e].
    pieces = mine[:, experts]
    starts = _first_rows(jnp.sum(pieces, axis=0), None if routing.rows else blocks)
    lands = starts[None] + jnp.cumsum(pieces, axis=0) - pieces
    at_home = at[copy][:, experts]
    out = Pieces(at_home[here], pieces[here], lands[here], lands[:, here], pieces[:, here])
    home = Pieces(lands[:, here], pieces[:, here], at_home[:, here], at_home[here], pieces[here])
    # Rows of this device's experts, by the copy of it that has them: [s, e].
    of_copies = jnp.sum(_of_own_experts(counts, routing, num_local), axis=1)
    between = _first_rows(of_copies)
    together = _first_rows(jnp.sum(of_copies, axis=0), blocks)[None]
    together = together + jnp.cumsum(of_copies, axis=0) - of_copies
    alike = partial(jnp.broadcast_to, shape=of_copies.shape)
    copies = Pieces(alike(between[copy]), alike(of_copies[copy]), alike(together[copy]), together, of_copies)
    part = num_between * jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
    parts = Pieces(
        together, of_copies, between + num_between * copy, between[copy][None] + part, copies.sizes
    )
    return _Ways(out, home, copies, parts)


def _own_experts(layout: Layout, moe: MoE) -> int:
    """How many a device has."""
    return moe.num_experts // layout.mesh.size(layout.table.axes_of("E"))


def _experts_of(routing: RowRouting, num_local: int, num_peers: int) -> Array:
    """i32[p, e]: the experts of each device that rows of this one may travel to."""
    sizes, number = get_abstract_mesh().shape, jnp.zeros(num_peers, jnp.int32)
    peers = jnp.unravel_index(jnp.arange(num_peers), [sizes[axis] for axis in routing.exchanged])
    places = dict(zip(routing.exchanged, peers, strict=True))
    for axis in routing.experts:
        number = number * sizes[axis] + places.get(axis, lax.axis_index(axis))
    return num_local * number[:, None] + jnp.arange(num_local, dtype=jnp.int32)[None]


def _of_own_experts(counts: Array, routing: RowRouting, num_local: int) -> Array:
    """counts[s, p, e] of a device's own experts, of counts[s, p, E]."""
    return lax.dynamic_slice_in_dim(counts, num_local * lax.axis_index(routing.experts), num_local, axis=2)


def _first_rows(counts: Array, blocks: Blocks | None = None) -> Array:
    """The index of each expert's first row, along the last dimension.

    blocks: each expert's rows are padded to whole blocks; None: not padded.
    """
    filled = counts if blocks is None else blocks.filled(counts) * blocks.rows
    return jnp.cumsum(filled, axis=-1) - filled


def ragged_exchange(rows: Array, way: Pieces, num_rows: int, *, axes: Axes) -> Array:
    """[num_rows, D]: the rows that arrive, of rows[C, D] of each device; zeros in places without one."""
    # The form in which XLA for TPU exchanges rows: each 32-bit word has numbers of `packed` parts of a row.
    packed = max(1, 4 // rows.dtype.itemsize) if platform().unfilled else 1
    packed = packed if rows.shape[-1] % packed == 0 else 1
    width, tile = rows.shape[-1], packed * platform().lanes
    if platform().unfilled and width % tile:
        # Otherwise XLA for TPU pads them, but first stores the rows column by column and copies them.
        rows = jnp.pad(rows, ((0, 0), (0, -width % tile)))
    arrives = unfilled_after((rows,), (num_rows, packed, rows.shape[-1] // packed), rows.dtype)
    arrives = jnp.reshape(arrives, (num_rows, -1))
    sent = (jnp.reshape(part, -1) for part in (way.send_at, way.sizes, way.land_at, way.received))
    arrives = lax.ragged_all_to_all(rows, arrives, *sent, axis_name=axes)
    if platform().unfilled:
        # XLA fuses this selection with the next reader, or with the copy to that reader's tiles.
        first, size = (jnp.reshape(part, (1, -1)) for part in (way.receive_at, way.received))
        numbers = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        of_pieces = (numbers >= first) & (numbers < first + size)
        arrives = jnp.where(jnp.any(of_pieces, axis=1)[:, None], arrives[:, :width], 0)
    if not platform().unnamed_exchange:
        return arrives
    # XLA's instruction takes the name of this rounding, which changes nothing.
    kind = jnp.finfo(rows.dtype)
    return lax.reduce_precision(arrives, kind.nexp, kind.nmant)


def _sent(rows: Array, way: Pieces, most: int) -> Array:
    """[p, most, D]: the rows that go to each device, one after another, then zeros."""
    return rows.at[_places(way.send_at, way.sizes, most, len(rows))].get(mode="fill", fill_value=0)


def _arrived(rows: Array, way: Pieces, num_rows: int) -> Array:
    """[num_rows, D]: the rows[p, most, D] of each device, as `_sent` made them, in their final places."""
    places = jnp.reshape(_places(way.receive_at, way.received, rows.shape[1], num_rows), -1)
    source = jnp.full(num_rows, len(places), jnp.int32)
    source = source.at[places].set(jnp.arange(len(places), dtype=jnp.int32), mode="drop")
    return jnp.reshape(rows, (-1, rows.shape[-1])).at[source].get(mode="fill", fill_value=0)


def _places(at: Array, sizes: Array, most: int, none: int) -> Array:
    """i32[p, most]: the rows of the pieces [p, e] of each device, one after another, then `none`."""
    ends = jnp.cumsum(sizes, axis=1)
    numbers = jnp.arange(most, dtype=jnp.int32)
    piece = jnp.sum(numbers[None, :, None] >= ends[:, None, :], axis=2)
    last = jnp.minimum(piece, sizes.shape[1] - 1)
    moved = jnp.take_along_axis(at - (ends - sizes), last, axis=1) + numbers[None]
    return jnp.where(numbers[None] < ends[:, -1:], moved, none)


# Shardings


def _of_rows(layout: Layout, last: Any = None, dims: int = 3) -> PartitionSpec:
    """The sharding of arrays with one entry a device, along the first dimension."""
    first = row_routing(layout).devices or None
    return PartitionSpec(first, *[None] * (dims - 2), *([last] if dims > 1 else []))


def _local_shape(x: Array) -> tuple[int, ...]:
    sizes = get_abstract_mesh().shape
    parts = (prod(sizes[axis] for axis in axes_of(entry)) for entry in spec_of(x).partitions)
    return tuple(size // part for size, part in zip(x.shape, parts, strict=True))
