"""Generated command lines: each ends in time with exit code 0, 1 or 2, and without a traceback.

A line is a valid one with a word, an option or a value changed. NUM_LINES and SEED in the environment run
others; a failing line is printed, and runs again by itself as `mw ...`.
"""

import io
import logging
import os
import random
import shlex
import signal
import sys
import time
import traceback
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.commands import command_in
from meshwright.cli.faults import logger
from meshwright.cli.main import main
from meshwright.errors import PlanError
from meshwright.plan.given import parse_conditions

pytestmark = pytest.mark.slow
NUM_LINES = int(os.environ.get("NUM_LINES", "300"))
SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
SECONDS = 60  # for one line; the searches of machines take some
durations: list[float] = []  # seconds of each line, and of each load of `test_file_fuzz`

TRAIN = "--model llama-3.2-1b --hardware h100:1x8 --batch-tokens 64Ki --seq-len 4096"
SERVE = "--model llama-3.2-1b --hardware h100:1x8 --prompt-tokens 512 --output-tokens 128"
LINES = [
    f"plan train {TRAIN} --top 3",
    f"plan train {TRAIN} --layout fsdp=8 --json",
    f"plan train {TRAIN} --given tensor<=2 --software megatron-core",
    "plan train --model mixtral-8x7b --hardware v5p:2x2x2 --batch-tokens 128Ki --seq-len 4k --given expert=8",
    f"plan serve {SERVE} --weights-dtype fp8",
    f"plan serve {SERVE} --layout tensor=8 --phase generate --batch 4 --json",
    f"plan serve {SERVE} --engine vllm --layout tensor=8",
    "fit llama-3.2-1b --hardware rtx4090",
    "compare llama-3.2-1b@h100:1x8@fsdp=8 llama-3.2-1b@v5p:2x2x2@fsdp=8 --batch-tokens 64Ki --seq-len 4096",
    "hardware h100",
    "hardware --json",
    "model llama-3-8b --seq-len 8k",
    "model config.json --explain-config",
    "model mixtral-8x7b --set num_kv_heads=4 --json",
    'shard "A[I_X, J] . B[J_X, K] -> C[I_X, K]" --mesh X=4,Y=2 --dims I=64,J=64,K=64 --hardware v5e:4x2',
    'shard "x[B_X, D] . w[D_X, F] -> h[B_X, F]; h . v[F, D_X] -> y[B_X, D]" --mesh X=4 --dims B=8,D=4,F=8',
    'shard "A[I_XY, J]" --mesh X=2,Y=4 --dims I=64,J=64',
    'collective "AllGather_X([B_X, D_Y])" --mesh X=4,Y=4,Z=4 --dims B=1024,D=4096 --hardware v4p:4x4x4',
    "support llama-3.2-1b",
    "reshard fsdp=8 tensor=8 --model llama-3.2-1b --hardware h100:1x8",
    "audit --hlo program.txt --hardware v5p",
    "validate rows.csv",
    "report plan.json",
    "doctor",
    "version",
    "help plan",
]  # fmt: skip
FILES = {
    "config.json": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, '
    '"num_attention_heads": 4, "intermediate_size": 128}',
    "program.txt": "HloModule m\n\nENTRY main {\n  ROOT p = f32[8]{0} parameter(0)\n}\n",
    "rows.csv": "source,model,hardware,layout\nx,llama-3-8b,h100:1x8,fsdp=8\n",
    "plan.json": "{}",
    "deep.json": "[" * 100_000,
    "binary": "\0\x01\x02" * 100,
    "empty": "",
    "list.json": "[1, 2]",
    "table.toml": "a = 1\n[b]\nc = [1, 2]\n",
}
WORDS = [
    "0", "-1", "1", "2", "3", "7", "1e999", "-inf", "nan", "9" * 400, "0x10", "1.5", "1_000", "½", "٣",
    "8k", "4Mi", "1TiB", "-4k", "1e18", "30ms", "1s", "10%", "-5%", "100%", "1:2", "::", "1x", "x8",
    "0x0", "h100", "h100:0", "h100:8", "h100:1x8x9", "v5p:16x20x28", "v5p:3x3", "cpu:8", "cpu:0",
    "tpu", "b200:99999999", "fsdp=8", "fsdp=0", "fsdp=-1", "fsdp=3", "tensor=8,fsdp=8",
    "tensor=8,tensor=8", "fsdp", "=8", "fsdp==8", "pipe=2,microbatches=0", "zero=9", "schedule=nope",
    "remat=", "expert=8", "context=2,context_method=ring", "bf16", "int4", "fp8", "f64", "complex64",
    "llama-3-8b", "deepseek-v3", "gpt-2", "../..", "/", "/dev/null", "/dev/full", "/proc/self/mem",
    "-", "--", "---", "-x", "--json", "--help", "'", '"', "\\", "\n", "\0", "\udc80",
    "A[I_X, J] . B[J_X, K]", "A[", "A[]]", "A[I_X_X]", "A[I_X, I_X]", "A[I]{U_X} -> A[I_X]", "I=0",
    "X=0", "X=1e9", "{}", "[]", "null", "{{}}", "%s", "$HOME", "*", "a" * 100_000, "é" * 100, "a=b",
    "a=b,c=d", "num_layers=0", "num_layers=1e30", "hidden_size=x", "moe.num_experts=7",
    "vocab_size=-1", "d_model=3", "lora_rank=0",
    *FILES,
]  # fmt: skip
# Runs on virtual devices, which take minutes by right.
_LONG = ("--run",)
_PLANNERS = (
    "plan",
    "fit",
    "compare",
    "hardware",
    "model",
    "shard",
    "collective",
    "support",
    "reshard",
    "audit",
)


