"""The formulas of a model in plain JAX: one device, one layer after another, no layouts, no caches.

It is read next to a paper, and run by the audit on a tiny model: a layout, a kernel or a cache must give the
same numbers. It shares no code with `nn/` and `models/transformer.py`, only the record of the model.

Weights are a dict by path, as `models/parameters.py` lists them: `layers/wq` is [L, D, N, H]. The letters are
from `models/transformer.py`. All numbers are float32.
"""

from collections.abc import Callable, Mapping
from math import log, pi, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.models.config import DRAFT_WEIGHT, ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.models.layer_kinds import Layer, Window
from meshwright.models.mixers import (
    GatedDelta,
    Lightning,
    LinearUnit,
    Selective,
    ShortConvolution,
    StateSpace,
)

Weights = Mapping[str, Any]
# (gates[B, T, E]) -> gates: which of the chosen experts have capacity left.
Capacity = Callable[[Array], Array]
# (a router's logits[B, T, E], gates) -> gates of the experts that compute.
_Route = Callable[[Array, Array], Array]


class Extras(NamedTuple):
    """Weights of terms that training adds to the loss.

    z: of log(sum exp(logits))^2. balance, router_z: of each router's losses, summed over the layers.
    """

    z: float = 0.0
    balance: float = 0.0
    router_z: float = 0.0


def mean_loss(
    config: ModelConfig,
    w: Weights,
    rows: Any,
    capacity: Capacity | None = None,
    extras: Extras | None = None,
) -> Array:
    """Mean nats per token of rows[B, T + 1]: -log softmax(logits)[target], plus the logits' z-loss.

    The routers' losses have gradients, and are no part of the value. With a draft head trained jointly, the
    value is the model's loss. The gradient includes the head's loss, at the default weight.
    If only the head is trained, both are of the head's loss.
    """
    extras, added = extras or Extras(), jnp.zeros(())

    def routed(scores: Array, gates: Array) -> Array:
        nonlocal added
        assert config.moe is not None
        balance, z = _router_losses(config.moe, scores, gates)
        added += extras.balance * balance + extras.router_z * z
        return _within(capacity)(scores, gates)

    hidden = _last_hidden(config, w, rows[:, :-1], routed)
    loss = jnp.mean(_nats(config, w, hidden, rows[:, 1:], extras.z))
    loss += added - lax.stop_gradient(added)
    if config.draft_head is None:
        return loss
    e = _norm(config, w, "draft_embed_norm", _embedded(config, w, rows[:, 1:]))
    h = _norm(config, w, "draft_hidden_norm", hidden)
    x = jnp.concatenate([e, h], axis=-1) @ w["draft_in"]
    of_head = {
        path.removeprefix("draft_layers/"): a[0] for path, a in w.items() if path.startswith("draft_layers/")
    }
    x, _ = _layer(config, of_head, x, config.draft_layer, None, _within(capacity))
    nats = _nats(config, w, _norm(config, w, "draft_norm", x)[:, :-1], rows[:, 2:], extras.z)
    of_draft = jnp.sum(nats) / rows[:, 1:].size
    if config.draft_head == "frozen":
        return of_draft
    return loss + DRAFT_WEIGHT * (of_draft - lax.stop_gradient(of_draft))


def _nats(config: ModelConfig, w: Weights, hidden: Array, targets: Array, z: float) -> Array:
    """-log softmax(logits)[target] of targets[B, T], plus z log(sum exp(logits))^2."""
    of_tokens = _logits_of(config, w, hidden)
    log_shares = jax.nn.log_softmax(of_tokens, axis=-1)
    nats = -jnp.take_along_axis(log_shares, targets[..., None], axis=-1)[..., 0]
    return nats + z * jax.nn.logsumexp(of_tokens, axis=-1) ** 2


def logits(config: ModelConfig, w: Weights, tokens: Array, capacity: Capacity | None = None) -> Array:
    """logits[B, T, V] after each of tokens[B, T]."""
    return _logits_of(config, w, _last_hidden(config, w, tokens, _within(capacity)))


def _embedded(config: ModelConfig, w: Weights, tokens: Array) -> Array:
    """The embeddings of tokens[B, T], scaled and normed."""
    x = w["embed"][tokens]
    x *= config.d_model**0.5 if config.scale_embedding else 1.0
    x *= config.embedding_scale or 1.0
    return _norm(config, w, "embed_norm", x) if config.embedding_norm else x


