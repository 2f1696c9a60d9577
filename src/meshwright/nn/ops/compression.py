"""Compressed keys in JAX. Each device of a sequence computes all of its entries."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout.moves.attention import gathered_series, token_sharding
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.ops import Entries
from meshwright.nn.attention.blockwise import in_order
from meshwright.nn.attention.compression import Windows, summed, windows_of
from meshwright.nn.each_device import each_device, spec_of, with_gradient
from meshwright.nn.ops.attention import AttentionOps
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.remat import OPERATION
from meshwright.nn.start.device_mesh import partition_spec


class CompressionOps(AttentionOps):
    """Attention with compressed keys of `models/transformer.py`."""

    def compressed(
        self, name: str, values: Array, gates: Array, bias: Array, at: AtLayer
    ) -> tuple[Entries[Array], AtLayer]:
        places = self._places_of_sequences(at.places._replace(tokens=None))
        letters = "BTcH" if name == "compressor" else "BTcy"
        with jax.named_scope(name):
            values, gates = (
                self._all_in_order(f"{name}_{part}", letters, x)
                for part, x in (("kv", values), ("gate", gates))
            )
            spec = PartitionSpec(*spec_of(values).partitions)
            rows = PartitionSpec(spec.partitions[0], None)
            ordered = jax.tree.map(lambda x: in_order(x, self._num_dealt, 1), places)
            of_places = jax.tree.map(lambda _: rows, places)
            windows = each_device(partial(windows_of, rate=bias.shape[0]), (of_places,), rows)(ordered)
            indices = [x for x in (windows.first, windows.places) if x is not None]

            def local(
                values: Array, gates: Array, bias: Array, first: Array, places: Array | None = None
            ) -> Array:
                # The bias's gradient is a sum in float32; the scope gives that sum its name.
                with jax.named_scope(f"{name}_positions"):
                    bias = bias.astype(jnp.float32)
                return summed(values, gates, bias, Windows(places, first, None))

            of_bias = PartitionSpec(None, None, None, reduced=spec_of(bias).reduced)
            out = PartitionSpec(spec.partitions[0], None, None)
            specs = [spec, spec, of_bias, *[rows] * len(indices)]
            run = with_gradient(local, specs, out, 3, names=("kv", "gate", f"{name}_positions"))
            entries = checkpoint_name(run(values, gates, reshard(bias, of_bias), *indices), OPERATION)
        return Entries(entries, Places(windows.first, windows.segments)), at

    @property
    def _num_dealt(self) -> int:
        """Number of shards of a sequence, among which a zigzag deals its positions."""
        return self.layout.mesh.size(token_sharding(self.layout, "tokens").axes_of("T"))

    def _all_in_order(self, name: str, letters: str, x: Array) -> Array:
        """x[B, T, c, ...] gathered over T, with positions in order."""
        with jax.named_scope(name):
            whole = apply_reshard(gathered_series(self.layout, name, letters), x)
            return in_order(whole, self._num_dealt, 1)

    def grouped(self, name: str, a: Array) -> Array:
        """a[B, T, N, H] with its heads in groups: [B, T, g, u, H]."""
        with jax.named_scope(name):
            shape = (*a.shape[:2], self.config.out_groups, -1, a.shape[-1])
            split = partition_spec(self.layout.activation(name, "BTguH"))
            return jnp.reshape(a, shape, out_sharding=split)
