"""Keys, rates, sizes and times: what a server refuses, and that nothing is left behind."""

import asyncio
import json
import logging
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request
from tests.serve.http.client import MODEL, client, events
from tests.serve.mock import MockRunner, byte_tokenizer, says

from meshwright.errors import MeshwrightError, PlanError, RequestError
from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.admission import Bodies, Rates, Refusals
from meshwright.serve.http.app import create_app
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.log import JsonFormatter

TEXT = "/v1/completions"
BODY = {"model": MODEL, "prompt": "x", "temperature": 0}


def answers(limits: ClientLimits, *asked: tuple, runner: MockRunner | None = None) -> list[httpx.Response]:
    """The responses to (method, path, further arguments), one after the other."""

    async def main():
        async with client(runner or MockRunner(says("ok")), limits=limits) as http:
            return [await http.request(method, path, **more) for method, path, more in asked]

    return asyncio.run(main())


def bearer(key: str) -> dict:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_a_server_with_keys_is_open_to_those_who_have_one():
    limits = ClientLimits(api_keys=frozenset({"secret", "other"}))
    post = ("POST", TEXT)
    given = [{}, bearer("wrong"), bearer(""), {"headers": {"Authorization": "secret"}}, bearer("secret")]
    *refused, taken = answers(limits, *((*post, {"json": BODY} | more) for more in given))
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
    assert taken.status_code == 200
    paths = ("/health", "/ready", "/metrics", "/", "/v1/models")
    statuses = [response.status_code for response in answers(limits, *(("GET", path, {}) for path in paths))]
    assert statuses == [200, 200, 200, 200, 401]


