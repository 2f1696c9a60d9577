"""`mw serve --replicas`: each replica opens the checkpoint in its own process. Imports Ray, but no JAX."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from typer.main import get_command

from meshwright.cli.served import Served, open_app
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.serve.replicas.deployment import ServerScale
from meshwright.serve.replicas.deployment import application as deployed


@contextmanager
def open_replica(served: Served) -> Iterator[Starlette]:
    """The application of one replica, in its own process."""
    served.asked.use_devices()
    with open_app(served, lambda _done, _share: None) as (app, _):
        yield app


def scale_of(served: Served, num_replicas: int, autoscaling: Mapping[str, str]) -> ServerScale:
    """How many replicas, and what one needs.

    Raises PlanError for a plan of more than one host, and for autoscaling that Ray Serve does not take.
    """
    plan = served.asked.plan
    kind = None if plan is None else catalog.load(plan.hardware).chip.kind
    return ServerScale(num_replicas, served.asked.slots, _num_devices(served), kind, autoscaling)


def replicas(served: Served, scale: ServerScale) -> serve.Application:
    """The application of several replicas, for the Ray cluster that this process has joined."""
    draft = served.asked.draft_checkpoint
    asked = replace(served.asked, draft_checkpoint=None if draft is None else draft.absolute())
    limits = served.limits.behind_front()
    behind = replace(served, checkpoint=served.checkpoint.absolute(), asked=asked, limits=limits)
    return deployed(partial(open_replica, behind), served.limits, scale)


def _num_devices(served: Served) -> int:
    plan = served.asked.plan
    if plan is None:
        return served.asked.num_devices
    hardware = catalog.load(plan.hardware)
    most = hardware.chip.chips_per_host
    if hardware.chip.kind != "cpu" and hardware.num_chips > most:
        raise PlanError(
            f"the plan is for {plan.hardware}, {hardware.num_chips} chips, and a replica runs on one host, "
            f"which has {most}; fits: a plan for up to {most} chips"
        )
    return hardware.num_chips


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """What a RayService starts. `command` of its arguments: the words behind `mw serve`."""
    from meshwright.cli.serve import app

    made: list[serve.Application] = []

    def take(served: Served, num_replicas: int, autoscaling: Mapping[str, str]) -> None:
        made.append(replicas(served, scale_of(served, num_replicas, autoscaling)))

    words = list(arguments["command"])
    get_command(app).main(words, prog_name="mw serve", standalone_mode=False, obj=take)
    return made[0]
