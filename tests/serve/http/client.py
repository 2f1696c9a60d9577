"""The application in this process, asked over ASGI without a port."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.serve.mock import MockRunner, byte_tokenizer

from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.client_limits import ClientLimits

MODEL = "tiny"


@asynccontextmanager
async def client(
    runner: MockRunner, *, max_waiting: int = 16, limits: ClientLimits | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    with Engine(runner, max_waiting=max_waiting) as engine:
        app = create_app(engine, byte_tokenizer(), MODEL, limits)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http


def ask(runner: MockRunner, question: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """The result of `question` put to a server of its own."""

    async def main() -> Any:
        async with client(runner) as http:
            return await question(http)

    return asyncio.run(main())


def post(runner: MockRunner, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(runner, lambda http: http.post(path, content=content))


def complete(runner: MockRunner, **body: Any) -> dict[str, Any]:
    response = post(runner, "/v1/completions", {"model": MODEL, "prompt": "x", **body})
    assert response.status_code == 200, response.text
    return response.json()


def chat(runner: MockRunner, **body: Any) -> dict[str, Any]:
    hi = [{"role": "user", "content": "hi"}]
    response = post(runner, "/v1/chat/completions", {"model": MODEL, "messages": hi, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[Any]:
    """The contents of a body of server-sent events; `[DONE]` stays text."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    contents = [line.removeprefix("data: ") for line in lines]
    return [content if content == "[DONE]" else json.loads(content) for content in contents]
