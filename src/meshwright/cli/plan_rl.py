"""mw plan rl: post-training, which generates and trains with the same weights."""

import json
from pathlib import Path
from typing import Any

import typer

from meshwright.cli.console import (
    CHANGES,
    HARDWARE,
    JSON,
    MODEL,
    emit,
    load_hardware,
    load_model_with,
    note,
    show,
    waiting,
)
from meshwright.errors import PlanError
from meshwright.files import check_writable, write_whole
from meshwright.models.presets import load_model
from meshwright.options import option, parse_dtype
from meshwright.plan_file import save_plan
from meshwright.post_training.work import PostTraining

_DOES_NOT_FIT = 1
# Lengths of rollouts for the comparison of forms, as multiples of the mean.
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


def rl(
    *,
    model: str = MODEL,
    hardware: str = HARDWARE,
    work: PostTraining,
    judge: str | None = option(None, help="A model that scores every rollout.", unset="a function"),
    reference_model: str = option("same", help="same: the first weights score every rollout too; or none."),
    weights_dtype: str | None = option(None, parser=parse_dtype, help="Dtype of weights.", unset="bf16"),
    crossover: bool = option(False, help="Compare the forms for rollouts of other lengths."),
    changes: str | None = CHANGES,
    output: Path | None = option(
        None, flag="-o --output", help="Write the trainer's plan here, and the server's as .generate.toml."
    ),
    html: Path | None = option(None, help="Write a page with each step along time."),
    as_json: bool = JSON,
) -> None:
    """Plan reinforcement learning or distillation: rollouts, scores and training on one pool or on two.

    Together: all chips roll out, score and train in turn, with the trainer's states kept on the chips or
    offloaded. Apart: one pool rolls out while the other trains on the rollouts before. Exits 1 if nothing
    fits.

    \b
    mw plan rl --model qwen3-32b --hardware h100:32x8 --prompts 512 --prompt-tokens 1k --output-tokens 4k
    """
    from meshwright.api.document import check_output
    from meshwright.api.inputs import SearchOptions
    from meshwright.post_training.rl_document import document_of, plans_of
    from meshwright.post_training.two_phases import Question, apart, together
    from meshwright.post_training.two_phases import crossover as compared

    if reference_model not in ("same", "none"):
        raise PlanError(f"--reference-model {reference_model}: fits: same, none")
    if output:
        check_output(output)
    if html:
        check_writable(html)
    config, machine = load_model_with(model, changes), load_hardware(hardware)
    if work.context > config.max_seq_len:
        raise PlanError(
            f"a prompt of {work.prompt_tokens:,} and a rollout of up to {work.longest_answer:,} tokens "
            f"exceed {config.name}'s context of {config.max_seq_len:,}; fits: --most-output-tokens "
            f"{max(1, config.max_seq_len - work.prompt_tokens)}, or --set max_seq_len={work.context}"
        )
    dtypes = SearchOptions(weights_dtype=weights_dtype).dtypes(machine.chip)
    scorer = load_model(judge) if judge else None
    asked = Question(config, machine, work, *dtypes, scorer, reference_model == "same")
    reason, steps = "no servers fit next to the trainer", []
    with waiting("planning both phases on all chips"):
        try:
            steps += together(asked)
        except PlanError as error:
            reason = str(error)
    with waiting("planning two pools"):
        steps += sorted(apart(asked, steps[0] if steps else None), key=lambda step: step.seconds)[:1]
    if not steps:
        note(f"mw: {config.name} on {machine.spec}: neither form fits: {reason}; take more chips")
        raise typer.Exit(_DOES_NOT_FIT)
    steps.sort(key=lambda step: step.seconds)
    rows = []
    if crossover and len(forms := list({step.staleness: step for step in reversed(steps)}.values())) > 1:
        with waiting("comparing lengths"):
            rows = compared(asked, forms[0], forms[1], _SCALES)
    document = document_of(asked, steps, rows)
    if output:
        for path, plan in zip(
            (output, output.with_suffix(".generate.toml")), plans_of(asked, steps[0]), strict=True
        ):
            save_plan(plan, path)
            note(f"wrote {path}")
        write_whole(output.with_suffix(".json"), json.dumps(document, indent=1))
    if html:
        from meshwright.report.pages.post_training import post_training_html

        note(f"wrote {write_whole(html, post_training_html(document))}")
    if as_json:
        emit(document)
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    from meshwright.report.answer import answer_lines, answer_of_post_training
    from meshwright.report.moves import move_words
    from meshwright.report.pages.post_training import crossover_table, forms_table
    from meshwright.report.terminal.tables import rich_table
    from meshwright.units import format_seconds

    show(
        "\n".join(answer_lines(answer_of_post_training(document))),
        rich_table(forms_table(document)),
    )
    for form in document["forms"]:
        parts = ", ".join(f"{one['what']} {format_seconds(one['seconds'])}" for one in form["phases"])
        show(f"{form['form']}: {parts}")
    show(f"{document['best']}: {move_words(document['forms'][0]['move'])}")
    if document["crossover"]:
        show("", rich_table(crossover_table(document)))
