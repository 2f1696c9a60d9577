"""A model without its adapters, added to their weights, and without its draft head."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.config import ModelConfig
from meshwright.models.parameters import ADAPTER_A, ADAPTER_B, parameters
from meshwright.nn.frozen import Frozen, widened
from meshwright.nn.params import build, flatten


def merged_adapters(config: ModelConfig, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of `config.base` that compute the same as `params` of `config`: W + s A B.

    s = lora_alpha / lora_rank. Sums are float32, results as the weights are stored; weights in narrow types
    are widened to the type of the embedding. The weights of a draft head are left out.
    """
    if config.base is config:
        return params
    flat, letters = flatten(params), parameters(config)

    def leaf(path: str, _: object) -> jax.Array:
        weight = flat[path]
        if isinstance(weight, Frozen):
            with jax.set_mesh(weight.values.sharding.mesh):
                weight = widened(weight, flat["embed"].dtype)
        if path + ADAPTER_A not in flat:
            return weight
        spec = ",".join(letters[path + part].letters for part in (ADAPTER_A, ADAPTER_B))
        return _plus(
            weight, flat[path + ADAPTER_A], flat[path + ADAPTER_B], f"{spec}->{letters[path].letters}"
        )

    def _plus(weight: jax.Array, a: jax.Array, b: jax.Array, spec: str) -> jax.Array:
        mesh = weight.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        with jax.set_mesh(mesh):
            wide = [x.astype(jnp.float32) for x in (a, b)]
            added = jnp.einsum(
                spec,
                *wide,
                precision="highest",
                out_sharding=weight.sharding.spec,  # pyright: ignore[reportAttributeAccessIssue]
            )
            return (weight.astype(jnp.float32) + config.lora_scale * added).astype(weight.dtype)

    return build(config.base, leaf)
