"""Pools of narrow heads, with several positions of a page in one row, so that rows fill the tiles of TPUs.

    rows[B, K, S / n, n H], or rows[B, S / n, n R] of latents, with n = lanes / H

Position n j + i of a page has the columns i H to (i + 1) H of row j. XLA for TPUs stores arrays in tiles of
128 columns. It keeps a pool of narrower heads with its pages last, and each step would copy the whole pool to
tiles that are half empty, and back: of four layers of LFM2 on 8 v5p, two copies of 67 MB (jax 0.10.2).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["width"])
@dataclass(frozen=True)
class Packed:
    """A device's part of a pool, or its sharding. width: columns of a position."""

    rows: Any
    width: int

    @property
    def num_together(self) -> int:
        """Positions in a row."""
        return self.rows.shape[-1] // self.width

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.rows.shape[-2] * self.num_together

    def page(self, pages: Array) -> Array:
        """The positions of pages, [..., S, H]."""
        rows = self.rows[pages]
        return rows.reshape(*rows.shape[:-2], self.page_size, self.width)

    def position(self, pages: Array, *at: Array) -> Array:
        """Latents [N, R] by `at` = (places in pages,), or keys [K, S, H] by `at` = (KV heads, places)."""
        *heads, places = at
        part = (places % self.num_together)[..., None]
        first, *others = self._cut(self.rows[(pages, *heads, places // self.num_together)])
        for number, columns in enumerate(others, 1):
            first = jnp.where(part == number, columns, first)
        return first

    def parts(self, pages: Array) -> list[Array]:
        """For each i, the positions n j + i of pages, [..., S / n, H]."""
        return self._cut(self.rows[pages])

    def _cut(self, rows: Array) -> list[Array]:
        """The columns of each position of rows."""
        return jnp.split(rows, self.num_together, axis=-1)

    def written(self, pages: Array, places: Array, x: Array) -> "Packed":
        """The pool with x[N, ..., H] at the places in pages; those out of range are left out.

        Whole rows are written, for each part of a row in turn: XLA for TPUs compiles a scatter of parts of
        rows to a loop over tokens.
        """
        num_rows, lanes = self.rows.shape[-2:]
        between = (slice(None),) * (self.rows.ndim - 3)
        wide = jnp.concatenate([x.astype(self.rows.dtype)] * self.num_together, axis=-1)
        part_of_lane = lax.broadcasted_iota(jnp.int32, (*[1] * (x.ndim - 1), lanes), x.ndim - 1) // self.width
        row, part = places // self.num_together, places % self.num_together
        rows = self.rows
        for number in range(self.num_together):
            written = jnp.where(part_of_lane == number, wide, rows[(pages, *between, row)])
            here = jnp.where(part == number, row, num_rows)
            rows = rows.at[(pages, *between, here)].set(written, mode="drop")
        return replace(self, rows=rows)


def positions_together(lanes: int, width: int, page_size: int) -> int:
    """Positions in a row of `lanes` columns; 1 if each position has a row.

    page_size: positions of a page on a device.

    >>> positions_together(128, 64, 64), positions_together(128, 128, 64), positions_together(128, 96, 64)
    (2, 1, 1)
    """
    together = lanes // width
    fills = together > 1 and lanes % width == 0 and page_size % together == 0
    return together if fills else 1