def _last_hidden(config: ModelConfig, w: Weights, tokens: Array, route: _Route) -> Array:
    """x[B, T, D] after the final norm."""
    x = _embedded(config, w, tokens)
    if config.positions == "learned":
        x += w["positions"][np.arange(tokens.shape[1]) + config.position_offset]
    keys_and_values = None
    for layer in config.layers:
        prefix = f"{layer.kind.stack}/"
        of_layer = {
            path.removeprefix(prefix): a[layer.row] for path, a in w.items() if path.startswith(prefix)
        }
        x, keys_and_values = _layer(config, of_layer, x, layer, keys_and_values, route)
    return _norm(config, w, "final_norm", x)


def _logits_of(config: ModelConfig, w: Weights, hidden: Array) -> Array:
    x = hidden * (config.logit_scale or 1.0)
    out = x @ (w["embed"].T if config.tied_embeddings else w["unembed"]) + w.get("unembed_bias", 0.0)
    return _softcap(out, config.logit_softcap)


def _layer(
    config: ModelConfig, w: Weights, x: Array, layer: Layer, earlier: Any, route: _Route
) -> tuple[Array, Any]:
    """x[B, T, D] after a layer, and the keys and values that later layers may read."""
    scale, source, h, made = config.residual_scale or 1.0, x, x, earlier
    if layer.kind.mixer != "none":
        h = _norm(config, w, "attention_norm", x) if config.pre_norms else x
        y = jnp.zeros(())
        if layer.kind.attends:
            attend = _latent_attention if config.mla else _attention
            of_attention, made = attend(config, w, h, layer, earlier)
            y += of_attention
        if layer.kind.has_state:
            if isinstance(config.state_mixer, Lightning):
                y += _lightning(layer.kind.slope, w, h)
            else:
                y += _MIXERS[type(config.state_mixer)](config.state_mixer, w, h, config.norm_eps)
        y = _norm(config, w, "attention_post_norm", y) if config.post_norms else y
        if config.residual_inputs:
            x = h * config.residual_inputs[0 if layer.kind.attends else 1]
        x += scale * y
    if "w_out" not in w and "router" not in w:
        return x, made
    if not config.shared_norm:
        h = source if config.parallel else x
        h = _norm(config, w, "mlp_norm", h) if config.pre_norms else h
    has_experts = "router" in w
    y = _experts(config, w, h, route) if has_experts else _feed_forward(config, w, "w", h)
    if config.post_norms or (has_experts and config.moe and config.moe.post_norm):
        y = _norm(config, w, "mlp_post_norm", y)
    if config.residual_inputs:
        x = h * config.residual_inputs[2]
    return x + scale * y, made


# Products, norms, activations


def _product(config: ModelConfig, w: Weights, name: str, x: Array, num_summed: int = 1) -> Array:
    """x W + b, and of a weight with adapters s (x A) B more; over the last `num_summed` dimensions of x."""
    y = jnp.tensordot(x, w[name], num_summed)
    if f"{name}_lora_a" in w:
        narrow = jnp.tensordot(x, w[f"{name}_lora_a"], num_summed)
        y += config.lora_scale * jnp.tensordot(narrow, w[f"{name}_lora_b"], 1)
    return y + w.get(f"{name}_bias", 0.0)


def _norm(
    config: ModelConfig,
    w: Weights,
    name: str,
    x: Array,
    dims: int = 1,
    kind: str = "",
    eps: float | None = None,
) -> Array:
    """x / rms(x) * scale + bias over the last dimensions; a layer norm subtracts the mean first."""
    axes = tuple(range(-dims, 0))
    if (kind or config.norm) == "layer":
        x -= jnp.mean(x, axes, keepdims=True)
    x /= jnp.sqrt(jnp.mean(x * x, axes, keepdims=True) + (config.norm_eps if eps is None else eps))
    scale = w.get(name)
    if scale is not None:
        x *= 1 + scale if config.norm_offset else scale
    return x + w.get(f"{name}_bias", 0.0)


def _softcap(x: Array, cap: float | None) -> Array:
    return cap * jnp.tanh(x / cap) if cap else x


