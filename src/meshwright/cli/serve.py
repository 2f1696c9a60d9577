"""mw serve: a server of a checkpoint with OpenAI's API."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import CHECKPOINT, JSON, load_hardware, note, progress
from meshwright.cli.draft_options import check_drafts
from meshwright.cli.extras import require
from meshwright.options import option
from meshwright.plan_file import load_plan
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.model_folder import check_model_folder
from meshwright.serve.settings import EngineSettings, Replicas, Server
from meshwright.signals import ends_at_once

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def serve(
    *,
    ctx: typer.Context,
    checkpoint: Path = CHECKPOINT,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan.toml, which sets layout, dtypes, slots and context.")
    ] = None,
    host: str = option("127.0.0.1", help="The address to listen on."),
    port: int = option(8000, least=0, most=65535, help="The port to listen on; 0 takes a free one."),
    health_port: int | None = option(
        None,
        least=0,
        most=65535,
        help="A further port, with a thread of its own, for /health, /ready and /metrics.",
        unset="none",
    ),
    engine: EngineSettings,
    limits: ClientLimits,
    log_json: bool = option(False, help="Log a JSON line per request on stderr.", after="cors_origins"),
    otlp_endpoint: str | None = option(
        None,
        metavar="URL",
        help="Send OpenTelemetry traces to http://collector:4318/v1/traces.",
        unset="none",
        after="log_json",
    ),
    replicas: Replicas,
    as_json: bool = JSON,
) -> None:
    """Serve a checkpoint over OpenAI's API.

    Endpoints are /v1/completions, /v1/chat/completions, /v1/responses and /v1/models, with a chat page at /,
    and /health and /metrics. The command prints its address once it answers. On Ctrl-C, SIGTERM or SIGHUP it
    finishes the answers under way for up to 20 seconds, then ends; a second signal ends it at once.

    \b
    mw serve --checkpoint runs/demo --port 8000
    curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "Once upon a time", "max_tokens": 32}'
    """
    check_model_folder(checkpoint)
    if plan is not None and engine.tensor > 1:
        raise typer.BadParameter(
            f"--tensor {engine.tensor} and {plan} both give a layout; leave out one of them"
        )
    check_drafts(engine)
    if replicas.prefill_autoscaling and not replicas.num_prefills:
        raise typer.BadParameter("--prefill-autoscaling scales nothing without --prefill-replicas 1 or more")
    if replicas.num_prefills and engine.mode != "interleaved":
        raise typer.BadParameter(
            f"--prefill-replicas and --mode {engine.mode} exclude one another; leave out one of them"
        )
    if otlp_endpoint is not None:
        require("otel")
    engine = replace(
        engine, plan=None if plan is None else load_plan(plan), has_pools=replicas.num_prefills > 0
    )
    engine.check_prefix_cache()
    server = Server(checkpoint, engine, limits, log_json, otlp_endpoint)
    if ctx.obj is not None:  # a RayService deploys the server itself
        ctx.obj(server, replicas)
    elif replicas.is_single:
        _serve(server, host, (port, health_port), as_json)
    else:
        _serve_replicas(server, replicas, host, port, as_json)


def _serve(server: Server, host: str, ports: tuple[int, int | None], as_json: bool) -> None:
    with ExitStack() as stack:
        with ends_at_once():
            from meshwright.serve.http.connections import Connections
            from meshwright.serve.http.server import address, bind, run_server

            if server.engine.plan is not None:
                load_hardware(server.engine.plan.hardware)  # for its warnings
            server.engine.use_devices()
            from meshwright.cli.service import open_app

            limits = server.limits
            connections = Connections(
                limits.max_connections,
                limits.max_connections_per_address,
                limits.proxies,
                limits.stalled_seconds,
            )
            # First, since loading may take minutes.
            listener, probes = [
                None if port is None else stack.enter_context(bind(host, port)) for port in ports
            ]
            assert listener is not None
            with progress() as report:
                api, name = stack.enter_context(open_app(server, report))
        if probes is not None:
            note(f"/health on {address(probes)}")
        run_server(api, listener, lambda url: _announce(url, name, as_json), connections, probes)


def _serve_replicas(server: Server, replicas: Replicas, host: str, port: int, as_json: bool) -> None:
    from meshwright.cli.ray_servers import application_of, scales
    from meshwright.models.model_files import read_model
    from meshwright.serve.http.server import address, bind
    from meshwright.serve.replicas.deployment import cluster, run_deployment

    name = read_model(server.checkpoint).name
    with bind(host, port) as listener:  # fails now if the port is taken; Ray binds it again
        url, port = address(listener), listener.getsockname()[1]
    number, prefills = replicas.num_servers, replicas.num_prefills
    more = f", and {prefills} that prefill" if prefills else ""
    note(f"starting {number} {'replica' if number == 1 else 'replicas'}{more}")
    scale, prefill_scale = scales(server, replicas)
    with cluster(scale.most_servers + (prefill_scale.most_servers if prefill_scale else 0)):
        deployed = application_of(server, scale, prefill_scale)
        run_deployment(deployed, host, port, lambda: _announce(url, name, as_json))


def _announce(address: str, name: str, as_json: bool) -> None:
    print(json.dumps({"address": address, "model": name}) if as_json else f"{name} on {address}", flush=True)
