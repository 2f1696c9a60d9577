"""mw plan: the layouts of a machine, ranked."""

from math import ceil, inf
from pathlib import Path
from typing import Annotated

import typer

from meshwright.api import Train, default_dtypes
from meshwright.api.document import check_output, plan_document
from meshwright.audit.second_opinion import second_opinion
from meshwright.cli.common import (
    HardwareOption,
    Json,
    ModelOption,
    SeqLenOption,
    SetOption,
    count_option,
    dtype_option,
    emit,
    load_hardware,
    load_model_with,
    note,
    number_option,
    progress,
    whole_option,
)
from meshwright.cli.extras import require
from meshwright.cli.plan_output import misses, show_plan, write_plan
from meshwright.cli.plan_serve import serve
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.software import DEFAULT as XLA
from meshwright.hardware.software import software_names
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.anchor import anchored, run_of, slowdown_of
from meshwright.plan.chosen import plan_of
from meshwright.plan.explain.explanation import explain as explain_search
from meshwright.plan.explain.fitting import cheapest_fit
from meshwright.plan.given import Condition, parse_conditions
from meshwright.plan.smallest import NothingFits, Smallest
from meshwright.plan.smallest import smallest as find_smallest
from meshwright.plan.train import price_alone, search
from meshwright.plan.validate.runs import runs_of

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


app.command()(serve)


@app.callback()
def plan() -> None:
    """Rank the layouts to train or to serve a model on a machine."""


@app.command()
def train(
    model: ModelOption,
    hardware: HardwareOption,
    batch_tokens: Annotated[int, count_option("--batch-tokens", help="Tokens of one step: 4M, 4Mi.")],
    seq_len: SeqLenOption,
    layout: Annotated[
        str | None,
        typer.Option(help="Price this one alone: data=2,fsdp=64,tensor=8,remat=full."),
    ] = None,
    weights_dtype: Annotated[
        str | None, dtype_option("--weights-dtype", help="Type of the weights. [bf16; f32 on cpu]")
    ] = None,
    compute_dtype: Annotated[
        str | None,
        dtype_option("--compute-dtype", help="Type of activations and matmuls. [bf16; on cpu the faster]"),
    ] = None,
    software: Annotated[
        str,
        typer.Option(help=f"What trains: {', '.join(software_names())}; mw train runs xla.", metavar="NAME"),
    ] = XLA,
    given: Annotated[
        str | None,
        typer.Option("--given", help="Conditions on every layout: tensor=8,pipe<=4,schedule!=zb-v."),
    ] = None,
    runnable: Annotated[
        bool | None,
        typer.Option(
            "--runnable/--any",
            help="Rank what mw train runs, or all that can be planned. [what runs, if anything does]",
        ),
    ] = None,
    top: Annotated[int, whole_option("--top", most=10_000, help="How many candidates to list.")] = 10,
    tokens: Annotated[
        int | None,
        count_option("--tokens", help="Tokens of the whole run, for its days, chip-hours and price."),
    ] = None,
    critical_batch: Annotated[
        int | None,
        count_option("--critical-batch", help="Critical batch size in tokens, to compare the batch with."),
    ] = None,
    smallest: Annotated[
        bool,
        typer.Option("--smallest", help="Find the fewest chips that suffice; --hardware v5p names the chip."),
    ] = False,
    max_seconds: Annotated[
        float | None,
        number_option("--max-seconds", metavar="SECONDS", help="With --smallest: the longest step allowed."),
    ] = None,
    days: Annotated[
        float | None,
        number_option(
            "--days", metavar="DAYS", help="With --smallest and --tokens: the longest run allowed."
        ),
    ] = None,
    anchor: Annotated[
        list[Path] | None,
        typer.Option(
            help="A run's metrics.jsonl, plan.toml beside it, or a CSV of runs; several may be named."
        ),
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Ask the hardware's compiler for the memory of the best; implies --runnable."
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain the choice, the alternatives and what would be faster.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan here, and its .json beside it.")
    ] = None,
    changes: SetOption = None,
    as_json: Json = False,
) -> None:
    """Rank the layouts to train a model on a machine by predicted step time.

    Exits 1 where none fits the memory.

    \b
    mw plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens 4M --seq-len 4096
    mw plan train --model llama-3-8b --hardware h100 --batch-tokens 4M --seq-len 8192 --smallest
    """
    config = load_model_with(model, changes)
    workload = Train(batch_tokens, seq_len).workload(config)
    if output:
        check_output(output)
    if layout:
        searching = {"--runnable": runnable is True, "--any": runnable is False, "--given": given is not None}
        _check_alone(searching)
    conditions = parse_conditions(given or "")
    runnable = True if audit and runnable is None else runnable
    sizing = None
    if smallest:
        _check_smallest(layout, anchor, software)
        chip = load_hardware(hardware).chip if ":" in hardware else catalog.chip_of(hardware)
        dtypes = default_dtypes(chip, weights_dtype, compute_dtype)
        longest = _longest_step(workload, tokens, max_seconds, days)
        sizing = _find_smallest(config, hardware, workload, dtypes, conditions, runnable, longest, as_json)
        machine, found = sizing.hardware, sizing.found
    else:
        _check_not_smallest(max_seconds, days)
        machine, said_of_runs = _anchored(load_hardware(hardware).running(software), anchor or [])
        for line in said_of_runs:
            note(f"--anchor: {line}")
        weights, computes = default_dtypes(machine.chip, weights_dtype, compute_dtype)
        if layout:
            layouts = [
                Layout.parse(layout, weights_dtype=weights, compute_dtype=compute) for compute in computes
            ]
            found = price_alone(config, machine, workload, layouts)
        else:
            found = search(
                config,
                machine,
                workload,
                weights_dtype=weights,
                compute_dtypes=computes,
                given=conditions,
                runnable=runnable,
            )
    opinions = ()
    if audit:
        require("run")
        with progress() as update:
            found, opinions = second_opinion(config, machine, found, progress=lambda what: update(what, None))
    said = None
    if explain or as_json or output or tokens or critical_batch:
        said = explain_search(config, machine, found, num_tokens=tokens, critical_tokens=critical_batch)
    document = plan_document(config, machine, batch_tokens, found, top, said, sizing, opinions)
    if as_json:
        for notice in found.notices:
            note(notice)
        emit(document)
    else:
        show_plan(document, found, said, in_words=explain, sizing=sizing)
    if output and found.best.fits:
        write_plan(output, plan_of(config, machine, found.workload, found.best), document)
    if not found.best.fits:
        change = said.change if said else cheapest_fit(config, machine, found.workload, found.best)
        note(f"mw: {config.name} on {machine.spec}: {misses(found, change)}")
        raise typer.Exit(_DOES_NOT_FIT)


