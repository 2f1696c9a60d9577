"""Bad requests: each a 4xx with the OpenAI error object, a message that names the field, nothing run."""

import asyncio

import pytest
from tests.serve.http.client import MODEL, client, events, post
from tests.serve.mock import MockRunner, says

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
PROMPTS = "a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
STOPS = "a string or a list of up to 4 strings, none of them empty or longer than 1,000 characters"


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (TEXT, {"prompt": None}, "prompt", "prompt is missing"),
        (TEXT, {"model": None}, "model", "model is missing"),
        (TEXT, {"model": 7}, "model", "model: input should be a valid string"),
        (TEXT, {"prompt": 7}, "prompt", f"prompt: must be {PROMPTS}"),
        (TEXT, {"prompt": []}, "prompt", f"prompt: must be {PROMPTS}"),
        (TEXT, {"prompt": [[]]}, "prompt", f"prompt: must be {PROMPTS}"),
        (TEXT, {"prompt": ["a", 1]}, "prompt", f"prompt: must be {PROMPTS}"),
        (TEXT, {"prompt": [-1]}, "prompt", f"prompt: must be {PROMPTS}"),
        (TEXT, {"prompt": [True]}, "prompt", f"prompt: must be {PROMPTS}"),
        (TEXT, {"prompt": [300], "echo": True}, "prompt", "token 300 is not in the vocabulary of 300 tokens"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "max_tokens = 0 answers nothing unless echo is true"),
        (TEXT, {"max_tokens": -1}, "max_tokens", "max_tokens: input should be greater than or equal to 0"),
        (TEXT, {"max_tokens": "5"}, "max_tokens", "max_tokens: input should be a valid integer"),
        (
            TEXT,
            {"temperature": -0.1},
            "temperature",
            "temperature: input should be greater than or equal to 0",
        ),
        (TEXT, {"temperature": 2.1}, "temperature", "temperature: input should be less than or equal to 2"),
        (TEXT, {"temperature": True}, "temperature", "temperature: input should be a valid number"),
        (TEXT, {"top_p": 1.1}, "top_p", "top_p: input should be less than or equal to 1"),
        (TEXT, {"top_k": -2}, "top_k", "top_k: input should be greater than or equal to -1"),
        (TEXT, {"min_p": 1.5}, "min_p", "min_p: input should be less than or equal to 1"),
        (
            TEXT,
            {"repetition_penalty": 0},
            "repetition_penalty",
            "repetition_penalty: input should be greater than 0",
        ),
        (TEXT, {"min_tokens": 17}, "min_tokens", "min_tokens = 17 is more than max_tokens = 16"),
        (
            TEXT,
            {"min_tokens": 3, "max_completion_tokens": 2},
            "min_tokens",
            "min_tokens = 3 is more than max_tokens = 2",
        ),
        (
            TEXT,
            {"allowed_token_ids": [300]},
            "allowed_token_ids",
            "token 300 is not in the vocabulary of 300 tokens",
        ),
        (TEXT, {"n": 0}, "n", "n: input should be greater than or equal to 1"),
        (TEXT, {"n": 30}, "n", "30 answers in one request, but the server holds at most 18"),
        (TEXT, {"seed": 1.5}, "seed", "seed: input should be a valid integer"),
        (TEXT, {"stop": ["a"] * 5}, "stop", f"stop: must be {STOPS}"),
        (TEXT, {"stop": ""}, "stop", f"stop: must be {STOPS}"),
        (TEXT, {"stop": ["a", ""]}, "stop", f"stop: must be {STOPS}"),
        (
            TEXT,
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream_options is only for stream = true",
        ),
        (TEXT, {"temprature": 1}, "temprature", "temprature is not a known field; did you mean temperature?"),
        (TEXT, {"suffix": "x"}, "suffix", 'suffix is not supported; leave it out or send ""'),
        (TEXT, {"logprobs": 21}, "logprobs", "logprobs: input should be less than or equal to 20"),
        (TEXT, {"best_of": 1, "n": 2}, "best_of", "best_of = 1 is fewer than n = 2"),
        (
            TEXT,
            {"best_of": 2, "stream": True},
            "best_of",
            "best_of cannot be streamed: all answers must be known first",
        ),
        (
            TEXT,
            {"presence_penalty": 2.5},
            "presence_penalty",
            "presence_penalty: input should be less than or equal to 2",
        ),
        (TEXT, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: 'x' is not a token id"),
        (TEXT, {"logit_bias": {"300": 1}}, "logit_bias", "token 300 is not in the vocabulary of 300 tokens"),
        (
            TEXT,
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_choice",
            "guided_regex and guided_choice ask for two forms of one answer; send one",
        ),
        (TEXT, {"guided_json": "{"}, "guided_json", None),
        (TEXT, {"prompt": "x" * 10_000}, "prompt", None),
        (CHAT, {"messages": None}, "messages", "messages is missing"),
        (CHAT, {"messages": "hi"}, "messages", "messages: input should be a valid array"),
        (
            CHAT,
            {"messages": []},
            "messages",
            "messages: list should have at least 1 item after validation, not 0",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            CHAT,
            {"messages": [*HI, {"role": "critic", "content": "hi"}]},
            "messages[1].role",
            "messages[1].role: input should be 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "messages[0].content: must be a string or a list of parts of type text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "weight": 1}]},
            "messages[0].weight",
            "messages[0].weight is not a known field",
        ),
        (CHAT, {"prompt": "x"}, "prompt", None),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "tools[0].function is missing"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "the model's chat template has no tools, or in a form that is not understood"
            " (understood: Hermes and Qwen, Mistral, Llama 3)",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "tool_choice = required needs tools"),
        (
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "tool_choice names 'g', which is not among the tools; there are none",
        ),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "top_logprobs is only for logprobs = true"),
        (
            CHAT,
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format.json_schema comes with type json_schema, and only with it",
        ),
        ("/v1/responses", {"input": []}, "input", "input is empty; send a text or at least one message"),
        (
            "/v1/responses",
            {"previous_response_id": "x"},
            "previous_response_id",
            "previous_response_id is not supported; leave it out",
        ),
        ("/tokenize", {}, "prompt", "send prompt or messages, one of them"),
        ("/detokenize", {"tokens": [300]}, "tokens", "token 300 is not in the vocabulary of 300 tokens"),
        (
            CHAT,
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "max_tokens = 1 and max_completion_tokens = 2 mean the same; send one, or one number for both",
        ),
        (
            TEXT,
            {"prompt": "x" * 64},
            "prompt",
            "the prompt has 64 tokens, but the context holds 64; send at most 63",
        ),
        (
            TEXT,
            {"prompt": "x" * 60, "max_tokens": 5},
            "max_tokens",
            "60 prompt tokens and max_tokens = 5 make 65, but the context holds 64; ask for at most 4",
        ),
    ],
)
def test_a_bad_field_is_named(path, fields, param, message):
    runner = MockRunner()
    good = {TEXT: {"prompt": "x"}, CHAT: {"messages": HI}, "/v1/responses": {"input": "hi"}}
    response = post(runner, path, {"model": MODEL} | good.get(path, {}) | fields)
    error = response.json()["error"]
    assert (error["message"] if message else None, error["param"], response.status_code) == (
        message,
        param,
        400,
    )
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["code"]
    assert runner.prefilled == []


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "message"),
    [
        ("POST", TEXT, b'{"model": ', 400, "invalid_json", "the body is not JSON: EOF while parsing"),
        ("POST", TEXT, b"", 400, "invalid_json", "the body is not JSON: EOF while parsing"),
        ("POST", TEXT, b"\xff\xfe", 400, "invalid_json", "the body is not JSON: "),
        (
            "POST",
            TEXT,
            rb'{"model": "tiny", "prompt": "\ud800"}',
            400,
            "invalid_json",
            "the body is not JSON: ",
        ),
        ("POST", TEXT, b"[" * 100_000, 400, "invalid_json", "the body is not JSON: recursion limit"),
        ("POST", TEXT, b"[]", 400, "invalid_value", "the body must be a JSON object"),
        (
            "POST",
            TEXT,
            b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
            400,
            "invalid_value",
            "temperature: ",
        ),
        (
            "POST",
            TEXT,
            b'{"model": "gpt-4", "prompt": "x"}',
            404,
            "model_not_found",
            "model 'gpt-4' is not served",
        ),
        ("POST", "/v1/audio/speech", b"{}", 404, "unknown_url", "POST /v1/audio/speech: not found"),
        ("GET", TEXT, b"", 405, "method_not_supported", "GET /v1/completions: method not allowed"),
        ("POST", TEXT, b" " * 16_000_001, 413, "request_too_large", "the body has more than 16000000 bytes"),
    ],
)
def test_a_bad_request(method, path, content, status, code, message):
    async def main():
        async with client(MockRunner()) as http:
            return await http.request(method, path, content=content)

    response = asyncio.run(main())
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert (response.status_code, error["code"]) == (status, code)


