"""mw serve --replicas of a checkpoint, and the application that a RayService starts, as processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.serve.replicas.processes import save_checkpoint

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")


def test_replicas_of_a_checkpoint_answer_alike(checkpoint: Path):
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", "--checkpoint", str(checkpoint)]
    options = ["--replicas", "2", "--slots", "2", "--dtype", "f32", "--port", "0", "--json"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert told["model"] == "small"
            body = {"model": "small", "prompt": "def f", "max_tokens": 8, "temperature": 0}
            url = f"{told['address']}/v1/completions"
            answers = [httpx.post(url, json=body, timeout=60).json() for _ in range(4)]
            assert len({answer["choices"][0]["text"] for answer in answers}) == 1
            metrics = httpx.get(f"{told['address']}/metrics", timeout=60).text
            assert metrics.count("\nmeshwright_pages{replica=") == 2
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0


STARTS = """
from meshwright.cli.replicas import application
from meshwright.serve.replicas.deployment import cluster
with cluster(1):
    print(type(application({{"command": {words!r}}})).__name__)
"""


def test_a_ray_service_starts_what_its_command_says(checkpoint: Path):
    words = ["--checkpoint", str(checkpoint), "--replicas", "2", "--autoscaling", "max_replicas=3"]
    done = subprocess.run(
        [sys.executable, "-c", STARTS.format(words=words)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["Application"], done.stderr


def test_autoscaling_that_ray_serve_does_not_have_is_refused(checkpoint: Path):
    for setting, said in (
        ("speed=3", "autoscaling speed is unknown to Ray Serve; it has"),
        ("upscale_delay_s=soon", "autoscaling upscale_delay_s: Input should be a valid number"),
        ("max_replicas=1", "max_replicas"),
    ):
        command = [sys.executable, "-m", "meshwright.cli.main", "serve", "--checkpoint", str(checkpoint)]
        options = ["--replicas", "2", "--autoscaling", setting, "--port", "0"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
