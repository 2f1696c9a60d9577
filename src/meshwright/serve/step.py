"""Prefill and generation as steps of a whole batch, for compiling and auditing as they are planned.

    prefill    tokens[B, T] into a fresh cache of S = T positions; logits after each sequence's last
    generate   one token of each of B sequences, behind the S - 1 that its cache may hold

`JaxRunner` serves requests one prompt at a time with the same forward pass; here every replica of the
layout takes its share of the batch.
"""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, reshard

from meshwright.layout import Layout
from meshwright.layout.runs import check_runs
from meshwright.layout.workload import Phase, Workload
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import Places
from meshwright.models.transformer import logits as forward
from meshwright.nn.attention import abstract_cache
from meshwright.nn.mesh import device_mesh, named_sharding, partition_spec
from meshwright.nn.ops import JaxOps
from meshwright.nn.params import abstract_params


class InferenceStep:
    """One forward pass with a cache, of one model, layout and workload on its devices.

    workload: the sequences B of the batch, and the positions S of each one's cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        workload: Workload,
        phase: Phase,
        *,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        layout = layout.at(phase)
        check_runs(config, layout, phase)
        layout.check(config, workload.num_sequences, workload.seq_len)
        self.config, self.layout, self.workload, self.phase = config, layout, workload, phase
        self.mesh = device_mesh(layout) if mesh is None else mesh
        self.ops = JaxOps(config, layout)
        self.query_len = workload.seq_len if phase == "prefill" else 1

    @cached_property
    def jitted(self) -> Any:
        """The jitted step: (params, cache, tokens, positions, lengths) -> (logits[B, V], cache)."""
        return jax.jit(self._step, donate_argnums=1)

    def _step(
        self, params: Any, cache: Any, tokens: Array, positions: Array, lengths: Array
    ) -> tuple[Array, Any]:
        last = (lengths - 1)[:, None]
        logits, cache = forward(self.config, self.ops, params, tokens, Places(positions), cache, last)
        with jax.named_scope("logits"):
            whole = partition_spec(self.layout.activation("logits", "BTV").replace(axes={"V": ()}))
            return reshard(logits, whole).astype(jnp.float32)[:, 0], cache

    def abstract_arguments(self) -> tuple[Any, ...]:
        """The arguments of `jitted` as ShapeDtypeStructs with their shardings."""
        rows = named_sharding(self.layout.tokens("tokens"), self.mesh)
        shape = (self.workload.num_sequences, self.query_len)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        by_row = NamedSharding(self.mesh, jax.sharding.PartitionSpec(rows.spec[0]))
        lengths = jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=by_row)
        params = abstract_params(self.config, self.layout, self.mesh)
        return params, self.abstract_cache(), tokens, tokens, lengths

    def abstract_cache(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Keys and values of every layer."""
        w = self.workload
        return abstract_cache(self.config, self.layout, self.mesh, w.num_sequences, w.seq_len)
