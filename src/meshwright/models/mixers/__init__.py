"""Mixers that keep a state for each sequence: one file each, a table of ModelConfig.

Attention, with its windows and latents, is in `models/transformer.py`.
"""

from meshwright.models.mixers.gated_delta import GatedDelta
from meshwright.models.mixers.lightning import Lightning
from meshwright.models.mixers.linear_unit import BLOCK_GATES, LinearUnit
from meshwright.models.mixers.mixer import LIKE_LETTERS, State, StateMixer
from meshwright.models.mixers.selective import Selective
from meshwright.models.mixers.short_convolution import ShortConvolution
from meshwright.models.mixers.state_space import StateSpace

# By the field of ModelConfig that holds it.
MIXERS: dict[str, type[StateMixer]] = {
    "delta": GatedDelta,
    "state_space": StateSpace,
    "short_convolution": ShortConvolution,
    "lightning": Lightning,
    "selective": Selective,
    "linear_unit": LinearUnit,
}

__all__ = [
    "BLOCK_GATES",
    "LIKE_LETTERS",
    "MIXERS",
    "GatedDelta",
    "Lightning",
    "LinearUnit",
    "Selective",
    "ShortConvolution",
    "State",
    "StateMixer",
    "StateSpace",
]
