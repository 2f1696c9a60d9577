"""mw bench serve: a load test of a server that speaks OpenAI's API."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.common import (
    Json,
    count_option,
    emit,
    note,
    number_option,
    progress,
    refuse_beside,
    show,
    whole_option,
)
from meshwright.files import write_whole
from meshwright.progress import Progress
from meshwright.units import format_number_of

if TYPE_CHECKING:
    from meshwright.load.drive import Load

PROBLEM = 1


def serve(
    url: Annotated[str | None, typer.Option("--url", help="The server: http://127.0.0.1:8000.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Simulate a server of this plan.toml instead of calling one."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model name in the requests. [default: the server's only model]"),
    ] = None,
    requests: Annotated[int, count_option("--requests", help="Number of requests.")] = 64,
    concurrency: Annotated[
        int | None, whole_option("--concurrency", help="Closed loop: requests in flight. [default: 8]")
    ] = None,
    rate: Annotated[
        float | None, number_option("--rate", least=1e-3, help="Open loop: requests per second, Poisson.")
    ] = None,
    burst: Annotated[int, whole_option("--burst", help="With --rate: requests that arrive together.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="JSON lines of arrival_seconds, prompt_tokens, output_tokens."),
    ] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Distribution of lengths: sharegpt, alpaca or fixed.")
    ] = "sharegpt",
    prompt_tokens: Annotated[
        int | None,
        count_option("--prompt-tokens", help="Mean length of prompts. [default: that of --lengths]"),
    ] = None,
    output_tokens: Annotated[
        int | None,
        count_option("--output-tokens", help="Mean length of answers. [default: that of --lengths]"),
    ] = None,
    prefix_tokens: Annotated[
        int, whole_option("--prefix-tokens", least=0, help="Length of the prefix that all prompts share.")
    ] = 0,
    turns: Annotated[
        int, whole_option("--turns", help="Turns of a chat; each prompt repeats the earlier turns.")
    ] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Send chats to /v1/chat/completions.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate the full length that was drawn (vLLM's ignore_eos).")
    ] = True,
    seed: Annotated[int, whole_option("--seed", least=0, help="Seed of lengths, texts and arrivals.")] = 0,
    ttft: Annotated[
        float | None, number_option("--ttft", least=0, help="Goodput target: time to first token, seconds.")
    ] = None,
    tpot: Annotated[
        float | None, number_option("--tpot", least=0, help="Goodput target: time per output token, seconds.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="The server's key. [$OPENAI_API_KEY]")
    ] = None,
    timeout: Annotated[
        float, number_option("--timeout", least=0.1, help="Seconds after which a request fails.")
    ] = 600.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the JSON here, for `mw report`.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the distributions in the terminal.")] = False,
    mode: Annotated[
        str, typer.Option("--mode", help="With --plan: interleaved, batched or disaggregated prefill.")
    ] = "interleaved",
    replicas: Annotated[
        int,
        whole_option(
            "--replicas", least=0, help="With --plan: servers; 0 finds the fewest that meet the targets."
        ),
    ] = 1,
    prefill_replicas: Annotated[
        int | None,
        whole_option(
            "--prefill-replicas", help="With --mode disaggregated: servers that only prefill. [default: 1]"
        ),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="With --plan: reuse cached pages of shared prompt prefixes.")
    ] = True,
    drafts: Annotated[
        int, whole_option("--drafts", least=0, most=16, help="With --plan: draft tokens per step.")
    ] = 0,
    acceptance: Annotated[
        float,
        number_option(
            "--acceptance", least=0, most=1, help="With --drafts: probability that a draft token is accepted."
        ),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Load-test a server of OpenAI's API and time every token.

    With --plan no server is called: the engine's scheduler runs on a simulated clock that advances by the
    plan's prices. Exits 1 if a request failed, or if no number of replicas meets the targets.

    \b
    mw bench serve --url http://127.0.0.1:8000 --requests 100 --rate 4 --ttft 0.5 --tpot 0.05
    mw bench serve --url http://127.0.0.1:8000 --chat --turns 10 --prefix-tokens 500 -o serve.json
    mw bench serve --plan plan.toml --rate 20 --requests 2000 --ttft 1 --tpot 0.03 --replicas 0
    mw report serve.json -o serve.html
    """
    if (url is None) == (plan is None):
        raise typer.BadParameter("name a server with --url, or a plan to simulate with --plan")
    if sum(option is not None for option in (concurrency, rate, trace)) > 1:
        raise typer.BadParameter("--concurrency, --rate and --trace cannot be combined")
    if burst > 1 and rate is None:
        raise typer.BadParameter("--burst needs --rate")
    if plan is None:
        of_plans = {
            "--mode": mode != "interleaved",
            "--replicas": replicas != 1,
            "--prefill-replicas": prefill_replicas,
            "--no-prefix-cache": not prefix_cache,
            "--drafts": drafts > 0,
            "--acceptance": acceptance > 0,
        }
        refuse_beside(of_plans, "the server at --url decides that itself")
    else:
        refuse_beside({"--chat": chat, "--api-key": api_key, "--model": model}, "--plan asks no server")
        _check_simulated(mode, prefill_replicas, drafts, acceptance)
    from meshwright.load import traffic
    from meshwright.load.drive import Load
    from meshwright.load.percentiles import LatencyTargets

    if trace:
        chats = traffic.read_trace(trace)
    else:
        arrivals = traffic.poisson(rate, burst, seed) if rate else traffic.at_once()
        drawn = traffic.named_lengths(lengths, prompt_tokens, output_tokens)
        chats = traffic.chats(drawn, requests, turns, arrivals, seed)
    closed = None if rate or trace else concurrency or 8
    load = Load(chats, closed, prefix_tokens, chat, seed)
    options: dict[str, Any] = {"temperature": 0} | ({"ignore_eos": True} if ignore_eos else {})
    targets = LatencyTargets(ttft, tpot)
    with progress() as report:
        if plan is None:
            key = api_key or os.environ.get("OPENAI_API_KEY")
            client = {"url": url, "model": model, "api_key": key, "options": options}
            measured = asyncio.run(_measure(client | {"timeout_seconds": timeout}, load, targets, report))
        else:
            from meshwright.load.planned_server import Engines, NotEnoughError, simulated

            engines = Engines(mode, replicas, prefill_replicas or 1, prefix_cache, drafts, acceptance)
            try:
                measured = simulated(plan, engines, load, targets, report)
            except NotEnoughError as error:
                note(f"mw: {error}")
                raise typer.Exit(PROBLEM) from error
    measured["traffic"] = {
        "arrivals": "trace" if trace else "poisson" if rate else "closed",
        "rate_per_second": rate,
        "burst": burst,
        "concurrency": closed,
        "lengths": str(trace) if trace else lengths,
        "prefix_tokens": prefix_tokens,
        "turns": turns,
        "chat": chat,
        "seed": seed,
    }
    if measured["cut"]:
        note(
            f"mw: warning: {format_number_of(measured['cut'], 'request')} shortened or left out to fit the "
            "context with 10% to spare"
        )
    _tell(measured, output, plot=plot, as_json=as_json)
    if measured["errors"]:
        raise typer.Exit(PROBLEM)


