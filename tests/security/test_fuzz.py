"""Generated grammars, templates and bodies: workers answer or end, and the next call is answered."""

import asyncio
import contextlib
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.http.client import MODEL
from tests.serve.mock import VOCAB_SIZE, byte_tokenizer

from meshwright.errors import CheckpointError, RequestError
from meshwright.models.chat import ChatTemplate
from meshwright.serve.http.reading import Reader
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.workers.pool import WorkerPool

pytest.importorskip("llguidance")
# The connections to workers end with the processes; no loop is left to close them.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
Pool = tuple[asyncio.Runner, WorkerPool]
BODY = {"model": MODEL, "prompt": "x"}

SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [{"type": "integer"}, {"type": "string"}, {"const": 1}, {"$ref": "#"}, True, {"enum": []}]
    ),
    lambda inner: (
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, max_size=4))
        | st.builds(lambda parts: {"type": "object", "properties": parts}, st.dictionaries(st.text(), inner))
        | st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers())
        | st.builds(lambda text: {"type": "string", "pattern": text}, st.text(max_size=20))
    ),
)
EXPRESSIONS = st.lists(
    st.sampled_from(
        ["a", "(", ")", "*", "+", "{1,9999}", "|", "[^a]", ".", "?", "\\w", "\\1", "(?=", "^", "$"]
    )
).map("".join)
RULES = st.lists(
    st.sampled_from(
        ["start: ", "a: ", "B: ", '"x" ', "a ", "B ", "| ", "( ", ") ", "+ ", "~9999 ", "/b+/ ", "\n"]
    )
).map("".join)
PIECES = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{% if x %}",
        "{% endif %}",
        "{% macro f() %}",
        "{{ f() }}",
        "{% endmacro %}",
        "{{ 'a' * 9999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set x = [1] * 9 %}",
        "{{",
        "}}",
        "{# ",
        " #}",
        "text",
        "{% for i in range(99999) %}",
        "{{ m.__class__ }}",
        "{{ messages.append(1) }}",
    ]
)


def reader(template: str | None = None) -> Reader:
    tokenizer = byte_tokenizer()
    if template is not None:
        chat = ChatTemplate(template)
        tokenizer = Tokenizer(tokenizer.tokenizer, tokenizer.eos_ids, tokenizer.start_id, chat)
    return Reader(tokenizer, MODEL, 1000, VOCAB_SIZE, 8, 264)


def survives(loop: asyncio.Runner, pool: WorkerPool, method: str, body: bytes) -> None:
    """A call of the method, and after it an honest one, in time."""

    async def main() -> None:
        async with asyncio.timeout(30):
            with contextlib.suppress(RequestError):
                await pool.call("hostile", method, body)
            await pool.call("honest", "completion", json.dumps(BODY).encode())

    loop.run(main())


@pytest.fixture(scope="module")
def pool():
    with asyncio.Runner() as loop, WorkerPool(reader(), 2) as pool:
        pool.check()
        yield loop, pool


NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
FUZZ = settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(form=st.builds(lambda v: {"guided_json": v}, st.dictionaries(st.just("anyOf"), st.lists(SCHEMAS)))
       | st.builds(lambda v: {"guided_regex": v}, EXPRESSIONS)
       | st.builds(lambda v: {"guided_grammar": v}, RULES))  # fmt: skip
def test_generated_grammars(pool: Pool, form: dict[str, Any]):
    survives(*pool, "completion", json.dumps(BODY | form).encode())


@FUZZ
@given(
    body=st.binary()
    | st.lists(st.sampled_from([b"{", b"[", b'"a"', b":", b",", b"1", b"]", b"}"])).map(b"".join)
)
def test_generated_bodies(pool: Pool, body: bytes):
    for method in ("completion", "chat", "embeddings", "tokenize", "detokenize", "response"):
        survives(*pool, method, body)


@settings(FUZZ, max_examples=max(5, NUM_EXAMPLES // 20))  # each starts a pool of workers
@given(pieces=st.lists(PIECES, min_size=1))
def test_generated_templates(pieces: list[str]):
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
    with asyncio.Runner() as loop, WorkerPool(reader("".join(pieces)), 2) as pool:
        try:
            pool.check()
        except CheckpointError:
            return
        survives(loop, pool, "chat", body)
