"""A training job, with all checks that need neither JAX nor the data's text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from meshwright.dtypes import types_for
from meshwright.errors import CheckpointError, MeshwrightError, PlanError
from meshwright.hardware.catalog import load
from meshwright.layout.layout_checks import check_stacks, check_updates
from meshwright.layout.runnable import check_runs, emulated
from meshwright.models.config import DraftHead, ModelConfig
from meshwright.models.model_files import read_model
from meshwright.nn.files import checkpoint_files
from meshwright.options import option
from meshwright.plan_file import PLAN_FILE, Plan, load_plan
from meshwright.train.bpe import check_vocab_size, load_bpe, tokenizer_file
from meshwright.train.documents import check_source, parse_sources
from meshwright.train.settings import (
    Settings,
    changed_settings,
    check_has_routers,
    evaluation_sets,
    load_settings,
    new_settings,
)
from meshwright.train.tensorboard_log import check_board
from meshwright.units import parse_count, parse_seconds


def check_run(run: Path) -> None:
    """Raise CheckpointError if the folder is not a run of mw train."""
    if not (run / PLAN_FILE).is_file():
        raise CheckpointError(f"run {run}: holds no {PLAN_FILE}; name the folder of a run of mw train")


@dataclass(frozen=True)
class RunOptions:
    """The options of `mw train` that settings.json does not keep."""

    lora: int | None = option(
        None,
        parser=parse_count,
        help="Train only LoRA adapters of this rank.",
        unset="all weights",
        after="from_",
    )
    lora_alpha: float | None = option(
        None, least=0, help="LoRA alpha: adapters add alpha / rank (x A) B.", unset="the rank"
    )
    draft_head: Literal["joint", "frozen"] | None = option(
        None, help="Train a head that drafts tokens: with the model, or only the head.", unset="none"
    )
    run: Path | None = option(None, help="The run's folder.", unset="runs/MODEL", after="bad_data")
    resume: bool = option(
        False, help="Continue from the last checkpoint with the run's settings.", after="steps"
    )
    time: float | None = option(
        None,
        parser=parse_seconds,
        above=0,
        help="End with a checkpoint after this time: 30min, 2h. Without a plan, train the steps that fit.",
        unset="no limit",
        after="epochs",
    )
    profile: str | None = option(
        None,
        metavar="FIRST:LAST",
        help="Trace these steps and print where their time went.",
        after="tensorboard",
    )
    base_dtype: str | None = option(
        None,
        help="Store the weights that --lora leaves as they are in this type (QLoRA).",
        unset="the plan's",
        after="lora_alpha",
        names=types_for("frozen weights", "train"),
    )


@dataclass(frozen=True)
class TrainingJob:
    """A run that can begin or continue. figures: the text of the plan's plan.json, if it exists.

    resume: continue from the last checkpoint, which exists. profile: the first and last step to trace. notes:
    a sentence about each option that differs from the run so far. seconds: time after which the run ends.
    """

    plan: Plan
    figures: str | None
    run: Path
    settings: Settings
    resume: bool
    notes: list[str] = field(default_factory=list)
    profile: tuple[int, int] | None = None
    seconds: float = inf


def prepare_job(
    plan: Plan | None, figures: str | None, options: RunOptions, given: Mapping[str, Any]
) -> TrainingJob:
    """The checked job of `options`. Writes nothing, and loads neither JAX nor the text.

    plan: None for the plan of the run. given: settings by name; None or missing for the run's, or the
    default. `resume` without a checkpoint begins at step 0 and says so: the same command can be repeated
    until the run is done. Raises a MeshwrightError for options that do not run, for another run in the
    folder, and for settings that cannot change.
    """
    profile = None if options.profile is None else _traced_steps(options.profile)
    folder, resume = options.run or (Path("runs") / plan.model.name if plan else None), options.resume
    written = load_plan(folder / PLAN_FILE) if folder and (folder / PLAN_FILE).is_file() else None
    chosen = _with_adapters(plan or written, options.lora, options.lora_alpha)
    chosen = _with_base(chosen, options.base_dtype)
    chosen = _with_draft_head(chosen, options.draft_head)
    if folder is None or chosen is None:
        raise PlanError(
            "no plan: name a PLAN.toml (mw plan train ... -o PLAN.toml), a text to train a small model on "
            "(mw train my.txt), or a --run that has a plan"
        )
    _check_plan(chosen)
    checkpoints = folder / checkpoint_files.CHECKPOINTS
    saved = checkpoint_files.checkpoint_steps(checkpoints)
    if saved and not resume:
        raise CheckpointError(
            f"checkpoint: {checkpoints} already holds step {saved[-1]}; go on from there with --resume, "
            "or name another --run"
        )
    stored = load_settings(folder) if resume else None
    notes: list[str] = []
    if stored is not None:
        settings, notes = changed_settings(folder, stored, given)
        if saved and settings.steps is not None and saved[-1] > settings.steps:
            raise MeshwrightError(
                f"run {folder}: is at step {saved[-1]} already, {settings.steps} were asked for; ask for more"
            )
    else:
        settings = new_settings(given)
        _check_new(settings, chosen.model)
    check_has_routers(chosen.model, settings.balance_loss, settings.router_z_loss)
    if given.get("draft_weight") is not None and chosen.model.draft_head != "joint":
        raise MeshwrightError(
            f"--draft-weight {settings.draft_weight:g}: no draft head is trained with the model; "
            "add --draft-head joint"
        )
    if settings.tensorboard:
        check_board()
    if stored is None and given.get("optimizer") is None:
        settings = replace(settings, optimizer=chosen.layout.precision.optimizer)
    chosen = _with_optimizer(chosen, settings.optimizer)
    if saved and written is not None:
        _check_same_model(folder, written.model, chosen.model)
        notes += _plan_changes(written, chosen)
    if resume and not saved:
        notes.append(f"{checkpoints} holds no checkpoint yet: beginning at step 0")
    chip = load(chosen.hardware).chip
    if sentence := emulated(chosen.layout, chip.platform, chip):
        notes.append(sentence)
    if not chosen.planned:
        figures = None  # they are not of the changed plan
    return TrainingJob(chosen, figures, folder, settings, bool(saved), notes, profile, options.time or inf)


def _traced_steps(text: str) -> tuple[int, int]:
    """The first and the last step of `FIRST:LAST`. Raises MeshwrightError for another form."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise MeshwrightError(f"--profile {text}: write FIRST:LAST, the steps to trace, such as 10:15")
    return first, last


def _check_plan(plan: Plan) -> None:
    if plan.workload.phase != "train":
        raise PlanError(
            f"{plan.model.name}: the plan is of phase {plan.workload.phase!r}; training takes 'train'"
        )
    check_runs(plan.layout)
    check_updates(plan.layout, plan.model)
    check_stacks(plan.layout, plan.model)


def _check_new(settings: Settings, model: ModelConfig) -> None:
    """Raise an error if inputs of a new run are missing, or do not fit its model."""
    for source in parse_sources(settings.data):
        check_source(source.path)
    for path in evaluation_sets(settings.eval).values():
        check_source(path)
    if settings.from_ is not None:
        _check_start(Path(settings.from_), model)
    if given_tokenizer := settings.tokenizer or settings.from_:
        load_bpe(tokenizer_file(given_tokenizer))
    else:
        check_vocab_size(model.vocab_size)
    if model.lora_rank and settings.from_ is None:
        raise MeshwrightError(
            f"--lora {model.lora_rank}: adapters are trained next to frozen weights; name their "
            "directory with --from DIR"
        )
    if model.draft_head == "frozen" and settings.from_ is None:
        raise MeshwrightError(
            "--draft-head frozen: the head is trained next to frozen weights; name their directory with "
            "--from DIR, or train both with --draft-head joint"
        )


def _with_adapters(plan: Plan | None, rank: int | None, alpha: float | None) -> Plan | None:
    """The plan with adapters of its model's weights; its figures are of training all weights."""
    if plan is None or (rank is None and alpha is None):
        return plan
    if alpha is not None and rank is None and plan.model.lora_rank is None:
        raise MeshwrightError(f"--lora-alpha {alpha:g} scales adapters; name their rank with --lora")
    model = replace(
        plan.model, lora_rank=rank or plan.model.lora_rank, lora_alpha=alpha or plan.model.lora_alpha
    )
    return plan if model == plan.model else replace(plan, model=model, planned={})


def _with_base(plan: Plan | None, dtype: str | None) -> Plan | None:
    """The plan with weights in `dtype` next to its adapters; its figures are of its own type."""
    if plan is None or dtype in (None, plan.layout.precision.weights_dtype):
        return plan
    if plan.model.lora_rank is None:
        raise MeshwrightError(
            f"--base-dtype {dtype}: only weights next to adapters can be stored so; add --lora 16"
        )
    return replace(plan, layout=plan.layout.replace(weights_dtype=dtype), planned={})


def _with_draft_head(plan: Plan | None, draft_head: DraftHead | None) -> Plan | None:
    """The plan with a draft head of its model; its figures are without it."""
    if plan is None or draft_head in (None, plan.model.draft_head):
        return plan
    return replace(plan, model=replace(plan.model, draft_head=draft_head), planned={})


def _with_optimizer(plan: Plan, optimizer: str) -> Plan:
    """The plan with this optimizer, without figures if it changes."""
    if plan.layout.precision.optimizer == optimizer:
        return plan
    return replace(plan, layout=plan.layout.replace(optimizer=optimizer), planned={})


def _check_start(folder: Path, planned: ModelConfig) -> None:
    """Raise CheckpointError or PlanError if `folder` has no weights of the planned model."""
    if not folder.is_dir() or not any(folder.glob("*.safetensors*")):
        raise CheckpointError(
            f"--from {folder}: there are no *.safetensors; name the folder of a Hugging Face checkpoint"
        )
    model = read_model(folder)
    for field_ in fields(ModelConfig):
        stored, wanted = getattr(model, field_.name), getattr(planned.base, field_.name)
        if stored != wanted and field_.name not in ("name", "max_seq_len", "tower_params"):
            raise PlanError(
                f"--from {folder}: its model has {field_.name} = {stored} and the plan's has {wanted};"
                f" plan with --model {folder}"
            )


def _check_same_model(run: Path, trained: ModelConfig, planned: ModelConfig) -> None:
    for field_ in fields(ModelConfig):
        old, new = getattr(trained, field_.name), getattr(planned, field_.name)
        if old != new and field_.name != "tower_params":
            raise PlanError(
                f"run {run}: its model has {field_.name} = {old} and the plan's has {new}; name another --run"
            )


def _plan_changes(written: Plan, chosen: Plan) -> list[str]:
    """A sentence about each difference of the plan from the run's."""
    pairs = {
        "layout": (written.layout, chosen.layout),
        "hardware": (written.hardware, chosen.hardware),
        "sequences per step": (written.workload.num_sequences, chosen.workload.num_sequences),
    }
    if written.workload.seq_len != chosen.workload.seq_len:
        raise MeshwrightError(
            f"the run's rows are of T = {written.workload.seq_len} tokens and the plan's of "
            f"{chosen.workload.seq_len}; name another --run"
        )
    return [
        f"{what}: {was} until now, {now} from here on" for what, (was, now) in pairs.items() if was != now
    ]
