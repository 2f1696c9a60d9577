"""What a machine is asked to do, as the library's user writes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from meshwright.errors import PlanError
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.units import parse_count, parse_length

if TYPE_CHECKING:
    from meshwright.plan.serve.requests import Requests, Targets


@dataclass(frozen=True)
class Train:
    """A training step of `batch_tokens`, in sequences of `seq_len`; integers, or text as on the command line.

    >>> Train(batch_tokens="4M", seq_len="8k")
    Train(batch_tokens=4000000, seq_len=8192)
    """

    batch_tokens: int
    seq_len: int

    def __init__(self, batch_tokens: int | str, seq_len: int | str) -> None:
        object.__setattr__(self, "batch_tokens", parse_count(batch_tokens))
        object.__setattr__(self, "seq_len", parse_length(seq_len))

    def workload(self, model: ModelConfig) -> Workload:
        """The nearest number of whole sequences. Raises PlanError where one is too long or too much."""
        if self.seq_len > model.max_seq_len:
            raise PlanError(
                f"--seq-len {self.seq_len} is longer than {model.name}'s context of {model.max_seq_len}; "
                f"fits: --seq-len {model.max_seq_len}, or --set max_seq_len={self.seq_len}"
            )
        if self.batch_tokens < self.seq_len:
            raise PlanError(
                f"--batch-tokens {self.batch_tokens} is less than one sequence of {self.seq_len} tokens; "
                f"fits: --batch-tokens {self.seq_len}"
            )
        return Workload(round(self.batch_tokens / self.seq_len), self.seq_len)


_TOKENS = ("prompt_tokens", "output_tokens")


def _means(
    prompt_tokens: int | str | None, output_tokens: int | str | None, lengths: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Tokens of a prompt and of its answer. Raises PlanError unless they are said, once."""
    if bool(lengths) == (prompt_tokens is not None or output_tokens is not None):
        raise PlanError("Serve: give prompt_tokens and output_tokens, or lengths")
    if lengths:
        from meshwright.plan.serve.requests import Requests

        found = Requests.of_lengths(lengths)
        return found.prompt_tokens, found.output_tokens
    if prompt_tokens is None or output_tokens is None:
        raise PlanError("Serve: prompt_tokens and output_tokens are both needed")
    return parse_length(prompt_tokens), parse_length(output_tokens)


@dataclass(frozen=True)
class Serve:
    """Requests of `prompt_tokens` answered with `output_tokens`; integers, or text as on the command line.

    ttft, tpot: the most seconds to the first token, and for each after it. max_price_per_hour: of all chips.
    prefix_hit, drafts, acceptance, paged, chunk: as plan/serve/requests.py has them. lengths: of a sample of
    requests that differ (prompt, output) tokens, in place of prompt_tokens and output_tokens.

    >>> Serve("8k", 512, tpot=0.02)
    Serve(prompt_tokens=8192, output_tokens=512, ttft=None, tpot=0.02)
    """

    prompt_tokens: int
    output_tokens: int
    ttft: float | None = None
    tpot: float | None = None
    max_price_per_hour: float | None = field(default=None, repr=False)
    prefix_hit: float = field(default=0.0, repr=False)
    drafts: int = field(default=0, repr=False)
    acceptance: float = field(default=0.0, repr=False)
    paged: bool = field(default=False, repr=False)
    chunk: int | None = field(default=None, repr=False)
    lengths: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def __init__(
        self,
        prompt_tokens: int | str | None = None,
        output_tokens: int | str | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
        *,
        max_price_per_hour: float | None = None,
        prefix_hit: float = 0.0,
        drafts: int = 0,
        acceptance: float = 0.0,
        paged: bool = False,
        chunk: int | None = None,
        lengths: Sequence[tuple[int, int]] = (),
    ) -> None:
        means = _means(prompt_tokens, output_tokens, lengths)
        values = locals() | {"lengths": tuple(lengths)} | dict(zip(_TOKENS, means, strict=True))
        for one in fields(self):
            object.__setattr__(self, one.name, values[one.name])

    @property
    def requests(self) -> "Requests":
        """What is served. Raises PlanError for a share or a number that is none."""
        from meshwright.plan.serve.requests import Requests

        names = ("prefix_hit", "drafts", "acceptance", "paged", "chunk")
        rest = {name: getattr(self, name) for name in names}
        if self.lengths:
            return Requests.of_lengths(self.lengths, **rest)
        return Requests(self.prompt_tokens, self.output_tokens, **rest)

    @property
    def targets(self) -> "Targets":
        """What every answer must meet. Raises PlanError for what is no time."""
        from meshwright.plan.serve.requests import Targets

        given = {"ttft": self.ttft, "tpot": self.tpot, "price_per_hour": self.max_price_per_hour}
        return Targets(**{name: value for name, value in given.items() if value is not None})
