"""Records of optimizers, which plans, checks, help and `train/optimizers/` read."""

from meshwright.optimizers.adafactor import ADAFACTOR
from meshwright.optimizers.adamw import ADAMW
from meshwright.optimizers.lion import LION
from meshwright.optimizers.muon import MUON
from meshwright.optimizers.optimizer import Optimizer

OPTIMIZERS: dict[str, Optimizer] = {one.name: one for one in (ADAMW, ADAFACTOR, LION, MUON)}
