"""Ways to break a step: each makes, of a plan, a program that is not the planned one.

The audit must flag every one. Of training four families: programs of another plan, steps that do something
more, operations that do, and edits of the compiled text; and those of serving. A way that does not apply to a
layout gives None.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.audit.compile.compile import CompiledProgram, memory_by_cause, program_text
from meshwright.audit.facts.groups import parse_groups
from meshwright.layout import Layout
from meshwright.layout.workload import InferencePhase, Workload
from meshwright.models import transformer
from meshwright.models.presets import load_model
from meshwright.nn.gradients import gathered, shards
from meshwright.nn.norms import along, log_sum_exp, mean_of_last
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.products.contract import local_product
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.remat import MATMUL
from meshwright.notation.einsum import Contraction
from meshwright.plan_file import Plan
from meshwright.platforms import CPU
from meshwright.serve.device.programs import workload_step
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep, TrainState

UNOPTIMIZED: Any = dict(CPU.compiler.options)

LAYOUTS = (
    "data=8,zero=1",
    "fsdp=8,remat=full",
    "data=2,fsdp=2,tensor=2",
    "fsdp=4,tensor=2,sequence_parallel=true,microbatches=2",
)
# Those of serving, behind their phase.
SERVING_LAYOUTS = ("generate data=2,tensor=4", "prefill data=2,tensor=4", "generate data=8")
P = PartitionSpec


def plan_of(layout: str) -> Plan:
    """A model of four small layers in bfloat16 on eight devices."""
    model = replace(load_model("tiny"), num_layers=4)
    phase, _, words = layout.rpartition(" ")
    workload = Workload(16, 64, cast(InferencePhase, phase)) if phase else Workload(32, 64)
    return Plan(model, "cpu:8", workload, Layout.parse(f"weights_dtype=bf16,compute_dtype=bf16,{words}"))


class Broken(CompiledStep):
    """A step that may be changed: its operations, and the step itself."""

    def __init__(self, plan: Plan, ops: type[JaxOps] = JaxOps) -> None:
        optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
        super().__init__(plan.model, plan.layout, plan.workload, optimizer, chip_flops_per_second=1.0)
        self.ops = ops(plan.model, plan.layout)

    @property
    def rows(self) -> P:
        return self.batch_sharding.spec


# Of a state, or of more than that, and the tokens.
Step = Callable[[Any, Array], Any]


def compiled(
    step: Broken, run: Step | None = None, *, donate: bool = True, state: Any = None
) -> CompiledProgram:
    """`run`, by default the step itself, compiled for virtual CPU devices."""
    with jax.set_mesh(step.mesh):
        jitted = jax.jit(run or step._step, donate_argnums=0 if donate else ())
        lowered = jitted.lower(state or step.abstract_state(), step.abstract_tokens())
        program = lowered.compile(compiler_options=UNOPTIMIZED)
    return CompiledProgram(program_text(program), 0.0, memory_by_cause(program, CPU.compiler))


@cache
def unbroken(layout: str) -> CompiledProgram:
    plan = plan_of(layout)
    return compiled(Broken(plan)) if plan.workload.phase == "train" else served(plan)


# Programs of another plan


def _layout(**values: object) -> Callable[[Plan], Plan | None]:
    def change(plan: Plan) -> Plan | None:
        other = plan.layout.replace(**values)
        return None if other == plan.layout else replace(plan, layout=other)

    return change


def _model(**values: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, model=replace(plan.model, **values))


def _workload(num_sequences: int, seq_len: int) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, workload=Workload(num_sequences, seq_len))


def _axes_swapped(plan: Plan) -> Plan | None:
    layout = plan.layout
    other = layout.replace(fsdp=layout.tensor, tensor=layout.fsdp)
    return None if layout.tensor == 1 or layout.fsdp == layout.tensor else replace(plan, layout=other)


def _replicated(plan: Plan) -> Plan | None:
    """Weights whole on every device where they are sharded."""
    layout = plan.layout
    other = layout.replace(data=layout.data * layout.fsdp, fsdp=1)
    return None if layout.fsdp == 1 else replace(plan, layout=other)


def _sharded(plan: Plan) -> Plan | None:
    layout = plan.layout
    other = layout.replace(fsdp=layout.data * layout.fsdp, data=1, zero=None)
    return None if layout.data == 1 else replace(plan, layout=other)


def _without_tensor(plan: Plan) -> Plan | None:
    layout = plan.layout
    other = layout.replace(data=layout.data * layout.tensor, tensor=1, sequence_parallel=False)
    return None if layout.tensor == 1 else replace(plan, layout=other)


def _toggled_sequence(plan: Plan) -> Plan | None:
    layout = plan.layout
    other = layout.replace(sequence_parallel=not layout.word("sequence_parallel"))
    return None if layout.tensor == 1 else replace(plan, layout=other)


def _other_zero(plan: Plan) -> Plan | None:
    layout = plan.layout
    return (
        None
        if layout.data == 1
        else replace(plan, layout=layout.replace(zero=0 if layout.word("zero") else 1))
    )


def _other_microbatches(plan: Plan) -> Plan:
    return replace(plan, layout=plan.layout.replace(microbatches=3 - plan.layout.schedule.microbatches))


def _whole_batch(plan: Plan) -> Plan:
    """As many sequences on every device as the whole batch has."""
    return replace(plan, workload=Workload(32 * plan.layout.num_batch_shards, 64))


OTHER_PLANS: dict[str, Callable[[Plan], Plan | None]] = {
    "half of the layers": _model(num_layers=2),
    "one layer less": _model(num_layers=3),
    "one layer more": _model(num_layers=5),
    "a wider feed-forward": _model(d_ff=160),
    "fewer KV heads": _model(num_kv_heads=2),
    "a tied table": _model(tied_embeddings=True),
    "twice the vocabulary": _model(vocab_size=1024),
    "half of the batch": _workload(16, 64),
    "half of the sequence": _workload(32, 32),
    "everything recomputed": _layout(remat="full"),
    "nothing recomputed": _layout(remat="none"),
    "computed in float32": _layout(compute_dtype="f32"),
    "weights in float32": _layout(weights_dtype="f32"),
    "axes swapped": _axes_swapped,
    "weights replicated": _replicated,
    "weights sharded": _sharded,
    "no tensor parallelism": _without_tensor,
    "sequence parallelism": _toggled_sequence,
    "another ZeRO stage": _other_zero,
    "other microbatches": _other_microbatches,
    "four microbatches": _layout(microbatches=4),
    "the batch on every device": _whole_batch,
    "moments in bfloat16": _layout(optimizer_dtype="bf16"),
    "a float32 copy of the weights": _layout(master_weights=True),
    "one moment of two": _layout(optimizer="lion"),
    "gradients in float32": _layout(gradients_dtype="f32"),
    "GELU in place of SiLU": _model(activation="gelu"),
    "ReLU in place of SiLU": _model(activation="relu"),
    "biases of queries, keys and values": _model(qkv_bias=True),
    "normed queries and keys": _model(qk_norm=True),
}


# Steps that do something more


def _metric(more: Callable[[Broken, TrainState, Array], Any]) -> Callable[[Broken], CompiledProgram]:
    """The step with a further result."""

    def broken(step: Broken) -> CompiledProgram:
        def run(state: TrainState, rows: Array) -> Any:
            after, metrics = step._step(state, rows)
            return after, metrics | {"more": more(step, state, rows)}

        return compiled(step, run)

    return broken


def _second_forward(step: Broken, state: TrainState, rows: Array) -> Array:
    return step.loss(state.params, rows + 1)


def _many_numbers(step: Broken, state: TrainState, rows: Array) -> Array:
    """Sixty-four sums of a number, one after another."""

    def one(total: Array, _: None) -> tuple[Array, None]:
        return jnp.sum(rows.astype(jnp.float32) * total) / 1e6, None

    return lax.scan(one, jnp.float32(1), None, length=64)[0]


def _whole(tree: Any) -> Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 1]
    return sum((jnp.cos(reshard(leaf, P()).astype(jnp.float32)).sum() for leaf in leaves), jnp.float32(0))


def _weights_gathered(step: Broken, state: TrainState, rows: Array) -> Array:
    return _whole(state.params)


def _gathered_at_the_end(step: Broken) -> CompiledProgram | None:
    is_sharded = step.layout.fsdp > 1 or step.layout.tensor > 1
    return _metric(_weights_gathered)(step) if is_sharded else None


def _moments_gathered(step: Broken, state: TrainState, rows: Array) -> Array:
    return _whole(state.opt_state)


def _gradients_again(step: Broken, state: TrainState, rows: Array) -> Array:
    return optax.tree.norm(step.loss_and_gradients(state.params, rows + 1)[1])


def _logits_product(step: Broken, state: TrainState, rows: Array) -> Array:
    """A product that nobody asked for."""
    x = reshard(rows[:, :64].astype(jnp.bfloat16), P(step.rows[0], None))
    w = jnp.cos(jnp.arange(64 * 512, dtype=jnp.float32)).astype(jnp.bfloat16).reshape(64, 512)

    def one(x: Array, _: None) -> tuple[Array, None]:
        return jnp.tanh((x @ w)[:, :64]), None

    return lax.scan(one, x, None, length=64)[0].astype(jnp.float32).sum()


def _gradients_returned(step: Broken, state: TrainState, rows: Array) -> Any:
    return step.loss_and_gradients(state.params, rows)[1]


def _not_donated(step: Broken) -> CompiledProgram:
    return compiled(step, donate=False)


def _third_moment(step: Broken) -> CompiledProgram:
    """Gradients are averaged over steps, in float32."""

    def run(both: tuple[TrainState, Any], rows: Array) -> Any:
        state, average = both
        after, metrics = step._step(state, rows)
        moved = jax.tree.map(lambda old, new: 0.9 * old + new.astype(jnp.float32), average, after.params)
        return (after, moved), metrics

    state = step.abstract_state()
    average = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state.params
    )
    return compiled(step, run, state=(state, average))


def _gradients_summed_twice(step: Broken) -> CompiledProgram:
    """Every gradient once more through a sum over all devices of a replicated copy."""
    plain = step._losses_and_gradients

    def again(params: Any, rows: Array) -> Any:
        losses, grads = plain(params, rows)

        def mixed(g: Array) -> Array:
            there = jax.typeof(g).sharding.spec
            return reshard(jnp.tanh(reshard(g, P())), there)

        return losses, jax.tree.map(mixed, grads)

    step._losses_and_gradients = again
    return compiled(step)


def _updated_whole(step: Broken) -> CompiledProgram:
    """Every device updates all weights and moments: they are gathered before it and cut after it."""

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda x: reshard(x, P()), tree)

    def cut(tree: Any, like: Any) -> Any:
        return jax.tree.map(lambda new, old: reshard(new, jax.typeof(old).sharding.spec), tree, like)

    def updated(state: TrainState, grads: Any, norm: Array, **given: Any) -> tuple[Any, Any]:
        mine = shards(step.config, step.layout, state.params)
        weights = whole(mine)
        updates, moments = step.optimizer.update(whole(grads), whole(state.opt_state), weights, norm=norm)
        return cut(optax.apply_updates(weights, updates), mine), cut(moments, state.opt_state)

    step._updated_shards = updated
    return compiled(step)


def _called_back(step: Broken) -> CompiledProgram:
    """The loss is handed to Python on the host."""

    def run(state: TrainState, rows: Array) -> Any:
        after, metrics = step._step(state, rows)
        jax.debug.callback(lambda loss: None, metrics["loss"])
        return after, metrics

    return compiled(step, run)


def _again_by_half(step: Broken, state: TrainState, rows: Array) -> Array:
    """Gradients of half of the sequences once more."""
    half = rows.shape[0] // 2
    spec = jax.typeof(rows).sharding.spec
    some = jnp.reshape(rows, (half, 2, rows.shape[1]), out_sharding=P(spec[0], None, None))[:, 0]
    return optax.tree.norm(jax.grad(step.loss)(state.params, some))


def _tokens_gathered(step: Broken, state: TrainState, rows: Array) -> Array:
    """The whole batch of tokens on every device, many times."""

    def one(total: Array, _: None) -> tuple[Array, None]:
        there = reshard(jnp.sin(rows.astype(jnp.float32) + total), P(None, None))
        return jnp.max(there), None

    return lax.scan(one, jnp.float32(1), None, length=64)[0]


def _not_clipped(step: Broken) -> CompiledProgram:
    """No norm of the gradients: they are taken as they come, and none is told."""
    plan = Plan(step.config, "cpu:8", step.workload, step.layout)
    with (
        patch("meshwright.train.optimizers.clipped", lambda _: optax.identity()),
        patch("meshwright.train.step.gradient_norm", lambda _: jnp.float32(1)),
    ):
        return compiled(Broken(plan))


def _clipped_by_value(step: Broken) -> CompiledProgram:
    """Every number of a gradient is clipped by itself; the norm is told and not used."""
    plan = Plan(step.config, "cpu:8", step.workload, step.layout)
    with patch("meshwright.train.optimizers.clipped", optax.clip):
        return compiled(Broken(plan))


def _changed_gradients(made: Callable[[Array], Array]) -> Callable[[Broken], CompiledProgram]:
    """The step by what is made of its gradients."""

    def broken(step: Broken) -> CompiledProgram:
        plain = step._losses_and_gradients

        def others(params: Any, rows: Array) -> Any:
            losses, grads = plain(params, rows)
            with jax.named_scope("update"):
                return losses, jax.tree.map(made, grads)

        step._losses_and_gradients = others
        return compiled(step)

    return broken


def _noised(g: Array) -> Array:
    """A gradient with noise, as differential privacy adds it."""
    return g + 1e-3 * jnp.sin(1e4 * g)


def _decayed_again(step: Broken) -> CompiledProgram:
    """Weights shrink once more after the update."""

    def run(state: TrainState, rows: Array) -> Any:
        after, metrics = step._step(state, rows)
        with jax.named_scope("update"):
            return replace(
                after, params=jax.tree.map(lambda w: w * w.dtype.type(0.98), after.params)
            ), metrics

    return compiled(step, run)


def _moments_kept(step: Broken) -> CompiledProgram:
    """The moments of before are handed on."""

    def run(state: TrainState, rows: Array) -> Any:
        after, metrics = step._step(state, rows)
        return replace(after, opt_state=state.opt_state), metrics

    return compiled(step, run)


def _one_weight_kept(step: Broken) -> CompiledProgram:
    """One weight is not updated."""

    def run(state: TrainState, rows: Array) -> Any:
        after, metrics = step._step(state, rows)
        return replace(after, params=after.params | {"final_norm": state.params["final_norm"]}), metrics

    return compiled(step, run)


def _weights_alone_donated(step: Broken) -> CompiledProgram:
    """Moments are new arrays."""

    def run(params: Any, others: Any) -> Any:
        opt_state, num_updates, rows = others
        return step._step(TrainState(params, opt_state, num_updates), rows)

    state = step.abstract_state()
    with jax.set_mesh(step.mesh):
        lowered = jax.jit(run, donate_argnums=0).lower(
            state.params, (state.opt_state, state.num_updates, step.abstract_tokens())
        )
        program = lowered.compile(compiler_options=UNOPTIMIZED)
    return CompiledProgram(program_text(program), 0.0, memory_by_cause(program, CPU.compiler))


def _weights_before(step: Broken, state: TrainState, rows: Array) -> Any:
    return state.params


def _averaged_again(step: Broken) -> CompiledProgram:
    """Gradients are averaged once more over the axes that do not split them."""
    plain = step._losses_and_gradients

    def mean(g: Array) -> Array:
        spec = jax.typeof(g).sharding.spec
        split = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
        axes = tuple(axis for axis, n in step.mesh.shape.items() if n > 1 and axis not in split)
        again = jax.shard_map(
            lambda x: lax.pmean(jnp.tanh(x), axes), in_specs=spec, out_specs=spec, check_vma=False
        )
        return again(g) if axes else g

    def averaged(params: Any, rows: Array) -> Any:
        losses, grads = plain(params, rows)
        return losses, jax.tree.map(mean, grads)

    step._losses_and_gradients = averaged
    return compiled(step)


def _updates_sent_in_float32(step: Broken) -> CompiledProgram | None:
    """Updated weights are gathered before they are cast."""
    if not step.layout.word("zero"):
        return None

    def wide(config: Any, layout: Layout, mine: Any, before: Any) -> Any:
        there = gathered(
            config, layout, *(jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (mine, before))
        )
        return jax.tree.map(lambda x, old: x.astype(old.dtype), there, mine)

    with patch("meshwright.train.step.gathered", wide):
        return compiled(step)


def _two_steps(step: Broken) -> CompiledProgram:
    """An update after each half of the batch."""

    def run(state: TrainState, rows: Array) -> Any:
        shape, spec = (rows.shape[0] // 2, 2, rows.shape[1]), jax.typeof(rows).sharding.spec
        halves = jnp.reshape(rows, shape, out_sharding=P(spec[0], None, None))
        state, _ = step._step(state, halves[:, 0])
        return step._step(state, halves[:, 1])

    return compiled(step, run)


def _weights_norm(step: Broken, state: TrainState, rows: Array) -> Array:
    return optax.tree.norm(state.params)


def _update_norm(step: Broken) -> CompiledProgram:
    """The norm of what the update changes."""

    def run(state: TrainState, rows: Array) -> Any:
        after, metrics = step._step(state, rows)
        moved = jax.tree.map(lambda new, old: new - old, after.params, state.params)
        return after, metrics | {"update_norm": optax.tree.norm(moved)}

    return compiled(step, run)


def _of_gradients(looked: Callable[[Array], Array]) -> Callable[[Broken], CompiledProgram]:
    """The step with a number of each gradient as a further result."""

    def broken(step: Broken) -> CompiledProgram:
        plain, seen = step._losses_and_gradients, {}

        def kept(params: Any, rows: Array) -> Any:
            losses, seen["gradients"] = plain(params, rows)
            return losses, seen["gradients"]

        def run(state: TrainState, rows: Array) -> Any:
            after, metrics = step._step(state, rows)
            return after, metrics | {"of_gradients": jax.tree.map(looked, seen["gradients"])}

        step._losses_and_gradients = kept
        return compiled(step, run)

    return broken


def _updated_twice(step: Broken) -> CompiledProgram:
    """Two updates by the same gradients, on the shards of the weights."""

    def twice(state: TrainState, grads: Any, norm: Array, **given: Any) -> tuple[Any, Any]:
        weights, moments = shards(step.config, step.layout, state.params), state.opt_state
        for _ in range(2):
            updates, moments = step.optimizer.update(grads, moments, weights, norm=norm)
            weights = optax.apply_updates(weights, updates)
        return weights, moments

    step._updated_shards = twice
    return compiled(step)


def _of_other_weights(step: Broken) -> CompiledProgram:
    """Every matrix squashed before it is used."""
    plain = step._over_all

    def squashed(params: Any, rows: Array, ops: JaxOps) -> Any:
        return plain(jax.tree.map(lambda w: jnp.tanh(w) if w.ndim > 1 else w, params), rows, ops)

    step._over_all = squashed
    return compiled(step)


def _nats_in_bf16(logits: Array, targets: Array, *, masked: bool, z_loss: float) -> Array:
    """The loss of logits that stay in bfloat16."""
    narrow = logits.astype(jnp.bfloat16)
    columns = lax.broadcasted_iota(targets.dtype, (1, 1, narrow.shape[-1]), 2)
    hit = jnp.where(columns == targets[..., None], narrow, jnp.bfloat16(0))
    return (log_sum_exp(narrow) - jnp.sum(hit, axis=-1)).astype(jnp.float32)


def _loss_in_bf16(step: Broken) -> CompiledProgram:
    with patch("meshwright.nn.ops.jax_ops.nats_of", _nats_in_bf16):
        return compiled(step)


def _norms_in_bf16(step: Broken) -> CompiledProgram:
    """Means of squares are rounded before their root."""

    def norm(
        x: Array, scale: Array, bias: Any, kind: str, config: Any, mean: Any = mean_of_last, *_: Any
    ) -> Array:
        inverse = lax.rsqrt(mean(x * x) + jnp.asarray(config.norm_eps, x.dtype))
        return x * inverse * along(x, scale.astype(x.dtype))

    with patch("meshwright.nn.ops.jax_ops.norm", norm):
        return compiled(step)


def _update_on_condition(step: Broken) -> CompiledProgram:
    """A step of large gradients is left out."""
    plain = step._updated_shards

    def updated(state: TrainState, grads: Any, norm: Array, **given: Any) -> tuple[Any, Any]:
        after = plain(state, grads, norm, **given)
        before = shards(step.config, step.layout, state.params), state.opt_state
        return lax.cond(norm < 100.0, lambda: after, lambda: before)

    step._updated_shards = updated
    return compiled(step)


def _logits(step: Broken, state: TrainState, rows: Array) -> Array:
    tokens, _, places = step.dealt(rows)
    return transformer.logits(step.config, step.ops, step.ops.reads(state.params), tokens, places)[0]


def _accuracy(step: Broken, state: TrainState, rows: Array) -> Array:
    """The share of targets that have the largest logit."""
    likeliest = jnp.argmax(_logits(step, state, rows), axis=-1)
    return jnp.mean((likeliest == step.dealt(rows)[1]).astype(jnp.float32))


def _losses_of_tokens(step: Broken, state: TrainState, rows: Array) -> Array:
    return step._nats(state.params, rows)


def _left_out_if_not_finite(step: Broken) -> CompiledProgram:
    """Every new number is chosen among two by whether the norm is finite."""
    plain = step._updated_shards

    def updated(state: TrainState, grads: Any, norm: Array, **given: Any) -> Any:
        after = plain(state, grads, norm, **given)
        before = shards(step.config, step.layout, state.params), state.opt_state
        return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), after, before)

    step._updated_shards = updated
    return compiled(step)


def _rows_in_reverse(step: Broken) -> CompiledProgram:
    """Sequences change their devices."""
    plain = step._losses_and_gradients

    def reversed_rows(params: Any, rows: Array) -> Any:
        spec = jax.typeof(rows).sharding.spec
        return plain(params, reshard(jnp.flip(reshard(rows, P(None, None)), 0), spec))

    step._losses_and_gradients = reversed_rows
    return compiled(step)


def _on_a_grid(x: Array) -> Array:
    return (jnp.round(x.astype(jnp.float32) * 1024) / 1024).astype(x.dtype)


def _weights_on_a_grid(step: Broken) -> CompiledProgram:
    """Weights are rounded before they are used, and gradients pass through."""
    plain = step._over_all

    def rounded(w: Array) -> Array:
        return w + lax.stop_gradient(_on_a_grid(w) - w) if w.ndim > 1 else w

    def of_rounded(params: Any, rows: Array, ops: JaxOps) -> Any:
        return plain(jax.tree.map(rounded, params), rows, ops)

    step._over_all = of_rounded
    return compiled(step)


def _of_new_weights(made: Callable[[Array], Array]) -> Callable[[Broken], CompiledProgram]:
    """Breaks a step by returning `made` of each new weight."""

    def broken(step: Broken) -> CompiledProgram:
        def run(state: TrainState, rows: Array) -> Any:
            after, metrics = step._step(state, rows)
            return replace(after, params=jax.tree.map(made, after.params)), metrics

        return compiled(step, run)

    return broken


def _new_weights_whole(step: Broken) -> CompiledProgram | None:
    is_sharded = step.layout.fsdp > 1 or step.layout.tensor > 1
    return _of_new_weights(lambda w: reshard(w, P()))(step) if is_sharded else None


def _loop_of_unknown_turns(step: Broken, state: TrainState, rows: Array) -> Array:
    """A loop whose end depends on the tokens."""
    limit = jnp.sum(rows).astype(jnp.float32)

    def turn(carried: tuple[Array, Array]) -> tuple[Array, Array]:
        count, total = carried
        return 2 * count + 1, total + jnp.sum(jnp.sin(rows.astype(jnp.float32) * count))

    return lax.while_loop(lambda carried: carried[0] < limit, turn, (jnp.float32(1), jnp.float32(0)))[1]


def _squares_by_row(g: Array) -> Array:
    return jnp.sum(g.astype(jnp.float32) ** 2, axis=tuple(range(1, g.ndim)))


STEPS: dict[str, Callable[[Broken], CompiledProgram | None]] = {
    "logits returned": _metric(_logits),
    "the share of right targets": _metric(_accuracy),
    "losses of tokens returned": _metric(_losses_of_tokens),
    "an update left out if it is not finite": _left_out_if_not_finite,
    "rows in reverse": _rows_in_reverse,
    "gradients on a grid": _changed_gradients(_on_a_grid),
    "weights on a grid": _weights_on_a_grid,
    "new weights with noise": _of_new_weights(lambda w: w + w.dtype.type(1e-4) * jnp.sin(1000 * w)),
    "new weights whole": _new_weights_whole,
    "a loop of unknown turns": _metric(_loop_of_unknown_turns),
    "squares of each row of gradients": _of_gradients(_squares_by_row),
    "a loss of bfloat16 logits": _loss_in_bf16,
    "norms in bfloat16": _norms_in_bf16,
    "an update on a condition": _update_on_condition,
    "a second forward pass": _metric(_second_forward),
    "a second backward pass": _metric(_gradients_again),
    "sixty-four sums of a number": _metric(_many_numbers),
    "weights gathered at the end": _gathered_at_the_end,
    "moments gathered": _metric(_moments_gathered),
    "an unplanned product": _metric(_logits_product),
    "gradients returned": _metric(_gradients_returned),
    "the state not donated": _not_donated,
    "a third moment": _third_moment,
    "gradients gathered": _gradients_summed_twice,
    "an update of whole arrays": _updated_whole,
    "a callback on the host": _called_back,
    "the old weights kept": _metric(_weights_before),
    "half of the batch again": _metric(_again_by_half),
    "all tokens on every device, 64 times": _metric(_tokens_gathered),
    "gradients not clipped": _not_clipped,
    "moments not updated": _moments_kept,
    "one weight not updated": _one_weight_kept,
    "moments not donated": _weights_alone_donated,
    "gradients averaged again": _averaged_again,
    "updated weights sent in float32": _updates_sent_in_float32,
    "a step for each half of the batch": _two_steps,
    "two updates": _updated_twice,
    "a norm of the weights": _metric(_weights_norm),
    "a norm of the update": _update_norm,
    "gradients looked over for NaN": _of_gradients(lambda g: jnp.all(jnp.isfinite(g))),
    "the largest of each gradient": _of_gradients(lambda g: jnp.max(jnp.abs(g))),
    "weights squashed": _of_other_weights,
    "gradients clipped by value": _clipped_by_value,
    "signs of gradients": _changed_gradients(jnp.sign),
    "gradients with noise": _changed_gradients(_noised),
    "weights decayed again": _decayed_again,
}


# Operations that do something more


class _Gathered(JaxOps):
    """Activations whole on every device before each product of a layer."""

    def norm(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        y = super().norm(name, x, *args, **kwargs)
        with jax.named_scope("gathered"):
            return reshard(jnp.tanh(reshard(y, P(None, None, None))), jax.typeof(y).sharding.spec)


class _Exchanged(JaxOps):
    """Activations sharded by their model dimension for a moment: an all-to-all there and back."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        there = jax.typeof(y).sharding.spec
        with jax.named_scope("exchanged"):
            y = reshard(jnp.tanh(reshard(y, P(None, None, there[0]))), there)
        return super().residual(name, x, y)


