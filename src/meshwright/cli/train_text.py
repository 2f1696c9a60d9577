"""`mw train my.txt`: a small model for a text, planned for this machine, and a sample of it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from meshwright.cli.common import note
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.here import this_machine
from meshwright.models.count import count_params
from meshwright.plan.train import price
from meshwright.plan_file import Plan
from meshwright.train.job import RunOptions
from meshwright.train.of_text import LEARNING_RATE, TRAIN_SECONDS, plan_for_text, steps_in
from meshwright.units import format_count

_PROMPT, _MAX_TOKENS, _TEMPERATURE = "The ", 120, 0.7


def of_text(text: Path, options: RunOptions, given: dict[str, object]) -> tuple[Plan, RunOptions]:
    """The plan of a small model for a text, and the options with a folder of its own.

    Completes `given` with the data, the steps and the learning rate. Raises PlanError for options of another
    model.
    """
    if given.get("data") is not None:
        raise PlanError(f"{text} is the data; leave out --data, or name a PLAN.toml before it")
    if options.lora is not None or given.get("from_") is not None:
        raise PlanError(
            f"{text} trains a new model; to fine-tune one, name a PLAN.toml (mw plan train ... -o PLAN.toml)"
        )
    plan = plan_for_text(text, this_machine())
    given["data"] = str(text)
    if not options.resume:
        seconds = price(plan.model, catalog.load(plan.hardware), plan.workload, plan.layout).step_seconds
        given.setdefault("steps", steps_in(TRAIN_SECONDS, seconds))
        given.setdefault("learning_rate", LEARNING_RATE)
        note(
            f"mw: a model of {format_count(count_params(plan.model).total)} parameters with a vocabulary of "
            f"{plan.model.vocab_size:,} on {plan.hardware}, {given['steps']} steps; --steps changes them, "
            "a PLAN.toml the model"
        )
    return plan, options if options.run else replace(options, run=Path("runs") / plan.model.name)


def continue_text(run: Path) -> None:
    """Print a sample of the trained model, by `mw generate` in another process."""
    arguments = ["generate", "--checkpoint", str(run), _PROMPT]
    note(f"\n$ mw {' '.join(arguments[:-1])} '{_PROMPT}'")
    sampling = ["--max-tokens", str(_MAX_TOKENS), "--temperature", str(_TEMPERATURE)]
    subprocess.run([sys.executable, "-m", "meshwright.cli.main", *arguments, *sampling], check=False)
    note("longer training reads better: mw train --run " + str(run) + " --resume --steps N")
