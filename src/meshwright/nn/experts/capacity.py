"""A mixture of experts: routing of tokens to experts, and dispatch and combine for experts with a capacity.

    gates[B, T, E]   the weight of each expert's work on a token, zero but for its k
    d[E, C, D]       for every expert the tokens that it takes, of each device C in its own order
    y[E, C, D]       the experts' outputs, summed by gate on the owners; plain sums if gates scaled d

Between them the rows travel as the layout plans (`Layout.to_experts`). Shapes are fixed: an expert takes its
even share of each device's tokens times the capacity factor, and later tokens skip it. Without a capacity no
token is dropped (nn/experts/dropless.py).

Two losses keep a router in balance and its logits small (`router_losses`); training weighs them.

Sources: Shazeer et al., 2017; DeepSeek-V3, 2024, for scores by sigmoids and the choice by groups.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.moves.experts import sorted_rows
from meshwright.models.config_tables import MoE
from meshwright.nn.each_device import with_gradient, zeros_after
from meshwright.nn.norms import log_sum_exp
from meshwright.nn.start.device_mesh import partition_spec

_SCORES = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sparsemixer": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
_SPARSE_MIXER_SHARE = 0.02  # twice router_jitter_noise
# Number of top scores of a group whose sum ranks it.
_BEST = {"softmax": 1, "sigmoid": 2, "sparsemixer": 1, "sqrtsoftplus": 2}


def gates_of(
    logits: Array, choice: Array | None, layout: Layout, moe: MoE, listed: tuple[Array, Array] | None = None
) -> Array:
    """gates f32[B, T, E] of a router's logits; choice[E] biases only the choice of experts.

    listed: table[t, r], the experts of each token id, stored less E / 2, and the ids [B, T]; these experts
    are taken instead of the highest logits.
    """
    spec = _spec(layout, "gates", "BTE")
    if listed is not None:
        table, tokens = lax.stop_gradient(listed)
        of_tokens = PartitionSpec(*spec.partitions[:2])
        inputs = reshard(table, PartitionSpec()), reshard(tokens, of_tokens)
        return with_gradient(partial(_listed_gates, moe=moe), [spec, PartitionSpec(), of_tokens], spec, 1)(
            logits, *inputs
        )
    local = partial(_gates, moe=moe)
    if choice is None:
        return with_gradient(local, [spec], spec, 1)(logits)
    # Whole and not typed `reduced`, since it has no gradient.
    choice = reshard(lax.stop_gradient(choice), PartitionSpec())
    return with_gradient(local, [spec, PartitionSpec()], spec, 1)(logits, choice)


def _gates(logits: Array, choice: Array | None = None, *, moe: MoE) -> Array:
    logits = logits.astype(jnp.float32)
    if moe.score == "sparsemixer":
        return _mixed_sparsely(logits, moe.experts_per_token) * moe.scaling
    scores = _SCORES[moe.score](logits)
    # By logits if each expert is chosen by its own score: sigmoids of large logits are equal.
    by = logits if choice is None and moe.num_groups == 1 else scores
    by = logits if moe.chosen_by_logits else by
    chosen = lax.stop_gradient(_chosen(by if choice is None else by + choice[None, None, :], moe))
    gates = jnp.where(chosen, scores, 0.0)
    if moe.normalized:
        gates /= jnp.sum(gates, axis=-1, keepdims=True)
    return gates * moe.scaling


def _listed_gates(logits: Array, table: Array, tokens: Array, *, moe: MoE) -> Array:
    """The gates of the experts that `table` lists for each token id."""
    experts = jnp.round(table[tokens].astype(jnp.float32)).astype(jnp.int32) + moe.num_experts // 2
    numbers = lax.broadcasted_iota(jnp.int32, (1, 1, 1, moe.num_experts), 3)
    chosen = jnp.any(experts[..., None] == numbers, axis=-2)
    gates = jnp.where(chosen, _SCORES[moe.score](logits.astype(jnp.float32)), 0.0)
    if moe.normalized:
        gates /= jnp.sum(gates, axis=-1, keepdims=True)
    return gates * moe.scaling


def _mixed_sparsely(logits: Array, count: int) -> Array:
    """`count` times the largest logit that is left, weighed by a softmax of the logits near it.

    Near: within 2% of the larger of it and the logit's size. Source: Liu et al., arXiv:2409.12136, as in
    Phi-3.5-MoE's inference.
    """
    gates, left = jnp.zeros_like(logits), logits
    for _ in range(count):
        best = jnp.max(left, axis=-1, keepdims=True)
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > _SPARSE_MIXER_SHARE
        shares = jax.nn.softmax(jnp.where(lax.stop_gradient(is_far), -jnp.inf, left), axis=-1)
        chosen = lax.stop_gradient(_among_the_best(left, 1))
        gates = jnp.where(chosen, shares, gates)
        left = jnp.where(chosen, -jnp.inf, left)
    return gates


def _chosen(scores: Array, moe: MoE) -> Array:
    """bool[B, T, E]: the best k experts of the best groups."""
    if moe.num_groups > 1:
        groups = jnp.reshape(scores, (*scores.shape[:-1], moe.num_groups, -1))
        best = jnp.sum(lax.top_k(groups, _BEST[moe.score])[0], axis=-1)
        allowed = _among_the_best(best, moe.groups_per_token)[..., None]
        scores = jnp.reshape(jnp.where(allowed, groups, -jnp.inf), scores.shape)
    return _among_the_best(scores, moe.experts_per_token)


def _among_the_best(scores: Array, count: int) -> Array:
    """Which of the last dimension are the `count` largest; of equals the first."""
    places = lax.top_k(scores, count)[1]
    numbers = lax.broadcasted_iota(places.dtype, (1,) * places.ndim + (scores.shape[-1],), places.ndim)
    return jnp.any(places[..., None] == numbers, axis=-2)


def router_losses(logits: Array, gates: Array, moe: MoE) -> Array:
    """f32[2]: the balance loss and the z-loss of one layer's logits[B, T, E] and gates[B, T, E].

        balance = mean over sequences of sum_e f_e P_e      z = mean over tokens of log(sum_e exp(logits))^2

    f_e: E/k times the share of a sequence's tokens that go to expert e. P_e: its mean score, with each
    token's scores normalised to a sum of 1. Balance is 1 if all experts get equal shares, and up to E/k if k
    get everything. It is computed per sequence, so it depends on neither microbatches nor the batch's
    sharding. Sources: DeepSeek-V3, 2024, section 2.1.2; Zoph et al., "ST-MoE", 2022, section 3.1.
    """
    wide = logits.astype(jnp.float32)
    log_sum = log_sum_exp(wide)
    scores = _SCORES[moe.score](wide)
    chosen = lax.stop_gradient(gates > 0).astype(jnp.float32)
    times = jnp.mean(chosen, axis=1) * (moe.num_experts / moe.experts_per_token)
    share = jnp.mean(scores / jnp.sum(scores, axis=-1, keepdims=True), axis=1)
    return jnp.stack([jnp.mean(jnp.sum(times * share, axis=-1)), jnp.mean(log_sum**2)])


def rows_of(num_tokens: int, moe: MoE, capacity: float) -> int:
    """An expert's rows for the tokens of one device: `capacity` times its even share."""
    share = moe.experts_per_token * num_tokens / moe.num_experts
    return min(num_tokens, max(1, round(capacity * share)))


