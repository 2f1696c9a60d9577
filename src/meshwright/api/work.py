"""What a machine is asked to do, as the library's user writes it."""

from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.units import parse_count, parse_length


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
                f"fits: --seq-len {model.max_seq_len}"
            )
        if self.batch_tokens < self.seq_len:
            raise PlanError(
                f"--batch-tokens {self.batch_tokens} is less than one sequence of {self.seq_len} tokens; "
                f"fits: --batch-tokens {self.seq_len}"
            )
        return Workload(round(self.batch_tokens / self.seq_len), self.seq_len)
