"""Ways to break the arithmetic of a step that change none of its collectives: `NUMERICS` must flag each.

A way is a function that returns patches of our code, applied to a plan of a training or an inference step.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from meshwright.audit.numerics import check_numerics
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config_tables import MoE
from meshwright.models.presets import load_model
from meshwright.nn import cached_ops, loss, norms
from meshwright.nn.attention import blockwise, flash, paged, paged_kernel, rotary
from meshwright.nn.attention.by_formula import visible
from meshwright.nn.experts import capacity, dropless
from meshwright.nn.mixers import state_cache
from meshwright.nn.ops import attention, jax_ops
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.products import quantised
from meshwright.nn.stack import KindInLoop
from meshwright.plan_file import Plan
from meshwright.serve.device import programs
from meshwright.train import optimizers, step

DENSE = replace(load_model("tiny"), num_layers=2, max_seq_len=256)
WINDOWED = replace(DENSE, sliding_window=16, global_every=2)
EXPERTS = replace(DENSE, moe=MoE(num_experts=8, experts_per_token=2, d_ff=32))
SINKS = replace(DENSE, attention_sinks=True)
# Heads that fill the lanes of the TPU's paged kernel.
OF_LANES = replace(DENSE, d_head=128)
OF_LANES_WINDOWED = replace(WINDOWED, d_head=128)
CAPPED = replace(DENSE, attention_softcap=5.0)
Patches = Sequence[Any]


def _object(owner: Any, name: str, new: Any) -> Any:
    return patch.object(owner, name, new)


def _after(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """The function's result, changed."""
    plain = getattr(owner, name)
    return patch.object(owner, name, lambda *given, **more: change(plain(*given, **more)))


def _in_bf16(x: Any) -> Any:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def _residual_left_out(self: JaxOps, name: str, x: Any, y: Any) -> Any:
    return y if name == "mlp_residual" else x + y


def _residual_left_out_once(self: Any, name: str, x: Any, y: Any) -> Any:
    """Of the first attention that is traced."""
    if name == "attention_residual" and not hasattr(self, "left_out"):
        self.left_out = True
        return y
    return x + y


def _ring_one_turn_short() -> Patches:
    """The last block of keys that arrives counts as hidden."""
    plain = blockwise._of_block

    def short(seen: Any, length: int, step: Any, number: Any, ring: Any, how: Any) -> Any:
        here = plain(seen, length, step, number, ring, how)
        lost = jnp.asarray(step == blockwise._size(ring) - 1)
        keys = jax.tree.map(lambda x: jnp.where(lost, 10**6, x), here.keys)
        return here._replace(keys=keys)

    return [_object(blockwise, "_of_block", short)]


def _ring_the_other_way() -> Patches:
    plain = lax.ppermute

    def other(x: Any, axis: Any, perm: Any) -> Any:
        return plain(x, axis, [(to, begin) for begin, to in perm])

    return [_object(lax, "ppermute", other)]


def _half_of_the_choices(gates: Any) -> Any:
    """Only the best of a token's experts."""
    return jnp.where(gates == jnp.max(gates, -1, keepdims=True), gates, 0.0)


def _smoothed(nats: Any) -> Any:
    def of(logits: Any, targets: Any, **how: Any) -> Any:
        even = norms.log_sum_exp(logits.astype(jnp.float32)) - jnp.mean(logits.astype(jnp.float32), -1)
        return 0.9 * nats(logits, targets, **how) + 0.1 * even

    return of


def _nats_of_bf16(logits: Any, targets: Any, **how: Any) -> Any:
    return _PLAIN_NATS(_in_bf16(logits), targets, **how)


_PLAIN_NATS = loss.nats_of


def _of_nats(changed: Any) -> Patches:
    return [_object(jax_ops, "nats_of", changed), _object(loss, "nats_of", changed)]


def _no_maximum(x: Any) -> Any:
    return jnp.log(jnp.sum(jnp.exp(x), axis=-1))


def _norm_in_bf16(x: Any, *given: Any, **more: Any) -> Any:
    return _PLAIN_NORM(_in_bf16(x), *given, **more)


_PLAIN_NORM = norms.norm


def _norm_without_eps(x: Any, scale: Any, bias: Any, kind: str, config: Any, *more: Any) -> Any:
    return _PLAIN_NORM(x, scale, bias, kind, replace(config, norm_eps=1e-2), *more)


def _norm_by_one_less(x: Any, *given: Any, **more: Any) -> Any:
    return _PLAIN_NORM(x, *given, **more) * ((x.shape[-1] - 1) / x.shape[-1]) ** 0.5