def _activation(config: ModelConfig, w: Weights, gate: Array, up: Array | None) -> Array:
    kind = config.activation
    if kind == "clamped_silu":  # gpt-oss: swiglu_limit 7, swiglu_alpha 1.702
        assert up is not None
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)
    if kind == "silu":
        y = gate / (1 + jnp.exp(-gate))
    elif kind == "gelu":  # the form with tanh
        y = 0.5 * gate * (1 + jnp.tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3)))
    elif kind == "gelu_erf":
        y = 0.5 * gate * (1 + lax.erf(gate / sqrt(2)))
    elif kind == "relu":
        y = jnp.maximum(gate, 0)
    elif kind == "relu2":
        y = jnp.maximum(gate, 0) ** 2
    else:  # xielu (Huang and Schlag, 2024), with two trained slopes
        p, n = (jnp.log1p(jnp.exp(w[f"w_slope_{name}"])) for name in ("up", "down"))
        below = (0.5 + n) * (jnp.expm1(jnp.minimum(gate, -1e-6)) - gate)
        y = jnp.where(gate > 0, p * gate * gate, below) + 0.5 * gate
    return y if up is None else y * up


def _feed_forward(config: ModelConfig, w: Weights, prefix: str, x: Array) -> Array:
    """W_out (f(W_gate x) * W_in x), or W_out f(W_in x) if it is not gated."""
    up = _product(config, w, f"{prefix}_in", x)
    h = (
        _activation(config, w, _product(config, w, f"{prefix}_gate", x), up)
        if config.gated
        else _activation(config, w, up, None)
    )
    h = _norm(config, w, "mlp_inner_norm", h) if config.inner_norms else h
    return _product(config, w, f"{prefix}_out", h)


# Positions


