"""mw plan: the layouts of a machine, ranked."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import meshwright as mw
from meshwright.api import Plans, Train
from meshwright.api.document import check_output
from meshwright.api.machine import anchored_by
from meshwright.cli.common import (
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
    refuse_beside,
    waiting,
    whole_option,
)
from meshwright.cli.compare import plan_to_compare, show_compared
from meshwright.cli.extras import require
from meshwright.cli.plan_output import misses, show_plan, write_plan_files
from meshwright.cli.plan_serve import serve
from meshwright.errors import PlanError
from meshwright.hardware.prices import priced_machines
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig
from meshwright.plan.compare import compared
from meshwright.plan.explain.explanation import Explanation
from meshwright.plan.smallest import NothingFits
from meshwright.programs.program import DEFAULT as XLA
from meshwright.programs.program import PROGRAMS

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


app.command()(serve)


@app.callback()
def plan() -> None:
    """Rank layouts for training or serving a model on a machine."""


@app.command()
def train(
    model: ModelOption,
    hardwares: Annotated[
        list[str],
        typer.Option(
            "--hardware",
            help="v5p:16x20x28, v5e:4x4, h100:8x8, 2*v5p:16x16x16, cpu:8 or a .toml; repeat to compare.",
        ),
    ],
    batch_tokens: Annotated[int, count_option("--batch-tokens", help="Tokens per step: 4M, 4Mi.")],
    seq_len: SeqLenOption,
    layout: Annotated[
        str | None,
        typer.Option(help="Price only this layout: data=2,fsdp=64,tensor=8,remat=full."),
    ] = None,
    weights_dtype: Annotated[
        str | None, dtype_option("--weights-dtype", help="Dtype of the weights. [default: bf16; f32 on cpu]")
    ] = None,
    compute_dtype: Annotated[
        str | None,
        dtype_option(
            "--compute-dtype", help="Dtype of activations and matmuls. [default: bf16; on cpu the faster]"
        ),
    ] = None,
    software: Annotated[
        str,
        typer.Option(
            help=f"Training software to price: {', '.join(PROGRAMS.names)}; mw train is xla.",
            metavar="NAME",
        ),
    ] = XLA,
    given: Annotated[
        str | None,
        typer.Option(
            "--given", help="Only layouts that meet these conditions: tensor=8,pipe<=4,schedule!=zb-v."
        ),
    ] = None,
    runnable: Annotated[
        bool | None,
        typer.Option(
            "--runnable/--any",
            help="Rank what mw train runs, or all that can be planned. [default: what runs, if anything]",
        ),
    ] = None,
    top: Annotated[int, whole_option("--top", most=10_000, help="How many layouts to list.")] = 10,
    tokens: Annotated[
        int | None,
        count_option("--tokens", help="Tokens of the whole run; adds its days, chip-hours and price."),
    ] = None,
    critical_batch: Annotated[
        int | None,
        count_option(
            "--critical-batch", help="Critical batch size in tokens; adds a comparison with the batch."
        ),
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
            help="Measured runs to correct by: a metrics.jsonl (plan.toml beside it) or a CSV; repeatable."
        ),
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Compile the best layouts and rank by the compiler's memory; implies --runnable."
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain the choice, the alternatives and what would be faster.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan here, and its .json beside it.")
    ] = None,
    changes: SetOption = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="With several --hardware: price of a chip-hour, v5p=4.2,h100=2.5. [default: the catalog's]"
        ),
    ] = None,
    currency: Annotated[str | None, typer.Option(help="Currency of --price. [default: USD]")] = None,
    as_json: Json = False,
) -> None:
    """Rank layouts for training a model by predicted step time.

    Exits 1 if none fits the memory.

    \b
    mw plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens 4M --seq-len 4096
    mw plan train --model llama-3-8b --hardware h100 --batch-tokens 4M --seq-len 8192 --smallest
    """
    config, work = load_model_with(model, changes), Train(batch_tokens, seq_len)
    work.workload(config)
    if output:
        check_output(output)
    runnable = True if audit and runnable is None else runnable
    searched = _Searched(given, runnable, weights_dtype, compute_dtype, top)
    if len(hardwares) > 1:
        alone = {
            "-o": output,
            "--smallest": smallest,
            "--layout": layout,
            "--anchor": anchor,
            "--audit": audit,
        }
        _check_several({option for option, value in alone.items() if value})
        machines = [load_hardware(spec).running(software) for spec in hardwares]
        _compare(config, priced_machines(machines, price, currency), work, searched, as_json)
        return
    refuse_beside({"--price": price, "--currency": currency}, "prices compare machines, and there is one")
    [hardware] = hardwares
    if smallest:
        _check_smallest(layout, anchor, software)
        limits = {"max_seconds": max_seconds, "days": days, "tokens": tokens}
        plans = _smallest(config, hardware, work, searched, limits, as_json)
    else:
        _check_not_smallest(max_seconds, days)
        machine, said_of_runs = anchored_by(load_hardware(hardware).running(software), anchor or [])
        for line in said_of_runs:
            note(f"--anchor: {line}")
        if layout:
            _check_alone(searched)
            dtypes = {"weights_dtype": weights_dtype, "compute_dtype": compute_dtype}
            plans = mw.price(config, machine, work, layout, **dtypes).alone
        else:
            with waiting("searching layouts"):
                plans = mw.plan(config, machine, work, **searched.words)
    if audit:
        require("run")
        with progress() as update:
            plans = plans.audited(update)
    said = None
    if explain or as_json or output or tokens or critical_batch:
        with waiting("pricing the alternatives"):
            said = plans.explain(tokens=tokens, critical_batch=critical_batch)
    _answer(plans, said, in_words=explain, as_json=as_json, output=output)


class _Searched(NamedTuple):
    """The options that bound or dress a search, as they were given."""

    given: str | None
    runnable: bool | None
    weights_dtype: str | None
    compute_dtype: str | None
    top: int

    @property
    def words(self) -> dict[str, Any]:
        """Arguments of `plan` and `smallest`."""
        return self._asdict() | {"given": self.given or ""}


def _answer(
    plans: Plans, said: Explanation | None, *, in_words: bool, as_json: bool, output: Path | None
) -> None:
    """Prints the ranking and writes the best plan. Exits 1 if nothing fits."""
    document, found, best = plans.document(said), plans.search, plans.best
    if as_json:
        for notice in found.notices:
            note(notice)
        emit(document)
    else:
        show_plan(document, found, said, in_words=in_words, sizing=plans.sizing)
    if output and best.fits:
        write_plan_files(output, best.plan, document)
    if not best.fits:
        change = said.change if said else best.cheapest_fit()
        note(f"mw: {plans.model.name} on {plans.hardware.spec}: {misses(found, change)}")
        raise typer.Exit(_DOES_NOT_FIT)


def _check_several(given: set[str]) -> None:
    if given:
        verb = "takes" if len(given) == 1 else "take"
        raise PlanError(f"{', '.join(sorted(given))} {verb} one machine; name one --hardware")


def _compare(
    config: ModelConfig,
    machines: list[Hardware],
    work: Train,
    searched: _Searched,
    as_json: bool,
) -> None:
    """Prints the best layout of every machine, side by side. Exits 1 if one does not fit."""
    found = []
    for machine in machines:
        with waiting(f"searching layouts of {machine.spec}"):
            plans = mw.plan(config, machine, work, **searched.words)
        for notice in plans.search.notices:
            note(f"{machine.spec}: {notice}")
        found.append({"plan": machine.spec, **compared(plan_to_compare(plans.best), machine)})
    show_compared(found, as_json=as_json)


def _check_alone(searched: _Searched) -> None:
    """Raises PlanError for an option that bounds a search, beside --layout."""
    given = {
        "--runnable": searched.runnable is True,
        "--any": searched.runnable is False,
        "--given": searched.given is not None,
    }
    refuse_beside(given, "--layout prices that layout alone")


def _check_smallest(layout: str | None, anchor: list[Path] | None, software: str) -> None:
    if software != XLA:
        raise PlanError(f"--smallest sizes machines for {XLA}; leave out --software, or name the topology")
    if anchor:
        raise PlanError("--smallest tries machines that --anchor's run was not on; leave one of them out")
    if layout:
        raise PlanError("--smallest searches layouts; leave out --layout, or name the topology")


def _check_not_smallest(max_seconds: float | None, days: float | None) -> None:
    for option, value in (("--max-seconds", max_seconds), ("--days", days)):
        if value is not None:
            raise PlanError(f"{option} bounds what --smallest looks for; add --smallest")


def _smallest(
    config: ModelConfig,
    hardware: str,
    work: Train,
    searched: _Searched,
    limits: dict[str, Any],
    as_json: bool,
) -> Plans:
    """The layouts of the smallest machine; exits 1 where none does."""
    if ":" in hardware:
        load_hardware(hardware)  # for its warnings
    try:
        with progress() as update:
            return mw.smallest(config, hardware, work, **searched.words, **limits, progress=update)
    except NothingFits as error:
        if as_json:
            tried = [tried.to_dict() for tried in error.tried]
            emit({"smallest": {"hardware": None, "num_chips": None, "tried": tried}})
        note(f"mw: {error}")
        raise typer.Exit(_DOES_NOT_FIT) from error
