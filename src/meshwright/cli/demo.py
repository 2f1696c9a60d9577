"""mw demo: all stages on this machine, by the usual commands.

calibrate -> corpus -> plan -> train -> audit -> serve -> report. Each stage that needs JAX is another
process, since the number of devices is fixed when JAX starts.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from meshwright.cli.command_options import command
from meshwright.cli.completion import PROMPT
from meshwright.cli.console import JSON, emit, note, progress, show
from meshwright.errors import DeviceError, PlanError
from meshwright.files import check_writable, write_whole
from meshwright.options import option
from meshwright.units import format_bytes, format_count, format_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None)

HARDWARE, MODEL, CORPUS = "cpu:8", "demo", "stories"
# A small vocabulary, since each of its tokens has to be seen often.
VOCAB_SIZE = 1024
# Small batches, since a model that has seen little text needs many updates.
SEQ_LEN, NUM_SEQUENCES, _LEARNING_RATE = 256, 8, 4e-3
# Planned time of all steps, without validation, checkpoints and compiling.
_TRAIN_SECONDS, FAST_TRAIN_SECONDS = 90, 20
_MIN_STEPS, _MAX_STEPS = 30, 600
# The files that a demo writes, and may remove.
_OWN = ("machine.toml", "plan.toml", "plan.json", "config.json", "tokenizer.json", "checkpoints")
_OWN += ("settings.json", "metrics.jsonl", "audit.json", "completion.json", "report.html", "data")
_FOUND_A_PROBLEM = 1


@dataclass
class Demo:
    """A demo in its folder. quiet: print no tables, since stdout is for the document."""

    run: Path
    train_seconds: float
    quiet: bool
    stages: dict[str, float] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""


@command(app)
def demo(
    run: Path = option(Path("runs/demo"), help="The folder to write everything to."),
    fast: bool = option(False, help="Train for 20 s only."),
    as_json: bool = JSON,
) -> None:
    """Calibrate, plan, train, audit and serve a small model on 8 virtual devices of this machine.

    The corpus is short stories in simple English, made here; nothing is downloaded. The demo takes under
    five minutes on two cores. Exits 1 if the audit differs from the plan.

    \b
    mw demo
    mw demo --run /tmp/demo --fast
    """
    check_writable(run / "completion.json")
    if find_spec("openai") is None:
        raise DeviceError("the demo asks its server with openai's client: pip install 'meshwright[demo]'")
    started = time.perf_counter()
    job = Demo(run, FAST_TRAIN_SECONDS if fast else _TRAIN_SECONDS, as_json)
    _clear(run)
    for number, (title, stage) in enumerate(_STAGES, start=1):
        note(f"\n[{number}/{len(_STAGES)}] {title}")
        began = time.perf_counter()
        stage(job)
        job.stages[stage.__name__] = time.perf_counter() - began
        note(f"      {format_seconds(job.stages[stage.__name__])}")
    _finish(job, time.perf_counter() - started)


def _clear(run: Path) -> None:
    """Remove an earlier demo, except its corpus, which is used again if nothing has changed.

    Raises PlanError for a folder with other files.
    """
    present = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
    if foreign := [name for name in present if name not in _OWN]:
        raise PlanError(
            f"--run {run}: holds {foreign[0]}, which is not a demo's; name a new or an empty folder"
        )
    stale = [name for name in present if name != "data"]
    if stale:
        note(f"replacing the demo in {run}")
    for name in stale:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run.mkdir(parents=True, exist_ok=True)


def calibrate(job: Demo) -> None:
    machine = mw("calibrate", "--hardware", HARDWARE, "-o", str(job.run / "machine.toml"))
    rates = ", ".join(f"{dtype} {format_count(rate)}" for dtype, rate in machine["flops_per_second"].items())
    memory = format_bytes(machine["hbm_bytes_per_second"])
    note(f"      a device: {rates} FLOP/s, memory {memory}/s, all {machine['num_chips']} at work")


def corpus(job: Demo) -> None:
    from meshwright.train.corpus import prepare_corpus

    with progress() as report:
        packed = prepare_corpus(
            CORPUS, job.run / "data", vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN, progress=report
        )
    train_tokens, held_out = packed.num_train_tokens, packed.num_validation_tokens
    note(
        f"      {format_bytes(packed.num_bytes)} of stories: {format_count(train_tokens)} tokens to train "
        f"on, {format_count(held_out)} held out; {packed.vocab_size:,} in the vocabulary"
    )


def plan(job: Demo) -> None:
    job.plan = mw(
        *(
            "plan",
            "train",
            "--model",
            MODEL,
            "--set",
            f"vocab_size={VOCAB_SIZE}",
            "--hardware",
            str(job.run / "machine.toml"),
        ),
        *("--batch-tokens", str(NUM_SEQUENCES * SEQ_LEN), "--seq-len", str(SEQ_LEN)),
        *("-o", str(job.run / "plan.toml")),
    )
    if not job.quiet:
        from meshwright.report.terminal.tables import plan_table

        show(plan_table(job.plan))


def train(job: Demo) -> None:
    line = mw(
        *("train", str(job.run / "plan.toml"), "--data", CORPUS, "--run", str(job.run)),
        *("--steps", str(num_steps(job)), "--learning-rate", str(_LEARNING_RATE)),
    )
    entropy = json.loads((job.run / "data" / "corpus.json").read_text())["unigram_entropy"]
    measured, planned = line["step_seconds"], line["planned_step_seconds"]
    note(f"      validation loss {line['validation_loss']:.3f} nats per token, unigram entropy {entropy:.3f}")
    note(f"      step time {format_seconds(measured)} measured, {format_seconds(planned)} planned")


def num_steps(job: Demo) -> int:
    """The number of steps that fill the demo's training time at the planned step time, within bounds."""
    steps = round(job.train_seconds / job.plan["best"]["step_seconds"] / 10) * 10
    return min(max(steps, _MIN_STEPS), _MAX_STEPS)


