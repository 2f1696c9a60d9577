"""Real `mw train` processes on one tiny model, which tests and benchmarks kill and damage."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 1200
# What does not depend on the clock: these are equal bit for bit, however often a run was killed.
EXACT = ("step", "loss", "grad_norm", "learning_rate", "validation_loss", "skipped")


class Runs:
    """A folder with a corpus and a plan for `mw train`. Programs are compiled once, for all processes."""

    def __init__(self, folder: Path, hardware: str = "cpu:1", layout: str = "data=1") -> None:
        self.folder, self.corpus, self.plan = folder, folder / "corpus", folder / "plan.toml"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT / "src"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        # As quickly as tests compile, but with as many devices as a plan has.
        flags = os.environ.get("XLA_FLAGS", "").split()
        self.environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
        self.corpus.mkdir()
        for number in range(20):
            lines = (f"def f{number}_{line}(x):\n    return x + {line}\n" for line in range(40))
            (self.corpus / f"{number}.py").write_text("\n".join(lines))
        self.write_plan(self.plan, hardware, layout)

    def write_plan(self, path: Path, hardware: str, layout: str) -> None:
        """Writes the plan of a layout of the tiny model for the corpus."""
        options = ["--model", "tiny", "--hardware", hardware, "--batch-tokens", "512", "--seq-len", "32"]
        self.mw("plan", "train", *options, "--layout", layout, "-o", str(path))

    def begin(self, run: Path, *more: str) -> list[str]:
        """The arguments that begin a run; with --resume they may be repeated until it is done."""
        return ["train", str(self.plan), "--data", str(self.corpus), "--run", str(run), *more]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A process of `mw` with these arguments."""
        return subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli.main", *arguments],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def mw(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """(stdout, stderr) of `mw` with these arguments, which ends with `code`."""
        return self.ended(self.start(*arguments), code=code)

    def ended(self, process: subprocess.Popen[str], *, code: int) -> tuple[str, str]:
        """(stdout, stderr) of a process of `start`, which ends with `code`."""
        try:
            out, err = process.communicate(timeout=LONGEST_SECONDS)
        finally:
            process.kill()
        assert process.returncode == code, err
        return out, err


def exact_lines(run: Path, keys: Sequence[str] = EXACT) -> list[dict[str, Any]]:
    """The lines of the run's metrics without what the clock decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in keys if key in line} for line in lines]