class Late(BaseException):
    """A line that has not ended in time."""


def options() -> dict[str, list[str]]:
    """The options of each command, by its first word."""
    found: dict[str, list[str]] = {}
    for name in (*_PLANNERS, "validate", "report"):
        waiting: list[Any] = [command_in(name)]
        for command in waiting:
            waiting += getattr(command, "commands", {}).values()
            found.setdefault(name, []).extend(
                param.opts[-1] for param in command.params if param.opts and param.opts[-1] not in _LONG
            )
    return found


def changed(line: list[str], known: dict[str, list[str]], draw: random.Random) -> list[str]:
    """The line with one to three words replaced, added, removed, doubled, cut or exchanged."""
    line = list(line)
    names = known.get(line[0], ["--json"])
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.randrange(1, len(line)) if len(line) > 1 else 0
        word, other = line[place], draw.choice(WORDS)
        match draw.randrange(8):
            case 0 | 1 | 2:
                line[place] = other
            case 3:
                line[place:place] = [draw.choice(names), other]
            case 4:
                line[place:place] = [draw.choice(names)]
            case 5:
                del line[place]
            case 6:
                cut = draw.randrange(len(word) + 1)
                line[place] = word[:cut] + draw.choice(["", "\0", ",", "=", "e", "9", "é", word]) + word[cut:]
            case _:
                end = draw.randrange(len(line))
                line[place], line[end] = line[end], word
        if not line:
            return ["version"]
    return line


def fault(line: list[str], seconds: float = SECONDS) -> str | None:
    """What is wrong with how a line ends; None if nothing is."""

    def end(*_: object) -> None:
        raise Late

    out, err, began = io.StringIO(), io.StringIO(), time.perf_counter()
    # An error in the search for a corrected line is only logged.
    handler = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code: Any = main(line)
    except Late:
        return f"not ended after {seconds:g} s"
    except SystemExit as error:
        code = error.code
    except BaseException:
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        logger.removeHandler(handler)
        durations.append(time.perf_counter() - began)
    if logged := handler.stream.getvalue():
        return logged
    if code not in (0, 1, 2, None):
        return f"exit code {code!r}"
    ours = [each for each in err.getvalue().splitlines() if each.startswith("mw: ")]
    if code == 2 and len(ours) - sum("warning:" in each for each in ours) != 1:
        return f"exit code 2 with {err.getvalue()[-500:]!r}"
    return None


def run_lines(folder: Path, seed: int, number: int) -> list[str]:
    """The generated lines that end badly, each with its fault."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    draw, known, faults = random.Random(seed), options(), []
    with chdir(folder):
        for _ in range(number):
            line = changed(shlex.split(draw.choice(LINES)), known, draw)
            if wrong := fault(line):
                faults.append(f"mw {shlex.join(word[:200] for word in line)!a}\n{wrong}")
                print(faults[-1], flush=True)
    return faults


def test_generated_command_lines_end_in_one_line(tmp_path: Path):
    assert not run_lines(tmp_path, SEED, NUM_LINES)


def test_the_lines_that_are_changed_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise the changes would all be refused for the same first word."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert not {line: wrong for line in LINES if (wrong := fault(shlex.split(line)))}


if __name__ == "__main__":
    run_lines(Path(sys.argv[3]), int(sys.argv[1]), int(sys.argv[2]))


def test_a_long_word_is_no_condition_at_once():
    """It took 100 s: each of its letters could begin the name of a field."""
    with pytest.raises(PlanError, match="not a condition"):
        parse_conditions("a" * 100_000)
