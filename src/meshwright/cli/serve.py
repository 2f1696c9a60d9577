"""mw serve: a checkpoint behind OpenAI's API."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from meshwright.cli.common import (
    BatchInvariantOption,
    CheckpointOption,
    ContextOption,
    Json,
    TensorOption,
    WeightsDtypeOption,
    count_option,
    note,
    number_option,
    progress,
    whole_option,
)
from meshwright.cli.extras import require
from meshwright.errors import MeshwrightError
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.plan_file import load_plan
from meshwright.serve.model_folder import check_model_folder

if TYPE_CHECKING:
    from meshwright.cli.served import Replicas, Served

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    command: typer.Context,
    checkpoint: CheckpointOption,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan.toml, which sets layout, dtypes, slots and context.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, whole_option("--port", least=0, most=65535, help="The port to listen on; 0 takes a free one.")
    ] = 8000,
    slots: Annotated[
        int | None,
        whole_option("--slots", help="Sequences that generate at once. [default: the plan's, or 8]"),
    ] = None,
    context: ContextOption = None,
    tensor: TensorOption = 1,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", envvar="MESHWRIGHT_API_KEYS", help="A key that clients must send; repeatable."
        ),
    ] = None,
    requests_per_minute: Annotated[
        float | None,
        number_option(
            "--requests-per-minute", least=1, help="Rate limit per key, or per address without keys."
        ),
    ] = None,
    request_seconds: Annotated[
        float | None, number_option("--request-seconds", least=0.1, help="Cut off answers that take longer.")
    ] = None,
    max_body_bytes: Annotated[
        int, count_option("--max-body-bytes", help="Largest request body in bytes: 16M.")
    ] = 16_000_000,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin", help="A site whose pages may send requests, or *; repeatable. [default: none]"
        ),
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log a JSON line per request on stderr.")
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send OpenTelemetry traces to http://collector:4318/v1/traces. [default: none]",
        ),
    ] = None,
    dtype: Annotated[
        Literal["f32", "bf16"] | None,
        typer.Option(
            help="Dtype of weights and matmuls. [default: the plan's; bf16, matmuls f32 on CPUs without it]"
        ),
    ] = None,
    weights_dtype: WeightsDtypeOption = None,
    kv_dtype: Annotated[
        Literal["int8", "fp8"] | None,
        typer.Option("--kv-dtype", help="Dtype of the KV cache. [default: as computed]"),
    ] = None,
    mode: Annotated[
        Literal["interleaved", "batched", "disaggregated"],
        typer.Option(
            help="Prefill in the same steps as generation, one batch at a time, or on separate devices."
        ),
    ] = "interleaved",
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        typer.Option(
            help="Answer requests in the order of arrival, or by their field priority, the lowest first."
        ),
    ] = "fcfs",
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Reuse cached pages of shared prompt prefixes."
        ),
    ] = True,
    cache_tokens: Annotated[
        int | None, count_option("--cache-tokens", help="Tokens in the KV cache. [default: slots x context]")
    ] = None,
    host_cache_bytes: Annotated[
        int | None,
        count_option("--host-cache-bytes", help="Host memory for evicted cache pages: 8G. [default: none]"),
    ] = None,
    chunk: Annotated[
        int | None,
        count_option(
            "--chunk",
            help="Most prompt tokens per step; smaller chunks delay running answers less. "
            f"[default: {DEFAULT_CHUNK}; whole prompts with context]",
        ),
    ] = None,
    drafts: Annotated[
        int,
        whole_option(
            "--drafts",
            least=0,
            most=15,
            help="Draft tokens per step (speculative decoding by n-gram look-up).",
        ),
    ] = 0,
    draft_checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--draft-checkpoint", help="A smaller model that makes the --drafts. [default: n-gram look-up]"
        ),
    ] = None,
    batch_invariant: BatchInvariantOption = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop if anything is compiled after the start.")
    ] = False,
    replicas: Annotated[
        int, whole_option("--replicas", help="Servers behind one address, on Ray Serve.")
    ] = 1,
    autoscaling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V", help="A Ray Serve autoscaling setting: max_replicas=8; repeatable. [default: none]"
        ),
    ] = None,
    prefill_replicas: Annotated[
        int,
        whole_option(
            "--prefill-replicas",
            least=0,
            help="Separate servers that prefill for the --replicas; 0: each replica does both.",
        ),
    ] = 0,
    prefill_autoscaling: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="The same for the --prefill-replicas. [default: none]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a checkpoint over OpenAI's API.

    Endpoints are /v1/completions, /v1/chat/completions, /v1/responses and /v1/models, with a chat page at /,
    and /health and /metrics. The command prints its address once it answers. On Ctrl-C or SIGTERM it finishes
    the answers under way, then ends.

    \b
    mw serve --checkpoint runs/demo --port 8000
    curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "def ", "max_tokens": 32}'
    """
    check_model_folder(checkpoint)
    if plan is not None and tensor > 1:
        raise typer.BadParameter(f"--tensor {tensor} and {plan} both give a layout; leave out one of them")
    if draft_checkpoint is not None:
        check_model_folder(draft_checkpoint)
        if not drafts:
            raise typer.BadParameter("--draft-checkpoint guesses nothing with --drafts 0; give 1 to 15")
    if prefill_autoscaling and not prefill_replicas:
        raise typer.BadParameter("--prefill-autoscaling scales nothing without --prefill-replicas 1 or more")
    if prefill_replicas and mode != "interleaved":
        raise typer.BadParameter(
            f"--prefill-replicas and --mode {mode} exclude one another; leave out one of them"
        )
    settings = autoscaling_settings(autoscaling)
    prefill_settings = autoscaling_settings(prefill_autoscaling, "--prefill-autoscaling")
    if otlp_endpoint is not None:
        require("otel")
    from meshwright.cli.served import Replicas, Served, Serving, open_app
    from meshwright.serve.http.client_limits import ClientLimits

    asked = Serving(
        tensor,
        slots,
        context,
        None if plan is None else load_plan(plan),
        dtype,
        mode,
        prefix_cache,
        cache_tokens,
        chunk,
        num_drafts=drafts,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        strict=strict,
        draft_checkpoint=draft_checkpoint,
        host_cache_bytes=host_cache_bytes or 0,
        has_pools=prefill_replicas > 0,
        batch_invariant=batch_invariant,
    )
    asked.check_prefix_cache()
    limits = ClientLimits(
        max_body_bytes=max_body_bytes,
        api_keys=frozenset(api_key or ()),
        requests_per_minute=requests_per_minute,
        request_seconds=request_seconds,
        cors_origins=tuple(cors_origin or ()),
        takes_priorities=scheduling_policy == "priority",
    )
    served = Served(checkpoint, asked, limits, log_json, otlp_endpoint)
    servers = Replicas(replicas, settings, prefill_replicas, prefill_settings)
    if command.obj is not None:  # a RayService asks what to start
        command.obj(served, servers)
        return
    if not servers.are_one:
        _serve_replicas(served, servers, host, port, as_json)
        return
    from meshwright.serve.http.server import bind, run

    asked.use_devices()
    with ExitStack() as stack:
        listener = stack.enter_context(bind(host, port))  # first, since loading may take minutes
        with progress() as report:
            api, name = stack.enter_context(open_app(served, report))
        run(api, listener, lambda address: _announce(address, name, as_json))


