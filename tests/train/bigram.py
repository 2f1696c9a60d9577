"""A training step small enough to follow: a table of bigram logits [V, V] on an explicit mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.train.optimizers import OptimizerConfig, learning_rate, make_optimizer

OPTIMIZER = OptimizerConfig(peak_learning_rate=0.5, warmup_steps=2, total_steps=40)


class BigramStep:
    """loss = mean -log softmax(w[t])[next t]; fails_at poisons the loss of that step with a NaN."""

    flops_per_step = 1e6
    peak_flops_per_second = 1e9

    def __init__(
        self,
        *,
        vocab_size: int = 300,
        seq_len: int = 16,
        batch_sequences: int = 8,
        data: int = 4,
        tensor: int = 2,
        fails_at: int = -1,
    ) -> None:
        self.batch_sequences, self.seq_len, self.vocab_size = batch_sequences, seq_len, vocab_size
        self.own_rows = range(batch_sequences)
        self.tokens_per_step = batch_sequences * seq_len
        self.batches: list[np.ndarray] = []
        self.num_evaluated = 0
        devices = jax.devices()[: data * tensor]
        mesh = jax.make_mesh((data, tensor), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=devices)
        self.mesh, self.sharded = mesh, NamedSharding(mesh, P(None, "tensor"))
        self._tokens, self._fails_at = NamedSharding(mesh, P("data")), fails_at
        self._optimizer = make_optimizer(OPTIMIZER)
        self._step = jax.jit(self._update, donate_argnums=0)
        self._loss_of = jax.jit(lambda state, tokens: self._loss(state["params"], tokens))

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        previous, following = tokens[:, :-1], tokens[:, 1:]
        one_hot = jax.nn.one_hot(previous, self.vocab_size)
        logits = jnp.einsum("BTV,VW->BTW", one_hot, params["w"], out_sharding=P("data"))
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(following, self.vocab_size), -1))

    def _update(self, state: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(self._loss)(state["params"], tokens)
        updates, opt_state = self._optimizer.update(gradients, state["opt_state"], state["params"])
        metrics = {
            "loss": jnp.where(state["step"] == self._fails_at, jnp.nan, loss),
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": learning_rate(OPTIMIZER)(state["step"]),
        }
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics

    def init(self, seed: int) -> Any:
        def build() -> Any:
            w = jax.random.normal(jax.random.key(seed), (self.vocab_size, self.vocab_size)) * 0.01
            params = {"w": jax.sharding.reshard(w, self.sharded)}
            return {"params": params, "opt_state": self._optimizer.init(params), "step": jnp.int32(0)}

        with jax.set_mesh(self.mesh):
            return jax.jit(build)()

    def abstract_state(self) -> Any:
        state = self.init(0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

    def saved(self, state: Any) -> Any:
        return state

    def placed(self, saved: Any) -> Any:
        return saved

    def step(self, state: Any, tokens: np.ndarray) -> tuple[Any, dict[str, jax.Array]]:
        self.batches.append(tokens)
        with jax.set_mesh(self.mesh):
            return self._step(state, jax.device_put(tokens, self._tokens))

    def evaluate(self, state: Any, tokens: np.ndarray) -> jax.Array:
        self.num_evaluated += 1
        with jax.set_mesh(self.mesh):
            return self._loss_of(state, jax.device_put(tokens, self._tokens))
