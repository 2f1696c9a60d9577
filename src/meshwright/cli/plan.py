"""mw plan: the layouts of a machine, ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import typer

import meshwright as mw
from meshwright.api import Plans, Train
from meshwright.api.document import check_output
from meshwright.api.inputs import Conditions, SearchOptions, SizeOptions
from meshwright.api.machine import anchored_by
from meshwright.cli.command_options import command
from meshwright.cli.compare import plan_to_compare, show_compared
from meshwright.cli.console import (
    CHANGES,
    HARDWARE_HELP,
    JSON,
    MODEL,
    OUTPUT,
    emit,
    load_hardware,
    load_model_with,
    note,
    progress,
    refuse_with,
    waiting,
)
from meshwright.cli.extras import require
from meshwright.cli.plan_output import shortage_words, show_plan, write_plan_files
from meshwright.cli.plan_rl import rl
from meshwright.cli.plan_serve import serve
from meshwright.errors import PlanError
from meshwright.hardware.catalog import specs
from meshwright.hardware.prices import ChipPrices
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig
from meshwright.options import REQUIRED, option
from meshwright.plan.explain.explanation import Explanation
from meshwright.plan.plan_costs import plan_costs
from meshwright.plan.smallest import NothingFits
from meshwright.plan.spending import SpendingLimits
from meshwright.programs.program import DEFAULT as XLA
from meshwright.units import parse_count

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


command(app)(serve)
command(app)(rl)


@app.callback()
def plan() -> None:
    """Rank layouts for training or serving a model on a machine."""


@command(app)
def train(
    *,
    model: str = MODEL,
    hardwares: tuple[str, ...] = option(
        REQUIRED,
        flag="--hardware",
        help=f"{HARDWARE_HELP.removesuffix('.')}; several, joined by commas, are compared.",
    ),
    work: Train,
    layout: str | None = option(None, help="Price only this layout: data=2,fsdp=64,tensor=8,remat=full."),
    search: SearchOptions,
    conditions: Conditions,
    tokens: int | None = option(
        None, parser=parse_count, help="Tokens of the whole run; adds its days, chip-hours and price."
    ),
    critical_batch: int | None = option(
        None, parser=parse_count, help="Critical batch size in tokens; adds a comparison with the batch."
    ),
    size: SizeOptions,
    limits: SpendingLimits,
    anchor: tuple[Path, ...] = option(
        (), help="Measured runs to correct by: a metrics.jsonl (with its plan.toml) or a CSV; repeatable."
    ),
    audit: bool = option(
        False, help="Compile the best layouts and rank by the compiler's memory; implies --runnable."
    ),
    explain: bool = option(False, help="Explain the choice, the alternatives and changes that save time."),
    output: Path | None = OUTPUT,
    changes: str | None = CHANGES,
    price: str | None = option(
        None, help="With several --hardware: price of a chip-hour, v5p=4.2,h100=2.5.", unset="the catalog's"
    ),
    currency: str | None = option(None, help="Currency of --price.", unset="USD"),
    as_json: bool = JSON,
) -> None:
    """Rank layouts for training a model by predicted step time.

    Exits 1 if none fits the memory, or if the best costs more than --max-price-per-hour or --budget.

    \b
    mw plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens 4M --seq-len 4096
    mw plan train --model llama-3-8b --hardware h100 --batch-tokens 4M --seq-len 8192 --smallest
    mw plan train --model llama-3-8b --hardware h100 --batch-tokens 4M --seq-len 8192 --max-price-per-hour 500
    """
    config = load_model_with(model, changes)
    hardwares = tuple(spec for text in hardwares for spec in specs(text))
    work.workload(config)
    if output:
        check_output(output)
    if audit and search.runnable is None:
        search = replace(search, runnable=True)
    if len(hardwares) != 1:
        single = {"-o": output, "--layout": layout, "--anchor": anchor, "--audit": audit}
        single |= {"--max-price-per-hour": limits.max_price_per_hour, "--budget": limits.budget}
        _check_several(single | {"--smallest": size.smallest})
        machines = [conditions.of(load_hardware(spec)) for spec in hardwares]
        priced = ChipPrices(price, currency).of(machines)
        _compare(config, priced, work, search, conditions.launcher, as_json)
        return
    [hardware] = hardwares
    limits.check(tokens)
    if size.smallest:
        _check_smallest(layout, anchor, conditions)
        plans = _smallest(config, hardware, work, search, size, tokens, ChipPrices(price, currency), as_json)
    else:
        _check_not_smallest(size)
        prices = ChipPrices(price, currency)
        hardware = limits.largest_machine(hardware, prices)
        [machine] = prices.of([conditions.of(load_hardware(hardware))])
        limits.check_price(machine)
        machine, corrections = anchored_by(machine, anchor)
        for line in corrections:
            note(f"--anchor: {line}")
        plans = _ranked(config, machine, work, layout, search, conditions)
    if audit:
        require("run")
        with progress() as update:
            plans = plans.audited(update)
    explanation = None
    if explain or as_json or output or tokens or critical_batch:
        with waiting("pricing the alternatives"):
            explanation = plans.explain(tokens=tokens, critical_batch=critical_batch)
    over_limit = limits.faults(plans.best.candidate, tokens)
    _answer(plans, explanation, over_limit, in_words=explain, as_json=as_json, output=output)
    if over_limit:
        unwritten = f"; {output} is not written" if output and plans.best.fits else ""
        note(f"mw: {'; '.join(over_limit)}{unwritten}")
        raise typer.Exit(_DOES_NOT_FIT)


def _ranked(
    config: ModelConfig,
    machine: Hardware,
    work: Train,
    layout: str | None,
    search: SearchOptions,
    conditions: Conditions,
) -> Plans:
    """The layouts of a machine, ranked, or only `layout`, priced."""
    if layout:
        _check_single(search, conditions)
        dtypes = {"weights_dtype": search.weights_dtype, "compute_dtype": search.compute_dtype}
        return mw.price(config, machine, work, layout, **dtypes).alone
    with waiting("searching layouts"):
        return mw.plan(config, machine, work, **vars(search), launcher=conditions.launcher)


def _answer(
    plans: Plans,
    explanation: Explanation | None,
    over_limit: Sequence[str],
    *,
    in_words: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Print the ranking and write the best plan, if it keeps the limits on money. Exits 1 if nothing fits.

    over_limit: the limits that the best plan exceeds, in words.
    """
    document, search, best = plans.document(explanation), plans.search, plans.best
    if over_limit:
        document["over_limit"] = [*over_limit]
    if output and best.fits and not over_limit:
        write_plan_files(output, best.plan, document, best.launch)
    if as_json:
        for notice in search.notices:
            note(notice)
        emit(document)
    else:
        show_plan(document, search, explanation, in_words=in_words, sizing=plans.sizing)
    if not best.fits:
        change = explanation.change if explanation else best.cheapest_fit()
        note(f"mw: {plans.model.name} on {plans.hardware.spec}: {shortage_words(search, change)}")
        raise typer.Exit(_DOES_NOT_FIT)


