"""The training step of a plan: loss, gradients, clipping and AdamW, compiled for its layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits, check_one_program, check_updates
from meshwright.layout.moves.attention import attention_layout, token_sharding
from meshwright.layout.workload import Workload
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.models.count import train_flops_per_token
from meshwright.models.parameters import parameters
from meshwright.native.processor import give_back_freed_memory, keep_freed_memory
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.blockwise import dealt_positions
from meshwright.nn.each_device import partitions_of
from meshwright.nn.files.weights import has_draft_head, load_hf
from meshwright.nn.gradients import added, as_used, differentiated, gathered, shards, summed, zeros
from meshwright.nn.loss import nats_of
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import abstract_params, as_frozen, flatten, init_params, merged_params, shardings
from meshwright.nn.pipeline.spmd_1f1b import SpmdPipeline
from meshwright.nn.policy_loss import ClippedPolicyLoss
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.compiler_options import compiler_options
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.nn.start.processes import wait_for_all
from meshwright.platforms import platform_of
from meshwright.platforms.platform import Options
from meshwright.train.batch_rows import BatchRows
from meshwright.train.optimizers import OptimizerConfig, gradient_norm, learning_rate, make_optimizer
from meshwright.train.optimizers.adafactor import MeanSquares, mean_squares
from meshwright.train.settings import check_has_routers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, the optimizer's state and the number of updates."""

    params: Any
    opt_state: Any
    num_updates: Array


class Mastered(NamedTuple):
    """The optimizer's state with a float32 copy of the weights (`master_weights`).

    weights: the copy, split as summed gradients. moments: optax's state.
    """

    weights: Any
    moments: Any