def _norm_without_the_table(plain: Any, gradients: Any) -> Any:
    return plain({name: one for name, one in gradients.items() if name != "embed"})


def _with_z_loss(logits: Any, targets: Any, **how: Any) -> Any:
    return _PLAIN_NATS(logits, targets, **{**how, "z_loss": 1e-3})


def _added_in_bf16(plain: Any, total: Any, more: Any) -> Any:
    return jax.tree.map(_in_bf16, plain(*(jax.tree.map(_in_bf16, one) for one in (total, more))))


def _cooler_gates(plain: Any, logits: Any, *given: Any, **more: Any) -> Any:
    return plain(logits / 1.05, *given, **more)


def _adamw_with(**constants: Any) -> Patches:
    plain = optax.adamw
    return [_object(optax, "adamw", lambda *given, **more: plain(*given, **{**more, **constants}))]


def _kept_moments() -> Patches:
    plain = step.CompiledStep._updated_shards

    def kept(self: Any, state: Any, *given: Any, **more: Any) -> Any:
        return plain(self, state, *given, **more)[0], state.opt_state

    return [_object(step.CompiledStep, "_updated_shards", kept)]


def _first_microbatch_again() -> Patches:
    plain = step.CompiledStep.microbatches

    def first(self: Any, rows: Any) -> Any:
        split = plain(self, rows)
        return jnp.stack([split[:, 0]] * split.shape[1], axis=1)

    return [_object(step.CompiledStep, "microbatches", first)]


def _read_before_written() -> Patches:
    """Attention over the pages as they were before the step's own keys and values."""
    plain = paged.PagedCache.written

    def written(self: Any, number: int, new: Any) -> Any:
        after = plain(self, number, new)
        object.__setattr__(after, "before", self)
        return after

    attend = paged.PagedCache.attend

    def late(self: Any, *given: Any) -> Any:
        return attend(getattr(self, "before", self), *given)

    return [_object(paged.PagedCache, "written", written), _object(paged.PagedCache, "attend", late)]


def _cache_without_window() -> Patches:
    plain = paged.PagedCache.attend

    def all_of_it(self: Any, number: int, q: Any, window: Any, how: Any, sinks: Any) -> Any:
        return plain(self, number, q, None, how, sinks)

    return [_object(paged.PagedCache, "attend", all_of_it)]


def _cache_without_sinks() -> Patches:
    plain = paged.PagedCache.attend

    def without(self: Any, number: int, q: Any, window: Any, how: Any, sinks: Any) -> Any:
        return plain(self, number, q, window, how, None)

    return [_object(paged.PagedCache, "attend", without)]


def _without_scales(weight: Any, dtype: Any) -> Any:
    return weight.values.astype(dtype) if isinstance(weight, quantised.Quantised) else weight.astype(dtype)


def _product_without_scales() -> Patches:
    plain = cached_ops.InferenceOps._scaled_product

    def without(self: Any, plan: Any, spec: str, x: Any, weight: Any) -> Any:
        ones = replace(weight, scales=jnp.ones_like(weight.scales))
        return plain(self, plan, spec, x, ones)

    return [_object(cached_ops.InferenceOps, "_scaled_product", without)]


def _positions_from_one() -> Patches:
    plain = rotary._turned

    def later(x: Any, positions: Any, config: Any, *more: Any) -> Any:
        # All positions shifted turn queries and keys alike: only those of queries are.
        return plain(x, positions + (x.shape[2] == config.num_heads), config, *more)

    return [_object(rotary, "_turned", later)]


def _window_of_keys_lost(self: Any, positions: Any, kind: Any) -> Any:
    return None


def _without_causal_mask(queries: Any, keys: Any, first: Any) -> Any:
    seen = visible(queries, keys, first)
    return seen._replace(mask=jnp.ones_like(seen.mask))


def _residual_doubled(self: JaxOps, name: str, x: Any, y: Any) -> Any:
    return x + (2 * y if name == "mlp_residual" else y)


def _gate_for_up(self: JaxOps, name: str, gate: Any, up: Any, *more: Any) -> Any:
    return _PLAIN_ACTIVATION(self, name, up, gate, *more)


def _gelu(self: JaxOps, name: str, gate: Any, up: Any, kind: str, *more: Any) -> Any:
    return _PLAIN_ACTIVATION(self, name, gate, up, "gelu", *more)


_PLAIN_ACTIVATION = JaxOps.activation


def _nats_without_the_last(logits: Any, targets: Any, **how: Any) -> Any:
    return _PLAIN_NATS(logits, targets, **how).at[..., -1].set(0.0)


