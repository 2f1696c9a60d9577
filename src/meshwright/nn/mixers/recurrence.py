"""Linear recurrences with a state for each head, chunk by chunk.

    S = exp(decay) S + k v^T      o = q S                       (state space, linear attention)
    S = exp(decay) S + k (beta (v - k exp(decay) S))^T          (gated delta rule)

Within a chunk of C positions, with cumulative decays c_i and the state S before it, the new values v' are
those given, or of the delta rule the solution of a unit triangular system (Yang et al., 2024):

    v'_i = beta_i (v_i - exp(c_i) k_i S - sum over j < i of exp(c_i - c_j) (k_i . k_j) v'_j)
    o_i  = exp(c_i) q_i S + sum over j <= i of exp(c_i - c_j) (q_i . k_j) v'_j
    S    = exp(c_C) S + sum over j of exp(c_C - c_j) k_j v'_j^T

With a decay for each element of a key (Kimi Linear), exp(c_i - c_j) is a factor of each term of q_i . k_j.
The products are then computed by blocks of positions. Within a block each exp(c_i - c_j) is computed. For
keys before the block it is exp(c_i - c_b) exp(c_b - c_j), with b the position before the block, so that both
factors are at most 1.

With `log_rates` (Mamba) the decay is -exp(log_rates) times `decay`, for each value and element of a key. No
product sums over such decays. The states of all positions of a chunk are computed, and o_i = q_i S_i.

Keys of one element, without the delta rule (RG-LRU), leave nothing to sum over either; the states are
computed in the same way.

All of it is float32, chunk by chunk: arrays of all chunks have the types of the inputs. The backward pass
computes each chunk again from the state before it.

Positions split over devices (`over_pieces`): a piece of positions maps the state S before it to A S + R. With
R and A, [s, p] and [s, s] (without the delta rule A is a factor for each element of a key), each device needs
no more of the other pieces:

    R_i, A_i   by a scan of each piece that computes no results, of values [v | 0] from the state [0 | 1]
    AllGather_{context} (R, A)[B, T_context, g, u, s, p + s], with T the pieces; backward a ReduceScatter
    S_i = A_(i-1) S_(i-1) + R_(i-1), in the order of the sequence, on each device
    o          by a scan of each piece from S_i

A chain of permutes would send S_i only, [s, p], but in as many dependent steps as there are pieces.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshwright.models.mixers.mixer import CHUNK
from meshwright.nn.each_device import KEPT, each_device, spec_of, with_gradient
from meshwright.nn.mixers.pieces import Pieces
from meshwright.nn.products.execute import run_to
from meshwright.notation.einsum import Reshard
from meshwright.platforms import PLATFORMS


class Inputs(NamedTuple):
    """q, k [B, T, (g), s], v [B, T, (g), u, p], decay and beta [B, T, (g), u]; no beta: no delta rule.

    With another dimension s, there is a decay for each element of a key. log_rates[(g), u, s]: see above; in
    training with a copy for each device, [n, (g), u, s].
    """

    q: Array | None
    k: Array
    v: Array
    decay: Array
    beta: Array | None
    log_rates: Array | None = None

    @classmethod
    def of(cls, given: Mapping[str, Array]) -> "Inputs":
        """Inputs of arrays by name, None for the others."""
        queries, beta, log_rates = (given.get(name) for name in ("q", "beta", "log_rates"))
        return cls(queries, given["k"], given["v"], given["decay"], beta, log_rates)

    @property
    def present(self) -> dict[str, Array]:
        """The arrays that are not None, by name."""
        return {name: array for name, array in self._asdict().items() if array is not None}


# Inputs with an entry for each position.
_OF_POSITIONS = ("q", "k", "v", "decay", "beta")


def recurrence(inputs: Inputs, segments: Array | None) -> Array:
    """o like v, on each device's sequences and heads. segments: i32[B, T]; a new one begins without state."""
    given = inputs.present

    def local(*blocks: Array) -> Array:
        out, _ = chunked(_named(given, blocks), *blocks[len(given) :])
        return out

    arguments = list(given.values())
    specs = [spec_of(array) for array in arguments]
    of_values = spec_of(inputs.v).partitions
    if segments is not None:
        arguments.append(segments)
        specs.append(PartitionSpec(of_values[0], None))
    out_spec = PartitionSpec(*of_values)
    return with_gradient(jax.checkpoint(local), specs, out_spec, len(given))(*arguments)


