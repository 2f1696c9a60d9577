"""The Ray deployments of `mw serve --replicas`, with a process for each replica. Imports no JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette

from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.serve.device.prefill_pool import PrefilledElsewhere, Prefiller, Prefills
from meshwright.serve.replicas.deployment import PrefillPool, ServerScale, ray_application
from meshwright.serve.settings import Replicas, Server

if TYPE_CHECKING:  # they load JAX
    from meshwright.cli.service import Service
    from meshwright.serve.device.page_transfer import PageTransfer


@contextmanager
def open_replica(server: Server, prefills: Prefills | None) -> Iterator[Starlette]:
    """The application of one replica, in its own process. prefills: the servers that prefill for it."""
    server.engine.use_devices()
    from meshwright.cli.service import open_app

    def prefilled(service: "Service") -> PrefilledElsewhere:
        assert prefills is not None
        return PrefilledElsewhere(service.engine, _transfer(service), prefills)

    with open_app(server, _no_report, prefilled if prefills else None) as (app, _):
        yield app


@contextmanager
def open_prefiller(server: Server, name: str) -> Iterator[Prefiller]:
    """One server that prefills for others, in its own process."""
    server.engine.use_devices()
    from meshwright.cli.service import open_service

    with open_service(server.checkpoint, server.engine, _no_report) as service:
        yield Prefiller(service.engine, _transfer(service), name)


def _transfer(service: "Service") -> "PageTransfer":
    from meshwright.serve.device.page_transfer import PageTransfer

    return PageTransfer(ray.util.get_node_ip_address(), service.page_types)


def _no_report(_done: str, _share: float | None) -> None:
    """Drop the progress of a replica."""


def scales(server: Server, replicas: Replicas) -> tuple[ServerScale, ServerScale | None]:
    """Number and resources of the replicas, and of the prefill servers, if any.

    Raises PlanError for a plan of more than one host, and for autoscaling that Ray Serve refuses.
    """
    plan = server.engine.plan
    kind = None if plan is None else catalog.load(plan.hardware).chip.kind
    needs = server.engine.slots, _num_devices(server), kind
    (num_servers, autoscaling), (num_prefills, prefill_autoscaling) = replicas.pools
    scale = ServerScale(num_servers, *needs, autoscaling)
    return scale, ServerScale(num_prefills, *needs, prefill_autoscaling) if num_prefills else None


def application_of(server: Server, scale: ServerScale, prefills: ServerScale | None) -> serve.Application:
    """The application of several replicas, for the Ray cluster that this process has joined."""
    draft = server.engine.draft_checkpoint
    engine = replace(server.engine, draft_checkpoint=None if draft is None else draft.absolute())
    limits = server.limits.behind_front()
    behind = replace(server, checkpoint=server.checkpoint.absolute(), engine=engine, limits=limits)
    pool = None
    if prefills is not None:
        prefiller = replace(behind, engine=replace(engine, num_drafts=0, draft_checkpoint=None))
        pool = PrefillPool(partial(open_prefiller, prefiller), prefills)
    return ray_application(partial(open_replica, behind), server.limits, scale, pool)


def _num_devices(server: Server) -> int:
    plan = server.engine.plan
    if plan is None:
        return server.engine.num_devices
    hardware = catalog.load(plan.hardware)
    most = hardware.chip.chips_per_host
    if not hardware.chip.platform.virtual and hardware.num_chips > most:
        raise PlanError(
            f"the plan is for {plan.hardware}, {hardware.num_chips} chips, and a replica runs on one host, "
            f"which has {most}; fits: a plan for up to {most} chips"
        )
    return hardware.num_chips
