"""mw bench serve: a load test of a server that speaks OpenAI's API."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.console import JSON, emit, note, progress, refuse_with, show
from meshwright.files import check_writable, write_whole
from meshwright.load.settings import LatencyTargets, SimulatedServers, Traffic
from meshwright.options import changed_options, option
from meshwright.progress import Progress
from meshwright.units import format_number_of, format_seconds

if TYPE_CHECKING:
    from meshwright.load.client import Client
    from meshwright.load.traffic import Load

PROBLEM = 1


def serve(
    *,
    url: str | None = option(None, help="The server: http://127.0.0.1:8000."),
    plan: Path | None = option(
        None, help="Simulate a server of this plan.toml: instead of a server, or with --url to compare."
    ),
    anchor: Path | None = option(
        None, help="With --plan: scale the plan's steps by this earlier run of --url with --plan (its -o)."
    ),
    model: str | None = option(None, help="Model name in the requests.", unset="the server's only model"),
    traffic: Traffic,
    targets: LatencyTargets,
    api_key: str | None = option(None, help="The server's key. [$OPENAI_API_KEY]"),
    timeout: float = option(600.0, least=0.1, help="Seconds after which a request fails."),
    output: Path | None = option(None, flag="-o --output", help="Write the JSON here, for `mw report`."),
    plot: bool = option(False, help="Draw the distributions in the terminal."),
    servers: SimulatedServers,
    as_json: bool = JSON,
) -> None:
    """Load-test a server of OpenAI's API and time every token.

    With --plan and no --url no server is called: the engine's scheduler runs on a simulated clock that
    advances by the plan's prices. With both, the same requests are simulated too, and measured figures are
    printed next to planned ones. Exits 1 if a request failed, or if no number of replicas meets the targets.

    \b
    mw bench serve --url http://127.0.0.1:8000 --requests 100 --rate 4 --ttft 0.5 --tpot 0.05
    mw bench serve --url http://127.0.0.1:8000 --concurrency 32 --duration 60s
    mw bench serve --url http://127.0.0.1:8000 --chat --turns 10 --prefix-tokens 500 -o serve.json
    mw bench serve --plan plan.toml --rate 20 --requests 2000 --ttft 1 --tpot 0.03 --replicas 0
    mw bench serve --plan plan.toml --rate 4 --mode all
    mw bench serve --url http://127.0.0.1:8000 --plan plan.toml --rate 4 -o run.json
    mw bench serve --plan plan.toml --rate 8 --anchor run.json
    mw report serve.json -o serve.html
    """
    _check_asked(url, plan, anchor, traffic)
    of_server = {} if url else {"--chat": traffic.chat, "--api-key": api_key, "--model": model}
    _refuse_unread(plan, servers, of_server, output, plot=plot)
    if output:
        check_writable(output)
    if url and plan and (servers.mode == "all" or not servers.replicas):
        raise typer.BadParameter(
            "with --url, --plan simulates one server: leave out --mode all, --replicas 0"
        )
    chats = traffic.chats()
    from meshwright.load.traffic import Load

    load = Load(
        chats, traffic.closed, traffic.prefix_tokens, traffic.chat, traffic.seed, traffic.until_seconds
    )
    with progress() as report:
        if url is not None:
            from meshwright.load.client import Client

            fields: dict[str, object] = {"temperature": 0}
            if traffic.ignore_eos:
                fields["ignore_eos"] = True
            key = api_key or os.environ.get("OPENAI_API_KEY")
            client = Client(url, model=model, api_key=key, options=fields, timeout_seconds=timeout)
            measured = asyncio.run(_measure(client, load, targets, report))
            if plan is not None:
                from meshwright.load.beside import beside
                from meshwright.load.planned_server import simulate_load

                measured = beside(measured, simulate_load(plan, servers, load, targets, report))
        else:
            assert plan is not None, "one of the two is given"
            measured = _simulated(plan, anchor, servers, load, targets, report)
    if "modes" in measured:
        _tell_modes(measured["modes"], as_json=as_json)
        return
    measured["traffic"] = traffic.to_dict()
    if measured["cut"]:
        drawn = f" of the {len(chats):,} drawn, which are repeated," if load.repeats else ""
        note(
            f"mw: warning: {format_number_of(measured['cut'], 'request')}{drawn} shortened or left out to "
            "fit the context with 10% to spare"
        )
    _tell(measured, output, plot=plot, as_json=as_json)
    if measured["errors"]:
        raise typer.Exit(PROBLEM)


def _simulated(
    plan: Path,
    anchor: Path | None,
    servers: SimulatedServers,
    load: "Load",
    targets: LatencyTargets,
    report: Progress,
) -> dict[str, Any]:
    """The figures of the plan's servers; with --mode all, each mode's as `modes`.

    Exits 1 if no number of replicas meets the targets.
    """
    from meshwright.load.planned_server import ALL_MODES, NotEnoughError, simulate_load, simulated_modes

    factor = _anchored(anchor)
    try:
        if servers.mode == ALL_MODES:
            return {"modes": simulated_modes(plan, servers, load, targets, report)}
        return simulate_load(plan, servers, load, targets, report, factor)
    except NotEnoughError as error:
        note(f"mw: {error}")
        raise typer.Exit(PROBLEM) from error


def _anchored(anchor: Path | None) -> float:
    """The factor of step times by an earlier run; 1 without one."""
    if anchor is None:
        return 1.0
    from meshwright.load.beside import factor_of

    factor = factor_of(anchor)
    note(f"--anchor: steps take {factor:.2f} times their planned time")
    return factor


def _check_asked(url: str | None, plan: Path | None, anchor: Path | None, traffic: Traffic) -> None:
    if url is None and plan is None:
        raise typer.BadParameter("name a server with --url, or a plan to simulate with --plan")
    if anchor is not None and (plan is None or url is not None):
        raise typer.BadParameter("--anchor needs --plan, without --url")
    if sum(value is not None for value in (traffic.concurrency, traffic.rate, traffic.trace)) > 1:
        raise typer.BadParameter("--concurrency, --rate and --trace cannot be combined")
    if traffic.duration is not None:
        refuse_with(
            {"--requests": traffic.requests, "--trace": traffic.trace}, "--duration ends a load by its time"
        )
    if traffic.burst > 1 and traffic.rate is None:
        raise typer.BadParameter("--burst needs --rate")


def _refuse_unread(
    plan: Path | None,
    servers: SimulatedServers,
    of_server: dict[str, object],
    output: Path | None,
    *,
    plot: bool,
) -> None:
    """Refuse options that nothing reads. of_server: a called server's."""
    if plan is None:
        refuse_with(
            changed_options(SimulatedServers, vars(servers)), "the server at --url decides that itself"
        )
        return
    refuse_with(of_server, "--plan asks no server")
    if servers.mode == "all":
        refuse_with({"--output": output, "--plot": plot}, "--mode all prints a table")
    elif servers.mode != "disaggregated":
        refuse_with({"--prefill-replicas": servers.prefill_replicas}, "only --mode disaggregated has them")
    if not servers.num_drafts:
        refuse_with({"--acceptance": servers.acceptance > 0}, "without --drafts there are none to accept")


