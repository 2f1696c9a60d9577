"""Words that a shell completes: commands, models, chips, programs and engines."""

import os
import subprocess
import sys

import pytest

from meshwright.cli.completions import OF_OPTIONS, chips, models


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (
            "mw plan train --model llama-3.1",
            ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.1-405b-fp8"],
        ),
        ("mw fit qwen3-32", ["qwen3-32b"]),
        ("mw plan train --for me", ["megatron"]),
    ],
)
def test_a_shell_completes_names(typed: str, completed: list[str]) -> None:
    words = str(len(typed.split()) - 1)
    env = os.environ | {"_MW_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": words}
    run = "import sys; from meshwright.cli.main import run; sys.argv = ['mw']; run()"
    done = subprocess.run([sys.executable, "-c", run], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == completed


def test_names_begin_with_what_is_typed() -> None:
    assert chips("v5") == ["v5e", "v5p"] and chips("2*v5p") == ["2*v5p"]
    assert models("LLAMA-3-8") == ["llama-3-8b"] and "vllm" in OF_OPTIONS["--engine"]("v")