def test_keys_of_a_file_that_others_cannot_read(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    file.chmod(0o640)
    limits = ClientLimits(file, frozenset({"zero"}))
    assert limits.api_keys == {"zero", "one", "two"} and not limits.behind_front().api_keys
    file.chmod(0o644)
    with pytest.raises(MeshwrightError, match=r"keys: other users can read it; run chmod o-r .*keys"):
        ClientLimits(api_key_file=file)
    file.write_text(" \n")
    with pytest.raises(MeshwrightError, match="has no key; write one per line"):
        ClientLimits(api_key_file=file)
    with pytest.raises(MeshwrightError, match="nowhere: cannot be read"):
        ClientLimits(api_key_file=tmp_path / "nowhere")


def test_rates_refill_evenly_and_each_client_has_its_own():
    rates = Rates(per_minute=2)
    assert [rates.wait_seconds("a", now) for now in (0.0, 0.0, 0.0, 15.0)] == [0, 0, 30.0, 15.0]
    assert rates.wait_seconds("b", 15.0) == 0
    assert rates.wait_seconds("a", 30.0) == 0


def test_rates_forget_who_asked_longest_ago():
    rates = Rates(per_minute=1)
    for number in range(10_001):
        rates.wait_seconds(str(number), 0.0)
    kept = rates._buckets._buckets
    assert len(kept) == 10_000 and "0" not in kept


def test_a_client_with_many_refusals_waits_while_others_are_served():
    refusals, now = Refusals(per_minute=60), 0.0
    refusals.begin("other")
    for _ in range(60):
        assert refusals.wait_seconds("bad", now) == 0
        refusals.begin("bad")
        refusals.end("bad", 400, now)
    assert refusals.wait_seconds("bad", now) == 1.0  # a token a second
    assert refusals.wait_seconds("bad", now + 0.75) == pytest.approx(0.25)
    assert refusals.wait_seconds("other", now) == 0
    for _ in range(100):
        refusals.begin("bad")
        refusals.end("bad", 404, now)
    assert refusals.wait_seconds("bad", now) == 2.0
    refusals.end("other", 200, now)
    assert refusals.wait_seconds("bad", now) == 0


def test_accepted_requests_make_up_for_refused_ones():
    refusals = Refusals(per_minute=60)
    refusals.begin("other")
    for status in [200, 422] * 200 + [429, 0, 500] * 100:
        assert refusals.wait_seconds("gateway", 0.0) == 0
        refusals.begin("gateway")
        refusals.end("gateway", status, 0.0)


def test_requests_of_a_client_with_many_refusals_wait():
    async def main() -> tuple[list[float], float]:
        runner = MockRunner(says("ok"))
        limits = ClientLimits(refused_per_minute=2, api_keys=frozenset({"good", "bad"}))
        good, bad = ({"Authorization": f"Bearer {key}"} for key in ("good", "bad"))
        async with client(runner, limits=limits) as http:

            async def seconds(**headers: str) -> float:
                began = time.perf_counter()
                assert (await http.get("/v1/nothing", headers=headers)).status_code == 404
                return time.perf_counter() - began

            alone = [await seconds(**bad) for _ in range(6)]
            runner.gate.clear()
            answer = asyncio.create_task(http.post(TEXT, json=BODY, headers=good))
            await asyncio.sleep(0.1)
            beside = await seconds(**bad)
            runner.gate.set()
            assert (await answer).status_code == 200
            return alone, beside

    alone, beside = asyncio.run(main())
    assert max(alone) < 1 and 2 <= beside < 10


def test_beyond_the_rate_is_429_and_says_when(monkeypatch: pytest.MonkeyPatch):
    # On a busy machine a second may pass between the requests.
    monkeypatch.setattr("meshwright.serve.http.admission.time", SimpleNamespace(monotonic=lambda: 0.0))
    limits = ClientLimits(requests_per_minute=2)
    *taken, refused, health = answers(limits, *[("POST", TEXT, {"json": BODY})] * 3, ("GET", "/health", {}))
    assert [response.status_code for response in taken] == [200, 200]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
    assert refused.json()["error"]["message"] == "more than 2 requests a minute; retry in 30 s"
    assert health.status_code == 200


def test_a_body_too_large_is_refused_by_its_length_alone():
    async def never():
        raise AssertionError("the body was read")
        yield b""

    limits = ClientLimits(max_body_bytes=100)
    declared = {"content": never(), "headers": {"Content-Length": "101"}}
    first, second = answers(limits, ("POST", TEXT, declared), ("POST", TEXT, {"content": b" " * 101}))
    assert (first.status_code, second.status_code) == (413, 413)
    assert first.json()["error"]["message"] == "the body has more than 100 bytes"


def test_long_bodies_are_limited_in_all_and_for_each_client():
    bodies, size = Bodies(100_000), 100_000

    def request(client: str, body: bytes) -> Request:
        async def receive():
            return {"type": "http.request", "body": body}

        return Request({"type": "http", "meshwright.client": client}, receive)

    async def main():
        async with AsyncExitStack() as stack:

            async def hold(client: str, count: int, size: int = size) -> None:
                for _ in range(count):
                    await stack.enter_async_context(bodies.parts(request(client, b"x" * size)))

            await hold("a", 16)
            with pytest.raises(RequestError, match=r"^the server holds too many long bodies"):
                await hold("a", 1)
            await hold("a", 512, 65_000)  # short ones are counted apart
            with pytest.raises(RequestError, match=r"^the server holds too many short bodies"):
                await hold("a", 10, 65_000)
            await hold("b", 16)
            with pytest.raises(RequestError) as refused:
                await hold("c", 1)
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
        async with bodies.parts(request("c", b"x" * size)) as body:
            assert len(b"".join(body)) == size
        with pytest.raises(RequestError, match=r"^the body has more than 100000 bytes$"):
            async with bodies.parts(request("c", b"x" * (size + 1))):
                pass

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_cut_off_and_its_slot_is_free(stream):
    runner = MockRunner(lambda prompt, answer: 5, context=1_000_000)
    limits = ClientLimits(request_seconds=0.3)
    endless = BODY | {"max_tokens": 900_000, "stream": stream}
    late, metrics = answers(limits, ("POST", TEXT, {"json": endless}), ("GET", "/metrics", {}), runner=runner)
    error = events(late.text)[-1]["error"] if stream else late.json()["error"]
    assert late.status_code == (200 if stream else 408)
    assert error["code"] == "request_timed_out" and error["message"].endswith("this server's limit of 0.3 s")
    assert "meshwright_running_requests 0.0" in metrics.text


def test_a_client_that_reads_nothing_is_left():
    runner = MockRunner(lambda prompt, answer: 5, context=1_000_000)
    body = json.dumps(BODY | {"max_tokens": 900_000, "stream": True}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "POST",
        "path": TEXT,
        "query_string": b"",
        "headers": [],
    }

    async def main(engine: Engine) -> None:
        sent, bodies = [], [body]

        async def receive():
            if not bodies:  # the client stays
                await asyncio.sleep(60)
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message):
            sent.append(message)
            if len(sent) > 3:
                await asyncio.sleep(60)

        app = create_app(engine, byte_tokenizer(), MODEL, ClientLimits(stalled_seconds=0.1))
        async with asyncio.timeout(20):
            await app(scope, receive, send)
        assert len(sent) == 4 and "meshwright_running_requests 0.0" in engine.metrics.text().decode()

    with Engine(runner) as engine:
        asyncio.run(main(engine))