def _anchored(machine: Hardware, files: list[Path]) -> tuple[Hardware, tuple[str, ...]]:
    """`machine` as runs of one's own were, if there are any, and what they moved."""
    if not files:
        return machine, ()
    if len(files) == 1 and files[0].suffix != ".csv":
        return machine.slowed(slowdown_of(files[0])), ()
    runs = [run for path in files for run in (runs_of(path) if path.suffix == ".csv" else [run_of(path)])]
    found = anchored(machine, runs)
    return machine.with_step(found.step), found.words


def _check_alone(searching: dict[str, bool]) -> None:
    """Raises PlanError for an option that bounds a search, beside --layout."""
    if clashing := [option for option, is_given in searching.items() if is_given]:
        raise PlanError(f"--layout prices that layout alone; leave out {', '.join(clashing)}")


def _check_smallest(layout: str | None, anchor: list[Path] | None, software: str) -> None:
    if software != XLA:
        raise PlanError(f"--smallest sizes machines for {XLA}; leave out --software, or name the topology")
    if anchor:
        raise PlanError(
            "--smallest tries machines that --anchor's run says nothing of; leave one of them out"
        )
    if layout:
        raise PlanError("--smallest searches layouts; leave out --layout, or name the topology")


def _check_not_smallest(max_seconds: float | None, days: float | None) -> None:
    for option, value in (("--max-seconds", max_seconds), ("--days", days)):
        if value is not None:
            raise PlanError(f"{option} bounds what --smallest looks for; add --smallest")


def _longest_step(
    workload: Workload, tokens: int | None, max_seconds: float | None, days: float | None
) -> float | None:
    """Seconds of the longest step that both options allow. Raises PlanError for what is no limit."""
    for option, value in (("--max-seconds", max_seconds), ("--days", days)):
        if value is not None and not 0 < value < inf:
            raise PlanError(f"{option} {value} is no time; write a number above 0")
    limits = [] if max_seconds is None else [max_seconds]
    if days is not None:
        if tokens is None:
            raise PlanError("--days needs the length of the run; add --tokens 1T")
        limits.append(days * 86_400 / ceil(tokens / workload.num_tokens))
    return min(limits, default=None)


def _find_smallest(
    config: ModelConfig,
    hardware: str,
    workload: Workload,
    dtypes: tuple[str, tuple[str, ...]],
    given: tuple[Condition, ...],
    runnable: bool | None,
    longest: float | None,
    as_json: bool,
) -> Smallest:
    """The smallest machine; exits 1 where none does."""
    try:
        with progress() as update:
            return find_smallest(
                config,
                hardware,
                workload,
                weights_dtype=dtypes[0],
                compute_dtypes=dtypes[1],
                given=given,
                runnable=runnable,
                max_seconds=longest,
                on_progress=lambda spec: update(f"trying {spec}", None),
            )
    except NothingFits as error:
        if as_json:
            tried = [tried.to_dict() for tried in error.tried]
            emit({"smallest": {"hardware": None, "num_chips": None, "tried": tried}})
        note(f"mw: {error}")
        raise typer.Exit(_DOES_NOT_FIT) from error