def _named(names: Iterable[str], blocks: Sequence[Array]) -> Inputs:
    """Inputs of these names on one device, each of which has a copy of log_rates."""
    given = dict(zip(names, blocks, strict=False))
    if "log_rates" in given:
        [given["log_rates"]] = given["log_rates"]
    return Inputs.of(given)


def over_pieces(inputs: Inputs, segments: Array | None, pieces: Pieces, to_all: Reshard) -> Array:
    """`recurrence` with positions split over devices. segments: i32[B, T], whole on every device.

    to_all: the gather of R and A.
    """
    return _results(inputs, segments, pieces, _summaries(inputs, segments, pieces, to_all))


def over_prompts(inputs: Inputs, pieces: Pieces, to_all: Reshard) -> tuple[Array, Array]:
    """`over_pieces` of whole prompts, and the states[B, (g), u, s, p] after them on each device."""
    gathered, size = _summaries(inputs, None, pieces, to_all), inputs.v.shape[-1]
    is_delta = inputs.beta is not None

    def local(gathered: Array) -> Array:
        after, _ = _states_of_pieces(pieces.in_order(gathered), size, is_delta=is_delta)
        return after

    spec = spec_of(gathered)
    of_states = PartitionSpec(spec.partitions[0], *spec.partitions[2:])
    return _results(inputs, None, pieces, gathered), each_device(local, [spec], of_states)(gathered)


def _states_of_pieces(summaries: Array, size: int, *, is_delta: bool) -> tuple[Array, Array]:
    """The states after all pieces, and those before each [m, B, ...], from summaries (R, A)[B, m, ...].

    size: p, the number of columns of R.
    """

    def after(state: Array, piece: Array) -> tuple[Array, Array]:
        by, plus = piece[..., size:], piece[..., :size]
        return (by @ state if is_delta else by * state) + plus, state

    of_pieces = jnp.moveaxis(summaries, 1, 0)
    return lax.scan(after, jnp.zeros_like(of_pieces[0, ..., :size]), of_pieces)


def _cut(
    pieces: Pieces, names: Sequence[str], blocks: Sequence[Array]
) -> tuple[Inputs, Array | None, Array | None]:
    """Inputs [B m, L, ...] of a device's pieces, with their segments and the segment before each."""
    made = [
        x.reshape(-1, pieces.length, *x.shape[2:]) if name in _OF_POSITIONS else x
        for name, x in zip(names, blocks, strict=False)
    ]
    if len(blocks) == len(names):
        return _named(names, made), None, None
    segments, before = pieces.segments_local(blocks[-1], 1)
    return _named(names, made), segments.reshape(-1, pieces.length), before.reshape(-1)


def _summaries(inputs: Inputs, segments: Array | None, pieces: Pieces, to_all: Reshard) -> Array:
    """(R, A) of every piece on each device, [B, pieces, (g), u, s, p + columns of A]."""
    size, is_delta = inputs.v.shape[-1], inputs.beta is not None
    added = inputs.k.shape[-1] if is_delta else 1
    of_keys = inputs._replace(q=None).present

    def local(*blocks: Array) -> Array:
        inputs, segments, before = _cut(pieces, [*of_keys], blocks)
        v = inputs.v
        start = jnp.eye(added) if is_delta else jnp.ones((inputs.k.shape[-1], 1))
        start = jnp.pad(start.astype(jnp.float32), ((0, 0), (size, 0)))
        wide = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, added)])
        start = jnp.broadcast_to(start, (len(v), *v.shape[2:-1], *start.shape))
        _, after = _over_chunks(inputs._replace(v=wide), segments, start, before)
        return after.reshape(-1, pieces.num_local, *after.shape[1:])

    specs, places = [spec_of(x) for x in of_keys.values()], [] if segments is None else [segments]
    of_values = spec_of(inputs.v).partitions
    of_places = [PartitionSpec(of_values[0], None)] * len(places)
    made = PartitionSpec(*of_values[:-1], None, None)
    scan = with_gradient(jax.checkpoint(local), [*specs, *of_places], made, len(specs))
    return _gathered(checkpoint_name(scan(*of_keys.values(), *places), KEPT), pieces, to_all)


