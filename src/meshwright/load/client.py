"""One request of a load test, streamed, with the arrival time of each piece."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx

from meshwright.addresses import base_of
from meshwright.errors import DeviceError, RequestError
from meshwright.load.timed_answer import TimedAnswer

TextOrChat = str | Sequence[Mapping[str, str]]
"""A text for completions, or the messages of a chat."""


class Client(AbstractAsyncContextManager):
    """Requests to one model of the server at `url`, a base with or without /v1.

    options: further fields of each request, such as ignore_eos.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        base = base_of(url, "--url")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.AsyncClient(
                base_url=base, headers=headers, limits=limits, timeout=timeout_seconds, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise DeviceError(f"--url {url}: {error}") from error
        self.url, self.model, self.context = base, model or "", None
        self._asked_model, self._options = model, dict(options or {})
        self._started = time.perf_counter()

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def start_clock(self) -> None:
        """Start to count seconds."""
        self._started = time.perf_counter()

    def now(self) -> float:
        """Seconds since the clock started."""
        return time.perf_counter() - self._started

    async def find_model(self) -> None:
        """Set `model` and its `context` from /v1/models: the named model, or the only one.

        Raises DeviceError if no server answers, RequestError if it refuses or does not have the model.
        """
        listed = (await self._get("/v1/models")).get("data") or []
        names = [str(entry.get("id")) for entry in listed if isinstance(entry, dict)]
        if self._asked_model is None and len(names) != 1:
            raise RequestError(f"{self.url} serves {', '.join(names) or 'no model'}; name one with --model")
        name = self._asked_model or names[0]
        if name not in names:
            raise RequestError(f"{self.url} does not serve {name!r}; it has {', '.join(names) or 'no model'}")
        self.model = name
        length = listed[names.index(name)].get("max_model_len")
        self.context = length if isinstance(length, int) else None

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(path, timeout=30)
            document = response.json() if response.is_success else {}
        except (httpx.HTTPError, ValueError) as error:
            raise DeviceError(
                f"no OpenAI-compatible server answers at {self.url}{path}: {_reason(error)};"
                " start one with `mw serve`"
            ) from error
        if not response.is_success:
            raise RequestError(f"{self.url}{path}: {_refusal(response.status_code, response.text)}")
        return document if isinstance(document, dict) else {}

    async def metrics(self) -> str:
        """The text of /metrics, empty if the server has none."""
        try:
            response = await self._http.get("/metrics", timeout=30)
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""

    async def ask(self, prompt: TextOrChat, max_tokens: int) -> TimedAnswer:
        """The answer to `prompt`, with any failure in its `error`."""
        answer = TimedAnswer(self.now())
        try:
            await self._stream(prompt, max_tokens, answer)
        except httpx.TimeoutException:
            answer.error = "timed out"
        except httpx.HTTPError as error:
            answer.error = _reason(error)
        answer.end_seconds = self.now()
        answer.num_tokens = answer.num_tokens or len(answer.piece_seconds)
        return answer

    async def _stream(self, prompt: TextOrChat, max_tokens: int, answer: TimedAnswer) -> None:
        text = isinstance(prompt, str)
        body = self._options | {
            "model": self.model,
            ("prompt" if text else "messages"): prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/completions" if text else "/v1/chat/completions"
        async with self._http.stream("POST", path, json=body) as response:
            if not response.is_success:
                await response.aread()
                answer.error = _refusal(response.status_code, response.text)
                return
            done = False
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    done = self._take(line.removeprefix("data:").strip(), answer) or done
            if not done and answer.error is None:
                answer.error = "the stream ended without [DONE]"

    def _take(self, event: str, answer: TimedAnswer) -> bool:
        """Add an event to `answer`; True if it is the last."""
        if event == "[DONE]":
            return True
        try:
            chunk = json.loads(event)
            if failure := chunk.get("error"):
                answer.error = str(failure.get("message") if isinstance(failure, dict) else failure)
                return False
            piece = "".join(_piece(choice) for choice in chunk.get("choices") or [])
            usage = chunk.get("usage") or {}
            answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
            answer.num_tokens = usage.get("completion_tokens", answer.num_tokens)
        except (ValueError, AttributeError, TypeError):
            answer.error = f"an event that is not a completion: {event[:80]}"
            return False
        if piece:
            answer.piece_seconds.append(self.now())
            answer.text += piece
        return False


def _piece(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _refusal(status: int, text: str) -> str:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = " ".join(text.split())[:200]
    return f"{status}: {message}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
