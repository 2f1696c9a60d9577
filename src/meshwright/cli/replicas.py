"""`mw serve --replicas`: each replica opens the checkpoint in its own process. Imports Ray, but no JAX."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from typer.main import get_command

from meshwright.cli.served import Replicas, Served, open_app
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.serve.device.prefill_pool import PrefilledElsewhere, Prefiller, Prefills
from meshwright.serve.replicas.deployment import PrefillPool, ServerScale
from meshwright.serve.replicas.deployment import application as deployed

if TYPE_CHECKING:  # they load JAX
    from meshwright.cli.serving import Service
    from meshwright.serve.device.page_transfer import PageTransfer


@contextmanager
def open_replica(served: Served, prefills: Prefills | None) -> Iterator[Starlette]:
    """The application of one replica, in its own process; `prefills` prefill for it."""
    served.asked.use_devices()

    def prefilled(service: "Service") -> PrefilledElsewhere:
        assert prefills is not None
        return PrefilledElsewhere(service.engine, _transfer(service), prefills)

    with open_app(served, _no_report, prefilled if prefills else None) as (app, _):
        yield app


@contextmanager
def open_prefiller(served: Served, name: str) -> Iterator[Prefiller]:
    """One server that prefills for others, in its own process."""
    served.asked.use_devices()
    from meshwright.cli.serving import open_service

    with open_service(served.checkpoint, served.asked, _no_report) as service:
        yield Prefiller(service.engine, _transfer(service), name)


def _transfer(service: "Service") -> "PageTransfer":
    from meshwright.serve.device.page_transfer import PageTransfer

    return PageTransfer(ray.util.get_node_ip_address(), service.page_types)


def _no_report(_done: str, _share: float | None) -> None:
    """Nobody looks at a replica's progress."""


def scales(served: Served, replicas: Replicas) -> tuple[ServerScale, ServerScale | None]:
    """How many replicas and what one needs; the same of those that prefill, if there are any.

    Raises PlanError for a plan of more than one host, and for autoscaling that Ray Serve does not take.
    """
    plan = served.asked.plan
    kind = None if plan is None else catalog.load(plan.hardware).chip.kind
    needs = served.asked.slots, _num_devices(served), kind
    scale = ServerScale(replicas.num_servers, *needs, replicas.autoscaling)
    if not replicas.num_prefills:
        return scale, None
    return scale, ServerScale(replicas.num_prefills, *needs, replicas.prefill_autoscaling)


def application_of(served: Served, scale: ServerScale, prefills: ServerScale | None) -> serve.Application:
    """The application of several replicas, for the Ray cluster that this process has joined."""
    draft = served.asked.draft_checkpoint
    asked = replace(served.asked, draft_checkpoint=None if draft is None else draft.absolute())
    limits = served.limits.behind_front()
    behind = replace(served, checkpoint=served.checkpoint.absolute(), asked=asked, limits=limits)
    pool = None
    if prefills is not None:
        alone = replace(behind, asked=replace(asked, num_drafts=0, draft_checkpoint=None))
        pool = PrefillPool(partial(open_prefiller, alone), prefills)
    return deployed(partial(open_replica, behind), served.limits, scale, pool)


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

    def take(served: Served, replicas: Replicas) -> None:
        made.append(application_of(served, *scales(served, replicas)))

    words = list(arguments["command"])
    get_command(app).main(words, prog_name="mw serve", standalone_mode=False, obj=take)
    return made[0]
