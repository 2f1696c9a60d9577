"""The servers and their front as deployments of Ray Serve, and a cluster of only this machine."""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from pydantic import ValidationError
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve.config import (  # pyright: ignore[reportMissingImports]
    AutoscalingConfig,
    HTTPOptions,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from starlette.types import Message

from meshwright.errors import DeviceError, MeshwrightError, PlanError
from meshwright.platforms import PLATFORMS
from meshwright.serve.device.prefill_pool import Offer, Prefiller, Prefills, Tokens
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.replicas.forwarded import ROUTING, Forwarded
from meshwright.serve.replicas.front import front_app
from meshwright.serve.replicas.router import PrefixRouter
from meshwright.serve.replicas.routes import Beginning, beginning_of
from meshwright.signals import end_event

APPLICATION, _SERVERS, _PREFILLS = "meshwright", "servers", "prefills"
# Time for answers to finish after a server is asked to end; equal to a single server's.
_SHUTDOWN_SECONDS = 20.0
_HEALTH_SECONDS = 5.0
# Requests that a server may hold: its engine's queue is what refuses more.
_MOST_REQUESTS = 10_000
_OBJECT_STORE_BYTES = 256 * 2**20

OpenApp = Callable[[Prefills | None], AbstractContextManager[Starlette]]
OpenPrefiller = Callable[[str], AbstractContextManager[Prefiller]]


@dataclass(frozen=True)
class ServerScale:
    """The number of servers, and the resources of each.

    num_slots: concurrent answers of one server. num_devices: devices of one server, of the given kind (cpu,
    gpu, tpu); without a kind, of the best in the cluster. autoscaling: settings of Ray Serve's
    AutoscalingConfig by name, as text; with any of them, num_servers is the minimum. Raises PlanError for a
    setting that Ray Serve refuses.
    """

    num_servers: int
    num_slots: int
    num_devices: int = 1
    kind: str | None = None
    autoscaling: Mapping[str, str] = field(default_factory=dict)

    @property
    def most_servers(self) -> int:
        """Maximum number of servers."""
        most = self.autoscaling.get("max_replicas", "")
        return max(self.num_servers, int(most) if most.isdecimal() else 0)

    def needs(self) -> dict[str, Any]:
        """The Ray resources of one server."""
        known = ray.cluster_resources()
        kind = self.kind or next(kind for kind in PLATFORMS if kind.upper() in {*known, "CPU"})
        return PLATFORMS[kind].ray_resources(self.num_devices)

    def __post_init__(self) -> None:
        self.options()  # before a cluster is started for it

    def options(self) -> dict[str, Any]:
        """Ray Serve's options for it."""
        if not self.autoscaling:
            return {"num_replicas": self.num_servers}
        known = AutoscalingConfig.model_fields
        for name in self.autoscaling:
            if name not in known:
                raise PlanError(
                    f"autoscaling {name} is unknown to Ray Serve; it has {', '.join(sorted(known))}"
                )
        defaults = {"min_replicas": self.num_servers, "target_ongoing_requests": self.num_slots}
        settings = defaults | {"max_replicas": self.num_servers} | dict(self.autoscaling)
        try:
            return {"autoscaling_config": AutoscalingConfig.model_validate(settings)}
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise PlanError(f"autoscaling {where}: {first['msg'].removeprefix('Value error, ')}") from error


class ReplicaServer:
    """One server: an application over an engine of its own, in a process of its own.

    prefills: the servers that prefill for it.
    """

    def __init__(self, open_app: OpenApp, prefills: DeploymentHandle | None = None) -> None:
        self._stack = ExitStack()
        self._app = self._stack.enter_context(open_app(RayPrefills(prefills) if prefills else None))

    async def answer(self, forwarded: Forwarded) -> AsyncIterator[Message]:
        """The application's answer to a request, as the messages of ASGI."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        asked: list[Message] = [{"type": "http.request", "body": forwarded.body, "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # a client that leaves cancels this
            return asked.pop()

        async def answer() -> None:
            try:
                await self._app(_scope(forwarded), receive, messages.put)
            finally:
                messages.put_nowait(None)

        working = asyncio.ensure_future(answer())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await working
        finally:
            working.cancel()

    async def check_health(self) -> None:
        """Raises RuntimeError once the engine has stopped; Ray then starts another server in its place."""
        forwarded = Forwarded("", "GET", "/health", b"", (), b"")
        statuses = [message.get("status") async for message in self.answer(forwarded)]
        if 200 not in statuses:
            raise RuntimeError("the engine has stopped")

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self._stack.close()


class PrefillServer:
    """One server that prefills for others, in a process of its own."""

    def __init__(self, open_prefiller: OpenPrefiller) -> None:
        self._stack = ExitStack()
        name = serve.get_replica_context().replica_id.unique_id
        self._prefiller = self._stack.enter_context(open_prefiller(name))

    async def prefill(self, _: Forwarded, prompt: Tokens) -> Offer | None:
        return await self._prefiller.prefill(prompt)

    async def pulled(self, _: Forwarded, number: int) -> None:
        self._prefiller.pulled(number)

    async def check_health(self) -> None:
        """Raises RuntimeError once the engine has stopped, as a ReplicaServer does."""
        if self._prefiller.engine.stopped:
            raise RuntimeError("the engine has stopped")

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self._stack.close()


@dataclass(frozen=True)
class RayPrefills:
    """The servers that prefill, asked by one that generates.

    A prompt goes to the server of earlier prompts with the same prefix, as clients' requests do.
    """

    handle: DeploymentHandle

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        return (RayActorError,)

    async def prefill(self, prompt: Tokens) -> Offer | None:
        name, beginning = uuid.uuid4().hex, beginning_of(repr(prompt))
        ROUTING.open(name)
        try:
            return await self.handle.prefill.remote(_own_forwarded(name, beginning), prompt)
        finally:
            ROUTING.end(name)

    async def pulled(self, offer: Offer) -> None:
        await self.handle.pulled.remote(replace(_own_forwarded(""), server=offer.server), offer.number)


def _own_forwarded(name: str, beginning: Beginning = ()) -> Forwarded:
    """A request between servers, as the router reads it."""
    return Forwarded(name, "", "", b"", (), b"", beginning)


def _scope(forwarded: Forwarded) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": forwarded.method,
        "path": forwarded.path,
        "raw_path": forwarded.path.encode(),
        "query_string": forwarded.query,
        "headers": list(forwarded.headers),
        "client": None,
        "server": None,
    }


@dataclass(frozen=True)
class PrefillPool:
    """Servers that prefill for the others. open_prefiller: opens one, of a name, in its own process."""

    open_prefiller: OpenPrefiller
    scale: ServerScale


def ray_application(
    open_app: OpenApp, limits: ClientLimits, scale: ServerScale, pool: PrefillPool | None = None
) -> serve.Application:
    """The servers with a front, for `serve.run` or a RayService.

    open_app: opens a server's application in its own process, given the servers that prefill for it if the
    deployment has a pool. limits: the front's limits on clients.
    """
    if pool is None:
        servers = _deployed(ReplicaServer, _SERVERS, scale).bind(open_app)
    else:
        prefills = _deployed(PrefillServer, _PREFILLS, pool.scale).bind(pool.open_prefiller)
        servers = _deployed(ReplicaServer, _SERVERS, scale).bind(open_app, prefills)

    def front() -> Starlette:
        return front_app(serve.get_deployment_handle(_SERVERS, app_name=APPLICATION), limits)

    return serve.deployment(
        serve.ingress(front)(),
        name="front",
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    ).bind(servers)


def _deployed(server: type, name: str, scale: ServerScale) -> serve.Deployment:
    """Servers of one kind, each with devices of its own."""
    return serve.deployment(
        server,
        name=name,
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options=scale.needs(),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"most_ahead": max(scale.num_slots // 2, 1)},
        ),
        **scale.options(),
    )


@contextmanager
def cluster(most_servers: int) -> Iterator[None]:
    """The Ray cluster that RAY_ADDRESS names, or one of this machine with a processor for each server."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**common)
    else:
        ray.init(
            "local",
            num_cpus=max(os.cpu_count() or 1, most_servers),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            **common,
        )
    try:
        yield
    finally:
        ray.shutdown()


def run_deployment(made: serve.Application, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or SIGINT, then lets answers under way finish.

    on_ready: called once every server answers. Raises MeshwrightError where a server cannot start.
    """
    ended = end_event()
    serve.start(http_options=HTTPOptions(host=host, port=port))
    try:
        try:
            serve.run(made, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise _why(str(error)) from error
        on_ready()
        ended.wait()
        serve.delete(APPLICATION)  # refuses new requests and waits for the running ones
    finally:
        serve.shutdown()


def _why(text: str) -> MeshwrightError:
    """The server's error at its start, extracted from Ray's message."""
    lines = text.splitlines()
    errors = [line.partition("Error: ")[2] for line in lines if line.startswith("meshwright.errors.")]
    return DeviceError(f"a replica cannot start: {errors[-1] if errors else lines[0]}")
