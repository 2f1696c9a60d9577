"""Pools of pages: how a device stores the keys and values of sequences, and reads them.

    pool     k[B_data, K_tensor, S, H], and v: B pages of S positions each

The TPU's kernel reads pools with key and value of a head side by side:

    pool     kv[B_data, S, 2K_tensor, H]

Other pools of TPUs have several positions in a row, if their heads are narrower than a tile
(packed_pages.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.dtypes import number_type
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import why_no_paged
from meshwright.models.config import ModelConfig
from meshwright.models.count import cache_windows, caches, pool_arrays
from meshwright.models.parameters import dimensions
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.packed_pages import Packed, positions_together
from meshwright.nn.products.quantised import Quantised, quantise, type_name
from meshwright.nn.start.device_mesh import array_type
from meshwright.notation.array import ShardedArray
from meshwright.platforms import Platform, platform_of

# Quantised if the type needs a scale for each token and head; Packed if heads are narrower than tiles.
Pool = Array | Quantised | Packed
Pools = dict[str, list[Pool]]
SIDE_BY_SIDE_POOL = "kv"  # the pools of the TPU's kernel
INDEX = "index"  # the pools of an indexer's keys
ENTRIES = "entries"  # the pools of compressed keys
_BITS = jnp.dtype(jnp.uint16)  # of a pool that stores bfloat16 as its bits


def letters_of(name: str, ndim: int) -> str:
    """The dimensions of a pool; K is 2K if keys and values are side by side."""
    if name == SIDE_BY_SIDE_POOL:
        return "BSKH"
    return "BKSH" if ndim == 4 else "BSH" if name == ENTRIES else "BSR"


def page_groups(config: ModelConfig, *, has_windows: bool) -> tuple[int, ...]:
    """The group of page tables of each cache: 1 for a window with tables of its own, otherwise 0."""
    return tuple(int(has_windows and window is not None) for window in cache_windows(config))


def _joins_heads(platform: Platform, config: ModelConfig, layout: Layout) -> bool:
    """Whether pools store a head's key next to its value, as the platform's kernel reads them."""
    joins = platform.paged is not None and platform.paged.joined_heads
    return joins and why_no_paged(platform, config, layout) is None


def abstract_pools(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    num_pages: Sequence[int],
    page_size: int,
    num_whole: int = 0,
) -> dict[str, list[Any]]:
    """The types of all layers' pools. num_pages: of each cache; num_whole: pages for its compressed keys.

    None in place of the index or entries of a layer that has none of its own. A page has an entry for each
    `config.compressed` of its positions.
    """
    platform, lanes = platform_of(mesh), platform_of(mesh).lanes
    variants = [config.at(cache.variant) for cache in caches(config)]
    dims = {letter: size for one in (*variants, config) for letter, size in dimensions(one).items()}
    of_caches = [pool_arrays(one) for one in variants]
    arrays = {name: order for of_cache in of_caches for name, order in of_cache.items()}
    letters = {name: "BKSH" if "K" in order else order for name, order in arrays.items()}
    if _joins_heads(platform, config, layout):
        letters, dims = {SIDE_BY_SIDE_POOL: letters_of(SIDE_BY_SIDE_POOL, 4)}, {**dims, "K": 2 * dims["K"]}

    def pool(array: ShardedArray, count: int, page_size: int) -> Any:
        sizes = {**dims, "B": count, "S": page_size}
        dtype = jax_dtype(layout.precision.cache_dtype)
        if number_type(layout.precision.cache_dtype).scales is None:
            if platform.cache_as_bits and dtype == jnp.bfloat16:
                dtype = _BITS
            width, of_device = dims[array.dims[-1]], page_size // layout.mesh.size(array.axes_of("S"))
            together = positions_together(lanes, width, of_device)
            if together == 1:
                return array_type(array, mesh, sizes, dtype)
            sizes |= {"S": page_size // together, array.dims[-1]: lanes}
            return Packed(array_type(array, mesh, sizes, dtype), width)
        scales = ShardedArray(array.name, array.dims[:-1], array.axes[:-1])
        return Quantised(array_type(array, mesh, sizes, dtype), array_type(scales, mesh, sizes, jnp.float32))

    def of_layer(name: str, order: str, count: int, variant: ModelConfig, arrays: Mapping[str, str]) -> Any:
        if name in (INDEX, ENTRIES) and name not in arrays:
            return None
        if variant.compressed and name in (INDEX, ENTRIES):
            return pool(layout.activation(name, order), num_whole, page_size // variant.compressed)
        return pool(layout.activation(name, order), count, page_size)

    return {
        name: [of_layer(name, order, *each) for each in zip(num_pages, variants, of_caches, strict=True)]
        for name, order in letters.items()
    }


def values_of(pool: Pool) -> Array:
    if isinstance(pool, Packed):
        return pool.rows
    return pool.values if isinstance(pool, Quantised) else pool


def page_size_of(pool: Pool, of_size: int = -2) -> int:
    """Positions of a page on a device. of_size: the dimension of positions."""
    return pool.page_size if isinstance(pool, Packed) else values_of(pool).shape[of_size]


def spec_of(pool: Pool, values: PartitionSpec) -> Any:
    """The sharding of a pool: scales are split as values, without the last dimension."""
    if isinstance(pool, Packed):
        return Packed(values, pool.width)
    return Quantised(values, PartitionSpec(*values[:-1])) if isinstance(pool, Quantised) else values


def as_stored(x: Array, pool: Pool) -> Pool:
    if values_of(pool).dtype == _BITS:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), _BITS)
    if not isinstance(pool, Quantised):
        return x
    return quantise(x, type_name(pool.values.dtype), 1, 1)


def store(at: tuple[Any, ...], pool: Array, x: Array) -> Array:
    return pool.at[at].set(x.astype(pool.dtype), mode="drop")


def read_pool(at: Any, pool: Pool) -> Array:
    """The pages `at`, or the positions at (pages, places in them)."""
    if isinstance(pool, Packed):
        return pool.position(*at) if isinstance(at, tuple) else pool.page(at)
    if not isinstance(pool, Quantised):
        return lax.bitcast_convert_type(pool[at], jnp.bfloat16) if pool.dtype == _BITS else pool[at]
    return pool.values[at].astype(jnp.float32) * pool.scales[at][..., None]


def value_width(pools: Sequence[Pool]) -> int:
    """Columns of a value; those of latents are the latents."""
    pool = pools[1] if values_of(pools[0]).ndim == 4 else pools[0]
    return pool.width if isinstance(pool, Packed) else values_of(pool).shape[-1]


def kv_heads_of(pools: Sequence[Pool]) -> int:
    """KV heads on a device; latents are one."""
    values = values_of(pools[0])
    return values.shape[1] if values.ndim == 4 else 1


def num_together(pools: Sequence[Pool]) -> int:
    """Positions in a row, if keys and values have the same number; 1 otherwise, and for latents."""
    if values_of(pools[0]).ndim < 4:
        return 1
    counts = {pool.num_together if isinstance(pool, Packed) else 1 for pool in pools}
    return counts.pop() if len(counts) == 1 else 1
