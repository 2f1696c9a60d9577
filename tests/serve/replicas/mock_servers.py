"""Two servers of a model worked by hand, on Ray Serve at a free port: prints their address, then `closed`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from starlette.applications import Starlette
from tests.serve.http.client import MODEL
from tests.serve.http.mock_server import answer
from tests.serve.mock import MockRunner, byte_tokenizer

from meshwright.nn.start.processes import free_port
from meshwright.serve.device.prefill_pool import Prefills
from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.replicas.deployment import ServerScale, cluster, ray_application, run_deployment


class SlowRunner(MockRunner):
    """A token of each sequence takes 20 ms."""

    def run(self, batch: Batch):
        time.sleep(0.02)
        return super().run(batch)


@contextmanager
def open_mock(limits: ClientLimits, _: Prefills | None) -> Iterator[Starlette]:
    with Engine(SlowRunner(answer, num_slots=4, context=20_000)) as engine:
        yield create_app(engine, byte_tokenizer(), MODEL, limits)


def main(*settings: str) -> None:
    limits = ClientLimits(api_keys=frozenset(["secret"]))
    scale = ServerScale(2, num_slots=4, autoscaling=dict(setting.split("=") for setting in settings))
    port = free_port()
    with cluster(scale.most_servers):
        made = ray_application(partial(open_mock, limits.behind_front()), limits, scale)
        run_deployment(made, "127.0.0.1", port, lambda: print(f"http://127.0.0.1:{port}", flush=True))
    print("closed", flush=True)


if __name__ == "__main__":
    # By its own name, so that the servers' processes find it.
    from tests.serve.replicas import mock_servers

    mock_servers.main(*sys.argv[1:])
