"""One step of post-training: the rollouts that it samples and the tokens that it trains on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.errors import PlanError
from meshwright.load.traffic import Lengths, Turn
from meshwright.options import REQUIRED, check_options, option
from meshwright.units import parse_count, parse_length

# By default an answer is cut at this many times the mean.
_CUT_AT = 4
_SEED = 0


@dataclass(frozen=True)
class PostTraining:
    """`samples` rollouts of each of `prompts`, and training on all of them.

    Lengths of answers are log-normal with a mean of output_tokens. spread: standard deviation of their
    logarithm. train_tokens: of one update of the optimizer; None: all tokens of the rollouts.
    """

    prompts: int = option(REQUIRED, least=1, most=1_000_000, help="Prompts of a step.")
    prompt_tokens: int = option(REQUIRED, parser=parse_length, help="Mean tokens of a prompt.")
    output_tokens: int = option(REQUIRED, parser=parse_length, help="Mean tokens of a rollout.")
    samples: int = option(16, least=1, most=10_000, help="Rollouts of each prompt.")
    spread: float = option(
        0.7, least=0, most=3, help="Standard deviation of the logarithm of a rollout's tokens."
    )
    most_output_tokens: int | None = option(
        None, parser=parse_length, help="Maximum tokens of a rollout.", unset="4 x --output-tokens"
    )
    train_tokens: int | None = option(
        None, parser=parse_count, help="Tokens of one update of the optimizer.", unset="all of a step"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.most_output_tokens is not None and self.most_output_tokens < self.output_tokens:
            raise PlanError(
                f"--most-output-tokens {self.most_output_tokens} is below the mean of {self.output_tokens}; "
                f"fits: {self.output_tokens} or more"
            )

    @property
    def num_rollouts(self) -> int:
        return self.prompts * self.samples

    @property
    def longest_answer(self) -> int:
        return self.most_output_tokens or _CUT_AT * self.output_tokens

    @property
    def context(self) -> int:
        """Tokens of the longest rollout with its prompt."""
        return self.prompt_tokens + self.longest_answer

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The lengths of all rollouts, the same in every call. The rollouts of a prompt share its length."""
        drawn = Lengths(self.prompt_tokens, self.output_tokens, self.spread).draw(
            np.random.default_rng(_SEED), self.num_rollouts
        )
        return tuple(Turn(self.prompt_tokens, min(turn.output_tokens, self.longest_answer)) for turn in drawn)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all rollouts with their prompts."""
        return sum(turn.prompt_tokens + turn.output_tokens for turn in self.turns)

    @cached_property
    def document_tokens(self) -> int:
        """Mean tokens of a rollout with its prompt, weighted by tokens: a token sees half of them."""
        lengths = [turn.prompt_tokens + turn.output_tokens for turn in self.turns]
        return round(sum(length**2 for length in lengths) / sum(lengths))

    @property
    def num_updates(self) -> int:
        return max(1, round(self.num_tokens / (self.train_tokens or self.num_tokens)))

    def shares(self, replicas: int, simulated: int) -> list[Sequence[Turn]]:
        """The rollouts of the first `simulated` of `replicas` servers; one of them has the longest.

        Rollouts are dealt in turn, as a client does that knows no lengths.
        """
        longest = max(range(self.num_rollouts), key=lambda number: self.turns[number].output_tokens)
        dealt = [self.turns[number::replicas] for number in range(replicas)]
        first = longest % replicas
        return [dealt[(first + number) % replicas] for number in range(min(simulated, replicas))]
