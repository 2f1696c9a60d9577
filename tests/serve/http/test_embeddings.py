"""/v1/embeddings: the form of OpenAI, batches and prefixes that change nothing, and its errors."""

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import pytest
from tests.serve.http.client import MODEL, ask, client, post
from tests.serve.mock import MockRunner, byte_tokenizer, count_up, embedding_of

PATH = "/v1/embeddings"


def ids(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text))


def embed(body: dict[str, Any], runner: MockRunner | None = None) -> dict[str, Any]:
    response = post(runner or MockRunner(), PATH, {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("abc", ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        (ids("abc"), ["abc"]),
        ([ids("abc"), ids("de")], ["abc", "de"]),
    ],
)
def test_an_input_has_openais_four_forms(given, prompts):
    body = embed({"input": given, "user": "someone"})
    count = sum(map(len, prompts))
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", index) for index in range(len(prompts))
    ]
    for one, prompt in zip(body["data"], prompts, strict=True):
        np.testing.assert_allclose(one["embedding"], embedding_of(ids(prompt)))
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1.0)


def test_base64_is_of_little_endian_floats():
    plain, packed = (embed({"input": "abc", "encoding_format": form}) for form in ("float", "base64"))
    found = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(found, np.float32(plain["data"][0]["embedding"]))


def test_long_inputs_go_in_pieces_and_find_cached_pages():
    """Beside an answer, which gets a token in each of the steps of a prompt of nine chunks."""
    runner = MockRunner(count_up, num_slots=3, chunk=4)
    text = "abcdefghi" * 4

    async def main(http: httpx.AsyncClient) -> tuple[Any, ...]:
        asked = {"model": MODEL, "input": text}
        answer = {"model": MODEL, "prompt": "x", "max_tokens": 24, "temperature": 0}
        runner.gate.clear()  # until all have arrived
        posts = http.post("/v1/completions", json=answer), *(http.post(PATH, json=asked) for _ in range(2))
        arriving = asyncio.gather(*posts)
        await asyncio.sleep(0.5)
        runner.gate.set()
        return *(one.json() for one in await arriving), (await http.post(PATH, json=asked)).json()

    answer, *embedded = ask(runner, main)
    assert answer["usage"]["completion_tokens"] == 24
    for body in embedded:
        np.testing.assert_allclose(body["data"][0]["embedding"], embedding_of(ids(text)))
    assert [1, 4] in runner.batches or [4, 1] in runner.batches
    assert runner.batches[-1] == [4]  # the third time only the last page was computed


def test_more_inputs_than_the_queue_holds_are_embedded():
    texts = [f"{number} of many" for number in range(100)]
    body = embed({"input": texts})
    for one, text in zip(body["data"], texts, strict=True):
        np.testing.assert_allclose(one["embedding"], embedding_of(ids(text)))


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        ({}, "input", "missing_required_parameter", "input is missing"),
        ({"input": []}, "input", "invalid_value", "input: must be a string, a list of strings, a list of"),
        ({"input": [300]}, "input", None, "token 300 is not in the vocabulary of 300 tokens"),
        ({"input": "x" * 65}, "input", "context_length_exceeded", "input has 65 tokens, but the context"),
        ({"input": "x", "dimensions": 2}, "dimensions", "unsupported_parameter", "dimensions = 2: the emb"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid_value", "encoding_format: "),
        ({"input": "x", "temperature": 1}, "temperature", "unknown_parameter", "temperature is not a known"),
        ({"input": "x", "model": "other"}, "model", "model_not_found", "model 'other' is not served here"),
        ({"input": ["x"] * 2049}, "input", None, "input has 2049 items; send at most 2048"),
    ],
)
def test_errors_have_openais_shape(body, param, code, message):
    response = post(MockRunner(), PATH, {"model": MODEL, **body})
    error = response.json()["error"]
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert (error["param"], error["code"]) == (param, code or "invalid_value")
    assert error["message"].startswith(message)


def test_a_prompt_may_fill_the_context_and_the_models_own_dimensions_are_taken():
    body = embed({"input": "x" * 64, "dimensions": 3})
    np.testing.assert_allclose(body["data"][0]["embedding"], embedding_of(ids("x" * 64)))


def test_a_client_that_leaves_frees_the_queue():
    runner = MockRunner(num_slots=1)

    async def main() -> None:
        async with client(runner) as http:
            runner.gate.clear()
            asking = asyncio.ensure_future(http.post(PATH, json={"model": MODEL, "input": ["a", "b"]}))
            await asyncio.sleep(0.05)
            asking.cancel()
            runner.gate.set()
            answer = {"model": MODEL, "prompt": "x", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=answer)).status_code == 200

    asyncio.run(main())