def _check_simulated(mode: str, prefill_replicas: int | None, drafts: int, acceptance: float) -> None:
    """Raises PlanError for options of a simulation that change nothing."""
    if mode != "disaggregated":
        refuse_beside({"--prefill-replicas": prefill_replicas}, "only --mode disaggregated has them")
    if not drafts:
        refuse_beside({"--acceptance": acceptance > 0}, "without --drafts there are none to accept")


async def _measure(options: dict[str, Any], load: "Load", targets: Any, report: Progress) -> dict[str, Any]:
    from dataclasses import replace

    from meshwright.load.client import Answer, Client
    from meshwright.load.drive import drive, fit_words
    from meshwright.load.percentiles import summary
    from meshwright.load.planned import planned_step_seconds
    from meshwright.load.traffic import num_cut, within

    async with Client(**options) as client:
        report("asking the server for its model", None)
        await client.find_model()
        words = await fit_words(client, chat=load.chat)
        asked, chats = load.chats, within(list(load.chats), client.context, load.prefix_tokens)
        load = replace(load, chats=chats)
        total, done = sum(len(chat.turns) for chat in load.chats), 0

        def on_answer(_: Answer) -> None:
            nonlocal done
            done += 1
            report(f"answers {done} of {total}", done / total)

        answers = await drive(client, load, words, on_answer)
        found = summary(answers, targets)
        planned = planned_step_seconds(await client.metrics())
        measured = found["tpot_seconds"]["p50"]
        ratio = measured / planned if measured and planned else None
        row = {"name": "tpot", "seconds": measured, "predicted_seconds": planned, "ratio": ratio}
        head = {"kind": "serving", "url": client.url, "model": client.model}
        return head | found | {"cut": num_cut(asked, chats), "results": [row]}


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


def _print(document: dict[str, Any]) -> None:
    from meshwright.report.pages.load import facts, times_table
    from meshwright.report.terminal.tables import rich_table

    table = rich_table(times_table(document, f"{document['model']} at {document['url']}"))
    show(table, *facts(document))