def test_other_sites_may_ask_only_where_they_are_named():
    origin = {"headers": {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}}
    asked = [("OPTIONS", TEXT, origin), ("GET", "/v1/models", origin)]
    for response in answers(ClientLimits(), *asked):
        assert "access-control-allow-origin" not in response.headers
    for response in answers(ClientLimits(cors_origins=("https://a.example",)), *asked):
        assert response.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://a.example/chat", "", "https://"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str):
    with pytest.raises(
        PlanError, match=r"CORS origin .* is not an address that browsers send; write https://"
    ):
        ClientLimits(cors_origins=("https://b.example:8443", "*", origin))


def test_each_request_has_an_id_and_a_line_in_the_log(caplog):
    with caplog.at_level(logging.INFO, "meshwright.serve.http.log"):
        mine, forged = answers(
            ClientLimits(),
            ("GET", "/health", {"headers": {"X-Request-Id": "abc-1"}}),
            ("GET", "/v1/models/none", {"headers": {"X-Request-Id": "a b\tc"}}),
        )
    assert mine.headers["x-request-id"] == "abc-1" and len(forged.headers["x-request-id"]) == 32
    records = [record for record in caplog.records if record.message == "request"]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    assert [(line["path"], line["status"]) for line in lines] == [("/health", 200), ("/v1/models/none", 404)]
    assert all(line["seconds"] >= 0 and line["level"] == "info" for line in lines)


def test_the_log_writes_exceptions_in_one_line():
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("broke",), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line and json.loads(line)["message"] == "it broke"


def test_metrics_have_the_names_that_dashboards_read():
    _, metrics = answers(ClientLimits(), ("POST", TEXT, {"json": BODY}), ("GET", "/metrics", {}))
    lines = metrics.text.splitlines()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
        'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1.0',
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0',
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 2.0',
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1.0',
        'vllm:request_queue_time_seconds_count{engine="0",model_name="tiny"} 1.0',
        'vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 1.0',
        'vllm:request_decode_time_seconds_count{engine="0",model_name="tiny"} 1.0',
        'vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 1.0',
        'vllm:request_generation_tokens_sum{engine="0",model_name="tiny"} 3.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0',
        'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 0.0',
        'vllm:num_preemptions_total{engine="0",model_name="tiny"} 0.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 0.0',
        "meshwright:generated_tokens_total 3.0",
        "meshwright:planned_step_seconds NaN",
        "meshwright_generated_tokens_total 3.0",
    ):
        assert line in lines, line


def test_the_dashboard_reads_metrics_that_there_are():
    path = Path(__file__).parents[3] / "docs" / "how-to" / "grafana.json"
    [metrics] = answers(ClientLimits(), ("GET", "/metrics", {}))
    there = set(re.findall(r"^# TYPE (\S+)", metrics.text, re.MULTILINE))
    exprs = [
        target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]
    ]
    asked = {name for expr in exprs for name in re.findall(r"(?:vllm|meshwright):\w+", expr)}
    assert len(asked) > 8
    assert {re.sub("_(bucket|sum)$", "", name) for name in asked} <= there


def test_priorities_are_taken_where_the_server_says_so():
    """Behind the one that has the only slot, the last to come is prefilled first."""
    runner = MockRunner(says("ok"), num_slots=1)
    runner.gate.clear()

    async def main() -> list[int]:
        async with client(runner, limits=ClientLimits(scheduling_policy="priority")) as http:
            asked = []
            for prompt, priority in (("first", 0), ("calm", 5), ("usual", 0), ("urgent", -1)):
                body = BODY | {"prompt": prompt, "priority": priority}
                asked.append(asyncio.create_task(http.post(TEXT, json=body)))
                await asyncio.sleep(0.05)
            runner.gate.set()
            return [response.status_code for response in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == [200] * 4
    order = [byte_tokenizer().decode(tokens) for tokens in runner.prefilled]
    assert order == ["first", "urgent", "usual", "calm"]


def test_a_priority_that_a_server_would_ignore_is_refused():
    plain, urgent = (("POST", TEXT, {"json": BODY | {"priority": number}}) for number in (0, -1))
    taken, refused = answers(ClientLimits(), plain, urgent)
    assert (taken.status_code, refused.status_code) == (200, 400)
    assert refused.json()["error"]["message"] == (
        "priority = -1: this server answers in the order of arrival; leave it out, or start the server with "
        "--scheduling-policy priority"
    )
