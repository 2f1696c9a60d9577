"""Several server processes behind one address: prefixes, one killed under load, scale, SIGTERM, metrics."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.serve.http.client import MODEL, events
from tests.serve.http.mock_server import ANSWER
from tests.serve.replicas.processes import server_pids, until

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KEY = {"Authorization": "Bearer secret"}
ENDLESS = {"model": MODEL, "prompt": "forever", "max_tokens": 9_000, "temperature": 0, "stream": True}
SHORT = {"model": MODEL, "prompt": "x", "max_tokens": 40, "temperature": 0}


@contextmanager
def started(*settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.serve.replicas.mock_servers", *settings]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with started() as found:
        yield found


def running(url: str) -> dict[str, float]:
    """Requests under way by replica."""
    text = httpx.get(f"{url}/metrics", timeout=20).text
    return {
        name: float(value)
        for name, value in re.findall(r'^meshwright_running_requests\{replica="(\S+)"\} (\S+)$', text, re.M)
    }


def test_a_request_is_checked_once_and_answered(servers):
    _, url = servers
    assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 401
    answer = httpx.post(
        f"{url}/v1/completions", json=SHORT, headers=KEY | {"x-request-id": "mine"}, timeout=20
    )
    assert answer.json()["choices"][0]["text"] == ANSWER
    assert answer.headers["x-request-id"] == "mine"
    wrong = httpx.post(f"{url}/v1/completions", content="{", headers=KEY)
    assert (wrong.status_code, set(wrong.json()["error"])) == (400, {"message", "type", "param", "code"})
    assert httpx.get(f"{url}/v1/nothing", headers=KEY).status_code == 404
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert "<html" in httpx.get(url).text


def test_prompts_that_begin_alike_are_prefilled_once(servers):
    _, url = servers
    for turn in range(6):
        body = SHORT | {"prompt": "shared " * 200 + str(turn)}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=20).status_code == 200
    text = httpx.get(f"{url}/metrics", timeout=20).text
    prompts = re.findall(r"^meshwright_prompt_tokens_total\{.*\} (\S+)$", text, re.M)
    assert len(prompts) == 2 and max(map(float, prompts)) > 6 * 1400 > min(map(float, prompts))


def test_a_client_that_leaves_frees_its_slot(servers):
    _, url = servers
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, headers=KEY, timeout=20) as response:
        lines = response.iter_lines()  # closing it closes the connection
        next(lines)
        until(lambda: sum(running(url).values()) == 1)
    until(lambda: sum(running(url).values()) == 0)


async def answered(http: httpx.AsyncClient) -> str:
    """The fate of a request that is not streamed and whose server may die."""
    response = await http.post("/v1/completions", json=SHORT)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == ANSWER
    return "whole"


async def streamed(http: httpx.AsyncClient, body: dict, began: Callable[[], object]) -> str:
    """The fate of a stream whose server may die: whole, or ended with an error after a beginning."""
    text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            text += piece
            began()
    found = events(text)
    if found[-1] == "[DONE]":
        whole = "".join(chunk["choices"][0]["text"] for chunk in found[:-1])
        assert whole == (ANSWER if body == SHORT else "r" * body["max_tokens"])
        return "whole"
    assert set(found[-1]["error"]) == {"message", "type", "param", "code"} and len(found) > 1
    assert "has died" in found[-1]["error"]["message"]
    return "ended"


def test_a_server_killed_under_load_loses_no_request_that_had_not_begun_to_stream(servers):
    process, url = servers
    victims = server_pids(process)
    assert len(victims) == 2

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=120, limits=limits) as http:
            # Streams that outlast the test, one after another, so that each server has half of them.
            streams = []
            for _ in range(4):
                began = asyncio.Event()
                streams.append(asyncio.ensure_future(streamed(http, ENDLESS, began.set)))
                await began.wait()
            others = [asyncio.ensure_future(answered(http)) for _ in range(20)]
            others += [asyncio.ensure_future(streamed(http, SHORT, bool)) for _ in range(20)]
            await asyncio.sleep(0.2)
            os.kill(victims[0], signal.SIGKILL)
            fates = await asyncio.gather(*others)
            assert set(fates[:20]) == {"whole"}  # not streamed: each was begun again elsewhere
            assert set(fates[20:]) <= {"whole", "ended"}
            ended = [stream for stream in streams if stream.done()]
            for stream in streams:
                stream.cancel()
            return [stream.result() for stream in ended]

    assert asyncio.run(main()) == ["ended"] * 2  # the others would go on
    until(lambda: len(server_pids(process)) == 2)
    until(lambda: sorted(running(url).values()) == [0, 0])


def test_sigterm_lets_answers_under_way_finish(servers):
    process, url = servers
    body = ENDLESS | {"max_tokens": 100}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=KEY, timeout=30) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert (len(rest), rest[-1]) == (100, "data: [DONE]")
    assert process.wait(60) == 0
    assert process.stdout is not None and process.stdout.read().endswith("closed\n")  # Ray has its say first


def test_servers_are_added_under_load():
    settings = ("max_replicas=3", "target_ongoing_requests=1", "upscale_delay_s=0", "look_back_period_s=2")
    with started(*settings, "metrics_interval_s=0.5") as (process, url):

        async def main() -> None:
            async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=120) as http:
                asked = [asyncio.ensure_future(http.post("/v1/completions", json=ENDLESS)) for _ in range(6)]
                for _ in range(600):
                    await asyncio.sleep(0.1)
                    if len(server_pids(process)) == 3:
                        break
                for one in asked:
                    one.cancel()

        asyncio.run(main())
        assert len(server_pids(process)) == 3