def test_harmless_fields_and_values_that_mean_off_are_taken():
    off = {
        "user": "me",
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "seed": None,
        "stop": None,
    }
    runner = MockRunner(says("ok"))
    text = {"model": MODEL, "prompt": "x", "best_of": 1, "suffix": None, **off}
    assert post(runner, TEXT, text).status_code == 200
    earlier = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []}
    more = {"logprobs": False, "tools": [], "response_format": {"type": "text"}, "store": False}
    assert post(runner, CHAT, {"model": MODEL, "messages": [earlier, *HI], **off, **more}).status_code == 200


def test_a_full_queue_is_429_in_the_same_shape():
    runner = MockRunner(num_slots=1)

    async def main():
        async with client(runner, max_waiting=0) as http:
            runner.gate.clear()
            body = {"model": MODEL, "prompt": "x"}
            first = asyncio.create_task(http.post(TEXT, json=body))
            while "meshwright_running_requests 1.0" not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)
            refused = await http.post(TEXT, json=body)
            runner.gate.set()
            return (await first).status_code, refused

    status, refused = asyncio.run(main())
    assert (status, refused.status_code) == (200, 429)
    assert refused.json()["error"] == {
        "message": "1 answers asked for, but the queue has room for 0; retry later",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


FAILED = {
    "message": "the engine failed: ValueError: out of memory",
    "type": "server_error",
    "param": None,
    "code": "engine_error",
}


def test_a_failed_engine_is_500_then_503_and_unhealthy():
    runner = MockRunner()

    async def main():
        async with client(runner) as http:
            runner.failure = ValueError("out of memory")
            body = {"model": MODEL, "prompt": "x"}
            under_way, later = [
                await http.post(TEXT, json=body | {"stream": stream}) for stream in (False, True)
            ]
            return under_way, later, await http.get("/health")

    under_way, later, health = asyncio.run(main())
    assert (under_way.status_code, under_way.json()["error"]) == (500, FAILED)
    assert (later.status_code, later.json()["error"]) == (503, FAILED | {"code": "engine_stopped"})
    assert health.status_code == 503
    assert health.json() == {"status": "stopped", "message": FAILED["message"]}


def test_an_engine_that_fails_within_a_stream_ends_it_with_an_error_event():
    runner = MockRunner(says("ab"))
    runner.rule = lambda prompt, answer: 1 // (2 - len(answer))
    body = {"model": MODEL, "prompt": "x", "stream": True, "temperature": 0}
    *chunks, last = events(post(runner, TEXT, body).text)
    assert len(chunks) == 2
    assert last["error"]["message"].startswith("the engine failed: ZeroDivisionError: ")
    assert last["error"]["type"] == "server_error"


def test_our_own_mistakes_are_500_without_their_details(monkeypatch):
    def broken(self, tokens):
        raise KeyError("private")

    monkeypatch.setattr("meshwright.serve.text.tokenizer.Tokenizer.decode", broken)
    response = post(MockRunner(), TEXT, {"model": MODEL, "prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed on this request; its log says why"
    assert "private" not in response.text