class _Permuted(JaxOps):
    """Activations sent round the ring of devices."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        with jax.named_scope("permuted"):
            axes = jax.typeof(y).sharding.spec[0]
            axis = axes if isinstance(axes, str) else axes[-1]
            count = dict(jax.sharding.get_abstract_mesh().shape)[axis]
            ring = [(i, (i + 1) % count) for i in range(count)]
            spec = jax.typeof(y).sharding.spec
            y = jax.shard_map(lambda z: lax.ppermute(z, axis, ring), in_specs=spec, out_specs=spec)(y)
        return super().residual(name, x, y)


class _Wide(JaxOps):
    """Products of float32."""

    def einsums(self, x: Array, weights: Any, **specs: str) -> tuple[Array, ...]:
        kept, self.dtype = self.dtype, jnp.dtype("float32")
        made = super().einsums(x.astype(jnp.float32), weights, **specs)
        self.dtype = kept
        return tuple(y.astype(kept) for y in made)


class _Sent32(JaxOps):
    """Weights gathered, and their gradients scattered, in float32."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        with jax.named_scope(name):
            w = apply_reshard(plan.rhs_reshard, weight.astype(jnp.float32)).astype(self.dtype)
            y = apply_reshard(plan.out_reshard, local_product(plan, self.dtype, x, w))
            return checkpoint_name(y, MATMUL)


