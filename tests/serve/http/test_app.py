"""The OpenAI API over a model worked by hand: what a well-formed request gets."""

import asyncio

import httpx
import pytest
from tests.serve.http.client import MODEL, ask, chat, client, complete, events, post
from tests.serve.mock import EOS, MockRunner, byte_tokenizer, count_up, says


def tokens(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text))


def usage(num_prompt: int, num_answer: int, num_cached: int = 0) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def test_a_completion():
    body = complete(MockRunner(says("héllo")), prompt="one", temperature=0)
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1.7e9
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "héllo", "logprobs": None, "finish_reason": "stop"}],
        "usage": usage(3, 7),
    }


def test_a_chat_completion():
    runner = MockRunner(says("hello"))
    body = chat(runner, temperature=0)
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1.7e9
    prompt = "user: hi\n\nassistant:"
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage(len(prompt), 6),
    }
    assert runner.prefilled[-1] == tokens(prompt)


def test_content_parts_are_joined():
    runner = MockRunner(says("ok"))
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    chat(runner, messages=[{"role": "user", "content": parts}])
    assert runner.prefilled[-1] == tokens("user: a b\n\nassistant:")


@pytest.mark.parametrize(
    ("prompt", "prefilled"),
    [
        ("ab", [[*b"ab"]]),
        (["ab", "c"], [[*b"ab"], [*b"c"]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ("", [[EOS]]),
    ],
)
def test_every_form_of_prompt(prompt, prefilled):
    as_text = {byte: tokens(chr(byte))[0] for byte in b"abc"}
    runner = MockRunner(count_up)
    body = complete(runner, prompt=prompt, max_tokens=2, temperature=0)
    expected = [[as_text.get(token, token) for token in tokens] for tokens in prefilled]
    assert runner.prefilled == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_usage_counts_the_tokens_of_cached_prefixes():
    runner = MockRunner(says("yes"))
    size = runner.limits.page_size
    prompt = "p" * (3 * size)

    async def main(http: httpx.AsyncClient) -> list[dict]:
        found = []
        for text, count in ((prompt, 2), (prompt + "q", 2), ("other", 1)):
            asked = {"model": MODEL, "prompt": [text, "x"], "n": count, "temperature": 0}
            found.append((await http.post("/v1/completions", json=asked)).json()["usage"])
        return found

    first, again, other = ask(runner, main)
    assert first == usage(3 * size + 1, 16)
    assert again == usage(3 * size + 2, 16, 3 * size)
    assert other == usage(len("other") + 1, 8)


def test_n_answers_to_each_prompt_in_order():
    body = complete(MockRunner(says("yes")), prompt=["a", "bc"], n=2, echo=True, temperature=0)
    assert [choice["text"] for choice in body["choices"]] == ["ayes", "ayes", "bcyes", "bcyes"]
    assert body["usage"] == usage(3, 16)


@pytest.mark.parametrize("prompt", ["é!", [*byte_tokenizer().encode("é!")]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt(prompt, stream):
    runner = MockRunner(says("yes"))
    body = {"model": MODEL, "prompt": prompt, "echo": True, "temperature": 0, "stream": stream}
    response = post(runner, "/v1/completions", body)
    chunks = events(response.text)[:-1] if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "é!yes"


@pytest.mark.parametrize(
    ("limit", "text", "reason"),
    [
        ({"max_tokens": 3}, "abc", "length"),
        ({}, "abcdefghijklmnop", "length"),
        ({"max_tokens": 40}, None, "stop"),
    ],
)
def test_max_tokens(limit, text, reason):
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    [choice] = complete(MockRunner(says(alphabet)), temperature=0, **limit)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text or alphabet, reason)


@pytest.mark.parametrize(
    "names", [("max_tokens",), ("max_completion_tokens",), ("max_tokens", "max_completion_tokens")]
)
def test_an_answer_goes_on_to_its_limit_or_the_end_of_the_context(names):
    runner, limit = MockRunner(says("z" * 100), context=64), dict.fromkeys(names, 3)
    num_prompt = len("user: hi\n\nassistant:")
    assert chat(runner)["usage"]["completion_tokens"] == 64 - num_prompt
    assert chat(runner, **limit)["usage"]["completion_tokens"] == 3
    assert complete(runner, **limit)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("three", "one two ", "stop"),
        (["two", "one two"], "", "stop"),
        (["x", "é t"], "one two three caf", "stop"),
        ("four", "one two three café thé", "stop"),
        ([], "one two three café thé", "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_are_not_in_it(stop, text, reason, stream):
    runner = MockRunner(says("one two three café thé"))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "temperature": 0, "stop": stop, "stream": stream}
    response = post(runner, "/v1/completions", body)
    choices = [chunk["choices"][0] for chunk in (events(response.text)[:-1] if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]


def test_a_stop_string_frees_the_slot():
    runner = MockRunner(says("stop here " + "z" * 5000), context=10_000)
    complete(runner, max_tokens=6000, stop="here", temperature=0)
    assert runner.num_generated < 1000


def test_the_same_seed_gives_the_same_text_alone_or_in_a_batch():
    def texts(prompts: list[str], **params) -> list[str]:
        runner = MockRunner(says("abcdefgh"), num_slots=3, spread=5.0)
        body = complete(runner, prompt=prompts, max_tokens=8, **params)
        return [choice["text"] for choice in body["choices"]]

    [alone] = texts(["x"], seed=7)
    assert texts(["a", "x", "b"], seed=7)[1] == alone
    assert texts(["x"], seed=7, n=3)[0] == alone
    assert len(set(texts(["x"], seed=7, n=3))) == 3
    assert len({texts(["x"])[0] for _ in range(4)}) > 1


def test_seeds_of_any_size_are_taken():
    for seed in (-1, 0, 2**32, 2**63 - 1):
        complete(MockRunner(says("a")), seed=seed)


def test_top_k_and_top_p_of_one_are_greedy():
    for only in ({"top_k": 1}, {"top_p": 0}):
        assert complete(MockRunner(says("abcd"), spread=1.0), **only)["choices"][0]["text"] == "abcd"


def test_streamed_completion_chunks():
    body = {"model": MODEL, "prompt": "x", "temperature": 0, "stream": True}
    response = post(MockRunner(says("né")), "/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("text_completion", MODEL)}
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("n", None),
        ("é", None),
        ("", "stop"),
    ]
    assert all("usage" not in chunk for chunk in chunks)


def test_streamed_chat_chunks_with_usage():
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 1,
        "n": 2,
    }
    *chunks, last, done = events(post(MockRunner(says("hey")), "/v1/chat/completions", body).text)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == usage(20, 2)
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in mine] == [
            {"role": "assistant", "content": ""},
            {"content": "h"},
        ]
        assert [choice["finish_reason"] for choice in mine] == [None, "length"]


def test_models():
    async def question(http):
        return [(await http.get(path)) for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/models/a/b")]

    listed, one, unknown = ask(MockRunner(), question)
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "meshwright", "max_model_len": 64}
    assert listed.json() == {"object": "list", "data": [model]}
    assert one.json() == model
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_health_and_metrics_by_their_stable_names():
    async def main():
        async with client(MockRunner(says("hi"))) as http:
            await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            await http.post("/v1/completions", content=b"{")
            await http.get("/../../secret")
            return await http.get("/health"), await http.get("/metrics")

    health, metrics = asyncio.run(main())
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert metrics.headers["content-type"].startswith("text/plain")
    lines = metrics.text.splitlines()
    for line in (
        'meshwright_http_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'meshwright_http_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        'meshwright_http_requests_total{endpoint="other",status="404"} 1.0',
        'meshwright_finished_requests_total{reason="stop"} 1.0',
        "meshwright_prompt_tokens_total 1.0",
        "meshwright_generated_tokens_total 3.0",
        "meshwright_time_to_first_token_seconds_count 1.0",
        "meshwright_time_per_output_token_seconds_count 1.0",
        "meshwright_waiting_requests 0.0",
        "meshwright_running_requests 0.0",
    ):
        assert line in lines