def rope(
    config: ModelConfig,
    x: Array,
    layer: Layer,
    positions: np.ndarray | None = None,
    *,
    leading: bool = False,
) -> Array:
    """x[B, T, ..., H] with pairs (i, i + A/2) turned by position * frequency_i; the others as they are.

    positions: i32[T]; None for 0, 1, 2, ...
    """
    if config.positions != "rope" or not layer.kind.turned:
        return x
    turned = config.rotary_dim or (config.mla.rope_dim if config.mla else config.d_head)
    positions = np.arange(x.shape[1]) if positions is None else positions
    is_local, length = layer.kind.window is not None, int(positions.max()) + 1
    frequency, magnitude = _frequencies(config, is_local, turned, length)
    angles = positions[:, None] * frequency
    shape = (1, len(positions), *[1] * (x.ndim - 3), turned // 2)
    cos, sin = (jnp.asarray(np.reshape(magnitude * f(angles), shape), jnp.float32) for f in (np.cos, np.sin))
    start = x.shape[-1] - turned if config.mla and not leading else 0  # heads of latents end with the part
    first, second = x[..., start : start + turned // 2], x[..., start + turned // 2 : start + turned]
    parts = x[..., :start], first * cos - second * sin, second * cos + first * sin, x[..., start + turned :]
    return jnp.concatenate(parts, axis=-1)


def _frequencies(config: ModelConfig, local: bool, turned: int, length: int) -> tuple[Any, float]:
    """(theta ** (-2i / A) as the model stretches them, the factor of cosines and sines)."""
    i, scaling = np.arange(turned // 2), config.rope_scaling
    if local and config.rope_theta_local is not None:
        return config.rope_theta_local ** (-2.0 * i / turned), 1.0
    base = config.rope_theta ** (-2.0 * i / turned)
    if scaling is None or scaling.kind == "dynamic":
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    original = scaling.original_max_seq_len or 0
    if scaling.kind == "longrope":
        factors = scaling.long_factor if length > original else scaling.short_factor
        grown = sqrt(1 + log(scaling.factor) / log(original)) if scaling.factor > 1 else 1.0
        return base / np.asarray(factors), scaling.attention_factor or grown
    if scaling.kind == "llama3":
        turns = original * base / (2 * pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns >= low
        return base * (kept + (1 - kept) / scaling.factor), 1.0
    ends = [
        turned / 2 * log(original / (turns * 2 * pi)) / log(config.rope_theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = (np.floor(ends[0]), np.ceil(ends[1])) if scaling.truncate else ends
    low, high = max(low, 0), min(high, turned - 1)
    kept = 1 - np.clip((i - low) / (high - low if high != low else 0.001), 0, 1)
    if (magnitude := scaling.attention_factor) is None:
        magnitude = _yarn(scaling.factor, 1.0)
        if scaling.mscale and scaling.mscale_all_dim:
            magnitude = _yarn(scaling.factor, scaling.mscale) / _yarn(scaling.factor, scaling.mscale_all_dim)
    return base * (kept + (1 - kept) / scaling.factor), magnitude


def _yarn(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1 if factor > 1 else 1.0


def _temperature(config: ModelConfig, q: Array) -> Array:
    """q times 1 + slope ln(1 + floor((position + start) / floor))."""
    assert config.temperature_floor
    start = 1 if config.nope_every or config.nope_layers else 0
    steps = (np.arange(q.shape[1]) + start) // config.temperature_floor
    return q * jnp.asarray(1 + config.temperature_slope * np.log1p(steps), jnp.float32)[:, None, None]


# Attention


def _attention(config: ModelConfig, w: Weights, h: Array, layer: Layer, earlier: Any) -> tuple[Array, Any]:
    """Attention of N query heads to K heads of keys and values, perhaps an earlier layer's."""
    q = _product(config, w, "wq", h)
    made = [_product(config, w, name, h) for name in ("wk", "wv")] if "wk" in w else None
    dims = 2 if config.qk_norm_over == "width" else 1

    def normed(name: str, x: Array) -> Array:
        return _norm(config, w, name, x, dims) if config.qk_norm else x

    def placed(name: str, x: Array) -> Array:
        x = x if config.qk_norm_last else normed(name, x)
        x = jnp.clip(x, -config.clip_qkv, config.clip_qkv) if config.clip_qkv else x
        x = rope(config, x, layer)
        if config.turned_norm and layer.kind.turned:
            x /= jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps)
        has_steps = config.temperature_floor and name == "q_norm"
        if has_steps and not (layer.kind.turned and (config.nope_every or config.nope_layers)):
            x = _temperature(config, x)
        return normed(name, x) if config.qk_norm_last else x

    q = placed("q_norm", q)
    if made:
        v = jnp.clip(made[1], -config.clip_qkv, config.clip_qkv) if config.clip_qkv else made[1]
        made = [placed("k_norm", made[0]), v]
    k, v = made or earlier
    chosen = _chosen_blocks(config, w, h, layer) if "index_q" in w else None
    a = _attend(config, q, k, v, layer.kind.window, w.get("sinks"), chosen)
    if config.attention_gate:
        a *= jax.nn.sigmoid(_product(config, w, "wg", h))
    if config.inner_norms:
        a = _norm(config, w, "attention_inner_norm", a, 2)
    return _product(config, w, "wo", a, 2), made or earlier


def _latent_attention(
    config: ModelConfig, w: Weights, h: Array, layer: Layer, earlier: Any
) -> tuple[Array, Any]:
    """Keys and values from a latent; each key ends with a rotary part that its heads share.

    earlier: the keys that an earlier layer chose, for a layer without an indexer of its own.
    """
    assert config.mla
    down, eps = None, config.mla.norm_eps
    if "wq_down" in w:
        down = _norm(config, w, "q_latent_norm", _product(config, w, "wq_down", h), eps=eps)
        q = _product(config, w, "wq_up", down)
    else:
        q = _product(config, w, "wq", h)
    latent = _norm(config, w, "kv_latent_norm", _product(config, w, "wkv_down", h), eps=eps)
    turned = rope(config, _product(config, w, "wk_rope", h), layer)
    q = rope(config, q, layer)
    q = _temperature(config, q) if config.temperature_floor else q
    k, v = _product(config, w, "wk_up", latent), _product(config, w, "wv_up", latent)
    shared = jnp.broadcast_to(turned[:, :, None], (*k.shape[:3], turned.shape[-1]))
    chosen = _chosen(config, w, h, down, layer) if "index_q" in w else earlier
    a = _attend(config, q, jnp.concatenate([k, shared], -1), v, layer.kind.window, None, chosen)
    return _product(config, w, "wo", a, 2), chosen


def _chosen(config: ModelConfig, w: Weights, h: Array, down: Any, layer: Layer) -> Array:
    """bool[B, T, S]: whether each query reads each key, by sorting the keys by falling scores."""
    indexer = config.indexer
    assert indexer is not None, "only an indexer has such weights"
    kind = "layer" if indexer.normed == "layer" else "rms"
    q = rope(config, _product(config, w, "index_q", h if down is None else down), layer, leading=True)
    k = _norm(config, w, "index_norm", _product(config, w, "index_k", h), kind=kind, eps=indexer.norm_eps)
    products = jnp.maximum(jnp.einsum("BTxy,BSy->BTxS", q, rope(config, k, layer, leading=True)), 0)
    scores = jnp.einsum("BTx,BTxS->BTS", _product(config, w, "index_weights", h), products)
    length = h.shape[1]
    seen = jnp.asarray(np.arange(length)[None, :] <= np.arange(length)[:, None])
    order = jnp.argsort(jnp.where(seen, -scores, jnp.inf), -1, stable=True)
    return (jnp.argsort(order, -1) < indexer.top_k) & seen


def _chosen_blocks(config: ModelConfig, w: Weights, h: Array, layer: Layer) -> Array:
    """bool[B, N, T, S]: the keys in the blocks that each query head reads, found by a full sort."""
    indexer = config.indexer
    assert indexer is not None, "only an indexer has such weights"
    q, k = (
        rope(config, _norm(config, w, norm, _product(config, w, name, h), eps=indexer.norm_eps), layer)
        for name, norm in (("index_q", "index_q_norm"), ("index_k", "index_norm"))
    )
    t = np.arange(h.shape[1])
    scores = jnp.where(jnp.asarray(t <= t[:, None]), jnp.einsum("BTKy,BSy->BKTS", q, k), -jnp.inf)
    block = t // indexer.block_size
    of_blocks = jnp.stack([jnp.max(scores[..., block == n], -1) for n in range(block[-1] + 1)], -1)
    behind = block[:, None] - np.arange(block[-1] + 1)
    of_blocks = jnp.where(jnp.asarray((behind >= 0) & (behind < indexer.local_blocks)), jnp.inf, of_blocks)
    places = jnp.argsort(jnp.argsort(-of_blocks, -1, stable=True), -1)
    chosen = (places < indexer.top_k // indexer.block_size)[..., block] & jnp.asarray(t <= t[:, None])
    return jnp.repeat(chosen, config.num_heads // config.num_kv_heads, 1)


def _attend(
    config: ModelConfig,
    q: Array,
    k: Array,
    v: Array,
    window: Window | None,
    sinks: Array | None,
    chosen: Array | None = None,
) -> Array:
    """softmax(q . k scale) . v over the positions that a query sees: its own, earlier ones, its window's."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * (config.score_scale or config.d_head**-0.5)
    scores = _softcap(scores, config.attention_softcap)
    t, s = np.arange(length)[:, None], np.arange(length)[None, :]
    if config.positions == "alibi":
        slopes = jnp.asarray(_alibi(config.num_heads), jnp.float32)[:, None, None]
        scores -= slopes * jnp.asarray(t - s, jnp.float32)
    seen = s <= t
    if window is not None:
        seen &= (s // window.size == t // window.size) if window.chunked else (s > t - window.size)
    if chosen is not None:
        seen = chosen if chosen.ndim == 4 else chosen[:, None]
    scores = jnp.where(jnp.asarray(seen), scores, -jnp.inf)
    if sinks is not None:  # one more logit, which takes weight and gives no value
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    shares = jax.nn.softmax(scores, -1)[..., :length]
    return jnp.einsum("BNTS,BSNO->BTNO", shares, v)


def _alibi(num_heads: int) -> list[float]:
    """Slopes of ALiBi (Press et al., 2022): 2 ** (-8 i / n) of the power of two below, then every other."""
    power = 2 ** (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return first + [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)][: num_heads - power]


# Experts


def _experts(config: ModelConfig, w: Weights, h: Array, route: _Route) -> Array:
    """Every expert of every token, weighed by its gate, which is 0 except for its k; and the shared ones."""
    moe = config.moe
    assert moe is not None
    scores = h @ w["router"] + w.get("router_bias", 0.0)
    gates = route(scores, _gates(scores, w.get("router_choice_bias"), moe))

    x = h @ w["latent_w_in"] + w.get("latent_w_in_bias", 0.0) if "latent_w_in" in w else h

    def of_expert(expert: Weights, gate: Array) -> Array:
        if moe.scales_input:
            return jnp.where(gate > 0, _feed_forward(config, expert, "expert", x * gate), 0.0)
        return gate * _feed_forward(config, expert, "expert", x)

    experts = {name: a for name, a in w.items() if name.startswith("expert_")}
    total = jnp.sum(jax.vmap(of_expert)(experts, jnp.moveaxis(gates, -1, 0)[..., None]), 0)
    if "latent_norm" in w:
        total = _norm(config, w, "latent_norm", total)
    if "latent_w_out" in w:
        total = total @ w["latent_w_out"] + w.get("latent_w_out_bias", 0.0)
    if "shared_in" not in w:
        return total
    shared = _feed_forward(config, w, "shared", h)
    if "shared_router" in w:
        shared *= jax.nn.sigmoid(h @ w["shared_router"])[..., None]
    return total + shared


def _gates(logits_of: Array, bias: Array | None, moe: MoE) -> Array:
    """gates[B, T, E]: scores of the k best experts, of the best groups; the bias only chooses."""
    if moe.score == "sparsemixer":
        return _sparse_mixer(logits_of, moe.experts_per_token) * moe.scaling
    scores = jax.nn.sigmoid(logits_of) if moe.score == "sigmoid" else jax.nn.softmax(logits_of, -1)
    by = logits_of if moe.chosen_by_logits or (bias is None and moe.num_groups == 1) else scores
    by = lax.stop_gradient(by if bias is None else by + bias)
    if moe.num_groups > 1:
        grouped = jnp.reshape(by, (*by.shape[:-1], moe.num_groups, -1))
        best = jnp.sum(-jnp.sort(-grouped, -1)[..., : 2 if moe.score == "sigmoid" else 1], -1)
        allowed = _best(best, moe.groups_per_token)[..., None]
        by = jnp.reshape(jnp.where(allowed, grouped, -jnp.inf), by.shape)
    gates = jnp.where(_best(by, moe.experts_per_token), scores, 0.0)
    if moe.normalized:
        gates /= jnp.sum(gates, -1, keepdims=True)
    return gates * moe.scaling


def _best(x: Array, count: int) -> Array:
    """Which of the last dimension are the `count` largest."""
    return jnp.argsort(jnp.argsort(-x, axis=-1), axis=-1) < count


def _sparse_mixer(logits_of: Array, count: int) -> Array:
    """`count` times the largest logit left, by a softmax of the logits within 2% (arXiv:2409.12136)."""
    gates, left = jnp.zeros_like(logits_of), logits_of
    for _ in range(count):
        best = jnp.max(left, -1, keepdims=True)
        far = (best - logits_of) / jnp.maximum(jnp.abs(logits_of), best) > 0.02
        shares = jax.nn.softmax(jnp.where(lax.stop_gradient(far), -jnp.inf, left), -1)
        chosen = _best(lax.stop_gradient(left), 1)
        gates, left = jnp.where(chosen, shares, gates), jnp.where(chosen, -jnp.inf, left)
    return gates


def _router_losses(moe: MoE, scores: Array, gates: Array) -> tuple[Array, Array]:
    """(the balance loss, the z-loss) of a router's logits.

    Balance is the mean over sequences of the sum over experts of f P, with f the share of tokens that chose
    the expert times E/k, and P its mean normalised score (DeepSeek-V3, section 2.1.2). The z-loss is the mean
    of log(sum exp(logits))^2 (arXiv:2202.08906, section 3.1).
    """
    shares = jax.nn.sigmoid(scores) if moe.score == "sigmoid" else jax.nn.softmax(scores, -1)
    shares /= jnp.sum(shares, -1, keepdims=True)
    chosen = jnp.mean(jnp.where(gates > 0, 1.0, 0.0), 1) * moe.num_experts / moe.experts_per_token
    balance = jnp.mean(jnp.sum(chosen * jnp.mean(shares, 1), -1))
    return balance, jnp.mean(jax.nn.logsumexp(scores, -1) ** 2)


def _within(capacity: Capacity | None) -> _Route:
    return lambda scores, gates: capacity(gates) if capacity else gates


def with_capacity(moe: MoE, factor: float, groups: Any) -> Capacity:
    """Gates of tokens that an expert has rows for; the others skip it.

    groups: i32[B, T], the device that holds each token. In the order of devices, an expert takes its even
    share times `factor`.
    """
    groups = np.asarray(groups)
    num_tokens = int((groups == groups.flat[0]).sum())
    rows = min(num_tokens, max(1, round(factor * moe.experts_per_token * num_tokens / moe.num_experts)))

    def within(gates: Array) -> Array:
        flat = jnp.reshape(gates, (-1, gates.shape[-1]))
        kept = jnp.zeros(flat.shape, bool)
        for group in np.unique(groups):
            members = np.flatnonzero(groups.ravel() == group)
            kept = kept.at[members].set(jnp.cumsum(flat[members] > 0, 0) <= rows)
        return jnp.where(jnp.reshape(kept, gates.shape), gates, 0.0)

    return within


# Mixers with a state


def _convolution(x: Array, taps: Array, bias: Any = 0.0) -> Array:
    """y_t = sum over j of taps_j x_(t - c + 1 + j), for each channel."""
    width, length = taps.shape[-1], x.shape[1]
    padded = jnp.pad(x, [(0, 0), (width - 1, 0), *[(0, 0)] * (x.ndim - 2)])
    shifted = jnp.stack([taps[..., j] * padded[:, j : j + length] for j in range(width)])
    return jnp.sum(shifted, 0) + bias


def _silu(x: Array) -> Array:
    return x * jax.nn.sigmoid(x)


def _recurrence(q: Array, k: Array, v: Array, decay: Array, beta: Array | None = None) -> Array:
    """o[B, T, g, u, p]: S = exp(decay) S + k v^T, o = q S; with beta v is beta (v - k exp(decay) S)."""

    def step(state: Array, now: Any) -> tuple[Array, Array]:
        q, k, v, decay, *beta = now
        state *= jnp.exp(decay)[..., None] if decay.ndim == v.ndim else jnp.exp(decay)[..., None, None]
        if beta:
            v = beta[0][..., None] * (v - jnp.einsum("Bgs,Bgusp->Bgup", k, state))
        state += jnp.einsum("Bgs,Bgup->Bgusp", k, v)
        return state, jnp.einsum("Bgs,Bgusp->Bgup", q, state)

    by_position = [jnp.moveaxis(each, 1, 0) for each in (q, k, v, decay, beta) if each is not None]
    state = jnp.zeros((*v.shape[:1], *v.shape[2:4], k.shape[-1], v.shape[-1]))
    return jnp.moveaxis(lax.scan(step, state, by_position)[1], 0, 1)


def _gated_delta(mixer: GatedDelta, w: Weights, h: Array, eps: float) -> Array:
    """The gated delta rule (Yang et al., arXiv:2412.06464)."""
    q, k, v = (
        _silu(_convolution(jnp.tensordot(h, w[f"state_{name}"], 1), w[f"conv_{name}"])) for name in "qkv"
    )
    q, k = (x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))

    def projected(name: str) -> Array:
        if f"state_{name}" in w:
            return jnp.tensordot(h, w[f"state_{name}"], 1)
        return jnp.tensordot(h @ w[f"state_{name}_down"], w[f"state_{name}_up"], 1)

    decay, beta, gate = projected("decay"), projected("beta"), projected("gate")
    by_element = w["decay_bias"].ndim > w["decay_log"].ndim
    rate = jnp.exp(w["decay_log"])[..., None] if by_element else jnp.exp(w["decay_log"])
    decay = -rate * jax.nn.softplus(decay + w["decay_bias"])
    o = _recurrence(q * mixer.key_dim**-0.5, k, v, decay, jax.nn.sigmoid(beta))
    gate = jax.nn.sigmoid(gate) if mixer.rank else _silu(gate)
    o = o / jnp.sqrt(jnp.mean(o * o, -1, keepdims=True) + eps) * w["state_norm"] * gate
    return jnp.tensordot(o, w["state_out"], 3)


def _state_space(mixer: StateSpace, w: Weights, h: Array, eps: float) -> Array:
    """Mamba-2 (Dao and Gu, arXiv:2405.21060); a model with one group has no letter for it."""

    def into(name: str) -> Array:
        return jnp.tensordot(h, w[f"state_{name}"], 1) + w.get(f"state_{name}_bias", 0.0)

    x, b, c = (
        _silu(_convolution(into(name), w[f"conv_{name}"], w.get(f"conv_{name}_bias", 0.0))) for name in "xbc"
    )
    step = jax.nn.softplus(into("step") + w["step_bias"])
    step = jnp.maximum(step, mixer.min_step) if mixer.min_step else step
    decay, v = -jnp.exp(w["decay_log"]) * step, x * step[..., None]
    if mixer.num_groups == 1:
        b, c, decay, v = b[:, :, None], c[:, :, None], decay[:, :, None], v[:, :, None]
    y = jnp.reshape(_recurrence(c, b, v, decay), x.shape) + x * w["skip"][..., None]
    gate = _silu(into("gate"))
    if mixer.norm == "none":
        y *= gate
    else:
        y = y * gate if mixer.norm == "before" else y
        y = y / jnp.sqrt(jnp.mean(y * y, (-2, -1), keepdims=True) + eps) * w["state_norm"]
        y = y * gate if mixer.norm == "after" else y
    return jnp.tensordot(y, w["state_out"], w["state_out"].ndim - 1) + w.get("state_out_bias", 0.0)


def _short_convolution(mixer: ShortConvolution, w: Weights, h: Array, eps: float) -> Array:
    """LFM2's: y = C conv(B x) (arXiv:2511.23404)."""
    b, c, x = (h @ w[f"state_{name}"] + w.get(f"state_{name}_bias", 0.0) for name in "bcx")
    y = c * _convolution(b * x, w["conv_x"], w.get("conv_x_bias", 0.0))
    return y @ w["state_out"] + w.get("state_out_bias", 0.0)


def _selective(mixer: Selective, w: Weights, h: Array, eps: float) -> Array:
    """Mamba (Gu and Dao, arXiv:2312.00752), position by position."""

    def product(name: str, x: Array) -> Array:
        return x @ w[name] + w.get(f"{name}_bias", 0.0)

    def normed(name: str, x: Array) -> Array:
        if name not in w and mixer.plain_norm_eps is None:
            return x
        size = jnp.mean(x * x, -1, keepdims=True) + (mixer.plain_norm_eps or eps)
        return x / jnp.sqrt(size) * w.get(name, 1.0)

    x = _silu(_convolution(product("state_x", h), w["conv_x"], w.get("conv_x_bias", 0.0)))
    down, b, c = (
        normed(f"{kind}_norm", x @ w[f"state_{name}"])
        for kind, name in (("step", "down"), ("b", "b"), ("c", "c"))
    )
    step = jax.nn.softplus(down @ w["state_step"] + w["step_bias"])
    decay = -jnp.exp(w["decay_log"]) * step[..., None]
    c, b, v, decay = (each[:, :, None] for each in (c, b, (x * step)[..., None], decay))
    y = (_recurrence(c, b, v, decay)[:, :, 0, :, 0] + x * w["skip"]) * _silu(product("state_gate", h))
    return product("state_out", y)


def _linear_unit(mixer: LinearUnit, w: Weights, h: Array, eps: float) -> Array:
    """RG-LRU (arXiv:2402.19427), position by position."""

    def by_blocks(name: str) -> Array:
        return jax.nn.sigmoid(jnp.einsum("BTgu,guo->BTgo", x, w[name]) + w[f"{name}_bias"])

    x = _convolution(jnp.tensordot(h, w["state_x"], 1) + w["state_x_bias"], w["conv_x"], w["conv_x_bias"])
    a = jnp.exp(-8 * by_blocks("decay_gate") * jnp.log1p(jnp.exp(w["decay_rate"])))
    v = by_blocks("input_gate") * x
    v = jnp.concatenate([v[:, :1], (jnp.sqrt(1 - a**2) * v)[:, 1:]], 1)

    def step(state: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        state = now[0] * state + now[1]
        return state, state

    by_position = jnp.moveaxis(a, 1, 0), jnp.moveaxis(v, 1, 0)
    y = jnp.moveaxis(lax.scan(step, jnp.zeros_like(v[:, 0]), by_position)[1], 0, 1)
    gate = jnp.tensordot(h, w["state_gate"], 1) + w["state_gate_bias"]
    y *= 0.5 * gate * (1 + jnp.tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3)))
    return jnp.tensordot(y, w["state_out"], 2) + w["state_out_bias"]


def _lightning(slope: float, w: Weights, h: Array) -> Array:
    """Lightning attention (arXiv:2501.08313): decays fixed by head and layer."""
    q, k, v = (_silu(jnp.tensordot(h, w[f"state_{name}"], 1)) for name in "qkv")
    num_heads = v.shape[2]
    rates = np.array([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]) * slope
    decay = jnp.broadcast_to(-jnp.asarray(rates, v.dtype)[:, None], v.shape[:4])
    o = _recurrence(q, k, v, decay)
    o = o / jnp.sqrt(jnp.mean(o * o, (-3, -2, -1), keepdims=True) + 1e-6) * w["state_norm"]
    gate = jax.nn.sigmoid(jnp.tensordot(h, w["state_gate"], 1))
    return jnp.tensordot(o * gate, w["state_out"], 3)


_MIXERS: dict[Any, Callable[..., Array]] = {
    GatedDelta: _gated_delta,
    StateSpace: _state_space,
    Selective: _selective,
    LinearUnit: _linear_unit,
    ShortConvolution: _short_convolution,
}
