"""A step of reinforcement learning as `train.loop` runs it: rollouts, rewards, scores and updates."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.nn.policy_loss import PolicyRows
from meshwright.reinforcement.prompts import Prompt, PromptBatch
from meshwright.reinforcement.rewards import Reward
from meshwright.reinforcement.rollouts import Generator, PackedRollouts, Rolled, pack_rollouts, seed_of
from meshwright.reinforcement.settings import RlSettings
from meshwright.serve.engine.request import Request, SamplingParams
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.train.step import CompiledStep, TrainState

# Added to the standard deviation of a prompt's rewards, which may be 0 (arXiv:2402.03300 leaves it out).
_LEAST_DEVIATION = 1e-4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RlState(TrainState):
    """The trainer's state. behind: parameters of an earlier step, which roll out; None without staleness."""

    behind: Any = None

    @property
    def train(self) -> TrainState:
        return TrainState(self.params, self.opt_state, self.num_updates)


class _Figures(NamedTuple):
    """Log-probabilities of the targets of one update's rows, [B, T+1], and the rows."""

    rows: PackedRollouts
    old: np.ndarray
    reference: np.ndarray


@jax.jit
def _copied(params: Mapping[str, Any]) -> Any:
    return jax.tree.map(jnp.copy, params)


class RlStep:
    """The TrainStep of reinforcement learning.

    learner: the compiled step of the policy loss. generator: rolls out with the weights that it is given.
    num_steps: of the run, after which nothing is rolled out. With staleness 1 the rollouts of a step come
    from the weights of one step earlier, and a generator apart makes them during that step.
    """

    def __init__(
        self,
        learner: CompiledStep,
        generator: Generator,
        tokenizer: Tokenizer,
        reward: Reward,
        settings: RlSettings,
        *,
        seed: int,
        num_steps: int,
    ) -> None:
        self.learner, self.generator, self.tokenizer = learner, generator, tokenizer
        self.reward, self.settings, self.seed, self.num_steps = reward, settings, seed, num_steps
        self.batch_sequences, self.seq_len = settings.prompts, learner.seq_len
        self.own_rows = range(settings.prompts)
        self.tokens_per_step = settings.updates * learner.tokens_per_step
        self.flops_per_step = settings.updates * learner.flops_per_step
        self.peak_flops_per_second = learner.peak_flops_per_second
        self.reference = learner.first_params(seed) if settings.kl else None
        self._started: int | None = None  # the first example of the rollouts under way
        self._asking_seconds = 0.0  # to make their requests

    # State

    def init(self, seed: int) -> RlState:
        state = self.learner.init(seed)
        return RlState(state.params, state.opt_state, state.num_updates, self._kept(state.params))

    def abstract_state(self) -> RlState:
        state = self.learner.abstract_state()
        behind = state.params if self.settings.staleness else None
        return RlState(state.params, state.opt_state, state.num_updates, behind)

    def saved(self, state: RlState) -> RlState:
        return state

    def placed(self, saved: RlState) -> RlState:
        return saved

    def _kept(self, params: Mapping[str, Any]) -> Any:
        """A copy of the parameters for the next step, since an update overwrites them."""
        if not self.settings.staleness:
            return None
        with jax.set_mesh(self.learner.mesh):
            return _copied(params)

    # The step

    def step(self, state: RlState, batch: PromptBatch) -> tuple[RlState, dict[str, Any]]:
        """(next state, metrics); see docs/reference/json.md for the metrics of a line."""
        began, seconds = time.perf_counter(), dict[str, float]()

        def timed(name: str, work: Callable[..., Any], *arguments: object) -> Any:
            started = time.perf_counter()
            result = jax.block_until_ready(work(*arguments))
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        policy = state.behind if self.settings.staleness else state.params
        if self._started != batch.example:
            timed("move_seconds", self.generator.load, policy)
            self._start(batch.example, batch.now)
        rolled: Rolled = timed("wait_seconds", self.generator.collect)
        self._started, asking = None, self._asking_seconds
        is_last = batch.example // len(batch.now) + 1 >= self.num_steps
        if self.settings.staleness and not is_last:
            timed("move_seconds", self.generator.load, state.params)
            self._start(batch.example + len(batch.now), batch.following)
        prompts = [prompt for prompt in batch.now for _ in range(self.settings.samples)]
        rewards = timed("reward_seconds", self._rewards, prompts, rolled)
        updates: list[_Figures] = timed("score_seconds", self._scored, prompts, rolled, policy)
        behind = timed("update_seconds", self._kept, state.params)
        after, metrics = timed("update_seconds", self._updated, state.train, updates, rewards, rolled)
        metrics |= timed("score_seconds", self._figures, rolled, rewards, updates)
        metrics |= seconds | {"rollout_seconds": rolled.seconds, "updates": len(updates)}
        if rolled.message_seconds:
            metrics["message_seconds"] = asking + rolled.message_seconds
        metrics["step_seconds"] = time.perf_counter() - began
        return RlState(after.params, after.opt_state, after.num_updates, behind), metrics

    def evaluate(self, state: RlState, tokens: np.ndarray) -> jax.Array:
        raise NotImplementedError("prompts have no validation")

    @property
    def num_compiled(self) -> int:
        return self.learner.num_compiled

    def program_texts(self) -> Mapping[str, str]:
        return {}

    def _start(self, example: int, prompts: Sequence[Prompt]) -> None:
        began, end = time.perf_counter(), frozenset(self.tokenizer.eos_ids)
        requests = [
            Request(
                prompt.tokens,
                self.settings.output_tokens,
                SamplingParams(seed=seed_of(self.seed, example + place, sample)),
                end,
            )
            for place, prompt in enumerate(prompts)
            for sample in range(self.settings.samples)
        ]
        self._started, self._asking_seconds = example, time.perf_counter() - began
        self.generator.start(requests)

    def _rewards(self, prompts: Sequence[Prompt], rolled: Rolled) -> np.ndarray:
        """f32[prompts, samples]."""
        answers = [
            self.tokenizer.decode([token for token in rollout.tokens if token not in self.tokenizer.eos_ids])
            for rollout in rolled.rollouts
        ]
        rewards = self.reward([prompt.row for prompt in prompts], answers)
        return np.asarray(rewards, np.float32).reshape(-1, self.settings.samples)

    def _scored(self, prompts: Sequence[Prompt], rolled: Rolled, policy: Any) -> list[_Figures]:
        """The rows of each update, with log-probabilities by `policy` and by the reference."""
        rows = pack_rollouts([prompt.tokens for prompt in prompts], rolled.rollouts, self.seq_len)
        size, count = self.learner.batch_sequences, len(rows.tokens)
        num_updates = min(count, max(self.settings.updates, -(-count // size)))
        parts = [rows.part(range(first, count, num_updates), size) for first in range(num_updates)]
        old = [self._log_probs(policy, part) for part in parts]
        if self.reference is None:
            reference = old
        else:
            reference = [self._log_probs(self.reference, part) for part in parts]
        return [_Figures(*one) for one in zip(parts, old, reference, strict=True)]

    def _log_probs(self, params: Any, rows: PackedRollouts) -> np.ndarray:
        """f32[B, T+1]: of each token as a target; 0 for the first."""
        return np.pad(self.learner.log_probs(params, rows.tokens), ((0, 0), (1, 0)))

    def _updated(
        self, state: TrainState, updates: Sequence[_Figures], rewards: np.ndarray, rolled: Rolled
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state after all updates; metrics are means over them, the learning rate is the last."""
        means, deviations = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True)
        advantages = ((rewards - means) / (deviations + _LEAST_DEVIATION)).reshape(-1)
        lengths = np.asarray([len(one.tokens) for one in rolled.rollouts], np.float32)
        lines = []
        for rows, old, reference in updates:
            counts = rows.rollout >= 0
            num_rollouts = len(np.unique(rows.rollout[counts]))
            # The loss is a mean over all targets of the rows; each rollout gets the same part of it.
            share = counts[:, 1:].size / (num_rollouts * lengths[rows.rollout])
            figures = PolicyRows(
                rows.tokens,
                old,
                reference,
                np.where(counts, advantages[rows.rollout], 0).astype(np.float32),
                np.where(counts, share, 0).astype(np.float32),
            )
            state, metrics = self.learner.step(state, figures)
            lines.append(jax.device_get(metrics))
        averaged = {name: float(np.mean([line[name] for line in lines])) for name in lines[0]}
        return state, averaged | {"learning_rate": float(lines[-1]["learning_rate"])}

    def _figures(self, rolled: Rolled, rewards: np.ndarray, updates: Sequence[_Figures]) -> dict[str, float]:
        counts = [one.rows.rollout >= 0 for one in updates]

        def of_targets(pick: Callable[[_Figures], np.ndarray]) -> np.ndarray:
            return np.concatenate([pick(one)[count] for one, count in zip(updates, counts, strict=True)])

        old = of_targets(lambda one: one.old)
        differences = np.abs(old - of_targets(lambda one: one.rows.log_probs))
        above = of_targets(lambda one: one.reference) - old
        lengths = [len(one.tokens) for one in rolled.rollouts]
        figures = {
            "reward": float(rewards.mean()),
            "reward_deviation": float(rewards.std(1).mean()),
            "answer_tokens": float(np.mean(lengths)),
            "cut_share": float(np.mean([one.cut for one in rolled.rollouts])),
            "entropy": float(-old.mean()),
            "logprob_difference": float(differences.max()),
            "mean_logprob_difference": float(differences.mean()),
        }
        if self.reference is not None:
            figures["kl"] = float(np.mean(np.exp(above) - above - 1))
        if self.reward.unread:
            figures["unread_scores"] = float(self.reward.unread)
        return figures