def _results(inputs: Inputs, segments: Array | None, pieces: Pieces, gathered: Array) -> Array:
    """o like v, by a scan of each piece from the state before it."""
    size, is_delta, present = inputs.v.shape[-1], inputs.beta is not None, inputs.present

    def local(gathered: Array, *blocks: Array) -> Array:
        inputs, segments, before = _cut(pieces, [*present], blocks)
        _, states = _states_of_pieces(pieces.in_order(gathered), size, is_delta=is_delta)
        mine = jnp.moveaxis(jnp.take(states, pieces.numbers_local(), axis=0), 0, 1)
        start = mine.reshape(-1, *mine.shape[2:])
        out, _ = chunked(inputs, segments, start, before)
        return out.reshape(-1, pieces.num_local * pieces.length, *out.shape[2:])

    given, places = [gathered, *present.values()], [] if segments is None else [segments]
    specs, of_values = [spec_of(x) for x in given], spec_of(inputs.v).partitions
    of_places = [PartitionSpec(of_values[0], None)] * len(places)
    out_spec = PartitionSpec(*of_values)
    scan = with_gradient(jax.checkpoint(local), [*specs, *of_places], out_spec, len(given))
    return scan(*given, *places)


def _gathered(summary: Array, pieces: Pieces, to_all: Reshard) -> Array:
    """The summaries of all pieces on each device. A reduce-scatter of JAX sums the cotangents.

    XLA for CPU would all-reduce the sum that its partitioner writes, since several readers slice it.
    """
    spec = spec_of(summary)

    def scattered(d: Array) -> Array:
        return lax.psum_scatter(d, pieces.axes, scatter_dimension=1, tiled=True)

    @jax.custom_vjp
    def moved(x: Array) -> Array:
        return run_to(x, to_all.forward, to_all.used, pieces.axes)

    def backward(_: None, d: Array) -> tuple[Array]:
        return (each_device(scattered, [spec_of(d)], spec)(d),)

    moved.defvjp(lambda x: (moved(x), None), backward)
    return moved(summary)


def chunked(
    inputs: Inputs, segments: Array | None = None, state: Array | None = None, before: Array | None = None
) -> tuple[Array, Array]:
    """(o like v, the state[B, g, u, s, p] after all positions) on one device.

    before: i32[B], the segments that `state` belongs to; None: those of the first positions.
    """
    out, after = _over_chunks(inputs, segments, state, before)
    assert out is not None, "inputs have queries"
    return out, after


