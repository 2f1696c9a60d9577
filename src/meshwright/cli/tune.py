"""mw tune: variants of a plan, ranked by compiling them for its hardware."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, note, progress, show
from meshwright.cli.extras import require
from meshwright.files import check_writable
from meshwright.options import option
from meshwright.plan_file import load_plan, save_plan

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


@command(app)
def tune(
    plan: Annotated[Path, typer.Argument(help="The plan.toml of a training step.", metavar="PLAN.toml")],
    target: str | None = option(
        None, help="tpu, gpu or cpu.", unset="the hardware's if installed, otherwise cpu"
    ),
    trials: int | None = option(None, least=1, help="The most variants to compile.", unset="all"),
    no_cache: bool = option(False, help="Compile trials again that were tried before."),
    output: Path | None = option(
        None, flag="-o --output", help="Write the best plan here.", unset="PLAN.toml itself"
    ),
    as_json: bool = JSON,
) -> None:
    """Compile variants of a plan and keep the fastest.

    No chip need be attached. The command varies the remat policy, then the layout (those nearest to the best
    by planned step time), then XLA's documented options, each time starting from the best so far. It ranks
    variants by the step time of the compiled schedule and by compiled memory, and takes a change that is more
    than 2% faster. Finished variants are cached, so an interrupted run continues. Exits 1 if nothing fits.

    \b
    mw tune plan.toml
    mw tune plan.toml --target tpu --trials 5 -o tuned.toml
    """
    require("run")
    original = load_plan(plan)
    check_writable(output or plan)
    from meshwright.audit.tuning import tune as tuned

    with progress() as update:
        tuning = tuned(
            original, target, lambda what: update(what, None), num_trials=trials, use_cache=not no_cache
        )
    document = tuning.to_dict()
    if tuning.best.fits:
        save_plan(tuning.plan, output or plan)
    if as_json:
        emit(document)
    else:
        from meshwright.report.terminal.tuned import tune_table

        show(tune_table(document))
    if not tuning.best.fits:
        note(f"mw: none of the {len(tuning.trials)} trials fits; {plan} is as it was")
        raise typer.Exit(_DOES_NOT_FIT)
    note(f"wrote {output or plan}: {tuning.best.change}")
