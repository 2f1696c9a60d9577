"""A generator in a process of its own, on devices of its own.

Weights go from device to device: the trainer's process offers them by `jax.experimental.transfer`, sharded as
`fsdp` over as many devices as the smaller pool has, and the other process pulls them. Each process moves them
from or to its layout by the planned collectives, if it has that many devices. Messages go over a socket.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import jax

from meshwright.errors import DeviceError
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.params import abstract_params
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.nn.start.devices import use_devices_of
from meshwright.nn.start.processes import COORDINATOR
from meshwright.reinforcement.rollouts import EngineOnDevices, Rolled
from meshwright.reinforcement.weights_mover import WeightsMover
from meshwright.serve.engine.request import Request

_HOST = "127.0.0.1"
_READY, _LOADED = "ready", "loaded"


@dataclass(frozen=True)
class Job:
    """The work of the other process. crossing: the layout of the pulled weights."""

    config: ModelConfig
    layout: Layout
    hardware: str
    crossing: Layout
    num_slots: int
    context: int
    address: str


class Apart:
    """The engine in another process. It may roll out while this process trains."""

    def __init__(
        self,
        config: ModelConfig,
        trainer: Layout,
        mesh: jax.sharding.Mesh,
        layout: Layout,
        hardware: tuple[str, str],
        *,
        num_slots: int,
        context: int,
    ) -> None:
        """hardware: of the trainer and of the generator."""
        from jax.experimental import transfer

        self.num_devices = layout.mesh.num_devices
        size = min(mesh.size, self.num_devices)
        crossing = Layout.of(fsdp=size, weights_dtype=trainer.precision.weights_dtype)
        self._send = _mover(config, trainer, crossing, mesh, hardware[0])
        self._server = transfer.start_transfer_server(jax.devices()[0].client, f"{_HOST}:0", [f"{_HOST}:0"])
        self._numbers, self._sent = count(), 0.0
        job = Job(config, layout, hardware[1], crossing, num_slots, context, self._server.address())
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._connection, self._process = _started(self._log)
        self._say(job)
        self._hear()

    def load(self, params: Mapping[str, Any]) -> None:
        number = next(self._numbers)
        self._server.await_pull(number, jax.block_until_ready(self._send(params)))
        self._say(number)
        self._hear()

    def start(self, requests: Sequence[Request]) -> None:
        self._sent = time.perf_counter()
        self._say(tuple(requests))

    def collect(self) -> Rolled:
        asked = time.perf_counter()
        rolled: Rolled = self._hear()
        # Rollouts that ended before they were asked for have waited here.
        back = time.perf_counter() - max(asked, rolled.began + rolled.seconds)
        return rolled._replace(message_seconds=rolled.began - self._sent + back)

    def close(self) -> None:
        """End the other process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _say(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._ended() from None

    def _hear(self) -> Any:
        try:
            return self._connection.recv()
        except (OSError, EOFError):
            raise self._ended() from None

    def _ended(self) -> DeviceError:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return DeviceError(f"the process that rolls out ended with {code}{f': {lines[-1]}' if lines else ''}")


def _started(log: Any) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != COORDINATOR}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.reinforcement.apart", str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
        )
    return Connection(ours.detach()), process


def _mover(config: ModelConfig, before: Layout, after: Layout, mesh: jax.sharding.Mesh, hardware: str) -> Any:
    """A function of parameters: the planned move, or JAX's copies if the numbers of devices differ."""
    if before.mesh.num_devices == after.mesh.num_devices:
        return WeightsMover(config, before, after, mesh, catalog.load(hardware))
    target = device_mesh(after, list(mesh.devices.reshape(-1)))
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(config, after, target))
    return lambda params: jax.device_put(params, where)


def _serve(connection: Connection) -> None:
    """Answer messages until the other end closes: numbers load weights, requests are rolled out."""
    job: Job = connection.recv()
    use_devices_of(catalog.load(job.hardware))
    from jax.experimental import transfer

    at = job.layout.at("generate")
    mesh = device_mesh(job.crossing)
    types = abstract_params(job.config, job.crossing, mesh)
    receive = _mover(job.config, job.crossing, as_read(at), _all_devices(mesh, at), job.hardware)
    engine = EngineOnDevices(job.config, at, device_mesh(at), num_slots=job.num_slots, context=job.context)
    client = jax.devices()[0].client
    server = transfer.start_transfer_server(client, f"{_HOST}:0", [f"{_HOST}:0"])
    offers = server.connect(job.address)
    connection.send(_READY)
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # the engine's thread may hold the device
        if isinstance(message, int):
            engine.load(receive(offers.pull(message, types)))
            connection.send(_LOADED)
        else:
            connection.send(engine.roll_out(message))


def _all_devices(mesh: jax.sharding.Mesh, layout: Layout) -> jax.sharding.Mesh:
    """The mesh of the crossing, or of the layout if that has more devices."""
    return mesh if mesh.size >= layout.mesh.num_devices else device_mesh(layout)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
