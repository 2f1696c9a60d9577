"""Requests of a serving plan, and its targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from meshwright.errors import PlanError
from meshwright.layout.page_sizes import num_state_entries
from meshwright.units import Numeric


@dataclass(frozen=True)
class Requests:
    """Requests of `prompt_tokens` and `output_tokens` tokens, or of these means if lengths differ.

    longest: positions of the longest request. token_context: mean positions that a generated token sees. Both
    are None if all requests have the same length; see `of_lengths`. prefix_hit: the share of a prompt with
    keys and values already in a prefix cache. drafts: tokens guessed before each step, which verifies them;
    guesses cost nothing (n-grams of the text so far), unless a draft_head of the model makes them one after
    another. acceptance: the chance that a guess is right if
    the guesses before it are. paged: caches take only the memory of the positions that they
    hold, on average the mean context; otherwise each is allocated for its whole request from the start.
    chunk: prompt tokens per prefill pass; None for whole prompts.
    """

    prompt_tokens: int
    output_tokens: int
    prefix_hit: float = 0.0
    drafts: int = 0
    acceptance: float = 0.0
    draft_head: bool = False
    paged: bool = False
    chunk: int | None = None
    longest: int | None = None
    token_context: int | None = None

    @classmethod
    def of_lengths(cls, lengths: Sequence[tuple[int, int]], **rest: Any) -> "Requests":
        """Requests of these (prompt, output) tokens, each equally likely. rest: further fields.

        A request of p and o tokens takes o steps, at a context of p + o/2 on average: a step reads the mean
        over tokens, not over requests. Memory is allocated for the longest request; prefill is priced for the
        mean prompt.

        >>> mixed = Requests.of_lengths([(100, 10), (300, 90)])
        >>> mixed.prompt_tokens, mixed.output_tokens, mixed.context, mixed.mean_context
        (200, 50, 390, 321)
        """
        if not lengths:
            raise PlanError("lengths: no request is given")
        prompts, outputs = zip(*lengths, strict=True)
        num_tokens = sum(outputs)
        if min(*prompts, *outputs) < 1:
            raise PlanError("lengths: each prompt and each answer has a positive number of tokens")
        seen = sum(output * (prompt + max(1, output // 2)) for prompt, output in lengths)
        return cls(
            round(sum(prompts) / len(lengths)),
            round(num_tokens / len(lengths)),
            longest=max(map(sum, lengths)),
            token_context=round(seen / num_tokens),
            **rest,
        )

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} = {value!r}; it must be a positive integer")
        for name in ("prefix_hit", "acceptance"):
            if not 0 <= getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)}; it must be at least 0 and below 1")
        if self.chunk is not None and self.chunk < 1:
            raise PlanError(f"chunk = {self.chunk}; it must be 1 or more")
        if self.drafts < 0:
            raise PlanError(f"drafts = {self.drafts}; it must be 0 or more")
        if self.acceptance and not self.drafts:
            raise PlanError(f"acceptance = {self.acceptance} needs drafts; add --drafts 4")
        if self.draft_head and not self.drafts:
            raise PlanError("a draft head needs drafts to make; add --drafts 4")

    @property
    def context(self) -> int:
        """Positions of the longest request."""
        return self.longest or self.prompt_tokens + self.output_tokens

    @property
    def mean_context(self) -> int:
        """Positions in the cache of a request on average while it is answered."""
        return self.token_context or self.prompt_tokens + max(1, self.output_tokens // 2)

    @property
    def held_context(self) -> int:
        """Positions of a request that take memory."""
        return self.mean_context if self.paged else self.context

    def num_state_entries(self, num_sequences: Numeric, num_replicas: int, *, is_ours: bool) -> Any:
        """States of layers with a state that a server keeps on all replicas; arrays of sequences give arrays.

        States after each draft are kept until it is verified. `mw serve` (is_ours) has as many snapshots of
        its prefix cache as sequences, and an entry for padding rows; other engines are assumed to have
        snapshots if prompts are found in a cache.
        """
        per_replica = num_sequences / num_replicas
        snapshots = per_replica if is_ours or self.prefix_hit else 0
        entries = num_state_entries(per_replica, snapshots, self.drafts)
        return num_replicas * (entries if is_ours else entries - 1)

    @property
    def new_prompt_tokens(self) -> int:
        """Tokens of a prompt that prefill computes."""
        return max(1, round(self.prompt_tokens * (1 - self.prefix_hit)))

    @property
    def tokens_a_step(self) -> float:
        """Tokens that one generate step adds to a sequence: (1 - a^(k+1)) / (1 - a) with k drafts.

        Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), eq. 1.

        >>> round(Requests(8, 8, drafts=4, acceptance=0.8).tokens_a_step, 3)
        3.362
        """
        return (1 - self.acceptance ** (self.drafts + 1)) / (1 - self.acceptance)


def paying_acceptance(drafts: int, step_ratio: float) -> float | None:
    """The acceptance above which drafts save time; None if no acceptance does.

    step_ratio: seconds of a step with `drafts` drafts, made and verified, over one without. The answer a
    solves 1 + a + ... + a^k = step_ratio.

    >>> paying_acceptance(1, 1.25), paying_acceptance(2, 4.0)
    (0.25, None)
    """
    if step_ratio > 1 + drafts:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if sum(middle**k for k in range(drafts + 1)) < step_ratio else (low, middle)
        )
    return round(high, 5)


@dataclass(frozen=True)
class Targets:
    """The most that may be: seconds to the first token, seconds of each token after it, price an hour."""

    ttft: float = inf
    tpot: float = inf
    price_per_hour: float = inf

    def __post_init__(self) -> None:
        given = {"ttft": self.ttft, "tpot": self.tpot, "max_price_per_hour": self.price_per_hour}
        for name, value in given.items():
            if not value > 0:
                raise PlanError(f"{name} = {value}; it must be a number above 0")
