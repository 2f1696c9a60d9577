"""A generator on the trainer's devices; the planned move brings its weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.products.quantised import as_read
from meshwright.reinforcement.rollouts import EngineOnDevices, Rolled
from meshwright.reinforcement.weights_mover import WeightsMover
from meshwright.serve.engine.request import Request


class Together:
    """The engine on the devices of `mesh`, which has the trainer's layout. Rollouts run in `collect`."""

    def __init__(
        self,
        config: ModelConfig,
        trainer: Layout,
        mesh: jax.sharding.Mesh,
        layout: Layout,
        hardware: Hardware,
        *,
        num_slots: int,
        context: int,
    ) -> None:
        at = layout.at("generate")
        self.mover = WeightsMover(config, trainer, as_read(at), mesh, hardware)
        self._engine = EngineOnDevices(config, at, self.mover.target, num_slots=num_slots, context=context)
        self.num_devices = mesh.size
        self._requests: Sequence[Request] = ()

    def load(self, params: Mapping[str, Any]) -> None:
        self._engine.load(self.mover(params))

    def start(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def collect(self) -> Rolled:
        return self._engine.roll_out(self._requests)

    def close(self) -> None:
        self._engine.close()