class CompiledStep(BatchRows):
    """The step for `train.loop.train`: of one model, layout and workload on its devices.

    peak_flops_per_second: of one chip, in the compute dtype; for MFU. options: XLA's, in addition to
    `compiler_options`. start_from: a Hugging Face checkpoint with the first parameters, except adapters.
    masked: as of BatchRows. objective: the loss of each target in place of the cross-entropy; rows are then
    PolicyRows.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        workload: Workload,
        optimizer: OptimizerConfig,
        *,
        chip_flops_per_second: float,
        mesh: jax.sharding.Mesh | None = None,
        options: Options | None = None,
        start_from: Path | None = None,
        masked: bool = False,
        objective: ClippedPolicyLoss | None = None,
    ) -> None:
        if workload.phase != "train":
            raise PlanError(f"{config.name}: the plan is of phase {workload.phase!r}; training takes 'train'")
        check_fits(layout, config, workload.num_sequences, workload.seq_len)
        check_updates(layout, config)
        check_one_program(layout, "a compiled step is")
        mesh = device_mesh(layout) if mesh is None else mesh
        super().__init__(layout, mesh, workload.num_sequences, workload.seq_len, masked=masked)
        self.config, self.workload, self.start_from = config, workload, start_from
        if platform_of(self.mesh).host_memory:
            give_back_freed_memory()
            keep_freed_memory()
        self.options = options or {}
        self.schedule = learning_rate(optimizer)
        self.router_weights = _router_weights(config, optimizer)
        self._other_weights = _other_weights(config, optimizer, self.router_weights)
        self.ops = JaxOps(
            config,
            layout,
            masked=masked,
            z_loss=optimizer.z_loss,
            router_losses=self.router_weights is not None,
            objective=objective,
        )
        self.optimizer = make_optimizer(
            replace(optimizer, optimizer=layout.precision.optimizer), layout.precision.optimizer_dtype, config
        )
        self.tokens_per_step = workload.num_tokens
        self.flops_per_step = train_flops_per_token(config, workload.seq_len) * workload.num_tokens
        self.peak_flops_per_second = chip_flops_per_second * layout.mesh.num_devices
        self.keeps_gradients = False  # in the metrics, for comparisons; set before the first step
        self._compiled: set[Any] = set()  # programs, by all processes

    # State

    def init(self, seed: int) -> TrainState:
        """The first state: `first_params`, and moments on their shards."""
        params = self.first_params(seed)
        with jax.set_mesh(self.mesh):
            return jax.jit(self.first_state)(params)

    def first_params(self, seed: int) -> Any:
        """Fresh parameters or the weights of `start_from`."""
        if self.start_from is None:
            return init_params(self.config, self.layout, self.mesh, seed)
        params = load_hf(
            self.start_from,
            self.config.base,
            as_read(self.layout),
            self.mesh,
            kept=partial(as_frozen, self.config, self.layout, self.mesh),
        )
        added = parameters(self.config).keys() - parameters(self.config.base).keys()
        if not added:
            return params
        if self.config.draft_head and has_draft_head(self.start_from, self.config.base):
            stored = load_hf(self.start_from, self.config.head, self.layout, self.mesh)
            return merged_params(self.config, stored, params)
        fresh = init_params(self.config, self.layout, self.mesh, seed, only=added)
        return merged_params(self.config, params, fresh)

    def first_state(self, params: Mapping[str, Any]) -> TrainState:
        state = self.with_moments(params)
        return replace(state, opt_state=self._waiting(state.opt_state))

    def with_moments(self, params: Mapping[str, Any]) -> TrainState:
        mine = shards(self.config, self.layout, params)
        start = jnp.zeros((), jnp.int32)
        if not self.layout.precision.master_weights:
            return TrainState(params, self.optimizer.init(mine), start)
        master = jax.tree.map(lambda weight: weight.astype(jnp.float32), mine)
        return TrainState(params, Mastered(master, self.optimizer.init(master)), start)

    def abstract_state(self, params: Any = None) -> TrainState:
        """The state as ShapeDtypeStructs with shardings: moments are split as summed gradients.

        params: parameters of a part of the model, by default of the whole model.
        """
        if params is None:
            params = abstract_params(self.config, self.layout, self.mesh)
        with jax.set_mesh(self.mesh):
            shapes = jax.eval_shape(self.with_moments, params)
        state = jax.tree.map(self._placed, shapes)
        if not self.layout.schedule.offload_optimizer:
            return state
        return replace(state, opt_state=jax.tree.map(_on_the_host, state.opt_state))

    def _placed(self, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

    def _waiting(self, opt_state: object) -> Any:
        """The optimizer's state between updates; its counters stay on the device."""
        return (
            _moved(opt_state, jax.memory.Space.Host) if self.layout.schedule.offload_optimizer else opt_state
        )

    def saved(self, state: TrainState) -> TrainState:
        """The state as it is saved."""
        return state

    def placed(self, saved: TrainState) -> TrainState:
        """The state of a restored one, which has the form of `abstract_state`."""
        return saved

    # The step

    def step(self, state: TrainState, tokens: Any) -> tuple[TrainState, dict[str, Array]]:
        """(next state, {"loss", "grad_norm", "learning_rate"}); the state is donated.

        tokens: rows of the batch, or PolicyRows. If the routers' losses have weights, "balance_loss" and
        "router_z_loss" too, means over the layers; "draft_loss" of a draft head trained with the model.
        """
        with jax.set_mesh(self.mesh):
            return self._run(self.jitted, state, self.put(tokens))

    def evaluate(self, state: TrainState, tokens: np.ndarray) -> Array:
        """Mean nats per token of tokens[B, T+1]."""
        with jax.set_mesh(self.mesh):
            return self._run(self._jitted_loss, state.params, self.put(tokens))

    def log_probs(self, params: Mapping[str, Any], rows: np.ndarray) -> np.ndarray:
        """f32[B, T]: the log-probability of each target of rows[B, T+1] in nats; 0 for uncounted ones."""
        with jax.set_mesh(self.mesh):
            nats = np.asarray(self._run(self._jitted_nats, params, self.put(rows)))
        attended = token_sharding(attention_layout(self.layout), "tokens").axes_of("T")
        losses = np.empty_like(nats)
        losses[:, dealt_positions(self.seq_len, self.layout.mesh.size(attended))] = -nats
        return losses

    @cached_property
    def _jitted_nats(self) -> Any:
        return jax.jit(self._nats, compiler_options=self._compiler_options)

    @property
    def _compiler_options(self) -> dict[str, bool | int | str] | None:
        return compiler_options(self.mesh, self.options, self.layout.schedule.microbatches)

    def _nats(self, params: Mapping[str, Any], rows: Array) -> Array:
        """The nats of each target of rows[B, T+1], by microbatches; positions as `dealt`."""
        ops, microbatches = self.ops.of_validation(), self.microbatches(rows)

        def of_microbatch(index: Array) -> Array:
            tokens, targets, places = self.dealt(microbatches[:, index])
            logits, _ = transformer.logits(self.config, ops, ops.reads(params), tokens, places)
            return nats_of(logits, targets, masked=self.masked, z_loss=0.0)

        nats = lax.map(of_microbatch, jnp.arange(self.layout.schedule.microbatches))
        rows_spec, positions_spec = partitions_of(nats)[1:]
        split = PartitionSpec(rows_spec, positions_spec)
        return jnp.reshape(jnp.moveaxis(nats, 0, 1), (-1, self.seq_len), out_sharding=split)

    def _run(self, jitted: Any, *arguments: Any) -> Any:
        """The result of a program, which a process begins only after all have compiled it."""
        if jitted not in self._compiled:
            jitted.lower(*arguments).compile()  # JAX keeps it for the call
            if platform_of(self.mesh).host_memory:
                give_back_freed_memory()
            wait_for_all("a program is compiled")
            self._compiled.add(jitted)
        return jitted(*arguments)

    @cached_property
    def jitted(self) -> Any:
        """The jitted step: (state, tokens[B, T+1]) -> (state, metrics). Call under the mesh."""
        options = self._compiler_options
        if not self.layout.schedule.offload_optimizer:
            return jax.jit(self._step, donate_argnums=0, compiler_options=options)
        # Given, since XLA otherwise does not use donated memory of the host.
        where = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        return jax.jit(self._step, donate_argnums=0, out_shardings=(where, None), compiler_options=options)

    def program_texts(self) -> dict[str, str]:
        """The optimized HLO of the step by its name; compiles it again."""
        with jax.set_mesh(self.mesh):
            compiled = self.jitted.lower(self.abstract_state(), self.abstract_tokens()).compile()
        return {"step": compiled.as_text()}

    @property
    def num_compiled(self) -> int:
        """The number of compiled programs of the step: 1, unless the types of its arguments changed."""
        return self.jitted._cache_size()

    @cached_property
    def _jitted_loss(self) -> Any:
        return jax.jit(self.loss)

    def loss(self, params: Mapping[str, Any], rows: Array) -> Array:
        """Mean nats per counted token of rows[B, T+1]."""
        if self.layout.pipe > 1:
            return self._pipeline(params, params, rows, self.ops.of_validation()).loss()
        loss, _ = self._over_all(params, rows, self.ops.of_validation())
        return loss * self.all_over_counted(rows) if self.masked else loss

    def _over_all(self, params: Any, rows: Any, ops: JaxOps) -> tuple[Array, Any]:
        """(nats of the counted targets over the number of all targets, the other losses).

        The others: None, or sums of the routers' losses, and after these the loss of a draft head.
        """
        tokens, targets, places = self.dealt(rows)
        ahead = self.dealt_ahead(rows) if self.config.draft_head else None
        return transformer.losses(self.config, ops, ops.reads(params), tokens, targets, places, ahead)

    def _pipeline(
        self, params: Mapping[str, Any], leaves: Mapping[str, Any], rows: Array, ops: JaxOps
    ) -> SpmdPipeline:
        microbatches = jnp.moveaxis(self.microbatches(rows), 1, 0)
        weights = self.router_weights if ops.router_losses else None
        share = self.share(rows)
        parts = microbatches, self.dealt, share, ops, weights
        return SpmdPipeline(self.config, self.layout, params, leaves, *parts)

    def _step(self, state: TrainState, rows: Any) -> tuple[TrainState, dict[str, Array]]:
        (loss, others), grads = self._losses_and_gradients(state.params, rows)
        norm = gradient_norm(grads)
        after = self.updated(state, grads, norm)
        metrics = self.metrics(loss, others, norm, state.num_updates)
        return after, metrics | {"gradients": grads} if self.keeps_gradients else metrics

    @jax.named_scope("update")
    def metrics(self, loss: Array, others: Array | None, norm: Array, num_updates: Array) -> dict[str, Array]:
        """The metrics of `step`. others: of `_over_all`. num_updates: before this one."""
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": self.schedule(num_updates)}
        if others is not None and self.router_weights is not None:
            mean = others / self.config.num_expert_layers
            metrics |= {"balance_loss": mean[0], "router_z_loss": mean[1]}
        if others is not None and self.config.draft_head == "joint":
            metrics["draft_loss"] = others[2]
        return metrics

    @jax.named_scope("update")
    def updated(
        self, state: TrainState, grads: Mapping[str, Any], norm: Array, **given: object
    ) -> TrainState:
        """The state after an update. norm: of the gradients. given: other arguments of the optimizer."""
        mine, opt_state = self._updated_shards(state, grads, norm, **given)
        whole = gathered(self.config, self.layout, mine, state.params)
        params = merged_params(self.config, state.params, whole)
        return TrainState(params, self._waiting(opt_state), state.num_updates + 1)

    def _updated_shards(
        self, state: TrainState, grads: Mapping[str, Any], norm: Array, **given: object
    ) -> tuple[Any, Any]:
        """The shards of the weights after an update, and the optimizer's state."""
        before, moments = self._to_update(state)
        updates, moments = self.optimizer.update(grads, moments, before, norm=norm, **given)
        after = optax.apply_updates(before, updates)
        if not self.layout.precision.master_weights:
            return after, moments
        dtype = jax_dtype(self.layout.precision.trained_dtype)
        return jax.tree.map(lambda weight: weight.astype(dtype), after), Mastered(after, moments)

    @jax.named_scope("update")
    def mean_squares(self, state: TrainState, grads: Mapping[str, Any], norm: Array) -> MeanSquares:
        """Adafactor's mean squares of a part of the model, from which a pipeline gets those of stacks."""
        weights, moments = self._to_update(state)
        return mean_squares(self.optimizer, grads, moments, weights, norm)

    def _to_update(self, state: TrainState) -> tuple[Any, Any]:
        """(the shards of the weights that an update changes, its moments), on the devices."""
        opt_state = state.opt_state
        if self.layout.schedule.offload_optimizer:
            opt_state = _moved(opt_state, jax.memory.Space.Device)
        if self.layout.precision.master_weights:
            return opt_state
        return shards(self.config, self.layout, state.params), opt_state

    def loss_and_gradients(self, params: Mapping[str, Any], rows: Array) -> tuple[Array, Any]:
        """The mean loss of the batch, without the routers' losses, and the gradients of the whole loss."""
        (loss, _), gradients = self._losses_and_gradients(params, rows)
        return loss, gradients

    def whole_gradients(
        self, params: Mapping[str, Any], tokens: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """(loss, gradients by path) for a whole model's parameters, all in the host's memory."""
        where = shardings(self.config, self.layout, self.mesh)
        with jax.set_mesh(self.mesh):
            placed = jax.device_put(params, where), self.put(tokens)
            loss, gradients = jax.jit(self.loss_and_gradients)(*placed)
        return float(loss), {path: np.asarray(one) for path, one in flatten(gradients).items()}

    def _losses_and_gradients(self, params: Any, rows: Any) -> tuple[tuple[Array, Any], Any]:
        """((loss, the other losses), gradients) over the microbatches, which run in sequence."""
        config, layout, count = self.config, self.layout, self.layout.schedule.microbatches
        leaves = differentiated(config, layout, params)

        share = self.share(rows)

        def of_microbatch(leaves: Mapping[str, Any], rows: Any) -> tuple[Array, tuple[Array, Any]]:
            loss, others = self._over_all(as_used(config, layout, params, leaves), rows, self.ops)
            loss = loss * share
            if self._other_weights is None:
                return loss, (loss, None)
            # Routers see all tokens, a draft head has the targets that are counted.
            shares = jnp.stack([1 / count, 1 / count, share])[: len(self._other_weights)]
            others = others * shares
            return loss + self._other_weights @ others, (loss, others)

        def losses_and_gradients(rows: Any) -> tuple[tuple[Array, Any], Any]:
            (_, losses), gradients = jax.value_and_grad(of_microbatch, has_aux=True)(leaves, rows)
            return losses, gradients

        if layout.pipe > 1:
            losses, grads = self._pipeline(params, leaves, rows, self.ops).losses_and_gradients()
            return losses, summed(config, layout, grads)
        if count == 1:
            return losses_and_gradients(rows)
        split = self.microbatches(rows)

        def add(total: Any, index: Array) -> tuple[Any, None]:
            losses, gradients = losses_and_gradients(jax.tree.map(lambda rows: rows[:, index], split))
            return (jax.tree.map(jnp.add, total[0], losses), added(total[1], gradients)), None

        none_yet = None if self._other_weights is None else jnp.zeros(len(self._other_weights))
        zero = ((jnp.zeros(()), none_yet), zeros(config, layout, leaves))
        losses, grads = lax.scan(add, zero, jnp.arange(count))[0]
        return losses, summed(config, layout, grads)


def _moved(tree: object, space: Any) -> Any:
    """The pytree with its arrays in another memory, except single numbers."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)


def _on_the_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of an array in host memory that devices can access; single numbers are unchanged."""
    if not leaf.shape:
        return leaf
    sharding = leaf.sharding.with_memory_kind("pinned_host")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _router_weights(config: ModelConfig, optimizer: OptimizerConfig) -> np.ndarray | None:
    """f32[2]: weights of the balance loss and the z-loss of each layer's router; None if both are 0."""
    weights = optimizer.balance_loss, optimizer.router_z_loss
    check_has_routers(config, *weights)
    return np.asarray(weights, np.float32) if any(weights) else None


def _other_weights(
    config: ModelConfig, optimizer: OptimizerConfig, of_routers: np.ndarray | None
) -> np.ndarray | None:
    """Weights of the other losses of `CompiledStep._over_all`."""
    if config.draft_head != "joint":
        return of_routers
    routers = np.zeros(2, np.float32) if of_routers is None else of_routers
    return np.append(routers, np.float32(optimizer.draft_weight))
