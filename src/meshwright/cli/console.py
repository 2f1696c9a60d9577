"""Common parts of the commands: options, output on stdout, notes on stderr, progress.

stdout has only the result (a table, or with --json one document), so that it can be piped.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from threading import Timer
from typing import Any

from meshwright.errors import LayoutError, MeshwrightError, ModelError, PlanError, nearest
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout.short import read_words
from meshwright.models.config import ModelConfig
from meshwright.models.model_files import field_here
from meshwright.models.presets import load_model
from meshwright.options import REQUIRED, option
from meshwright.progress import Progress
from meshwright.units import parse_count

# Width of piped output, enough for the tables.
_PIPED_WIDTH = 140
# Delay before a terminal shows progress.
_PATIENCE_SECONDS = 1.0
# Number of lines of progress for a kind of work, without a terminal.
_PIPED_SHARES = 5


# The text for `python -c` that runs `mw` with its arguments; its messages offer no line to type.
WITHOUT_LINES = "from meshwright.cli.main import run; run(offers_line=False)"
HARDWARE_HELP = "v5p:16x20x28, v5e:4x4, h100:8x8, 2*v5p:16x16x16, cpu:8 or a .toml."

JSON = option(False, flag="--json", help="Print one JSON document on stdout.")
MODEL: str = option(
    REQUIRED,
    flag="--model",
    help="A preset (llama-3-70b), a config.json, a checkpoint folder or a TOML.",
)
HARDWARE: str = option(REQUIRED, flag="--hardware", help=HARDWARE_HELP)
LOCAL_HARDWARE = option("cpu:8", flag="--hardware", help="This machine, as virtual CPU devices: cpu:8.")
CHANGES: str | None = option(
    None, flag="--set", metavar="K=V,...", help="Change the model: num_kv_heads=64,d_ff=20480."
)
CHECKPOINT: Path = option(
    REQUIRED, flag="--checkpoint", help="The folder of a run or of a Hugging Face model."
)
PROCESSES = option(1, flag="--processes", least=1, help="JAX processes to split the devices over.")
OUTPUT: Path | None = option(
    None, flag="-o --output", help="Write the best plan here, and its .json next to it."
)


def refuse_with(given: Mapping[str, object], why: str, *, otherwise: str = "") -> None:
    """Raise PlanError with the reason `why` if a given option has a value other than None and False."""
    if clashing := [option for option, value in given.items() if value is not None and value is not False]:
        raise PlanError(f"{why}; leave out {', '.join(clashing)}{otherwise}")


def emit(document: Mapping[str, Any], *, as_line: bool = False) -> None:
    """Print the JSON document of a command. as_line: on one line, as in metrics.jsonl."""
    with _whose_reader_may_end():
        print(json.dumps(document, indent=None if as_line else 2, allow_nan=False), flush=True)


def show(*renderables: Any) -> None:
    """Print tables and text on stdout, in the width of the terminal or of COLUMNS."""
    from rich.console import Console

    from meshwright.report.terminal.fitted import fitted

    asked = os.environ.get("COLUMNS", "").isdecimal()  # rich reads it by itself
    console = Console(width=None if asked or sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    console.on_broken_pipe = _raise_broken_pipe  # in place of rich's exit code 1
    with _whose_reader_may_end():
        for renderable in renderables:
            console.print(fitted(renderable, console.width), markup=False)
        sys.stdout.flush()


def _raise_broken_pipe() -> None:
    raise BrokenPipeError


@contextmanager
def _whose_reader_may_end() -> Iterator[None]:
    """Output whose reader, such as `head`, may end before it: the command goes on to its exit code."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def load_hardware(spec: str) -> Hardware:
    """The hardware of a spec, with a warning on stderr if its file lacks the efficiency of steps."""
    machine = catalog.load(spec)
    for warning in (catalog.step_warning(machine.chip), catalog.slice_warning(machine)):
        if warning:
            note(f"mw: warning: {warning}")
    return machine


def load_model_with(model: str, changes: str | None) -> ModelConfig:
    """The model of a spec, with fields changed by `--set`.

    Raises ModelError for an unknown field or an invalid value.
    """
    config = load_model(model)
    if not changes:
        return config
    try:
        words = read_words(changes)
    except LayoutError as error:
        again = "; run it once for each value" if re.search(r"=\d+(,\d+)+$", changes) else ""
        raise ModelError(
            f"--set {changes!r}: write FIELD=VALUE: num_kv_heads=64,d_ff=20480{again}"
        ) from error
    known = [field.name for field in fields(config)]
    for name in words:
        if name not in known:
            hint = f"write {ours}" if (ours := field_here(name)) in known else nearest(name, known)
            raise ModelError(f"--set {name}: a model has no such field; {hint}")
    return replace(config, **{name: _field(config, name, value) for name, value in words.items()})


def _field(config: ModelConfig, name: str, value: object) -> object:
    """A field's value from its text: flags, and counts such as 128k."""
    if isinstance(value, str) and type(getattr(config, name)) is int:
        with suppress(MeshwrightError):
            return parse_count(value)
    return _FLAGS.get(str(value), value)


def warn_of_long_context(config: ModelConfig, context: int) -> None:
    """Warn if sequences are longer than the model's context."""
    if context > config.max_seq_len:
        note(
            f"mw: warning: {context:,} positions exceed {config.name}'s context of {config.max_seq_len:,}; "
            "the figures ignore that limit"
        )


_FLAGS = {"true": True, "false": False}


@contextmanager
def progress() -> Iterator[Progress]:
    """A function that shows progress: a bar on a terminal, otherwise a few lines."""
    if not sys.stderr.isatty():
        yield _Lines().update
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, fraction: float | None) -> None:
            bar.update(
                task, description=what, completed=fraction or 0, total=None if fraction is None else 1.0
            )

        yield update
        bar.update(task, completed=1.0, total=1.0)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show `what` and the elapsed time on a terminal if the work inside takes over a second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=None)
    timer = Timer(_PATIENCE_SECONDS, bar.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


class _Lines:
    """Progress as lines: one at the beginning of each kind of work, then one for each share done."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._last: tuple[str, int] | None = None
        self._shown = ""

    def update(self, what: str, fraction: float | None) -> None:
        # "step 3, loss 2.1" and "step 4, loss 2.0" are one kind of work.
        kind, share = what.split(" ", 1)[0], int((fraction or 0) * _PIPED_SHARES)
        if (kind, share) != self._last:
            self._last = (kind, share)
            done = f", {fraction:.0%}" if fraction is not None and what == self._shown else ""
            self._shown = what
            note(f"  {time.perf_counter() - self._started:5.1f} s  {what}{done}")
