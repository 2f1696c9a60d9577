"""A Workload: the sequences of one step, their length, and the phase."""

from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.errors import PlanError, nearest

InferencePhase = Literal["prefill", "generate"]  # of inference
# A search looks at the divisors of a batch, which are found by trial.
_MOST = 2**32
# Default number of prompt tokens in a server's step.
DEFAULT_CHUNK = 512
PHASES = ("train", *get_args(InferencePhase))


@dataclass(frozen=True)
class Workload:
    """The input of one step: whole sequences of seq_len tokens.

    phase: "train"; "prefill" of seq_len tokens a sequence; "generate", one more token a sequence after a
    cache of seq_len positions.
    document_tokens: in training, the mean length of the documents that a sequence is packed of, weighted by
    length; a token attends only within its own. None: a sequence is one document.
    """

    num_sequences: int
    seq_len: int
    phase: str = "train"
    document_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise PlanError(f"workload: phase = {self.phase!r}; {nearest(self.phase, list(PHASES))}")
        for name in ("num_sequences", "seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"workload: {name} = {value!r}; it must be a positive integer")
            if value > _MOST:
                raise PlanError(
                    f"workload: {name} = {value:,} is more than {_MOST:,}, the most that is planned"
                )

    @property
    def attended_len(self) -> int:
        """Tokens of the sequence or document within which a token attends."""
        return min(self.document_tokens or self.seq_len, self.seq_len)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_len
