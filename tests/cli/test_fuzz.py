"""Random command lines: whatever is typed, no traceback, no hang, exit code 0, 1 or 2, and few words.

Every command's options are read from the command itself, so a new one is tried without a word here. Commands
that start JAX always get something that they must refuse before; that they do so is part of the test.
"""

import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cli.test_main import CALLS

from meshwright.cli.commands import command_in
from meshwright.cli.main import main

pytestmark = pytest.mark.slow
_SECONDS = 10
_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
# Four lines of a terminal of 120 columns.
_MOST_CHARACTERS = 480
_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "130"))  # of each command; nineteen make over 2,000
# doctor and demo take no input to refuse, bench plan searches for minutes whatever it is given.
_FUZZED = [call for call in CALLS if call not in (["doctor"], ["demo"], ["bench", "plan"])]
# An option of each that must make it stop before JAX is started, files are packed or a page is served.
_REFUSED = {
    "train": "--data",
    "ui": "--hardware",  # else it serves until it is interrupted
    "generate": "--checkpoint",
    "serve": "--checkpoint",
    "export": "--output",
    "audit": "--hlo",
    "calibrate": "--hardware",
    "bench collectives": "--hardware",
    "bench matmul": "--hardware",
    "bench train": "--hardware",
    "bench serve": "--trace",
    "launch local": "--processes",
}

_SMALL = ["tiny", "toy.toml", "llama-3-8b"]
_MACHINES = ["cpu:8", "h100:8", "h100:16", "v5e:2x2", "v5p:2x2x4", "2*v5e:2x2", "h100", "chip.toml:8"]
_GOOD: dict[str, list[str]] = {
    "model": _SMALL,
    "hardware": _MACHINES,
    "template": ["h100", "v5p", "cpu"],
    "batch_tokens": ["64Ki", "1M", "4096", "1e18"],
    "seq_len": ["64", "128", "1k", "1M"],
    "layout": ["data=8", "fsdp=4,tensor=2", "data=2,pipe=4,schedule=zb-v,microbatches=4", "tensor=16"],
    "given": ["tensor=2", "pipe<=4,schedule!=zb-v", "matmul_dtype=fp8", "expert>1"],
    "weights_dtype": ["f32", "bf16"],
    "compute_dtype": ["f32", "bf16", "fp8"],
    "dtype": ["bf16", "f32", "int8", "fp4"],
    "kv_dtype": ["int8", "bf16"],
    "tokens": ["1T", "1M"],
    "critical_batch": ["4M"],
    "max_seconds": ["5", "1e-9", "1e9"],
    "days": ["30", "0.001"],
    "top": ["1", "10000"],
    "mesh": ["X=4,Y=2", "X=8", "X=2,Y=2,Z=2", "X=1"],
    "dims": ["I=64,J=64,K=64", "B=64,D=64", "I=8,J=8,K=8,L=8", "I=1e18,J=1e18,K=1e18"],
    "written": [
        "A[I_X, J] . B[J_X, K] -> C[I_X, K]", "A[I_X, J] -> A[I, J_X]", "A[I, J_X] . B[J_X, K]",
        "A[I_X,J] . B[J,K] -> C[I_X,K]; C . D[K,L_X] -> E[I_X,L]", "AllGather_X([B_X, D])",
        "ReduceScatter_{X,D}([B, D]{U_X})", "AllToAll_X([B_X, D] -> [B, D_X])",
    ],
    "memory_limit": ["1G", "1"],
    "objective": ["latency", "throughput"],
    "file": ["published.csv"],
    "run": ["plan.toml", "folder", "config.json"],
    "plan": ["plan.toml"],
    "plan_path": ["plan.toml"],
    "anchor": ["metrics.jsonl"],
    "command": ["mw"],
    "image": ["image"],
}  # fmt: skip
_JUNK = [
    "0", "-1", "1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "0x10", "١", "1,5", " ", "\t",
    "", "''", "a=b=c", "=", ",", ",,", "data=4,data=4", "data=0", "data=-1", "data=nan", "schedule=",
    "tensor=99999999999", "pipe=3.5", "remat=full,remat=none", "X=0", "X=-1", "X=99999999999999", "X=4,X=4",
    "X", "h100:0", "h100:1x2x3x4", "h100:99999999999", "v5p:7x11x13", "v5p:", ":8", "*", "0*v5e:2x2",
    "99999999*v5e:2x2", "cpu:0", "nosuch", "llama", "A[", "A[I_X", "A[I] .", "->", ";", "A[I,I]",
    "A[I_X,J_X]", "{U_X}", "é", "\u202e", "🙂" * 50, "x" * 5000, "/dev/zero", "/dev/null", "/dev/full",
    "/proc/self/mem", "/", ".", "..", "~", "nowhere/at/all", "empty", "folder", "moe.toml", "huge.toml",
    "nested.json", "nested.toml", "config.json", "binary", "chip.toml", "lines.csv", "metrics.jsonl",
    "plan.toml", "toy.toml", "deep.json", "loop", "%s%n", "$(id)", "--", "-", "--json", "--nope",
]  # fmt: skip