def within_capacity(gates: Array, moe: MoE, capacity: float) -> Array:
    """gates[1, n, E] of each device's tokens, with zeros for tokens beyond an expert's capacity."""
    taken = jnp.cumsum(gates > 0, axis=1) <= rows_of(gates.shape[1], moe, capacity)
    return jnp.where(taken, gates, 0)


def dispatch(x: Array, gates: Array, layout: Layout, moe: MoE) -> Array:
    """d[E, C, D] on the tokens' devices: each expert's tokens, in the order of the sequence."""

    def local(x: Array, gates: Array) -> Array:
        tokens = _tokens_of_experts(gates, layout, moe)
        rows = jnp.reshape(x, (-1, x.shape[-1]))[tokens]
        return rows * _gates_of_rows(gates, tokens).astype(rows.dtype) if moe.scales_input else rows

    specs = _spec(layout, "x", "BTD"), _spec(layout, "gates", "BTE")
    out = partition_spec(sorted_rows(layout, "d"))
    return with_gradient(local, specs, out, 2 if moe.scales_input else 1)(x, gates)


def combine(y: Array, gates: Array, layout: Layout, moe: MoE) -> Array:
    """[B, T, D] of y[E, C, D], on the tokens' devices: sums of the experts' outputs, weighted by gates.

    If gates scaled the experts' inputs, outputs are not weighted again.
    """
    letters = "BTD"

    def local(y: Array, gates: Array) -> Array:
        tokens = _tokens_of_experts(gates, layout, moe)
        weights = _gates_of_rows(gates, tokens)
        weights = weights > 0 if moe.scales_input else weights
        total = zeros_after((y,), (gates.shape[0] * gates.shape[1], y.shape[-1]), y.dtype)
        total = total.at[tokens].add(y * weights.astype(y.dtype))
        return jnp.reshape(total, (*gates.shape[:2], y.shape[-1]))

    specs = partition_spec(sorted_rows(layout, "y")), _spec(layout, "gates", "BTE")
    out = _spec(layout, "x", letters)
    return with_gradient(local, specs, out, 2)(y, gates)


def _tokens_of_experts(gates: Array, layout: Layout, moe: MoE) -> Array:
    """The indices of each expert's tokens, [E, C]: first the tokens that chose it, in order."""
    by_expert = jnp.reshape(gates, (-1, moe.num_experts)).T
    assert layout.schedule.capacity is not None, "nn/experts/dropless.py has the others"
    num_rows = rows_of(by_expert.shape[1], moe, layout.schedule.capacity)
    return jnp.argsort(by_expert == 0, axis=1, stable=True)[:, :num_rows]


def _gates_of_rows(gates: Array, tokens: Array) -> Array:
    """[E, C, 1]: the gate of each row of tokens[E, C]; 0 if the token did not choose the expert."""
    by_expert = jnp.reshape(gates, (-1, gates.shape[-1])).T
    return jnp.take_along_axis(by_expert, tokens, axis=1)[..., None]


def _spec(layout: Layout, name: str, letters: str) -> PartitionSpec:
    return partition_spec(layout.activation(name, letters))
