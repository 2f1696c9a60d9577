"""The front door: help, versions, typing mistakes, exit codes, and what is imported when."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
from typer.main import get_command

from meshwright import __version__
from meshwright.__main__ import run as entry_point
from meshwright.cli import console
from meshwright.cli import main as front_door
from meshwright.cli.main import COMMANDS, main

GROUPS = {
    "plan": ["rl", "serve", "train"],
    "bench": ["collectives", "matmul", "plan", "serve", "train"],
    "plot": ["attention", "bandwidth", "decode", "fsdp", "latency", "lookahead", "roofline", "strategies"],
    "launch": ["k8s", "local", "slurm"],
}
CALLS = [[name] for name in COMMANDS if name not in GROUPS]
CALLS += [[group, command] for group, commands in GROUPS.items() for command in commands]


def raising(error: BaseException):
    def call(*_, **__):
        raise error

    return call


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.MULTILINE), name


def test_without_arguments_is_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: mw ")


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_command_has_an_example(call: list[str], capsys):
    assert main([*call, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  mw {' '.join(call)}\b", text, re.MULTILINE)
    assert "--json" in text or call[0] in ("launch", "mcp")  # which print what another program asks for


@pytest.mark.parametrize("group", GROUPS)
def test_groups_hold_their_commands(group: str):
    app = import_module(f"meshwright.cli.{group}").app
    assert sorted(get_command(app).commands) == sorted(GROUPS[group])  # pyright: ignore[reportAttributeAccessIssue]


def test_help_explains_a_term(capsys):
    assert main(["help", "hbm"]) == 0
    assert capsys.readouterr().out == "HBM: The memory of a chip.\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {__version__}\n"


COMPLETE = ["--model", "tiny", "--hardware", "h100:1", "--prompt-tokens", "8", "--output-tokens", "8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle"], "mw: command 'modle' is unknown; did you mean model"),
        (["plan", "trian"], "mw: No such command 'trian'. Did you mean 'train'?"),
        (["model", "tiny", "--seqlen", "8"], "mw: mw model has no --seqlen; did you mean --seq-len?"),
        (["shard"], "mw: mw shard needs EXPRESSION, --mesh; such as"),
        (["plan"], "mw: name a command of mw plan: serve, rl, train"),
        (["launch"], "mw: name a command of mw launch: local, slurm, k8s"),
        (
            ["model", "tiny", "--seq-len", "8x"],
            "mw: Invalid value for '--seq-len': '8x' is not a count",
        ),
        (
            ["model", "tiny", "--kv-dtype", "int9"],
            "mw: Invalid value for '--kv-dtype': dtype 'int9'",
        ),
        (["--loud"], "mw: mw has no --loud"),
        (["model", "tiny", "8k"], "mw: mw model takes MODEL; leave out '8k'"),
        # Searches in a layout's text once took minutes.
        (["support", "tiny", "a" * 100_000], "mw: mw support takes"),
        (["plan", "serve", *COMPLETE, "a" * 100_000], "mw: 'aaa"),
        (["plan", "serve", *COMPLETE, "a\0.toml"], "mw: mw plan serve takes only options"),
        (["plan", "serve", *COMPLETE, "--layout", "a" * 100_000], "mw: layout: has 100000 characters"),
        (["serve", "--checkpoint", "x", "--port", "70000"], "mw: Invalid value for '--port'"),
        (
            ["serve", "--checkpoint", "x", "--kv-dtype", "int4"],
            "mw: Invalid value for '--kv-dtype': 'int4' is not one of 'int8', 'fp8'",
        ),
    ],
)
def test_typing_mistakes_are_one_line_and_exit_2(arguments: list[str], message: str, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message) and printed.err.count("\n") == 1, printed.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x"), 2, "mw: /x: Permission denied\n"),
        (IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "/x"), 2, "mw: /x: Is a directory\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "mw: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_of_the_system(error: BaseException, code: int, message: str, capsys, monkeypatch):
    monkeypatch.setattr(front_door, "command_in", raising(error))
    assert main(["model", "tiny"]) == code
    assert capsys.readouterr().err == message


def test_ctrl_c_ends_the_imports_quietly(monkeypatch):
    handlers = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it

    class Main:
        @property
        def run(self):
            handlers.append(signal.getsignal(signal.SIGINT))
            return lambda: handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setitem(sys.modules, "meshwright.cli.main", Main())
    entry_point()
    assert handlers == [signal.SIG_DFL, signal.default_int_handler]


def test_a_terminal_shows_what_is_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(console, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.waiting("searching layouts"):
        time.sleep(0.2)
    assert "searching layouts" in capsys.readouterr().err
    monkeypatch.setattr(console, "_PATIENCE_SECONDS", 60.0)
    with console.waiting("searching layouts"):
        pass
    assert "searching layouts" not in capsys.readouterr().err


def test_a_pipe_shows_nothing_of_it(capsys):
    with console.waiting("searching layouts"):
        pass
    assert capsys.readouterr().err == ""


def test_progress_in_a_pipe_says_the_share_where_its_words_do_not(capsys):
    with console.progress() as report:
        for what, share in (
            ("packing", 0.0),
            ("packing", 0.1),
            ("packing", 0.4),
            ("step 3/4", 0.75),
            ("saving", None),
        ):
            report(what, share)
    lines = [line.split(" s  ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["packing", "packing, 40%", "step 3/4", "saving"]


def test_a_reader_that_has_had_enough_is_no_error():
    command = f"{sys.executable} -m meshwright.cli.main hardware --json | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "tiny"],
        ["hardware", "v5p:4x4x4"],
        ["collective", "AllGather_X([B_X])", "--mesh", "X=8", "--dims", "B=8", "--hardware", "h100:8"],
        [
            "plan",
            "train",
            "--model",
            "tiny",
            "--hardware",
            "cpu:8",
            "--batch-tokens",
            "1Ki",
            "--seq-len",
            "64",
        ],
        ["train", "--help"],
        ["train", "/nowhere.toml", "--data", "stdlib"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_imports_no_jax(arguments: list[str]):
    code = f"""
import sys
from meshwright.cli.main import main
main({arguments!r})
heavy = [name for name in ("jax", "grain", "starlette", "transformers") if name in sys.modules]
print("loaded:", *heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr
