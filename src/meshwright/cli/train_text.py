"""`mw train` without a plan: a small model for a text, or a checkpoint to fine-tune, on this machine."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.cli.console import note
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.here import this_machine
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.count import count_params
from meshwright.models.model_files import read_model
from meshwright.native.processor import keep_freed_memory
from meshwright.nn.start.devices import use_devices_of
from meshwright.nn.start.processes import num_processes
from meshwright.plan.train import price
from meshwright.plan_file import Plan
from meshwright.train.job import RunOptions
from meshwright.train.of_text import (
    LEARNING_RATE,
    TRAIN_SECONDS,
    WEIGHT_DECAY,
    is_short,
    largest_trainable,
    most_steps,
    openings,
    plans_for_text,
    steps_in,
    whole_sentences,
)
from meshwright.train.settings import check_one_length
from meshwright.units import format_bytes, format_count, format_seconds

_MAX_TOKENS, _TEMPERATURE, _NUM_SAMPLES, _NUM_OPENINGS = 100, 0.4, 8, 3
# A sample ends with its paragraph, and before tables, headings and code.
_ENDS = ("\n\n", "\n|", "\n#", "```")
# The suggested run in the background has at most this many times the steps.
_LONGER = 6
# Runs of a step that are timed before training.
_TIMED_STEPS = 8
# Sequences of a chip in a step of fine-tuning, and the most tokens of each.
_TUNED_SEQUENCES, _TUNED_TOKENS = 8, 1024


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
    plans = plans_for_text(text, this_machine())
    given["data"] = str(text)
    plan = plans[0]
    if not options.resume:
        check_one_length(given)
        has_length = given.get("steps") is not None or given.get("epochs") is not None
        seconds = _step_seconds(plans, is_needed=len(plans) > 1 or not has_length)
        time = options.time or TRAIN_SECONDS
        number = largest_trainable(seconds, time)
        plan = plans[number]
        if not has_length:
            given["steps"] = steps_in(time, seconds[number], most_steps(text, plan.workload.num_tokens))
            options = replace(options, time=None)  # the number of steps is chosen for it
        length = f"{given['epochs']:g} epochs in" if given.get("epochs") else f"{given['steps']}"
        given.setdefault("learning_rate", LEARNING_RATE)
        given.setdefault("weight_decay", WEIGHT_DECAY)
        if is_short(text):
            note(f"mw: {text} is too short to learn sentences from; from about 400 kB on samples read better")
        note(
            f"mw: a model of {format_count(count_params(plan.model).total)} parameters with a vocabulary of "
            f"{plan.model.vocab_size:,} on {plan.hardware}, {length} steps of "
            f"{format_seconds(seconds[number])}; --steps or --time changes them, a PLAN.toml the model"
        )
    return plan, options if options.run else replace(options, run=Path("runs") / plan.model.name)


def _step_seconds(plans: Sequence[Plan], *, is_needed: bool) -> list[float]:
    """Seconds of a step of each plan: the first is timed, the others are scaled by their planned times.

    All are planned times if no measurement is needed, or if several processes train: JAX must join those
    before it runs a step.
    """
    hardware = catalog.load(plans[0].hardware)
    planned = [price(each.model, hardware, each.workload, each.layout).step_seconds for each in plans]
    if not is_needed or num_processes() > 1:
        return planned
    if hardware.chip.platform.virtual:
        keep_freed_memory()  # before JAX starts its threads
    use_devices_of(hardware)
    from meshwright.bench.timing import time_interleaved
    from meshwright.bench.train_step import step_program

    smallest = plans[0]
    program = step_program(smallest.model, smallest.layout, smallest.workload)
    [timing] = time_interleaved([program], _TIMED_STEPS)
    return [seconds * timing.seconds / planned[0] for seconds in planned]


def of_checkpoint(folder: Path, options: RunOptions) -> Plan:
    """The plan to fine-tune a checkpoint here: FSDP with the fastest microbatches and remat that fit.

    Raises PlanError with the memory of the smallest step if none fits.
    """
    machine = catalog.load(this_machine())
    model = replace(read_model(folder), lora_rank=options.lora, lora_alpha=options.lora_alpha)
    dtype = machine.chip.platform.dtype
    sharded = Layout.of(
        fsdp=machine.num_chips, weights_dtype=options.base_dtype or dtype, compute_dtype=dtype
    )
    work = Workload(_TUNED_SEQUENCES * machine.num_chips, min(_TUNED_TOKENS, model.max_seq_len))
    tried = [
        price(model, machine, work, sharded.replace(microbatches=microbatches, remat=remat))
        for microbatches in (1, 2, 4, _TUNED_SEQUENCES)
        for remat in ("none", "matmuls", "full")
    ]
    fitting = [candidate for candidate in tried if candidate.fits]
    if not fitting:
        least = min(tried, key=lambda candidate: candidate.needed_bytes)
        raise PlanError(
            f"{model.name} on {machine.spec}: needs {format_bytes(least.needed_bytes)} a chip, "
            f"{format_bytes(least.lacking_bytes)} more than it has; mw fit {folder} lists the ways that fit"
        )
    best = min(fitting, key=lambda candidate: candidate.step_seconds)
    note(
        f"mw: {model.name} on {machine.spec} as {best.layout}, {work.num_sequences} sequences of "
        f"{work.seq_len:,} tokens a step, {format_seconds(best.step_seconds)} planned; "
        "a PLAN.toml changes them"
    )
    return Plan(model, machine.spec, work, best.layout)


def continue_text(run: Path, text: Path, num_steps: int, step_seconds: float | None) -> None:
    """Print samples of the trained model in whole sentences, by `mw generate` in other processes.

    Ends with the command of a longer run in the background. num_steps: the steps that the run has had.
    """
    sampling = ["--max-tokens", str(_MAX_TOKENS), "--temperature", str(_TEMPERATURE)]
    arguments = ["--checkpoint", str(run), *sampling, "--best-of", str(_NUM_SAMPLES)]
    prompts = openings(text, _NUM_OPENINGS)
    note(f"\n$ mw generate {shlex.join([prompts[0], *arguments])}")
    arguments += [word for end in _ENDS for word in ("--stop", end)]
    for prompt in prompts:
        command = [sys.executable, "-m", "meshwright.cli.main", "generate", prompt, *arguments, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            print(whole_sentences(prompt + json.loads(done.stdout)["text"]))
    most = most_steps(text, plans_for_text(text, this_machine())[0].workload.num_tokens)
    if num_steps >= most:
        note("a longer text gives better samples; with more steps the model would learn this one by heart")
        return
    more = min((_LONGER - 1) * num_steps, most - num_steps)
    takes = f"{format_seconds(more * step_seconds)} more, " if step_seconds else ""
    longer = shlex.join(["mw", "train", str(text), "--run", str(run), "--resume"])
    note(
        f"longer training gives better samples ({takes}in the background; its log ends with some):\n"
        f"nohup {longer} --steps {num_steps + more} > {shlex.quote(f'{run}.log')} 2>&1 &"
    )