def audit(job: Demo) -> None:
    document = mw(
        *("audit", str(job.run / "plan.toml"), "-o", str(job.run / "audit.json")),
        codes=(0, _FOUND_A_PROBLEM),
    )
    job.verdict = document["verdict"]
    missing, unplanned = len(document["missing"]), len(document["unplanned"])
    note(f"      {job.verdict}: {missing} planned and not emitted, {unplanned} emitted and not planned")


def serve(job: Demo) -> None:
    from meshwright.cli.completion import complete

    document = complete(job.run)
    write_whole(job.run / "completion.json", json.dumps(document, indent=1))


def report(job: Demo) -> None:
    mw("report", str(job.run), "-o", str(job.run / "report.html"))


_STAGES: tuple[tuple[str, Callable[[Demo], None]], ...] = (
    (f"Calibrate: what 8 virtual devices of this machine do ({HARDWARE})", calibrate),
    ("Corpus: short stories, split, tokenised and packed", corpus),
    ("Plan: every layout priced on this machine", plan),
    ("Train: the best layout, run", train),
    ("Audit: the compiled step against the plan", audit),
    (f"Serve: the checkpoint behind OpenAI's API, asked to go on after {PROMPT!r}", serve),
    ("Report: one HTML file", report),
)


def mw(*arguments: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The document of one `mw` command, with its messages and progress on stderr.

    Ends the demo with the command's exit code if that is not in `codes`.
    """
    note(f"      $ mw {' '.join(arguments)}")
    command = [sys.executable, "-m", "meshwright.cli.main", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in codes:
        raise typer.Exit(done.returncode if done.returncode > 0 else _FOUND_A_PROBLEM)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        raise typer.Exit(_FOUND_A_PROBLEM) from None  # the command's message is on stderr


def _finish(job: Demo, seconds: float) -> None:
    places = {
        "report": job.run / "report.html",
        "plan": job.run / "plan.toml",
        "this machine": job.run / "machine.toml",
        "checkpoints": job.run / "checkpoints",
        "metrics": job.run / "metrics.jsonl",
        "serve it": f"mw serve --checkpoint {job.run}",
    }
    if job.quiet:
        emit({"run": str(job.run), "seconds": seconds, "stages": job.stages, "verdict": job.verdict})
    else:
        from meshwright.report.run_documents import read_run
        from meshwright.report.terminal.tables import summary_panel

        show("", summary_panel(read_run(job.run), places))
        note(f"done in {format_seconds(seconds)}")
    if job.verdict != "match":
        raise typer.Exit(_FOUND_A_PROBLEM)
