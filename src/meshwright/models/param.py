"""The description of one parameter: its letters and its start."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """One parameter: its letters, the first of them its stack's if layers have one each, and its start.

    init: "ones", "zeros", or "normal" with standard deviation `fan_in ** -0.5` over the letters `fan_in`.
    "taps" is normal too, for a convolution along positions, which is no matrix of products; "decay" is the
    logarithm of a decay rate, uniform in 1 to 16; "slow_decay" is a number whose softplus is the rate of a
    decay with a factor uniform in 0.9 to 0.999. "experts" gives each row the numbers of different experts,
    less half the number of experts, so that 16-bit types hold them exactly.
    trained: whether gradients change it; a model with adapters trains only these.
    has_gradient: False if its gradient is zero, as of a bias that only chooses experts.
    wide_in: the narrow type whose published files keep this matrix wide, in this share of its layers.
    """

    letters: str
    init: str = "normal"
    fan_in: str = "D"
    trained: bool = True
    has_gradient: bool = True
    wide_in: str | None = None
    wide_share: float = 0.0

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.letters)