def _serve_replicas(served: "Served", servers: "Replicas", host: str, port: int, as_json: bool) -> None:
    from meshwright.cli.replicas import application_of, scales
    from meshwright.models.files import read_model
    from meshwright.serve.http.server import address, bind
    from meshwright.serve.replicas.deployment import cluster, run

    name = read_model(served.checkpoint).name
    with bind(host, port) as listener:  # to be told now that it is taken; Ray binds it again
        where, port = address(listener), listener.getsockname()[1]
    besides = f", and {servers.num_prefills} that prefill" if servers.num_prefills else ""
    note(f"starting {servers.num_servers} {'replica' if servers.num_servers == 1 else 'replicas'}{besides}")
    scale, prefills = scales(served, servers)
    with cluster(scale.most_servers + (prefills.most_servers if prefills else 0)):
        made = application_of(served, scale, prefills)
        run(made, host, port, lambda: _announce(where, name, as_json))


def autoscaling_settings(words: Sequence[str] | None, option: str = "--autoscaling") -> dict[str, str]:
    """The settings of `option` by name; MeshwrightError for what is not NAME=VALUE or is repeated."""
    settings: dict[str, str] = {}
    for text in words or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in settings:
            raise MeshwrightError(f"{option} {text!r}: each is NAME=VALUE, once, such as max_replicas=8")
        if name.endswith("_replicas") and not value.isdecimal():
            raise MeshwrightError(f"{option} {text!r}: {value!r} is not a number of replicas")
        settings[name] = value
    return settings


def _announce(address: str, name: str, as_json: bool) -> None:
    print(json.dumps({"address": address, "model": name}) if as_json else f"{name} on {address}", flush=True)