def _over_chunks(
    inputs: Inputs, segments: Array | None, state: Array | None, before: Array | None
) -> tuple[Array | None, Array]:
    """`chunked`, with None for o if there are no queries."""
    q, k, v, decay, beta, log_rates = inputs
    grouped = v.ndim == 5
    if not grouped:
        k, v, decay = k[:, :, None], v[:, :, None], decay[:, :, None]
        q = None if q is None else q[:, :, None]
        beta = None if beta is None else beta[:, :, None]
        log_rates = None if log_rates is None else log_rates[None]
    batch, length = v.shape[:2]
    size, of_chunk = min(CHUNK, length), _chunk
    if decay.ndim == v.ndim:
        size = -(-size // _BLOCK) * _BLOCK
    elif log_rates is not None or (k.shape[-1] == 1 and beta is None):
        size = -(-size // _ROW) * _ROW
        of_chunk = partial(_by_states, None if log_rates is None else rates_of(log_rates))
    rest = -length % size
    given = q, k, v, decay, beta
    shapes = [None if x is None else x.shape[2:] for x in given]
    chunks = [None if x is None else _in_chunks(_flat(x), size, rest) for x in given]
    if segments is None:
        segments = jnp.zeros((batch, length), jnp.int32)
    places = _in_chunks(segments, size, rest, last=True)
    first = jnp.zeros((batch, *v.shape[2:4], k.shape[-1], v.shape[-1]), jnp.float32)
    if state is not None:
        first = state if grouped else state[:, None]
    start = (first, segments[:, 0] if before is None else before)

    def computed(carry: tuple[Array, Array], chunk: tuple[Array | None, ...]) -> Any:
        *flat, places = chunk
        wide: list[Any] = [
            None if x is None or shape is None else x.astype(jnp.float32).reshape(*x.shape[:2], *shape)
            for x, shape in zip(flat, shapes, strict=True)
        ]
        carry, out = of_chunk(carry, cast("Any", (*wide, places)))
        return carry, None if out is None else _flat(out.astype(v.dtype))

    (after, _), out = lax.scan(jax.checkpoint(computed), start, (*chunks, places))
    after = after if grouped else after[:, 0]
    if out is None:
        return None, after
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *v.shape[2:])[:, :length]
    return (out if grouped else out[:, :, 0]), after


def _flat(x: Array) -> Array:
    """x[B, T, ...] as [B, T, n].

    All chunks together are arrays in memory, which on TPUs are stored by tiles of their last two dimensions:
    with p = 1 last, the tiles would be mostly empty. If products sum over positions, XLA stores a chunk's 64
    positions last, and fills half of the tiles. With B sequences' positions in one dimension they would be
    full, but then each turn of the loops transposes them, and takes 30% longer in Codestral Mamba.
    """
    return x.reshape(*x.shape[:2], -1)


def rates_of(log_rates: Array) -> Array:
    """The rates that steps multiply, to the logarithms of decays."""
    return -jnp.exp(log_rates.astype(jnp.float32))


def _by_states(
    rates: Array | None,
    carry: tuple[Array, Array],
    chunk: tuple[Array | None, Array, Array, Array, None, Array],
) -> tuple[tuple[Array, Array], Array | None]:
    """`_chunk` by the states of all positions, with decays[B, C, g, u], perhaps times rates[g, u, s].

    States are [B, n, p, g, s, u], without s if there are no rates: keys then have one element. TPUs compute
    in tiles of the last two dimensions. With p = 1 among them, seven of a tile's eight rows would be empty.

    The positions are n blocks of m. With L_j the state after position j of a block that begins without one,
    c_j the sum of decays up to it, and S the state before the block:

        L_j = exp(decay_j) L_(j-1) + k_j v_j^T      S_j = L_j + exp(c_j) S      S of the next block = S_m

    Each step is over all blocks at once, and reads decays and inputs of one position only. A scan of pairs
    (`jax.lax.associative_scan`) passes all positions through memory at each of its levels, in slices that cut
    TPUs' tiles: with it a step of two layers of Falcon Mamba on 8 v5p took 2.5 times its plan.
    """
    (state, before), (q, k, v, steps, _, places) = carry, chunk
    earlier = jnp.concatenate([before[:, None], places[:, :-1]], axis=1)
    turned = None if rates is None else jnp.swapaxes(rates, -1, -2)
    values, entered = jnp.moveaxis(v, -1, 2), jnp.moveaxis(state, (-1, -2), (1, 3))
    entered = entered if turned is not None else entered[:, :, :, 0]
    # Whether the state before a block reaches a position.
    continues = _in_rows(places == earlier)
    reaches = jnp.cumprod(continues.astype(jnp.int32), axis=2) > 0
    steps, values, keys = _in_rows(steps), _in_rows(values), _in_rows(k)
    totals = jnp.cumsum(steps, axis=2)

    def kept(log_decay: Array, holds: Array) -> Array:
        """Factors [B, n, 1, g, s, u] of a state, zero unless it `holds`[B, n]."""
        decay = log_decay if turned is None else log_decay[..., None, :] * turned[None, None]
        holds = holds.reshape(*holds.shape, *[1] * (decay.ndim - 2))
        return jnp.where(holds, jnp.exp(decay), 0.0)[:, :, None]

    within: list[Array] = []
    for j in range(_ROW):
        key, value = keys[:, :, j, None], values[:, :, j]
        added = key * value if turned is None else key[..., None] * value[..., None, :]
        if within:
            added += kept(steps[:, :, j], continues[:, :, j]) * within[-1]
        within.append(added)
    through, starts = kept(totals[:, :, -1], reaches[:, :, -1]), []
    for number in range(through.shape[1]):
        starts.append(entered)
        entered = through[:, number] * entered + within[-1][:, number]
    start, outs = jnp.stack(starts, axis=1), []
    queries = None if q is None else _in_rows(q)
    for j in range(_ROW) if queries is not None else ():
        states = within[j] + kept(totals[:, :, j], reaches[:, :, j]) * start
        query = cast("Array", queries)[:, :, j]
        if turned is None:
            outs.append(jnp.moveaxis(query[:, :, None] * states, 2, -1))
        else:
            outs.append(jnp.einsum("bngs,bnpgsu->bngup", query, states))
    last = entered if turned is not None else entered[:, :, :, None]
    out = jnp.stack(outs, axis=2).reshape(v.shape) if outs else None
    return (jnp.moveaxis(last, (1, 3), (-1, -2)), places[:, -1]), out


def _in_rows(x: Array) -> Array:
    """x[B, C, ...] as [B, n, m, ...]."""
    return x.reshape(x.shape[0], -1, _ROW, *x.shape[2:])


def _solved(system: Array, wanted: Array) -> Array:
    """x[..., C, p] of (1 + system) x = wanted; system[..., C, C] has entries only below the diagonal."""
    of_platforms = {platform.name: by_products for platform in PLATFORMS.values() if platform.solve_blocks}
    with_solver = partial(jax.scipy.linalg.solve_triangular, lower=True, unit_diagonal=True)
    return lax.platform_dependent(system, wanted, default=with_solver, **of_platforms)


@jax.custom_vjp
def by_products(system: Array, wanted: Array) -> Array:
    """`_solved` by a product with the inverse, which is itself computed by products of blocks."""
    return _inverse(system) @ wanted


def _by_products_forward(system: Array, wanted: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(system)
    solved = inverse @ wanted
    return solved, (inverse, solved)


def _by_products_backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    inverse, solved = saved
    d_wanted = jnp.swapaxes(inverse, -1, -2) @ d
    return -d_wanted @ jnp.swapaxes(solved, -1, -2), d_wanted


by_products.defvjp(_by_products_forward, _by_products_backward)


def _inverse(system: Array) -> Array:
    """The inverse of 1 + system[..., C, C], which has entries only below the diagonal, by halves.

    With the inverses a and b of the halves on the diagonal, the block below is -b system a.
    """
    size = system.shape[-1]
    if size <= 2:
        return jnp.broadcast_to(jnp.eye(size, dtype=system.dtype), system.shape) - system
    half = -(-size // 2)
    rest = [(0, 0)] * (system.ndim - 2) + [(0, 2 * half - size)] * 2
    system = jnp.pad(system, rest)
    upper, lower = _inverse(jnp.stack([system[..., :half, :half], system[..., half:, half:]]))
    below = -lower @ system[..., half:, :half] @ upper
    top = jnp.concatenate([upper, jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, lower], axis=-1)], axis=-2)[..., :size, :size]


def _in_chunks(x: Array, size: int, rest: int, *, last: bool = False) -> Array:
    """x[B, T, ...] as [T / size, B, size, ...], filled up with zeros, or with its last position."""
    pads = [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, pads, mode="edge" if last else "constant")
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


# Positions of a block, if there is a decay for each element of a key.
_BLOCK = 16
# Positions of a block in `_by_states`, whose states are computed one after another.
_ROW = 8


def _by_element(x: Array, k: Array, total: Array) -> Array:
    """sum over s of x_i k_j exp(c_i - c_j), [B, C, C, g, u]; only entries with j <= i are right.

    x, k: [B, C, g, s]. total: c, [B, C, g, u, s].
    """
    batch, size, num_groups = x.shape[:3]
    blocks = size // _BLOCK

    def folded(y: Array) -> Array:
        return y.reshape(batch, blocks, _BLOCK, *y.shape[2:])

    ends = folded(total)[:, :-1, -1]
    before = jnp.concatenate([jnp.zeros_like(total[:, :1]), ends], axis=1)
    # Keys of earlier blocks, by two factors.
    of_queries = folded(x)[..., None, :] * jnp.exp(folded(total) - before[:, :, None])
    of_keys = k[:, None, :, :, None] * jnp.exp(jnp.minimum(before[:, :, None] - total[:, None], 0.0))
    earlier = jnp.einsum("bnigus,bnjgus->bnijgu", of_queries, of_keys)
    starts = jnp.arange(blocks)[:, None] * _BLOCK
    is_earlier = (jnp.arange(size)[None] < starts)[None, :, None, :, None, None]
    # Keys of the same block, placed on the diagonal of blocks.
    gaps = folded(total)[:, :, :, None] - folded(total)[:, :, None]
    within = jnp.einsum("bnigs,bnjgs,bnijgus->bnijgu", folded(x), folded(k), jnp.exp(jnp.minimum(gaps, 0.0)))
    placed = jnp.einsum("bnijgu,nm->bnimjgu", within, jnp.eye(blocks, dtype=within.dtype))
    every = jnp.where(is_earlier, earlier, 0.0) + placed.reshape(earlier.shape)
    return every.reshape(batch, size, size, num_groups, -1)


def _chunk(
    carry: tuple[Array, Array], chunk: tuple[Array | None, Array, Array, Array, Array | None, Array]
) -> tuple[tuple[Array, Array], Array | None]:
    """The state and the last segment after a chunk, and its results[B, C, g, u, p] if there are queries."""
    (state, before), (q, k, v, decay, beta, places) = carry, chunk
    size = v.shape[1]
    total = jnp.cumsum(decay, axis=1)
    seen = jnp.tril(jnp.ones((1, size, size), bool)) & (places[:, :, None] == places[:, None, :])
    by_element = decay.ndim == v.ndim

    def masked(of_positions: Array) -> Array:
        return of_positions[..., None, None, None] if by_element else of_positions[..., None, None]

    entered = jnp.exp(total) * masked(places == before[:, None])
    last = places[:, -1]
    left = jnp.exp(total[:, -1:] - total) * masked(places == last[:, None])
    kept = jnp.exp(total[:, -1]) * masked(last == before)
    if by_element:

        def scored(x: Array) -> Array:
            return jnp.where(seen[..., None, None], _by_element(x, k, total), 0.0)

        def of_state(x: Array) -> Array:
            return jnp.einsum("bigus,bgusp->bigup", x[..., None, :] * entered, state)

    else:
        gaps = total[:, :, None] - total[:, None, :]
        within = jnp.where(seen[..., None, None], jnp.exp(jnp.where(seen[..., None, None], gaps, 0.0)), 0.0)

        def scored(x: Array) -> Array:
            return jnp.einsum("bigs,bjgs->bijg", x, k)[..., None] * within

        def of_state(x: Array) -> Array:
            return jnp.einsum("bigs,bgusp->bigup", x, state) * entered[..., None]

    if beta is not None:
        keys = scored(k) * beta[:, :, None]
        system = jnp.moveaxis(jnp.tril(jnp.moveaxis(keys, (1, 2), (3, 4)), -1), (3, 4), (-2, -1))
        known = of_state(k)
        wanted = jnp.moveaxis(beta[..., None] * (v - known), 1, -2)
        solved = _solved(system, wanted)
        v = jnp.moveaxis(solved, -2, 1)
    out = None
    if q is not None:
        out = jnp.einsum("bijgu,bjgup->bigup", scored(q), v)
        out += of_state(q)
    if by_element:
        added = jnp.einsum("bjgus,bjgup->bgusp", k[..., None, :] * left, v)
        return (kept[..., None] * state + added, last), out
    added = jnp.einsum("bjgs,bjgup->bgusp", k, left[..., None] * v)
    return (kept[..., None, None] * state + added, last), out