def _without_softcap() -> Patches:
    plain: Any = attention.blockwise

    def uncapped(*given: Any) -> Any:
        before, how, after = given[:8], given[8], given[9:]
        return plain(*before, how._replace(softcap=None), *after)

    return [_object(attention, "blockwise", uncapped)]


def _written_otherwise(change: Callable[[int, Any], Any]) -> Patches:
    """The caches' new keys and values, changed by layer."""
    plain = paged.PagedCache.written

    def written(self: Any, number: int, new: Any) -> Any:
        return plain(self, number, jax.tree.map(lambda x: change(number, x), new))

    return [_object(paged.PagedCache, "written", written)]


def _read_otherwise(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patches:
    """The caches read with another window or other scores."""
    plain = paged.PagedCache.attend

    def attend(self: Any, number: int, q: Any, window: Any, how: Any, sinks: Any) -> Any:
        return plain(self, number, q, *change(window, how), sinks)

    return [_object(paged.PagedCache, "attend", attend)]


def _kernel_with_a_wider_window() -> Patches:
    plain = masks.LocalMask
    return [_object(masks, "LocalMask", lambda shape, sizes, *more: plain(shape, (sizes[0] + 1, 0), *more))]


def _kernel_of_another_scale() -> Patches:
    plain = flash.splash

    def scaled(q: Any, *given: Any, **more: Any) -> Any:
        return plain(1.01 * q, *given, **more)

    return [_object(flash, "splash", scaled)]


def _kernel_over_whole_pages() -> Patches:
    """The paged kernel reads all positions of a row's last page."""
    plain = paged_kernel._of_rows

    def whole(q: Any, lengths: Any, tables: Any, pool: Any, *more: Any) -> Any:
        return plain(q, -(-lengths // pool.shape[1]) * pool.shape[1], tables, pool, *more)

    return [_object(paged_kernel, "_of_rows", whole)]


def _kernel_without_a_window() -> Patches:
    plain = paged_kernel.ragged

    def without(q: Any, positions: Any, tables: Any, pool: Any, window: Any, how: Any) -> Any:
        return plain(q, positions, tables, pool, None, how)

    return [_object(paged_kernel, "ragged", without)]


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Patches:
    """The function as `change` calls it: with the function, then its arguments."""
    plain = getattr(owner, name)
    return [_object(owner, name, lambda *given, **more: change(plain, *given, **more))]


def _heads_in_reverse() -> Patches:
    """Query heads attend to the keys of other heads."""

    def attend(plain: Any, self: Any, name: str, q: Any, *given: Any, **more: Any) -> Any:
        return plain(self, name, jnp.flip(q, 2), *given, **more)

    return _around(attention.AttentionOps, "attention", attend)


def _keys_without_norm() -> Patches:
    def norm(plain: Any, x: Any, scale: Any, bias: Any, kind: str, config: Any, *more: Any) -> Any:
        is_of_keys = x.ndim == 4 and x.shape[2] == config.num_kv_heads
        return x if is_of_keys else plain(x, scale, bias, kind, config, *more)

    return _around(jax_ops, "norm", norm)


def _norms_without_offset() -> Patches:
    def norm(plain: Any, x: Any, scale: Any, bias: Any, kind: str, config: Any, *more: Any) -> Any:
        return plain(x, scale, bias, kind, replace(config, norm_offset=False), *more)

    return _around(jax_ops, "norm", norm)


def _shares_normalised_otherwise() -> Patches:
    def gates(plain: Any, logits: Any, *given: Any, moe: MoE) -> Any:
        return plain(logits, *given, moe=replace(moe, normalized=not moe.normalized))

    return _around(capacity, "_gates", gates)


def _one_row_lost(plain: Any, rows: Any, *given: Any) -> Any:
    return plain(rows.at[..., 0, :].set(0.0), *given)


def _theta_without_scaling(plain: Any, config: Any, **how: Any) -> Any:
    return plain(replace(config, rope_scaling=None), **how)


def _other_rate(changed: Callable[[Any, Any], Any]) -> Patches:
    """The learning rate of AdamW, by its function and the optimizer's settings."""
    return _around(import_module("meshwright.train.optimizers.adamw"), "learning_rate", changed)


def _page_of_another_layer(plain: Any, self: Any, number: int, *given: Any) -> Any:
    return plain(self, 1 - number, *given)


def _positions_of_a_chunk(plain: Any, x: Any, positions: Any, *given: Any) -> Any:
    return plain(x, positions % 16, *given)


def _scales_of_neighbours() -> Patches:
    def product(plain: Any, self: Any, plan: Any, spec: str, x: Any, weight: Any) -> Any:
        return plain(self, plan, spec, x, replace(weight, scales=jnp.flip(weight.scales, -1)))

    return _around(cached_ops.InferenceOps, "_scaled_product", product)


def _turned_at(change: Callable[[Any], Any]) -> Patches:
    def turned(plain: Any, x: Any, positions: Any, *given: Any) -> Any:
        return plain(x, change(positions), *given)

    return _around(rotary, "_turned", turned)


def _other_base(plain: Any, config: Any, **how: Any) -> Any:
    return plain(replace(config, rope_theta=2 * config.rope_theta), **how)


def _without_gradient(name: str) -> Patches:
    def einsum(plain: Any, self: Any, other: str, plan: Any, x: Any, weight: Any) -> Any:
        return plain(self, other, plan, x, lax.stop_gradient(weight) if other == name else weight)

    return _around(JaxOps, "_einsum", einsum)


def _adamw_as(made: Callable[..., Any]) -> Patches:
    """AdamW as `made` builds it, of the plain one and its constants."""
    plain = optax.adamw
    return [_object(optax, "adamw", lambda rate, **constants: made(plain, rate, constants))]


def _decay_in_gradients(plain: Any, rate: Any, constants: dict[str, Any]) -> Any:
    decay, mask = constants.pop("weight_decay"), constants.pop("mask")
    return optax.chain(optax.add_decayed_weights(decay, mask), optax.adam(rate, **constants))


def _clipped_afterwards() -> Patches:
    def made(plain: Any, rate: Any, constants: dict[str, Any]) -> Any:
        return optax.chain(plain(rate, **constants), optax.clip_by_global_norm(0.0025))

    return [*_adamw_as(made), _object(optimizers, "clipped", lambda *_: optax.identity())]


def _only_the_last(plain: Any, total: Any, more: Any) -> Any:
    return jax.tree.map(lambda sums, one: one.astype(sums.dtype), total, more)


def _choice_weighs(plain: Any, logits: Any, choice: Any = None, *, moe: MoE) -> Any:
    biased = logits if choice is None else logits + choice[None, None, :]
    return plain(biased, choice, moe=moe)


def _of_any_group(plain: Any, scores: Any, moe: MoE) -> Any:
    return plain(scores, replace(moe, num_groups=1, groups_per_token=1))


def _last_tokens_first(plain: Any, gates: Any, layout: Layout, moe: MoE) -> Any:
    by_expert = jnp.reshape(gates, (-1, moe.num_experts)).T
    num_rows = plain(gates, layout, moe).shape[1]
    order = jnp.argsort((by_expert == 0)[:, ::-1], axis=1, stable=True)[:, :num_rows]
    return by_expert.shape[1] - 1 - order


def _a_key_narrower(plain: Any, self: Any, positions: Any, kind: Any) -> Any:
    first = plain(self, positions, kind)
    return None if first is None else first + 1


def _keys_of_other_groups(plain: Any, self: Any, name: str, q: Any, *given: Any, **more: Any) -> Any:
    order = np.arange(q.shape[2]).reshape(2, -1).T.ravel()
    return plain(self, name, q[:, :, order], *given, **more)


def _left_out(operation: str, name: str) -> Patches:
    """An operation of JaxOps that returns its input wherever it has this name."""

    def left_out(plain: Any, self: Any, other: str, x: Any, *given: Any, **more: Any) -> Any:
        return x if other == name else plain(self, other, x, *given, **more)

    return _around(JaxOps, operation, left_out)


def _other_metric(name: str, change: Callable[[Any], Any]) -> Patches:
    def metrics(plain: Any, *given: Any) -> Any:
        made = plain(*given)
        return made | {name: change(made[name])}

    return _around(step.CompiledStep, "metrics", metrics)


def _cudnn_with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patches:
    """The call of jax.nn.dot_product_attention with other options."""
    plain = jax.nn.dot_product_attention

    def attend(*given: Any, **options: Any) -> Any:
        return plain(*given, **options | change(options))

    return [_object(jax.nn, "dot_product_attention", attend)]


def _wider(options: dict[str, Any]) -> dict[str, Any]:
    window = options["local_window_size"]
    return {"local_window_size": window and (window[0] + 1, 0)}


def _slot_late(plain: Any, self: Any, positions: Any, *given: Any) -> Any:
    return plain(self, jnp.where(positions >= 0, positions + 1, positions), *given)


def _seen_from(change: int) -> Patches:
    """Queries that see keys as if they stood elsewhere."""

    def scored(plain: Any, scores: Any, queries: Any, *given: Any) -> Any:
        return plain(scores, queries + change, *given)

    return _around(paged, "_scored", scored)


def _pages_of_neighbours(plain: Any, self: Any, *given: Any) -> Any:
    return plain(replace(self, tables=jnp.roll(self.tables, 1, 0)), *given)


def _logits_before(plain: Any, x: Any, heads: Any) -> Any:
    return plain(x, jnp.where(heads > 0, heads - 1, heads))


def _token_of_another_slot(plain: Any, tokens: Any, last: Any, slots: Any) -> Any:
    return plain(tokens, jnp.roll(last, 1), slots)


def _cached_without_scales(plain: Any, at: Any, pool: Any) -> Any:
    is_scaled = isinstance(pool, quantised.Quantised)
    return pool.values[at].astype(jnp.float32) if is_scaled else plain(at, pool)


def _sinks_of_neighbours(plain: Any, self: Any, *given: Any) -> Any:
    *others, sinks = given
    return plain(self, *others, jnp.roll(sinks, 1))


def _values_of_other_heads(plain: Any, self: Any, name: str, *given: Any) -> Any:
    weight = plain(self, name, *given)
    return jnp.flip(weight, 0) if name == "wv_up" else weight


def _states_of_neighbours(plain: Any, self: Any, rows: Any, positions: Any, read: Any, count: int) -> Any:
    return plain(self, rows, positions, jnp.roll(read, 1), count)


def _without_cap(plain: Any, self: Any, number: int, q: Any, window: Any, how: Any, sinks: Any) -> Any:
    return plain(self, number, q, window, how._replace(softcap=None), sinks)


# Positions that 16 bits cannot hold.
LONG = replace(DENSE, max_seq_len=4096)
_ROUTERS = import_module("meshwright.nn.ops.experts")
TRAINING: dict[str, tuple[Any, str, Callable[[], Patches]]] = {
    "a rotation of another base": (DENSE, "fsdp=2", lambda: _around(rotary, "frequencies", _other_base)),
    "positions in bfloat16": (LONG, "fsdp=2", lambda: _turned_at(lambda at: at.astype(jnp.bfloat16))),
    "positions that begin again at 512": (LONG, "fsdp=2", lambda: _turned_at(lambda at: at % 512)),
    "no gradient of the keys' weight": (DENSE, "fsdp=2", lambda: _without_gradient("wk")),
    "moments without their correction": (
        DENSE, "fsdp=2", lambda: [_object(optax.tree, "bias_correction", lambda moment, *_: moment)]
    ),
    "decay within the gradients": (DENSE, "fsdp=2", lambda: _adamw_as(_decay_in_gradients)),
    "clipped after the update": (DENSE, "fsdp=2", _clipped_afterwards),
    "only the last microbatch": (
        DENSE, "fsdp=2,microbatches=2", lambda: _around(step, "added", _only_the_last)
    ),
    "a choice's bias that weighs": (
        load_model("deepseek-v3"), "fsdp=2,expert=2", lambda: _around(capacity, "_gates", _choice_weighs)
    ),
    "groups of experts ignored": (
        load_model("deepseek-v3"), "fsdp=2,expert=2",
        lambda: _around(capacity, "_chosen", _of_any_group),
    ),
    "the last tokens first": (
        load_model("mixtral-8x7b"), "fsdp=2,expert=2,capacity=1.0",
        lambda: _around(capacity, "_tokens_of_experts", _last_tokens_first),
    ),
    "routers' losses dropped": (
        EXPERTS, "fsdp=2,expert=2", lambda: [_after(_ROUTERS, "router_losses", lambda losses: 0 * losses)]
    ),
    "a window a key narrower": (
        WINDOWED, "fsdp=2", lambda: _around(attention.AttentionOps, "_first", _a_key_narrower)
    ),
    "windows of the other layers": (
        load_model("gemma-2-2b"), "fsdp=2",
        lambda: _around(KindInLoop, "choose", lambda plain, self, choices: plain(self, choices[::-1])),
    ),
    "keys of other groups": (
        replace(DENSE, num_kv_heads=2), "fsdp=2",
        lambda: _around(attention.AttentionOps, "attention", _keys_of_other_groups),
    ),
    "no final norm": (DENSE, "fsdp=2", lambda: _left_out("norm", "final_norm")),
    "no norm of latents": (
        load_model("deepseek-v2-lite"), "fsdp=2", lambda: _left_out("norm", "kv_latent_norm")
    ),
    "residuals without their scale": (
        replace(DENSE, residual_scale=0.5), "fsdp=2", lambda: _left_out("scale", "mlp_residual_scale")
    ),
    "a norm reported after clipping": (
        DENSE, "fsdp=2", lambda: _other_metric("grad_norm", lambda norm: jnp.minimum(norm, 0.25))
    ),
    "another rate reported": (DENSE, "fsdp=2", lambda: _other_metric("learning_rate", lambda rate: 2 * rate)),
    "activations rounded to eight bits": (
        DENSE, "fsdp=2",
        lambda: [_after(JaxOps, "activation", lambda y: y.astype(jnp.float8_e5m2).astype(y.dtype))],
    ),
    "products of eight bits": (
        DENSE, "fsdp=2",
        lambda: [_after(JaxOps, "_fetched", lambda w: w.astype(jnp.float8_e4m3fn).astype(w.dtype))],
    ),
    "half of the routers' choices": (
        EXPERTS, "fsdp=2,expert=2", lambda: [_after(capacity, "_gates", _half_of_the_choices)]
    ),
    "gates that are not normalised": (
        EXPERTS, "fsdp=2,expert=2", lambda: [_after(capacity, "_gates", lambda g: 1.1 * g)]
    ),
    "attention without its window": (
        WINDOWED, "fsdp=2", lambda: [_object(attention.AttentionOps, "_first", _window_of_keys_lost)]
    ),
    "a ring one turn short": (DENSE, "context=4,context_method=ring", _ring_one_turn_short),
    "a ring the other way": (DENSE, "context=4,context_method=ring", _ring_the_other_way),
    "no residual of feed-forwards": (
        DENSE, "fsdp=2", lambda: [_object(JaxOps, "residual", _residual_left_out)]
    ),
    "loss from bfloat16 logits": (DENSE, "fsdp=2", lambda: _of_nats(_nats_of_bf16)),
    "label smoothing": (DENSE, "fsdp=2", lambda: _of_nats(_smoothed(_PLAIN_NATS))),
    "no maximum subtracted": (
        DENSE, "fsdp=2", lambda: [_object(loss, "log_sum_exp", _no_maximum)]
    ),
    "norms in bfloat16": (DENSE, "fsdp=2", lambda: [_object(jax_ops, "norm", _norm_in_bf16)]),
    "another epsilon of norms": (DENSE, "fsdp=2", lambda: [_object(jax_ops, "norm", _norm_without_eps)]),
    "queries a position late": (DENSE, "fsdp=2", _positions_from_one),
    "no decay": (DENSE, "fsdp=2", lambda: _adamw_with(weight_decay=0.0)),
    "an activation without its clamp": (
        replace(DENSE, activation="clamped_silu"), "fsdp=2", lambda: [_object(norms, "_CLAMP", 1e9)]
    ),
    "values that are not clipped": (
        replace(DENSE, clip_qkv=8.0), "fsdp=2", lambda: [_object(jax_ops, "clip", lambda x, limit: x)]
    ),
    "decay of norms": (DENSE, "fsdp=2", lambda: _adamw_with(mask=None)),
    "another second moment": (DENSE, "fsdp=2", lambda: _adamw_with(b2=0.999)),
    "not clipped": (
        DENSE, "fsdp=2", lambda: [_object(optimizers, "clipped", lambda *_: optax.identity())]
    ),
    "moments not kept": (DENSE, "fsdp=2", _kept_moments),
    "an update in bfloat16": (
        DENSE, "fsdp=2", lambda: [_after(optax, "apply_updates", lambda w: jax.tree.map(_in_bf16, w))]
    ),
    "one microbatch twice": (DENSE, "fsdp=2,microbatches=2", _first_microbatch_again),
    "feed-forwards counted twice": (
        DENSE, "fsdp=2", lambda: [_object(JaxOps, "residual", _residual_doubled)]
    ),
    "gates and inputs swapped": (DENSE, "tensor=2", lambda: [_object(JaxOps, "activation", _gate_for_up)]),
    "GELU for SiLU": (DENSE, "fsdp=2", lambda: [_object(JaxOps, "activation", _gelu)]),
    "no loss of the last token": (DENSE, "fsdp=2", lambda: _of_nats(_nats_without_the_last)),
    "a router without a gradient": (
        EXPERTS, "fsdp=2,expert=2", lambda: [_after(capacity, "_gates", lax.stop_gradient)]
    ),
    "a softcap left out": (CAPPED, "fsdp=2", _without_softcap),
    "clipped by tensor": (
        DENSE, "fsdp=2", lambda: [_object(optimizers, "clipped", lambda *_: optax.clip_by_block_rms(0.25))]
    ),
    "an epsilon within the root": (DENSE, "fsdp=2", lambda: _adamw_with(eps_root=1e-4)),
    "another first moment": (DENSE, "fsdp=2", lambda: _adamw_with(b1=0.91)),
    "a kernel whose window is a key wider": (WINDOWED, "fsdp=2", _kernel_with_a_wider_window),
    "a kernel that sees later keys": (
        DENSE, "fsdp=2", lambda: [_object(masks, "CausalMask", masks.FullMask)]
    ),
    "a kernel of another scale": (DENSE, "fsdp=2", _kernel_of_another_scale),
    "heads in reverse": (replace(DENSE, num_kv_heads=2), "fsdp=2", _heads_in_reverse),
    "keys without their norm": (
        replace(DENSE, num_kv_heads=2, qk_norm=True), "fsdp=2", _keys_without_norm
    ),
    "norms without their offset": (load_model("gemma-2-2b"), "fsdp=2", _norms_without_offset),
    "an embedding that is not scaled": (
        load_model("gemma-2-2b"), "fsdp=2", lambda: [_object(JaxOps, "scale", lambda s, n, x, f: x)]
    ),
    "gates normalised otherwise": (
        load_model("deepseek-v2-lite"), "fsdp=2,expert=2", _shares_normalised_otherwise
    ),
    "a row of each expert lost": (
        load_model("mixtral-8x7b"), "fsdp=2,expert=2", lambda: _around(dropless, "_by_gate", _one_row_lost)
    ),
    "a context that is not stretched": (
        load_model("llama-3.1-8b"), "fsdp=2", lambda: _around(rotary, "frequencies", _theta_without_scaling)
    ),
    "a magnitude left out": (
        load_model("gpt-oss-20b"), "fsdp=2", lambda: [_after(rotary, "_magnitude", lambda _: 1.0)]
    ),
    "a table without the gradient of its rows": (
        replace(DENSE, tied_embeddings=True), "fsdp=2",
        lambda: _around(
            JaxOps, "embed", lambda plain, s, n, t, table: plain(s, n, t, lax.stop_gradient(table))
        ),
    ),
    "heads in reverse after an exchange": (
        DENSE, "context=4,context_method=ulysses",
        lambda: [_after(attention.AttentionOps, "_by_heads", lambda x: jnp.flip(x, 2))],
    ),
    "a constant rate": (
        DENSE, "fsdp=2",
        lambda: _other_rate(lambda plain, config: plain(replace(config, schedule="constant"))),
    ),
    "the rate of the step before": (
        DENSE, "fsdp=2",
        lambda: _other_rate(lambda plain, config: lambda n: plain(config)(jnp.maximum(n - 1, 0))),
    ),
    "clipped by a norm 5% too large": (
        DENSE, "fsdp=2", lambda: [_after(step, "gradient_norm", lambda norm: 1.05 * norm)]
    ),
    "rotations the other way": (DENSE, "fsdp=2", lambda: _turned_at(lambda at: -at)),
    "norms by n - 1": (DENSE, "fsdp=2", lambda: [_object(jax_ops, "norm", _norm_by_one_less)]),
    "a norm of gradients without the table": (
        DENSE, "fsdp=2", lambda: _around(step, "gradient_norm", _norm_without_the_table)
    ),
    "an unplanned z-loss": (DENSE, "fsdp=2", lambda: _of_nats(_with_z_loss)),
    "microbatches' gradients added in bfloat16": (
        DENSE, "fsdp=2,microbatches=2", lambda: _around(step, "added", _added_in_bf16)
    ),
    "a router's temperature of 1.05": (
        EXPERTS, "fsdp=2,expert=2", lambda: _around(capacity, "_gates", _cooler_gates)
    ),
    "gates normalised with 2% more": (
        EXPERTS, "fsdp=2,expert=2", lambda: [_after(capacity, "_gates", lambda g: g / 1.02)]
    ),
}  # fmt: skip
# With cuDNN's attention on an H100.
ON_GPUS: dict[str, tuple[Any, str, Callable[[], Patches]]] = {
    "cuDNN without its mask": (DENSE, "fsdp=2", lambda: _cudnn_with(lambda _: {"is_causal": False})),
    "cuDNN of another scale": (DENSE, "fsdp=2", lambda: _cudnn_with(lambda _: {"scale": 0.2})),
    "cuDNN with a window a key wider": (WINDOWED, "fsdp=2", lambda: _cudnn_with(_wider)),
}
GENERATION: dict[str, tuple[Any, str, Callable[[], Patches]]] = {
    "keys written a slot late": (DENSE, "tensor=2", lambda: _around(paged.PagedCache, "_places", _slot_late)),
    "pages of neighbours": (
        DENSE, "tensor=2", lambda: _around(paged.PagedCache, "attend", _pages_of_neighbours)
    ),
    "a query that does not see itself": (DENSE, "tensor=2", lambda: _seen_from(-1)),
    "a query that sees the next key": (DENSE, "tensor=2", lambda: _seen_from(1)),
    "logits of the token before": (DENSE, "tensor=2", lambda: _around(programs, "_taken", _logits_before)),
    "the last token of another slot": (
        DENSE, "tensor=2",
        lambda: _around(programs, "_known", _token_of_another_slot),
    ),
    "an int8 cache without scales": (
        DENSE, "tensor=2,kv_dtype=int8", lambda: _around(paged, "_read", _cached_without_scales)
    ),
    "sinks of neighbours": (
        SINKS, "tensor=2", lambda: _around(paged.PagedCache, "attend", _sinks_of_neighbours)
    ),
    "values of other heads": (
        load_model("deepseek-v2-lite"), "tensor=2",
        lambda: _around(cached_ops.InferenceOps, "_absorbed", _values_of_other_heads),
    ),
    "states of neighbours": (
        load_model("qwen3-next-80b-a3b"), "data=2",
        lambda: _around(state_cache.StateCache, "_places", _states_of_neighbours),
    ),
    "positions that begin again at 512": (LONG, "tensor=2", lambda: _turned_at(lambda at: at % 512)),
    "positions from 16 on a turn late": (DENSE, "tensor=2", lambda: _turned_at(lambda at: at + (at >= 16))),
    "values 0.5% too large in the cache": (
        DENSE, "tensor=2", lambda: _written_otherwise(lambda _, x: 1.005 * x)
    ),
    "no shared expert": (
        load_model("deepseek-v2-lite"), "tensor=2", lambda: _left_out("residual", "shared_residual")
    ),
    "scores without their cap": (
        CAPPED, "tensor=2", lambda: _around(paged.PagedCache, "attend", _without_cap)
    ),
    "caches read before they are written": (DENSE, "tensor=2", _read_before_written),
    "a cache without its window": (WINDOWED, "tensor=2", _cache_without_window),
    "a cache without sinks": (SINKS, "tensor=2", _cache_without_sinks),
    "one layer without its residual": (
        DENSE, "tensor=2", lambda: [_object(JaxOps, "residual", _residual_left_out_once)]
    ),
    "int8 weights without scales": (DENSE, "tensor=2,weights_dtype=int8", _product_without_scales),
    "queries a position late": (DENSE, "tensor=2", _positions_from_one),
    "half of the routers' choices": (
        EXPERTS, "fsdp=2", lambda: [_after(capacity, "_gates", _half_of_the_choices)]
    ),
    "a cache shifted in one layer": (
        DENSE, "tensor=2", lambda: _written_otherwise(lambda n, x: jnp.roll(x, 1, 0) if n == 1 else x)
    ),
    "a cache in bfloat16": (DENSE, "tensor=2", lambda: _written_otherwise(lambda _, x: _in_bf16(x))),
    "a window a token wider": (
        WINDOWED, "tensor=2",
        lambda: _read_otherwise(lambda w, how: (w and w._replace(size=w.size + 1), how)),
    ),
    "scores 0.1% too large": (
        DENSE, "tensor=2",
        lambda: _read_otherwise(lambda w, how: (w, how._replace(scale=1.001 * (how.scale or 1.0)))),
    ),
    "the cache of another layer": (
        DENSE, "tensor=2", lambda: _around(paged.PagedCache, "attend", _page_of_another_layer)
    ),
    "positions within a chunk": (DENSE, "data=2", lambda: _around(rotary, "_turned", _positions_of_a_chunk)),
    "scales of other columns": (DENSE, "tensor=2,weights_dtype=int8", _scales_of_neighbours),
    "logits that are not capped": (
        load_model("gemma-2-2b"), "tensor=2", lambda: [_object(JaxOps, "softcap", lambda s, n, x, cap: x)]
    ),
    "a kernel over whole pages": (OF_LANES, "tensor=2,weights_dtype=bf16", _kernel_over_whole_pages),
    "a kernel without its window": (
        OF_LANES_WINDOWED, "tensor=2,weights_dtype=bf16", _kernel_without_a_window
    ),
}  # fmt: skip


def report(
    model: Any, layout: str, phase: Any, patches: Patches = (), hardware: str = "v5p:2x2x2"
) -> dict[str, Any]:
    """The report of a plan whose code is patched."""
    words = layout if phase != "train" else f"weights_dtype=bf16,{layout}"
    plan = Plan(model, hardware, Workload(32, 256 if phase == "train" else 64, phase), Layout.parse(words))
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        jax.clear_caches()
        return check_numerics(plan)


def flagged(report: dict[str, Any]) -> list[str]:
    return [check["what"] for check in report["checks"] if not check["agrees"]]
