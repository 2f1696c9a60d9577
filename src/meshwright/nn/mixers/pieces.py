"""Positions split over devices: pieces of a sequence, and the inputs that a convolution reads before each.

A device has one piece of each sequence, or two (an early and a late one, `zigzag`), so that causal attention
has equal work everywhere. A mixer with a state reads the pieces in the order of the sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.moves.attention import attention_layout, token_sharding
from meshwright.nn.attention.blockwise import dealt_pieces
from meshwright.nn.each_device import axes_of, each_device, of_cotangent, spec_of
from meshwright.notation.array import Axes


class Pieces(NamedTuple):
    """Equal pieces of a sequence, some on each device of `axes`.

    order: number of each piece in its sequence, device by device. length: positions of a piece.
    """

    axes: Axes
    order: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, layout: Layout, x: Array) -> "Pieces | None":
        """The pieces of x[B, T, ...]; None if each device has whole sequences."""
        axes = axes_of(spec_of(x)[1])
        num_shards = layout.mesh.size(axes)
        if num_shards == 1:
            return None
        attended = token_sharding(attention_layout(layout), "tokens").axes_of("T")
        dealt = dealt_pieces(x.shape[1], layout.mesh.size(attended))
        order = dealt if len(dealt) > 1 else range(num_shards)
        return cls(axes, tuple(order), x.shape[1] // len(order))

    @property
    def num_local(self) -> int:
        """Pieces of one device."""
        return len(self.order) // lax.axis_size(self.axes)

    def numbers_local(self) -> Array:
        """The numbers i32[m] of this device's pieces."""
        return jnp.asarray(self.order).reshape(-1, self.num_local)[lax.axis_index(self.axes)]

    def cut_local(self, x: Array) -> Array:
        """This device's x[B, m L, ...] as [B, m, L, ...]."""
        return x.reshape(x.shape[0], -1, self.length, *x.shape[2:])

    def in_order(self, x: Array, dim: int = 1) -> Array:
        """Entries of pieces, reordered from the order of devices to the order of the sequence."""
        slots = sorted(range(len(self.order)), key=self.order.__getitem__)
        return jnp.take(x, jnp.asarray(slots), axis=dim)

    def segments_local(self, segments: Array, num_before: int) -> tuple[Array, Array]:
        """The segments [B, m, L] of this device's pieces, and [B, m, num_before] of positions before each.

        segments: i32[B, T] of whole sequences. A sequence begins after positions of segment -1.
        """
        pieces = self.in_order(self.cut_local(segments))
        last = pieces[:, :, self.length - num_before :]
        before = jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], axis=1)
        mine = self.numbers_local()
        return jnp.take(pieces, mine, axis=1), jnp.take(before, mine, axis=1)


def halos(x: Array, width: int, pieces: Pieces) -> Array:
    """The `width` inputs [B, T, width, ...] before each piece of x[B, T, ...]; T: pieces; zeros at the start.

    Each device sends the end of its first piece to the next device, and the end of its second piece to the
    device before: two permutes of one hop. An all-gather of the ends would move a block
    for every piece.
    """
    if width > pieces.length:
        over = "·".join(pieces.axes)
        raise LayoutError(
            f"{over}: pieces of {pieces.length} positions are shorter than the {width} that a convolution "
            f"reads; fits: longer sequences, or fewer devices of {over}"
        )
    spec, length = spec_of(x), pieces.length
    size = len(pieces.order)

    def local(x: Array) -> Array:
        num_shards = lax.axis_size(pieces.axes)
        ends = pieces.cut_local(x)[:, :, length - width :]
        first = lax.ppermute(ends[:, 0], pieces.axes, [(i, i + 1) for i in range(num_shards - 1)])
        if size == num_shards:
            return first[:, None]
        second = lax.ppermute(ends[:, 1], pieces.axes, [(i, i - 1) for i in range(1, num_shards)])
        is_last = lax.axis_index(pieces.axes) == num_shards - 1
        return jnp.stack([first, jnp.where(is_last, ends[:, 0], second)], axis=1)

    @jax.custom_vjp
    def moved(x: Array) -> Array:
        return each_device(local, [spec], spec)(x)

    def backward(_: None, d: Array) -> tuple[Array]:
        def back(d: Array) -> Array:
            of_x = jax.ShapeDtypeStruct((d.shape[0], d.shape[1] * length, *d.shape[3:]), d.dtype)
            (d_x,) = jax.linear_transpose(local, of_x)(d)
            return d_x

        of_d = of_cotangent(spec)
        return (each_device(back, [of_d], of_d)(d),)

    moved.defvjp(lambda x: (moved(x), None), backward)
    return moved(x)
