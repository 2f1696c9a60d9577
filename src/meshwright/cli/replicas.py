"""The application of a RayService, whose manifest `mw launch k8s --serve` writes. Imports Ray, but no JAX."""

from collections.abc import Mapping, Sequence

from ray import serve  # pyright: ignore[reportMissingImports]
from typer.main import get_command

from meshwright.cli.ray_servers import application_of, scales
from meshwright.cli.serve import app
from meshwright.serve.settings import Replicas, Server


def application(arguments: Mapping[str, Sequence[str]]) -> serve.Application:
    """The servers of a RayService. arguments: `command` has the words after `mw serve`."""
    made: list[serve.Application] = []

    def deploy(server: Server, replicas: Replicas) -> None:
        made.append(application_of(server, *scales(server, replicas)))

    get_command(app).main(list(arguments["command"]), prog_name="mw serve", standalone_mode=False, obj=deploy)
    return made[0]
