"""What is not installed: planning does without it; a command that needs it says the line that installs it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import doctor
from meshwright.cli.extras import EXTRAS, bringing

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Typer brings these of its own.
TYPERS = ("pydantic",)
# Modules that the installer would not have brought are made to be missing.
BARE = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from meshwright.cli.main import main
sys.exit(main({arguments!r}))
"""
PLAN = ["plan", "train", "--model", "tiny", "--hardware", "cpu:8", "--batch-tokens", "1Ki", "--seq-len", "64"]
NEEDING = {
    "run": [
        ["train", "plan.toml", "--data", "stdlib"],
        ["audit", "plan.toml"],
        ["launch", "slurm", "--", "mw", "train", "plan.toml", "--data", "stdlib"],
    ],
    "serve": [["serve", "--checkpoint", "model"], ["bench", "serve", "--url", "http://127.0.0.1:9"]],
}  # fmt: skip
PLANNING = [
    ["--help"],
    ["model", "tiny"],
    ["hardware", "v5p:4x4x4"],
    ["collective", "AllGather_X([B_X])", "--mesh", "X=8", "--dims", "B=8", "--hardware", "h100:8"],
    ["shard", "A[I_X, J] . B[J_X, K]", "--mesh", "X=4", "--dims", "I=64,J=64,K=64"],
    [*PLAN, "-o", "plan.toml"],
    ["report", "plan.toml"],
    ["doctor"],
]  # fmt: skip


def bare(arguments: list[str], missing: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    code = BARE.format(missing=missing, arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )


def test_planning_needs_no_extra(tmp_path: Path):
    """One process for all: what one command imports, another might have needed."""
    every = [module for extra in EXTRAS for module in extra.modules if module not in TYPERS]
    calls = ", ".join(f"main({arguments!r})" for arguments in PLANNING)
    code = BARE.format(missing=every, arguments=[]).replace("sys.exit(main([]))", f"print([{calls}])")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    *planned, checked = json.loads(done.stdout.splitlines()[-1])
    # The machine itself may have something wrong, such as a lock that was left.
    assert planned == [0] * (len(PLANNING) - 1) and checked in (0, 1), done.stderr
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("extra", NEEDING)
def test_the_line_that_installs_what_is_missing(extra: str, tmp_path: Path):
    from meshwright.cli.main import main

    assert main([*PLAN, "--layout", "data=8", "-o", str(tmp_path / "plan.toml")]) == 0
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    modules = next(one.modules for one in EXTRAS if one.name == extra)
    missing = [module for module in modules if module not in TYPERS]
    for arguments in NEEDING[extra]:
        done = bare(arguments, missing, tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        said = done.stderr.splitlines()[-1]
        assert said.startswith(f"mw: this needs the extra [{extra}] ("), said
        assert said.endswith(f" is not installed): pip install 'meshwright[{extra}]'"), said


def test_generation_needs_no_server(tmp_path: Path):
    missing = [module for module in bringing("starlette").modules if module not in TYPERS]  # pyright: ignore[reportOptionalMemberAccess]
    code = BARE.partition("from meshwright")[0].format(missing=missing)
    code += "import meshwright.cli.generate, meshwright.cli.service, meshwright.serve.text.generation"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_module_belongs_to_the_smallest_extra_that_brings_it():
    assert [bringing(name) and bringing(name).name for name in ("jax.numpy", "uvicorn", "no")] == [  # pyright: ignore[reportOptionalMemberAccess]
        "run",
        "serve",
        None,
    ]


def test_every_requirement_of_an_extra_is_known():
    """A package that moves to an extra has its module named there."""
    other = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "absl-py": "absl"}
    for extra in EXTRAS[:2]:
        required = [re.split(r"[<>=\[]", text)[0] for text in PROJECT["optional-dependencies"][extra.name]]
        modules = {other.get(name, name.replace("-", "_")) for name in required} - {"meshwright"}
        assert modules == {*extra.modules} - {"jaxlib"}


def test_python_dash_m(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("meshwright ")


@pytest.mark.parametrize(
    ("typed", "words", "offered"),
    [("mw pla", 1, "plan"), ("mw plan train --mo", 3, "--model"), ("mw rep", 1, "report")],
)
def test_completion(typed: str, words: int, offered: str):
    """As the shell asks for it."""
    env = {**os.environ, "_MW_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(words)}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright"], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [offered], done.stderr


def test_a_lock_of_a_live_process_is_no_stale_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock = tmp_path / "libtpu_lockfile"
    monkeypatch.setattr(doctor, "_TPU_LOCK", lock)
    [none] = doctor._locks()
    with lock.open("w"):
        [held] = doctor._locks()
    [stale] = doctor._locks()
    assert none.ok and held.ok and not stale.ok
    assert f"process {os.getpid()} uses" in held.state and stale.mend == f"rm {lock}"
