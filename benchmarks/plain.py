"""A LLaMA and its training step as one writes them down in JAX, which XLA shards as its arguments are."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.models.config import ModelConfig

RATE, DECAY, CLIP, B1, B2 = 1e-3, 0.1, 1.0, 0.9, 0.95


def plain_weights(config: ModelConfig) -> dict[str, Any]:
    sizes = {
        "wq": (config.d_model, config.num_heads, config.d_head),
        "wk": (config.d_model, config.num_kv_heads, config.d_head),
        "wv": (config.d_model, config.num_kv_heads, config.d_head),
        "wo": (config.num_heads, config.d_head, config.d_model),
        "w_gate": (config.d_model, config.d_ff),
        "w_in": (config.d_model, config.d_ff),
        "w_out": (config.d_ff, config.d_model),
    }
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return 0.02 * random.standard_normal(shape, np.float32)

    layers = {name: normal(config.num_layers, *shape) for name, shape in sizes.items()}
    layers |= {name: np.ones((config.num_layers, config.d_model), np.float32) for name in ("norm1", "norm2")}
    whole = {"embed": normal(config.vocab_size, config.d_model), "layers": layers}
    whole["norm"] = np.ones(config.d_model, np.float32)
    if not config.tied_embeddings:
        whole["unembed"] = normal(config.d_model, config.vocab_size)
    return jax.tree.map(jnp.asarray, whole)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale


def _rope(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def plain_loss(config: ModelConfig, dtype: Any, weights: dict[str, Any], rows: jax.Array) -> jax.Array:
    w = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    hidden = jnp.triu(jnp.full((tokens.shape[1],) * 2, -jnp.inf), 1)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = _norm(x, w["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in ("wq", "wk", "wv"))
        scores = jnp.einsum("btnh,bsnh->bnts", _rope(q), _rope(k)) * config.d_head**-0.5
        probabilities = jax.nn.softmax(scores.astype(jnp.float32) + hidden).astype(dtype)
        x = x + jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", probabilities, v), w["wo"])
        h = _norm(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_in"])) @ w["w_out"], None

    x, _ = jax.lax.scan(layer, w["embed"][tokens], w["layers"])
    head = w["embed"].T if config.tied_embeddings else w["unembed"]
    logits = (_norm(x, w["norm"]) @ head).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


class PlainStep:
    """AdamW of gradients clipped by their norm; `weights` are used up. dtype: of the products."""

    def __init__(self, config: ModelConfig, dtype: Any, weights: dict[str, Any]) -> None:
        optimizer = optax.chain(
            optax.clip_by_global_norm(CLIP), optax.adamw(RATE, b1=B1, b2=B2, weight_decay=DECAY)
        )
        self._state = weights, jax.jit(optimizer.init)(weights)

        @partial(jax.jit, donate_argnums=0)
        def step(state: tuple[Any, Any], rows: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
            weights, moments = state
            loss, grads = jax.value_and_grad(partial(plain_loss, config, dtype))(weights, rows)
            updates, moments = optimizer.update(grads, moments, weights)
            return (optax.apply_updates(weights, updates), moments), loss

        self._step = step

    def __call__(self, rows: jax.Array) -> float:
        """The loss of rows[B, T+1], once the step is done."""
        self._state, loss = jax.block_until_ready(self._step(self._state, rows))
        return float(loss)
