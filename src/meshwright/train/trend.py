"""The trend of the training loss, and the test for a spike above it."""

import math
from dataclasses import asdict, dataclass
from typing import Any

# The mean is over about 50 steps. In the first 50 steps only a value that is not finite is a spike.
_DECAY, _FEWEST = 0.98, 50
# A spike is above the mean by this number of standard deviations, and by at least this share of the mean.
_DEVIATIONS, _SHARE = 8.0, 0.2


@dataclass(frozen=True)
class LossTrend:
    """Exponential mean and variance of the loss over the steps so far.

        d = loss - m;   m <- m + (1 - b) d;   v <- b (v + (1 - b) d^2)

    b = 0.98. A checkpoint includes it, so that a resumed run finds the same spikes.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def after(self, loss: float) -> "LossTrend":
        """The trend with one more loss."""
        if self.count == 0:
            return LossTrend(1, loss, 0.0)
        above = loss - self.mean
        mean = self.mean + (1 - _DECAY) * above
        return LossTrend(self.count + 1, mean, _DECAY * (self.variance + (1 - _DECAY) * above**2))

    def fault(self, loss: float, grad_norm: float) -> str | None:
        """The fault in the numbers of the next step, None if there is none."""
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        limit = self.mean + max(_DEVIATIONS * math.sqrt(self.variance), _SHARE * abs(self.mean))
        if self.count >= _FEWEST and loss > limit:
            return f"loss {loss:.3f} is a spike above the trend's {self.mean:.3f}"
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
