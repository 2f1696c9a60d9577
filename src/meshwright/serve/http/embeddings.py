"""OpenAI's /v1/embeddings: the last hidden state of each input, after the final norm and L2-normalised."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from meshwright.errors import RequestError
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.limits import check_length
from meshwright.serve.engine.request import Request
from meshwright.serve.engine.sequence import Lifetime
from meshwright.serve.http.forms import Json
from meshwright.serve.http.protocol import MAX_COUNT, PromptField, RequestObject, Truncation, prompts_of
from meshwright.serve.text.generation import timed_out

MAX_INPUTS = 2048  # of one request, as in OpenAI's API


class EmbeddingsRequest(RequestObject):
    """The second half is vLLM's."""

    model: str
    input: PromptField
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, lt=MAX_COUNT)

    add_special_tokens: bool = True
    truncate_prompt_tokens: Truncation = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.input)


def check_request(asked: EmbeddingsRequest, embedding_size: int) -> None:
    """Raise RequestError for too many inputs, or for other dimensions than the model's."""
    if len(asked.prompts) > MAX_INPUTS:
        raise RequestError(f"input has {len(asked.prompts)} items; send at most {MAX_INPUTS}", param="input")
    if asked.dimensions not in (None, embedding_size):
        raise RequestError(
            f"dimensions = {asked.dimensions}: the embeddings of this model have {embedding_size}, "
            "and it was not trained for fewer; leave it out",
            param="dimensions",
            code="unsupported_parameter",
        )


def check_lengths(prompts: Sequence[Sequence[int]], context: int) -> None:
    """Raise RequestError for an input that is longer than the context."""
    check_length(max(map(len, prompts)), context, context, "input")


async def embeddings(
    engine: Engine,
    requests: Sequence[Request],
    limit_seconds: float | None,
    on_closed: Callable[[Sequence[Lifetime]], None] | None,
) -> list[np.ndarray]:
    """f32[D] of each request, in order. Raises RequestError 408 after `limit_seconds`."""
    await asyncio.to_thread(engine.prepare_reads)
    vectors: list[np.ndarray] = []
    try:
        async with asyncio.timeout(limit_seconds):
            size = max(1, engine.max_waiting // 2)  # at once, so that the queue stays open to others
            for first in range(0, len(requests), size):
                vectors += await _submitted(engine, requests[first : first + size], on_closed)
    except TimeoutError:
        raise timed_out(limit_seconds) from None
    return vectors


async def _submitted(
    engine: Engine, requests: Sequence[Request], on_closed: Callable[[Sequence[Lifetime]], None] | None
) -> list[np.ndarray]:
    by_index: dict[int, np.ndarray] = {}
    with engine.submit(*requests) as stream:
        async for event in stream:
            assert event.embedding is not None
            by_index[event.index] = event.embedding
    if on_closed is not None:
        on_closed(stream.lifetimes)
    return [by_index[index] for index in range(len(requests))]


def body(asked: EmbeddingsRequest, model: str, vectors: np.ndarray, num_tokens: int) -> Json:
    """The answer in OpenAI's form; base64 is of little-endian float32."""

    def encoded(vector: np.ndarray) -> str | list[float]:
        if asked.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        return vector.tolist()

    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encoded(vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
