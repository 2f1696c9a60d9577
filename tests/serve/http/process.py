"""The mock server as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]


@contextmanager
def server_process(context: int = 100_000, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; env: what its environment has besides."""
    command = [sys.executable, "-m", "tests.serve.http.mock_server", str(context)]
    all_env = {**os.environ, **env}
    with subprocess.Popen(command, cwd=ROOT, env=all_env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