def _contents() -> dict[str, bytes | str]:
    nested = "[" * 5000 + "]" * 5000
    sizes = "num_layers = 2\nd_model = 64\nd_ff = 128\nnum_heads = 4\nnum_kv_heads = 4\nd_head = 16\n"
    toy = f"{sizes}vocab_size = 256\nmax_seq_len = 512\n"
    return {
        "toy.toml": toy,
        "moe.toml": f'{toy}moe = "yes"\n',
        "huge.toml": toy.replace("= 64", "= 2147483648").replace("= 128", "= 2147483648"),
        "nested.json": nested,
        "nested.toml": f"a = {nested}",
        "deep.json": '{"a":' * 900 + "1" + "}" * 900,
        "config.json": json.dumps(
            {"architectures": ["LlamaForCausalLM"], "hidden_size": 1e308, "vocab_size": "8"}
        ),
        "binary": bytes(range(256)),
        "empty": "",
        "chip.toml": _chip(),
        "published.csv": "id,source,metric,value\n1,2\n",
        "lines.csv": 'id,"\n\x00,,,\n',
        "metrics.jsonl": '{"step_seconds": 1}\n{"step_seconds": NaN}\n',
        "plan.toml": "[layout]\n[workload]\n[model]\nhardware = 3\n",
    }


def _chip() -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["hardware", "--template", "h100"]) == 0
    return output.getvalue()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all invocations, and a limit to memory, which what never ends must meet."""
    path = tmp_path_factory.mktemp("fuzz")
    for name, content in _contents().items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    before, limits = Path.cwd(), resource.getrlimit(resource.RLIMIT_AS)
    os.chdir(path)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, limits[1]))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.chdir(before)


def params_of(call: list[str]) -> list[Any]:
    command: Any = command_in(call[0])
    return (command.commands[call[1]] if len(call) > 1 else command).params


def invocations(call: list[str]) -> st.SearchStrategy[list[str]]:
    """Command lines of one command: its options and arguments, with values that fit or do not."""
    refused = _REFUSED.get(" ".join(call))
    options, needed, arguments = [], [], []
    for param in params_of(call):
        name = str(param.name)
        values = st.sampled_from(_GOOD.get(name, ["1"])) | st.sampled_from(_JUNK) | st.text(max_size=12)
        values = values.filter(lambda text: "\0" not in text and text not in ("--help", "-h"))
        if param.param_type_name == "argument":
            arguments.append(values)
        elif param.is_flag:
            options.append(st.sampled_from([[flag] for flag in (*param.opts, *param.secondary_opts)]))
        elif param.opts[-1] != refused and name != "help":
            pair = st.builds(lambda value, flag: [flag, value], values, st.just(param.opts[-1]))
            # A command line without what it needs is refused at once, and tries nothing else.
            (needed if param.required else options).append(pair)
    bad = [["--nope" if refused is None else f"{refused}=/dev/zero/x"]] if refused else [[]]
    chosen = st.lists(st.one_of(options), max_size=4) if options else st.just([])
    given_ = st.tuples(*arguments) if arguments else st.just(())
    return st.builds(
        lambda must, some, given: [
            *call, *given, *(word for pair in (*must, *some, *bad) for word in pair),
        ],
        st.tuples(*needed), chosen, given_,
    )  # fmt: skip


class Hang(BaseException):
    """Not an Exception, which a command might catch."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(code: object, stderr: str) -> None:
    assert code in (0, 1, 2), code
    assert "Traceback" not in stderr and "pydantic" not in stderr
    said = [line for line in stderr.splitlines() if line.startswith("mw: ")]
    assert code != 2 or said, "refused without a word"
    for line in said:
        assert len(line) <= _MOST_CHARACTERS, f"{len(line)} characters: {line}"


# mw mcp serves on the standard streams of its process.
@pytest.mark.parametrize("call", [c for c in _FUZZED if c[0] != "mcp"], ids=" ".join)
def test_random_command_lines(call: list[str]):
    @settings(max_examples=_EXAMPLES, suppress_health_check=_SLOW, deadline=None)
    @given(arguments=invocations(call))
    def fuzz(arguments: list[str]) -> None:
        output, notes = io.StringIO(), io.StringIO()
        # mw shard --run and mw audit go on to it where nothing is wrong.
        jax_before = "jax" in sys.modules or call[0] in ("shard", "audit", "plan")
        with redirect_stdout(output), redirect_stderr(notes), at_most(_SECONDS):
            code = main(arguments)
        check(code, notes.getvalue())
        if code == 0 and "--json" in arguments and "--" not in arguments:
            json.loads(output.getvalue())
        assert "jax" not in sys.modules or jax_before, "JAX was started for what is refused"

    fuzz()


@pytest.mark.parametrize("call", [c for c in _FUZZED if c[0] != "launch"], ids=" ".join)
def test_random_command_lines_as_processes(call: list[str]):
    """The same in processes of their own: what an interpreter adds, at its start and at its end."""

    @settings(max_examples=6, suppress_health_check=_SLOW, deadline=None)
    @given(
        arguments=invocations(call).filter(
            lambda words: not any("\ud800" <= c <= "\udfff" for w in words for c in w)
        )
    )
    def fuzz(arguments: list[str]) -> None:
        command = [sys.executable, "-m", "meshwright.cli.main", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=6 * _SECONDS, check=False)
        assert "Traceback" not in done.stderr, shlex.join(arguments)
        check(done.returncode, done.stderr)

    fuzz()
