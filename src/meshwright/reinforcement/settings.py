"""The settings of `mw train --rl`, stored in rl.json of the run's folder. Imports no JAX."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, PlanError
from meshwright.files import parse_json, read_text, write_whole
from meshwright.hardware import catalog
from meshwright.options import check_options, flag_of, option
from meshwright.plan_file import Plan
from meshwright.train.settings import of_stored
from meshwright.units import parse_count, parse_length

RL_SETTINGS = "rl.json"
# A resumed run may change these: they say where scores come from, and not which rollouts are drawn.
_CHANGEABLE = ("judge",)


@dataclass(frozen=True)
class RlSettings:
    """The settings of reinforcement learning. A resumed run keeps them, except `judge`."""

    reward: str | None = option(
        None, metavar="FILE.py:FUNCTION", help="The reward, a function of (row, answer).", unset="--judge"
    )
    judge: str | None = option(
        None, metavar="URL", help="A served model that scores answers (OpenAI's API).", unset="--reward"
    )
    judge_template: str | None = option(
        None, metavar="FILE", help="The judge's prompt, with {prompt}, {answer} and keys of the row."
    )
    prompts: int = option(16, parser=parse_count, least=1, help="Prompts of a step.")
    samples: int = option(8, least=2, most=10_000, help="Rollouts of each prompt.")
    output_tokens: int = option(128, parser=parse_length, help="The most tokens of a rollout.")
    updates: int = option(1, least=1, help="The fewest updates of the optimizer in a step.")
    clip: float = option(0.2, above=0, help="Clip probability ratios to 1 - clip.")
    clip_high: float | None = option(None, above=0, help="Clip ratios to 1 + this.", unset="--clip")
    kl: float = option(0.0, least=0, help="Weight of the KL divergence to the first weights.")
    staleness: int = option(0, least=0, most=1, help="Steps between rolling out and learning weights.")
    apart: bool = option(False, help="Roll out in a process of its own, on the devices of --generate-plan.")
    generate_plan: str | None = option(
        None,
        metavar="PLAN.toml",
        help="The plan of one server that rolls out.",
        unset="PLAN.generate.toml if there is one; otherwise a replica on each device",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if (self.reward is None) == (self.judge is None):
            given = "both are" if self.reward else "neither is"
            raise MeshwrightError(
                f"--rl takes one of --reward FILE.py:FUNCTION and --judge URL, and {given} given"
            )
        if self.judge_template is not None and self.judge is None:
            raise MeshwrightError("--judge-template is the prompt of a --judge URL, and none is given")

    @property
    def num_rollouts(self) -> int:
        """Rollouts of a step."""
        return self.prompts * self.samples


def rl_settings(run: Path, given: Mapping[str, Any], *, resumes: bool) -> RlSettings:
    """The settings of a new run, or of a resumed run with changes from `given`.

    Raises MeshwrightError for a setting that a resumed run cannot change.
    """
    path = run / RL_SETTINGS
    if not (resumes and path.is_file()):
        return RlSettings(**given)
    try:
        stored = of_stored(RlSettings, parse_json(read_text(path, MeshwrightError)), path)
    except (ValueError, TypeError, MeshwrightError) as error:
        raise MeshwrightError(f"{path}: cannot be read ({error}); give the options again") from None
    for name, value in given.items():
        if name not in _CHANGEABLE and getattr(stored, name) != value:
            raise MeshwrightError(
                f"run {run}: began with {flag_of(name)} {getattr(stored, name)}, not {value}; "
                "leave the option out, or name another run"
            )
    kept = {field.name: getattr(stored, field.name) for field in fields(RlSettings)}
    return RlSettings(**kept | dict(given))


def save_rl_settings(settings: RlSettings, run: Path) -> None:
    """Write rl.json atomically."""
    write_whole(run / RL_SETTINGS, json.dumps(asdict(settings), indent=1) + "\n")


def check_learns(plan: Plan, settings: RlSettings) -> None:
    """Raise PlanError if reinforcement learning does not run with this plan."""
    layout, chip = plan.layout, catalog.load(plan.hardware).chip
    if layout.pipe > 1:
        raise PlanError(f"{layout}: --rl trains without a pipeline; fits: pipe = 1")
    if plan.model.lora_rank:
        raise PlanError(f"{plan.model.name}: --rl trains all weights; fits: a plan without lora_rank")
    if settings.apart and not chip.platform.virtual:
        raise PlanError(
            f"{plan.hardware}: --apart divides the virtual devices of CPUs among processes; fits: without "
            "--apart, on the same chips"
        )
    if settings.output_tokens >= (longest := plan.workload.seq_len):
        raise PlanError(
            f"--output-tokens {settings.output_tokens}: rows of T = {longest} tokens have no place for a "
            f"prompt; fits: up to {longest - 1}, or a plan with a longer --seq-len"
        )
