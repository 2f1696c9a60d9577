"""The answer to one request of a load test, measured or simulated."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TimedAnswer:
    """The answer to one request, with times in seconds since the start of the test.

    piece_seconds: arrivals of pieces of text, a list or an array.
    num_tokens: the server's count of tokens, or the number of pieces if it has none.
    error: the reason for an incomplete answer, or None.
    """

    start_seconds: float
    piece_seconds: Any = field(default_factory=list)
    end_seconds: float = 0.0
    prompt_tokens: int | None = None
    num_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ttft_seconds(self) -> float | None:
        return float(self.piece_seconds[0]) - self.start_seconds if len(self.piece_seconds) else None

    def first_sent(self, *, pools_apart: bool) -> float:
        """Time of the first message.

        With pools apart a client reads the stream of a decode worker. It sends the first token, which a
        prefill worker computed, at the end of the request's first decode step, with the second token.
        """
        return float(self.piece_seconds[min(int(pools_apart), len(self.piece_seconds) - 1)])
