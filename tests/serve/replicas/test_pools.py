"""mw serve --prefill-replicas: servers that prefill and servers that generate, as processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.serve.replicas.processes import save_checkpoint, server_pids, until

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.slow

OPTIONS = ["--slots", "2", "--context", "512", "--dtype", "f32", "--port", "0", "--json"]
PROMPTS = [f"{word} " * 40 for word in ("one", "two", "three", "four")]


def fetched(address: str) -> dict[str, float]:
    """Prompts whose pages were asked for, by what became of them, over all servers that generate."""
    text, found = httpx.get(f"{address}/metrics", timeout=60).text, {"fetched": 0.0, "failed": 0.0}
    for result, value in re.findall(
        r'^meshwright_fetched_prompts_total\{.*result="(\w+)".*\} (\S+)$', text, re.M
    ):
        found[result] += float(value)
    return found


def answer(address: str, prompt: str) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    done = httpx.post(f"{address}/v1/completions", json=body, timeout=120)
    assert done.status_code == 200, done.text
    return done.json()["choices"][0]["text"]


def test_pages_of_those_that_prefill_are_used_and_their_death_costs_no_answer(tmp_path: Path):
    folder = save_checkpoint(tmp_path / "small", max_position_embeddings=512)
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", "--checkpoint", str(folder), *OPTIONS]

    def answers(*pools: str) -> list[str]:
        with subprocess.Popen([*command, *pools], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                address = json.loads(process.stdout.readline())["address"]
                found = [answer(address, prompt) for prompt in PROMPTS[:3]]
                if not pools:
                    return [*found, answer(address, PROMPTS[3])]
                until(lambda: fetched(address) == {"fetched": 3.0, "failed": 0.0})
                for pid in server_pids(process, "prefills"):
                    os.kill(pid, signal.SIGKILL)
                found.append(answer(address, PROMPTS[3]))
                return found
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(90) == 0

    assert answers("--prefill-replicas", "1", "--replicas", "2") == answers()