def _check_several(single: Mapping[str, object]) -> None:
    """Raise PlanError if an option for one machine is given for several."""
    if given := sorted(flag for flag, value in single.items() if value):
        verb = "takes" if len(given) == 1 else "take"
        raise PlanError(f"{', '.join(given)} {verb} one machine; name one --hardware")


def _compare(
    config: ModelConfig,
    machines: list[Hardware],
    work: Train,
    search: SearchOptions,
    launcher: str | None,
    as_json: bool,
) -> None:
    """Print the best layout of every machine in one table. Exits 1 if one of them does not fit."""
    rows = []
    for machine in machines:
        with waiting(f"searching layouts of {machine.spec}"):
            plans = mw.plan(config, machine, work, **vars(search), launcher=launcher)
        for notice in plans.search.notices:
            note(f"{machine.spec}: {notice}")
        rows.append({"plan": machine.spec, **plan_costs(plan_to_compare(plans.best), machine)})
    show_compared(rows, as_json=as_json)


def _check_single(search: SearchOptions, conditions: Conditions) -> None:
    """Raise PlanError for an option that bounds a search if --layout is given."""
    given = {
        "--for": conditions.launcher is not None,
        "--runnable": search.runnable is True,
        "--any": search.runnable is False,
        "--given": search.given != "",
    }
    refuse_with(given, "--layout prices only that layout")


def _check_smallest(layout: str | None, anchor: tuple[Path, ...], conditions: Conditions) -> None:
    if given := conditions.given:
        raise PlanError(
            f"--smallest sizes machines for {XLA} on their usual networks; leave out {', '.join(given)}, or "
            "name the topology"
        )
    if anchor:
        raise PlanError("--smallest tries machines that --anchor's run was not on; leave one of them out")
    if layout:
        raise PlanError("--smallest searches layouts; leave out --layout, or name the topology")


def _check_not_smallest(size: SizeOptions) -> None:
    for flag, value in (("--max-seconds", size.max_seconds), ("--days", size.days)):
        if value is not None:
            raise PlanError(f"{flag} bounds what --smallest looks for; add --smallest")


def _smallest(
    config: ModelConfig,
    hardware: str,
    work: Train,
    search: SearchOptions,
    size: SizeOptions,
    tokens: int | None,
    prices: ChipPrices,
    as_json: bool,
) -> Plans:
    """The layouts of the smallest machine. Exits 1 if no size suffices."""
    if ":" in hardware:
        load_hardware(hardware)  # for its warnings
    limits = {"max_seconds": size.max_seconds, "days": size.days, "tokens": tokens, "prices": prices}
    try:
        with progress() as update:
            return mw.smallest(config, hardware, work, **vars(search), **limits, progress=update)
    except NothingFits as error:
        if as_json:
            tried = [tried.to_dict() for tried in error.tried]
            emit({"smallest": {"hardware": None, "num_chips": None, "tried": tried}})
        note(f"mw: {error}")
        raise typer.Exit(_DOES_NOT_FIT) from error