async def _measure(
    client: "Client", load: "Load", targets: LatencyTargets, report: Progress
) -> dict[str, Any]:
    from dataclasses import replace

    from meshwright.load.drive import drive, fit_words
    from meshwright.load.percentiles import load_figures
    from meshwright.load.planned import draft_counts, planned_step_seconds
    from meshwright.load.timed_answer import TimedAnswer
    from meshwright.load.traffic import num_cut, within

    async with client:
        report("asking the server for its model", None)
        await client.find_model()
        words = await fit_words(client, chat=load.chat)
        drawn, chats = load.chats, within(list(load.chats), client.context, load.prefix_tokens)
        load = replace(load, chats=chats)
        total, done = sum(len(chat.turns) for chat in load.chats), 0
        until = load.until_seconds if load.repeats else None

        def on_answer(_: TimedAnswer) -> None:
            nonlocal done
            done += 1
            if until is None:
                report(f"answers {done} of {total}", done / total)
            else:
                report(f"answers {done} in {format_seconds(until)}", min(1.0, client.now() / until))

        before = draft_counts(await client.metrics())
        answers = await drive(client, load, words, on_answer)
        figures = load_figures(answers, targets)
        metrics = await client.metrics()
        planned = planned_step_seconds(metrics)
        drafts = [after - first for after, first in zip(draft_counts(metrics), before, strict=True)]
        measured = figures["tpot_seconds"]["p50"]
        ratio = measured / planned if measured and planned else None
        row = {"name": "tpot", "seconds": measured, "predicted_seconds": planned, "ratio": ratio}
        head = {"kind": "serving", "url": client.url, "model": client.model}
        drafted = {"drafts": {"verified": int(drafts[0]), "accepted": int(drafts[1])}} if drafts[0] else {}
        return head | figures | drafted | {"cut": num_cut(drawn, chats), "results": [row]}


def _tell(document: dict[str, Any], output: Path | None, *, plot: bool, as_json: bool) -> None:
    import json

    if output:
        write_whole(output, json.dumps(document, indent=2, allow_nan=False))
        note(f"wrote {output}")
    if as_json:
        emit(document)
    else:
        _print(document)
    if plot:
        from meshwright.report.pages.load import terminal_histograms

        note(terminal_histograms(document))


def _tell_modes(documents: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    """The engines side by side."""
    if as_json:
        emit({"modes": documents})
        return
    from meshwright.report.pages.load import modes_table
    from meshwright.report.terminal.tables import rich_table

    show(rich_table(modes_table(documents)))


def _print(document: dict[str, Any]) -> None:
    from meshwright.report.answer import price_of_load
    from meshwright.report.pages.load import facts, times_table
    from meshwright.report.terminal.tables import rich_table

    table = rich_table(times_table(document, f"{document['model']} at {document['url']}"))
    show(table, *facts(document), *filter(None, [price_of_load(document)]))
