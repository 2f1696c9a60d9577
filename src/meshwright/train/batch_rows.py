"""The rows of a step's batch: on which devices they are, and cut into microbatches, tokens and targets."""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.moves.attention import attention_layout, token_sharding
from meshwright.models.at_layer import Places
from meshwright.models.transformer import Ahead
from meshwright.nn.attention.blockwise import zigzag
from meshwright.nn.loss import NOT_COUNTED
from meshwright.nn.policy_loss import PolicyRows
from meshwright.nn.start.device_mesh import named_sharding, partition_spec
from meshwright.notation.array import ShardedArray
from meshwright.train.row_codes import BEGINS, ID_BITS, UNCOUNTED


class BatchRows:
    """Rows of T+1 token ids, split over the devices of a mesh. Base of the step that trains on them.

    masked: rows have the flags of `row_codes`: attention stays within a document, and uncounted targets have
    no loss.
    """

    def __init__(
        self, layout: Layout, mesh: jax.sharding.Mesh, num_sequences: int, seq_len: int, *, masked: bool
    ) -> None:
        self.layout, self.mesh, self.masked = layout, mesh, masked
        self.batch_sequences, self.seq_len = num_sequences, seq_len

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Rows of T+1 tokens split over the batch axes; T is split after inputs and targets are cut."""
        rows = token_sharding(self.layout, "tokens").replace(axes={"T": ()})
        return named_sharding(rows, self.mesh)

    def abstract_tokens(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch_sequences, self.seq_len + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)

    @property
    def own_rows(self) -> list[int]:
        """The numbers of the batch's rows that devices of this process hold, ascending.

        Processes with devices that differ only in other axes hold the same rows.
        """
        batch = self.abstract_tokens().shape
        held = self.batch_sharding.addressable_devices_indices_map(batch).values()
        return sorted({row for index in held if index for row in range(*index[0].indices(batch[0]))})

    def put(self, rows: Any) -> Any:
        """The batch. rows: this process's rows of it, `own_rows`, an array or several."""
        batch, numbers = self.abstract_tokens().shape, self.own_rows

        def placed(array: np.ndarray) -> Array:
            def held(index: Any) -> np.ndarray:
                first, end, _ = index[0].indices(batch[0])
                place = numbers.index(first)
                return array[place : place + end - first]

            return jax.make_array_from_callback(batch, self.batch_sharding, held)

        return jax.tree.map(placed, rows)

    def all_over_counted(self, rows: Array) -> Array:
        """B T over the number of counted targets, in the whole batch, since microbatches differ."""
        targets = rows[:, 1:]
        counted = jnp.sum((targets & (BEGINS | UNCOUNTED)) == 0)
        return targets.size / jnp.maximum(counted, 1).astype(jnp.float32)

    def dealt(self, rows: Any) -> tuple[Array, Any, Places]:
        """Tokens and targets [B, T] of rows[B, T+1], dealt so that shards of T have equal work."""
        if isinstance(rows, PolicyRows):
            tokens, targets, places = self.dealt(rows.tokens)
            place = partial(reshard, out_shardings=partition_spec(self._token_split))
            figures = (place(self._deal(of_targets[:, 1:])) for of_targets in rows[1:])
            return tokens, PolicyRows(targets, *figures), places
        deal, place = self._deal, partial(reshard, out_shardings=partition_spec(self._token_split))
        positions = jnp.broadcast_to(jnp.arange(self.seq_len)[None, :], (rows.shape[0], self.seq_len))
        if not self.masked:
            tokens, targets = place(deal(rows[:, :-1])), place(deal(rows[:, 1:]))
            return tokens, targets, Places(deal(positions))
        begins = (rows[:, :-1] & BEGINS) != 0
        first = lax.cummax(jnp.where(begins, positions, 0), axis=1)  # the first position of its document
        targets = rows[:, 1:]
        targets = jnp.where((targets & (BEGINS | UNCOUNTED)) == 0, targets & ID_BITS, NOT_COUNTED)
        tokens = place(deal(rows[:, :-1] & ID_BITS))
        return tokens, place(deal(targets)), Places(deal(positions - first), deal(first))

    def dealt_ahead(self, rows: Array) -> Ahead:
        """The inputs and targets of a draft head, dealt as the tokens of rows[B, T+1].

        A document's last two tokens have no target after the next token, and the last of a row has none.
        """
        ids, targets = rows[:, 1:], rows[:, 2:]
        if self.masked:
            ends = ((rows[:, 1:-1] & BEGINS) != 0) | ((targets & (BEGINS | UNCOUNTED)) != 0)
            ids, targets = ids & ID_BITS, jnp.where(ends, NOT_COUNTED, targets & ID_BITS)
        targets = jnp.pad(targets, ((0, 0), (0, 1)), constant_values=NOT_COUNTED)
        place = partial(reshard, out_shardings=partition_spec(self._token_split))
        return Ahead(place(self._deal(ids)), place(self._deal(targets)))

    @property
    def _token_split(self) -> ShardedArray:
        return token_sharding(self.layout, "tokens")

    def _deal(self, x: Array) -> Array:
        """x[B, T] as `dealt`."""
        attended = token_sharding(attention_layout(self.layout), "tokens").axes_of("T")
        return zigzag(x, num_shards=self.layout.mesh.size(attended))

    def share(self, rows: Any) -> Any:
        """The weight of a microbatch's mean loss in the mean over all counted targets of rows[B, T+1].

        PolicyRows have weights of their own.
        """
        scale = self.all_over_counted(rows) if self.masked and not isinstance(rows, PolicyRows) else 1.0
        return scale / self.layout.schedule.microbatches

    def microbatches(self, rows: Any) -> Any:
        """rows[B, T+1] as [B/m, m, T+1].

        Row i of a device goes to microbatch i mod m, so that no row changes its device.
        """
        count, spec = self.layout.schedule.microbatches, self.batch_sharding.spec

        def cut(array: Array) -> Array:
            shape = (array.shape[0] // count, count, array.shape[1])
            return jnp.reshape(array, shape, out_sharding=PartitionSpec(spec[0], None, None))

        return jax.tree.map(cut, rows)