class _Twice(JaxOps):
    """Every product once more, of slightly other numbers."""

    def einsums(self, x: Array, weights: Any, **specs: str) -> tuple[Array, ...]:
        first = super().einsums(x, weights, **specs)
        second = super().einsums(jnp.tanh(x), weights, **specs)
        return tuple(a + b for a, b in zip(first, second, strict=True))


class _Norms(JaxOps):
    """The scale of a norm gathered, though it is whole: a sum over all devices of what it becomes."""

    def norm(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        y = super().norm(name, x, *args, **kwargs)
        with jax.named_scope("mean"):
            return y + jnp.mean(y.astype(jnp.float32), axis=(0, 1)).astype(y.dtype)[None, None, :]


def _moved(x: Array, *spec: Any) -> Array:
    """x as other numbers, which were sharded by `spec` for a moment."""
    there = jax.typeof(x).sharding.spec
    return reshard(jnp.tanh(reshard(x, P(*spec))), there)


class _OneSent32(_Sent32):
    """One weight gathered, and its gradient scattered, in float32."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        if name == "w_out":
            return super()._einsum(name, plan, x, weight)
        return JaxOps._einsum(self, name, plan, x, weight)


class _WithoutGradients(JaxOps):
    """The backward pass leaves out the first products of the feed-forward."""

    def activation(self, name: str, gate: Array, up: Array | None, kind: str, *more: Any) -> Array:
        return lax.stop_gradient(super().activation(name, gate, up, kind, *more))


class _HeadTwice(JaxOps):
    """The mean of the losses by two slightly different states."""

    def loss(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        second = super().loss(name, jnp.tanh(x), *args, **kwargs)
        return (super().loss(name, x, *args, **kwargs) + second) / 2


class _AttentionTwice(JaxOps):
    """The sum of what two slightly different queries attend to."""

    def attention(self, name: str, q: Array, *args: Any, **kwargs: Any) -> tuple[Array, Any]:
        out, cache = super().attention(name, q, *args, **kwargs)
        return out + super().attention(name, jnp.tanh(q), *args, **kwargs)[0], cache


class _KeysGathered(JaxOps):
    """Keys and values of all heads on every device."""

    def attention(
        self, name: str, q: Array, k: Array, v: Array, *args: Any, **kwargs: Any
    ) -> tuple[Array, Any]:
        with jax.named_scope("heads"):
            k, v = (_moved(x, *jax.typeof(x).sharding.spec[:2], None, None) for x in (k, v))
        return super().attention(name, q, k, v, *args, **kwargs)


class _TableGathered(JaxOps):
    """The embedding table whole on every device."""

    def embed(self, name: str, tokens: Array, table: Array) -> Array:
        with jax.named_scope("table"):
            return super().embed(name, tokens, _moved(table, None, None))


class _LogitsGathered(JaxOps):
    """Logits of the whole vocabulary on every device."""

    def einsums(self, x: Array, weights: Any, **specs: str) -> tuple[Array, ...]:
        made = super().einsums(x, weights, **specs)
        if "unembed" not in specs:
            return made
        with jax.named_scope("logits"):
            return tuple(_moved(y, *jax.typeof(y).sharding.spec[:2], None) for y in made)


class _StatesGathered(JaxOps):
    """The states of all tokens on every device before the head."""

    def loss(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        with jax.named_scope("states"):
            x = _moved(x, None, None, None)
        return super().loss(name, x, *args, **kwargs)


class _MaskGathered(JaxOps):
    """A mask of dropout, drawn by every device for its tokens and gathered."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        with jax.named_scope("dropout"):
            there = jax.typeof(y).sharding.spec
            drawn = reshard(jnp.sin(y.astype(jnp.float32)) > -0.9, P(None, None, None))
            kept = reshard(jnp.logical_not(drawn), there)
        return super().residual(name, x, jnp.where(kept, 0, y))


class _Recomputed(JaxOps):
    """The backward pass computes the products with one weight again."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        if name != "w_in":
            return super()._einsum(name, plan, x, weight)
        with jax.named_scope(name):
            w = apply_reshard(plan.rhs_reshard, weight.astype(self.dtype))
            return apply_reshard(plan.out_reshard, local_product(plan, self.dtype, x, w))


class _GatheredTwice(JaxOps):
    """One weight gathered a second time, as other numbers."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        y = super()._einsum(name, plan, x, weight)
        if name != "w_gate":
            return y
        with jax.named_scope("again"):
            return y + super()._einsum(name, plan, jnp.tanh(x), jnp.tanh(weight))


class _NormDropped(JaxOps):
    """A layer without its second norm."""

    def norm(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        return x if name == "mlp_norm" else super().norm(name, x, *args, **kwargs)


class _WideAttention(JaxOps):
    """Attention of float32 queries, keys and values."""

    def attention(
        self, name: str, q: Array, k: Array, v: Array, *args: Any, **kwargs: Any
    ) -> tuple[Array, Any]:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        out, cache = super().attention(name, q, k, v, *args, **kwargs)
        return out.astype(self.dtype), cache


class _WideHead(_Wide):
    """The product with the head's weight in float32."""

    def einsums(self, x: Array, weights: Any, **specs: str) -> tuple[Array, ...]:
        return (_Wide if "unembed" in specs else JaxOps).einsums(self, x, weights, **specs)


class _WeightExchanged(JaxOps):
    """One weight, sharded by its other dimension for a moment: an all-to-all there and back."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        spec = jax.typeof(weight).sharding.spec
        if name == "w_in":
            with jax.named_scope("exchanged"):
                weight = _moved(weight, *reversed(spec.partitions))
        return super()._einsum(name, plan, x, weight)


class _SumsGathered(JaxOps):
    """What enters each product, whole along its model dimension: after each sum, an exchange and a gather."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        there = jax.typeof(y).sharding.spec
        with jax.named_scope("whole"):
            y = _moved(_moved(y, None, None, there[0]), None, there[0], None)
        return super().residual(name, x, y)


class _LookedUpByProduct(JaxOps):
    """Tokens as rows of ones and zeros, multiplied by the table."""

    def embed(self, name: str, tokens: Array, table: Array) -> Array:
        spec = jax.typeof(super().embed(name, tokens, table)).sharding.spec
        with jax.named_scope(name):
            chosen = jax.nn.one_hot(tokens, table.shape[0], dtype=self.dtype)
            return jnp.einsum("BTV,VD->BTD", chosen, reshard(table, P(None, None)), out_sharding=spec)


class _ByEverybody(JaxOps):
    """One product of the whole batch on every device."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        y = super()._einsum(name, plan, x, weight)
        if name != "w_gate":
            return y
        with jax.named_scope(name):
            whole, w = reshard(x, P(None, None, None)), reshard(weight.astype(self.dtype), P(None, None))
            return reshard(jnp.einsum("BTD,DF->BTF", whole, w), jax.typeof(y).sharding.spec)


class _WideResidual(JaxOps):
    """The residual stream in float32: collectives and products are as planned, what is saved is not."""

    def embed(self, name: str, tokens: Array, table: Array) -> Array:
        return super().embed(name, tokens, table).astype(jnp.float32)

    def residual(self, name: str, x: Array, y: Array) -> Array:
        return super().residual(name, x, y.astype(x.dtype))

    def norm(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        return super().norm(name, x, *args, **kwargs).astype(self.dtype)


class _Dropout(JaxOps):
    """Dropout, each device by its own tokens."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        with jax.named_scope("dropout"):
            y = jnp.where(jnp.sin(1e3 * y.astype(jnp.float32)) > -0.9, y, 0)
        return super().residual(name, x, y)


class _NormedResidual(JaxOps):
    """A further norm, without a scale, of what is added to the residual stream."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        wide = y.astype(jnp.float32)
        y = (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(y.dtype)
        return super().residual(name, x, y)


class _CappedLogits(JaxOps):
    """Logits squashed to thirty at most."""

    def einsums(self, x: Array, weights: Any, **specs: str) -> tuple[Array, ...]:
        made = super().einsums(x, weights, **specs)
        return tuple(30 * jnp.tanh(y / 30) for y in made) if "unembed" in specs else made


class _WithoutPositions(JaxOps):
    """Queries and keys are not turned."""

    def rope(self, name: str, x: Array, *args: Any) -> Array:
        return x


class _WithoutResidual(JaxOps):
    """Layers that hand on what they make, and not what they were given."""

    def residual(self, name: str, x: Array, y: Array) -> Array:
        return y


class _WithoutGate(JaxOps):
    """The gate goes by no function."""

    def activation(self, name: str, gate: Array, up: Array | None, kind: str, *more: Any) -> Array:
        with jax.named_scope(name):
            return gate if up is None else gate * up


class _ScaledTable(JaxOps):
    """Rows of the table times the root of D, as Gemma has them."""

    def embed(self, name: str, tokens: Array, table: Array) -> Array:
        x = super().embed(name, tokens, table)
        return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)


class _InEightBits(JaxOps):
    """Products of operands that are rounded to eight bits."""

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array) -> Array:
        x, weight = (one.astype(jnp.float8_e4m3fn).astype(one.dtype) for one in (x, weight))
        return super()._einsum(name, plan, x, weight)


class _KeptInEightBits(JaxOps):
    """Activations that are rounded to eight bits."""

    def activation(self, name: str, gate: Array, up: Array | None, kind: str, *more: Any) -> Array:
        y = super().activation(name, gate, up, kind, *more)
        return y.astype(jnp.float8_e5m2).astype(y.dtype)


class _WithSumsSoFar(JaxOps):
    """What enters a layer, less a cumulative sum over its positions."""

    def norm(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        y = super().norm(name, x, *args, **kwargs)
        with jax.named_scope("so_far"):
            return y - (jnp.cumsum(y.astype(jnp.float32), 1) * 1e-6).astype(y.dtype)


class _KeysAmongValues(JaxOps):
    """Values with a part of the keys."""

    def attention(
        self, name: str, q: Array, k: Array, v: Array, *args: Any, **kwargs: Any
    ) -> tuple[Array, Any]:
        return super().attention(name, q, k, v + jnp.asarray(0.01, v.dtype) * k, *args, **kwargs)


class _CentredNorms(JaxOps):
    """Norms that subtract the mean, in bfloat16."""

    def norm(self, name: str, x: Array, *args: Any, **kwargs: Any) -> Array:
        with jax.named_scope(name):
            x -= jnp.mean(x.astype(jnp.float32), -1, keepdims=True).astype(x.dtype)
        return super().norm(name, x, *args, **kwargs)


OPERATIONS: dict[str, type[JaxOps]] = {
    "products of eight bits": _InEightBits,
    "activations of eight bits": _KeptInEightBits,
    "cumulative sums": _WithSumsSoFar,
    "keys among the values": _KeysAmongValues,
    "centred norms": _CentredNorms,
    "activations gathered": _Gathered,
    "activations exchanged": _Exchanged,
    "activations permuted": _Permuted,
    "products of float32": _Wide,
    "weights sent in float32": _Sent32,
    "every product twice": _Twice,
    "a mean over the batch in each norm": _Norms,
    "one weight sent in float32": _OneSent32,
    "weights without gradients": _WithoutGradients,
    "the head twice": _HeadTwice,
    "attention twice": _AttentionTwice,
    "keys and values gathered": _KeysGathered,
    "the table gathered": _TableGathered,
    "logits gathered": _LogitsGathered,
    "states gathered before the head": _StatesGathered,
    "a mask of dropout gathered": _MaskGathered,
    "one product recomputed": _Recomputed,
    "one weight gathered twice": _GatheredTwice,
    "a norm dropped": _NormDropped,
    "attention of float32": _WideAttention,
    "the head of float32": _WideHead,
    "a weight exchanged before its product": _WeightExchanged,
    "activations exchanged twice": _SumsGathered,
    "a look-up by products": _LookedUpByProduct,
    "a product by everybody": _ByEverybody,
    "a residual stream of float32": _WideResidual,
    "dropout on each device": _Dropout,
    "a norm of each residual": _NormedResidual,
    "capped logits": _CappedLogits,
    "no positions": _WithoutPositions,
    "no residual stream": _WithoutResidual,
    "no activation": _WithoutGate,
    "a scaled table": _ScaledTable,
}


def _applies(kind: str, layout: Layout) -> bool:
    """Whether a change of an operation changes a layout's program."""
    if kind in ("keys and values gathered", "logits gathered"):
        return layout.tensor > 1
    if kind in ("the table gathered", "one weight sent in float32", "weights sent in float32"):
        return layout.fsdp > 1 or layout.tensor > 1
    if kind == "cumulative sums":  # over positions that no axis splits
        return not layout.word("sequence_parallel")
    if kind == "a weight exchanged before its product":
        return layout.fsdp > 1
    return kind != "one product recomputed" or layout.schedule.remat != "full"


# Edits of the compiled text


def _edited(text: str, wanted: str, old: str, new: str) -> str | None:
    """The text with `old` made `new` in the first line that has `wanted` too; None where none has both."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if re.search(wanted, line) and re.search(old, line):
            lines[index] = re.sub(old, new, line, count=1)
            return "\n".join(lines)
    return None


def _fewer_turns(text: str) -> str | None:
    return _edited(text, "known_trip_count", r'"known_trip_count":\{"n":"4"', '"known_trip_count":{"n":"2"')


def _not_summed(text: str) -> str | None:
    return _edited(text, r"transpose\(jvp.*w_out", r" all-reduce\(", " copy(")


def _not_gathered(text: str) -> str | None:
    return _edited(text, "w_in", r" all-gather\(", " copy(")


def _other_groups(text: str) -> str | None:
    return _edited(
        text,
        r" all-reduce\(.*w_out",
        r"replica_groups=.+?(?=, use_global|, channel)",
        "replica_groups=[4,2]<=[2,2,2]T(1,2,0)",
    )


def _product_not_summed(text: str) -> str | None:
    return _edited(text, r'op_name="[^"]*/jvp\([^"]*/wo/', r" all-reduce\(", " copy(")


def _more_turns(text: str) -> str | None:
    return _edited(text, "known_trip_count", r'"known_trip_count":\{"n":"4"', '"known_trip_count":{"n":"8"')


def _gathered_elsewhere(text: str) -> str | None:
    groups = r"replica_groups=.+?(?=, dimensions|, use_global|, channel)"
    return _edited(text, r" all-gather\(.*w_in", groups, "replica_groups=[4,2]<=[2,2,2]T(1,2,0)")


def _fewer_devices(text: str) -> str | None:
    groups = r"replica_groups=.+?(?=, use_global|, channel)"
    return _edited(
        text, r" all-(reduce|gather)\(.*w_out", groups, "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    )


def _unknown_call(text: str) -> str | None:
    return _edited(text, r"w_gate.*dot_general", r" dot\(", " custom-call(")


def _half_of_the_axis(text: str) -> str | None:
    """A gradient summed over half of the devices of its axes."""
    groups = r"replica_groups=.+?(?=, use_global|, channel)"
    wanted = r" all-reduce\(.*transpose\(jvp.*w_out"
    line = next((line for line in text.splitlines() if re.search(wanted, line)), "")
    found = re.search(groups, line)
    if not found:
        return None
    members = parse_groups(found[0].removeprefix("replica_groups="), 8).members
    halves = [half for group in members for half in (group[::2], group[1::2]) if len(group) > 1]
    said = "{" + ",".join("{" + ",".join(map(str, half)) + "}" for half in halves) + "}"
    return _edited(text, wanted, groups, f"replica_groups={said}")


def _over_everybody(text: str) -> str | None:
    """A gradient of a layer summed over all devices."""
    everybody, wanted = "{{0,1,2,3,4,5,6,7}}", r"replica_groups=.+?(?=, use_global|, channel)"
    edited = _edited(text, r" all-reduce\(.*jvp.*/wo/", wanted, f"replica_groups={everybody}")
    return None if edited is None or _joined_by(edited, everybody) == _joined_by(text, everybody) else edited


def _joined_by(text: str, everybody: str) -> int:
    """How many collectives of a program join all devices, however their groups are written."""
    found = re.findall(r"replica_groups=(.+?)(?=, use_global|, channel|, dimensions)", text)
    return sum(parse_groups(groups, 8) == parse_groups(everybody, 8) for groups in found)


def _exchanged(text: str) -> str | None:
    return _edited(text, r" all-gather\(.*w_in", r" all-gather\(", " all-to-all(")


def _gathered_by_sum(text: str) -> str | None:
    return _edited(text, r" all-gather\(.*w_in", r" all-gather\(", " all-reduce(")


def _largest(text: str) -> str | None:
    """The largest part of a gradient in place of the sum of all."""
    of_numbers = r"%?([\w.\-]+) \([^\n]*\) -> \w+\[\] \{\n(?:(?!\n\}).)*?ROOT [^\n]* maximum\("
    largest = re.search(of_numbers, text, re.S)
    wanted = r" all-reduce\(.*transpose\(jvp.*w_out"
    return _edited(text, wanted, r"to_apply=%?[\w.\-]+", f"to_apply=%{largest[1]}") if largest else None


def _microbatch_again(text: str) -> str | None:
    return _edited(text, "known_trip_count", r'"known_trip_count":\{"n":"2"', '"known_trip_count":{"n":"3"')


def _loss_elsewhere(text: str) -> str | None:
    """The loss, alone or beside others, summed over pairs of devices that lie beside each other."""
    groups = r"replica_groups=.+?(?=, use_global|, channel)"
    pairs = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    return _edited(text, r"f32\[\].* all-reduce\(.*loss", groups, pairs)


def _shuffled(text: str) -> str | None:
    """The shards of a weight gathered from the last to the first."""
    groups = r"replica_groups=.+?(?=, dimensions|, use_global|, channel)"
    line = next((line for line in text.splitlines() if re.search(r" all-gather\(.*w_in", line)), "")
    found = re.search(groups, line)
    if not found:
        return None
    members = parse_groups(found[0].removeprefix("replica_groups="), 8).members
    said = ",".join("{" + ",".join(map(str, reversed(group))) + "}" for group in members)
    return _edited(text, r" all-gather\(.*w_in", groups, f"replica_groups={{{said}}}")


EDITS: dict[str, Callable[[str], str | None]] = {
    "half of the turns": _fewer_turns,
    "a gradient not summed": _not_summed,
    "a weight not gathered": _not_gathered,
    "a sum over other devices": _other_groups,
    "a sum over nobody": _fewer_devices,
    "a product in an unknown call": _unknown_call,
    "a product not summed": _product_not_summed,
    "twice the turns": _more_turns,
    "a gather over other devices": _gathered_elsewhere,
    "a gradient summed over half of its devices": _half_of_the_axis,
    "a sum over everybody": _over_everybody,
    "an exchange in place of a gather": _exchanged,
    "a sum in place of a gather": _gathered_by_sum,
    "the largest part of a gradient": _largest,
    "a microbatch again": _microbatch_again,
    "the loss summed over other devices": _loss_elsewhere,
    "shards gathered in another order": _shuffled,
}

# Steps of serving

# Of a step's arguments: weights, then caches.
_WEIGHTS, _CACHES = 0, 1
Served = Callable[..., Any]


def served(
    plan: Plan, change: Callable[[Served], Served] | None = None, donated: int | tuple[()] = _CACHES
) -> CompiledProgram:
    """The step of an inference plan, or what `change` makes of it, compiled for virtual CPU devices."""
    jitted, arguments, mesh = workload_step(
        plan.model, plan.layout, plan.workload, cast(InferencePhase, plan.workload.phase)
    )
    with jax.set_mesh(mesh):
        changed = jax.jit(change(jitted), donate_argnums=donated) if change else jitted
        program = changed.lower(*arguments).compile(compiler_options=UNOPTIMIZED)
    return CompiledProgram(program_text(program), 0.0, memory_by_cause(program, CPU.compiler))


def _given(argument: int, made: Callable[[Array], Array]) -> Callable[[Served], Served]:
    """The step of other weights, or of other caches: of `made` of each array of two dimensions and more."""

    def change(step: Served) -> Served:
        def run(*arguments: Any) -> Any:
            others = list(arguments)
            others[argument] = jax.tree.map(lambda x: made(x) if x.ndim > 1 else x, arguments[argument])
            return step(*others)

        return run

    return change


def _whole_for_a_moment(x: Array) -> Array:
    return _moved(x, *[None] * x.ndim)


def _run_twice(step: Served) -> Served:
    def run(*arguments: Any) -> Any:
        logits, pools = step(*arguments)
        again, pools = step(arguments[_WEIGHTS], pools, *arguments[2:])
        return logits + again, pools

    return run


def _of_logits(made: Callable[[Array], Array]) -> Callable[[Served], Served]:
    """The step with what is made of its logits in their place."""

    def change(step: Served) -> Served:
        def run(*arguments: Any) -> Any:
            logits, pools = step(*arguments)
            return made(logits), pools

        return run

    return change


def _shifted(pages: Array) -> Array:
    return jnp.roll(pages, 1, axis=2)


def _other_split(plan: Plan) -> Plan:
    return replace(plan, layout=plan.layout.replace(data=4, tensor=2))


SERVING_PLANS: dict[str, Callable[[Plan], Plan | None]] = {
    "half of the layers": _model(num_layers=2),
    "a wider feed-forward": _model(d_ff=160),
    "computed in float32": _layout(compute_dtype="f32"),
    "weights in float32": _layout(weights_dtype="f32"),
    "another split of the batch": _other_split,
    "twice the sequences": lambda plan: replace(plan, workload=Workload(32, 64, plan.workload.phase)),
    "twice the context": lambda plan: replace(plan, workload=Workload(16, 128, plan.workload.phase)),
}


def _in_reverse(pages: Array) -> Array:
    return jnp.flip(pages, 2) if pages.ndim > 2 else pages


def _only_the_best(logits: Array) -> Array:
    return jnp.where(logits >= lax.top_k(logits, 5)[0][:, -1:], logits, -1e30)


def _only_the_likeliest(logits: Array) -> Array:
    return jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=logits.dtype) * logits


def _handed_to_python(step: Served) -> Served:
    def run(*arguments: Any) -> Any:
        logits, pools = step(*arguments)
        jax.debug.callback(lambda total: None, logits.sum())
        return logits, pools

    return run


def _scaled(x: Array) -> Array:
    return (1.0001 * x.astype(jnp.float32)).astype(x.dtype)


SERVING_STEPS: dict[str, Callable[[Served], Served]] = {
    "caches scaled": _given(_CACHES, _scaled),
    "pages in reverse": _given(_CACHES, _in_reverse),
    "weights on a grid": _given(_WEIGHTS, _on_a_grid),
    "the five best logits": _of_logits(_only_the_best),
    "the likeliest token's logit": _of_logits(_only_the_likeliest),
    "capped logits": _of_logits(lambda logits: 30 * jnp.tanh(logits / 30)),
    "a callback on the host": _handed_to_python,
    "caches computed anew": _given(_CACHES, jnp.tanh),
    "caches masked": _given(_CACHES, lambda pages: jnp.where(pages > 0, pages, 0)),
    "caches shifted by a position": _given(_CACHES, _shifted),
    "caches gathered": _given(_CACHES, _whole_for_a_moment),
    "weights computed anew": _given(_WEIGHTS, jnp.sin),
    "weights gathered": _given(_WEIGHTS, _whole_for_a_moment),
    "the step twice": _run_twice,
    "logits sorted": _of_logits(jnp.sort),
    "probabilities in place of logits": _of_logits(jax.nn.softmax),
    "logits over a temperature": _of_logits(lambda logits: logits / 0.7),
}


def _served_otherwise(kind: str, plan: Plan) -> CompiledProgram | None:
    if kind in SERVING_PLANS:
        other = SERVING_PLANS[kind](plan)
        return None if other is None or other == plan else served(other)
    if kind == _NOT_DONATED:
        return served(plan, lambda step: lambda *arguments: step(*arguments), donated=())
    return served(plan, SERVING_STEPS[kind])


_NOT_DONATED = "caches not donated"
SERVING_KINDS = (*SERVING_PLANS, *SERVING_STEPS, _NOT_DONATED)
KINDS = (*OTHER_PLANS, *STEPS, *OPERATIONS, *EDITS)
# Every kind beside every layout that it is for.
CASES = (
    *((kind, layout) for layout in LAYOUTS for kind in KINDS),
    *((kind, layout) for layout in SERVING_LAYOUTS for kind in SERVING_KINDS),
)


def broken(kind: str, layout: str) -> CompiledProgram | None:
    """The program of `layout`'s plan with the fault `kind`; None where it does not apply."""
    plan = plan_of(layout)
    if plan.workload.phase != "train":
        return _served_otherwise(kind, plan)
    if kind in OTHER_PLANS:
        other = OTHER_PLANS[kind](plan)
        return None if other is None or other == plan else compiled(Broken(other))
    if kind in STEPS:
        return STEPS[kind](Broken(plan))
    if kind in OPERATIONS:
        if not _applies(kind, plan.layout):
            return None
        return compiled(Broken(plan, OPERATIONS[kind]))
    text = EDITS[kind]((given := unbroken(layout)).hlo)
    return None if text is None else replace(given, hlo=text)
