"""The operations of the forward pass in JAX, under explicit sharding.

A result's letters and the Layout give its sharding. The collectives of an einsum are exactly those
of its `Contraction` (nn/products/execute.py): three projections of one input share its move and, backward,
the one reduction of its cotangent; a gathered weight's gradient is reduce-scattered.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.layout import Layout
from meshwright.layout.contractions import input_groups
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Layer
from meshwright.nn.each_device import partitions_of
from meshwright.nn.experts.grouped_products import computed_rows
from meshwright.nn.loss import Names, Nats, loss_by_slices, nats_of, num_slices
from meshwright.nn.norms import activate, clip, dot, gated, mean_of_last, norm, softcap
from meshwright.nn.ops.compression import CompressionOps
from meshwright.nn.ops.experts import ExpertOps
from meshwright.nn.ops.mixers import MixerOps
from meshwright.nn.ops.products import Readable
from meshwright.nn.ops.streams import StreamOps
from meshwright.nn.products.narrow import Kept, wide
from meshwright.nn.remat import INPUT, OPERATION, policy
from meshwright.nn.stack import KindInLoop, run_layers, run_stage


def _kept_mean(x: Array, num_dims: int = 1) -> Array:
    """The mean over split last dimensions, saved: to recompute it would take another all-reduce."""
    return checkpoint_name(mean_of_last(x, num_dims), OPERATION)


class JaxOps(CompressionOps, ExpertOps, MixerOps, StreamOps):
    """Operations of `models/transformer.py` for one model and layout. Call under `jax.set_mesh`.

    masked: some targets of the loss may be NOT_COUNTED. z_loss: see `nats_of`. objective: the loss of each
    target in place of the cross-entropy. router_losses: `layers` also returns the sum of the layers'
    `router_losses`. Caches are for inference (nn/cached_ops.py): here always None.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        *,
        masked: bool = False,
        z_loss: float = 0.0,
        router_losses: bool = False,
        objective: Nats | None = None,
    ) -> None:
        super().__init__(config, layout)
        self.masked, self.z_loss, self.router_losses = masked, z_loss, router_losses
        self._objective = objective
        self._of_routers = []
        self._stage: tuple[Array, Sequence[Sequence[Layer]]] | None = None

    def of_validation(self) -> "JaxOps":
        """A copy with the plain cross-entropy as its loss."""
        ops = copy(self)
        ops.z_loss, ops.router_losses = 0.0, False
        return ops

    def on_stage(self, number: Array, layers: Sequence[Sequence[Layer]]) -> "JaxOps":
        """A copy for stage `number` of a pipeline. layers: of every stage."""
        ops = copy(self)
        ops._stage = number, layers
        ops.layout = self.layout.replace(offload=False)  # the pipeline offloads the ring as a whole
        return ops

    def parting(self, token: Array | None) -> "JaxOps":
        """A copy whose products multiply gradients of weights by `token` (`local_product`).

        `parted` holds the names of such weights once a program has been traced.
        """
        ops = copy(self)
        ops._token = token
        return ops

    def scale(self, name: str, x: Array, factor: float) -> Array:
        with jax.named_scope(name):
            return x * jnp.asarray(factor, x.dtype)

    def norm(
        self,
        name: str,
        x: Array,
        scale: Array | None,
        bias: Array | None = None,
        *,
        kind: str = "rms",
        num_letters: int = 1,
        eps: float | None = None,
    ) -> Array:
        def split(vector: Array) -> Array:
            return self._split_as(x, range(x.ndim - vector.ndim, x.ndim), vector)

        with jax.named_scope(name):
            scale, bias = (None if vector is None else split(vector) for vector in (scale, bias))
            is_split = any(partitions_of(x)[-num_letters:])
            mean = partial(_kept_mean if is_split else mean_of_last, num_dims=num_letters)
            return checkpoint_name(norm(x, scale, bias, kind, self.config, mean, eps), OPERATION)

    def dot(self, name: str, x: Array | Kept, w: Array) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(dot(wide(x), self._split_as(wide(x), (2,), w)), OPERATION)

    def clip(self, name: str, x: Array, limit: float) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(clip(x, limit), OPERATION)

    def gated(self, name: str, y: Array, gate: Array) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(gated(y, gate), OPERATION)

    def activation(
        self,
        name: str,
        gate: Readable,
        up: Readable,
        kind: str,
        slopes: tuple[Array, Array] | None = None,
    ) -> Array:
        gate, up = wide(gate), None if up is None else wide(up)
        with jax.named_scope(name):
            if self._routes:
                inputs = (gate,) if up is None else (gate, up)
                made = computed_rows(lambda gate, up=None: activate(gate, up, kind), self._routes, *inputs)
                return checkpoint_name(made, OPERATION)
            return checkpoint_name(activate(gate, up, kind, slopes), OPERATION)

    def residual(self, name: str, x: Array, y: Array) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(x + y, OPERATION)

    def add_shared_experts(self, name: str, chosen: Array, shared: Array, gate: Array | None) -> Array:
        shared = shared if gate is None else self.gated(f"{name}_gated", shared, gate)
        return self.residual(f"{name}_residual", chosen, shared)

    def layers(
        self,
        block: Callable,
        weights: Any,
        x: Array,
        places: Places,
        cache: Any,
        layers: Sequence[Layer],
    ) -> tuple[Array, Any]:
        """The layers in loops, rematerialised by the Layout's policy."""

        def plain(
            x: Array, w: Mapping[str, Any], lost: Any, kind: KindInLoop, shared: Any
        ) -> tuple[Array, Any, Any]:
            def layer(
                x: Array, w: Mapping[str, Any], which: Array | None, shared: Any
            ) -> tuple[Array, Any, Any]:
                self._num_products, self._of_routers = 0, []
                x = checkpoint_name(x, INPUT) if self.layout.schedule.offload else x
                at = AtLayer(places, None, kind._replace(which=which))
                x, _, made = block(self, self.reads(w), x, at, shared)
                return x, sum(self._of_routers) if self._of_routers else None, made

            x, more, made = jax.checkpoint(layer, policy=policy(self.layout))(x, w, kind.which, shared)
            return x, lost if more is None else lost + more, made

        with jax.named_scope("layers"):
            nothing = jnp.zeros(2) if self.router_losses else None
            if self._stage is not None:
                return run_stage(plain, weights, x, nothing, *self._stage)
            return run_layers(plain, weights, x, nothing, layers)

    def take(self, name: str, x: Array, indices: Array) -> Array:
        with jax.named_scope(name):
            return jnp.take_along_axis(x, indices[:, :, None], axis=1)

    def join(self, name: str, x: Array, y: Array) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(jnp.concatenate([x, y], axis=-1), OPERATION)

    def detached(self, x: Array) -> Array:
        return lax.stop_gradient(x)

    def undifferentiated(self, block: Callable[..., Any], *inputs: object) -> Any:
        token, self._token = self._token, None  # no gradients of weights to postpone
        try:
            return block(*lax.stop_gradient(inputs))
        finally:
            self._token = token

    def with_draft_loss(self, handed_on: Any, loss: Array) -> Array:
        """The routers' losses, zeros without any, and the loss of the draft head: f32[3]."""
        routers = jnp.zeros(2) if handed_on is None else handed_on
        return jnp.concatenate([routers, loss[None]])

    def softcap(self, name: str, logits: Array, cap: float) -> Array:
        with jax.named_scope(name):
            return softcap(logits, cap).astype(logits.dtype)

    def loss(
        self,
        name: str,
        x: Array | Kept,
        weights: Mapping[str, Array],
        targets: Array,
        cap: float | None = None,
        *,
        has_last: bool = True,
        **head: str,
    ) -> Array:
        """The mean over all targets; targets that are not counted add zero to the sum."""
        [group] = input_groups(self.layout, head)
        [(weight, plan)] = group.plans.items()

        masked = self.masked or not has_last
        objective = self._objective or partial(nats_of, masked=masked, z_loss=self.z_loss)

        def nats(logits: Array, targets: Array) -> Array:
            return objective(softcap(logits, cap) if cap else logits, targets)

        shape = jax.tree.leaves(targets)[0].shape
        count = num_slices(group, shape, self.layout.num_batch_shards)
        bias = weights.get("unembed_bias")
        if count > 1 and bias is None and not self._narrow and not isinstance(x, Kept):
            with jax.named_scope(weight):
                w = self._fetched(plan, weights[weight])
            return loss_by_slices(plan, self.dtype, x, w, targets, nats, count, Names(weight, name))
        (logits,) = self.einsums(x, weights, **head)
        if bias is not None:
            logits = self.bias("unembed_bias", logits, bias)
        if cap:
            logits = self.softcap("logit_softcap", logits, cap)
        with jax.named_scope(name):
            return jnp.mean(objective(logits, targets))
