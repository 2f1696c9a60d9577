"""Rewards of answers: a Python function, or a served model that judges them."""

import asyncio
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.addresses import base_of
from meshwright.errors import MeshwrightError
from meshwright.files import read_text

# A judge's requests at a time, the seconds of one, and the tokens of its answer.
_AT_ONCE, _SECONDS, _JUDGE_TOKENS = 64, 600.0, 64
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE_TEMPLATE = """Score the answer to a task from 0 (wrong) to 1 (right). Write only the number.

Task:
{prompt}

Answer:
{answer}

Score:"""


class Reward(Protocol):
    """Scores answers. unread: replies so far that had no score, which count as 0."""

    unread: int

    def __call__(self, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float]: ...


class FunctionReward:
    """The function of `FILE.py:FUNCTION`, called with the row of a prompt and the text of an answer.

    Raises MeshwrightError if there is no such function, it fails, or returns no finite number.
    """

    unread = 0

    def __init__(self, written: str) -> None:
        path, colon, name = written.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            raise MeshwrightError(f"--reward {written}: write FILE.py:FUNCTION, such as rewards.py:score")
        if not Path(path).is_file():
            raise MeshwrightError(f"--reward {written}: there is no file {path}")
        self._written, self._function = written, _function(Path(path), name, written)

    def __call__(self, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float]:
        return [self._of(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def _of(self, row: Mapping[str, Any], answer: str) -> float:
        try:
            value = float(self._function(dict(row), answer))
        except Exception as error:  # of the user's code
            raise MeshwrightError(
                f"--reward {self._written}: fails on the answer {answer[:80]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise MeshwrightError(f"--reward {self._written}: gives {value} for the answer {answer[:80]!r}")
        return value


def _function(path: Path, name: str, written: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of the user's code
        raise MeshwrightError(f"--reward {written}: {path} does not run: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise MeshwrightError(f"--reward {written}: {path} has no function {name}")
    return function


class JudgeReward:
    """The first number in the reply of a model served at `url`, by OpenAI's API for chats, greedily.

    template: the judge's prompt, with {prompt}, {answer} and keys of the row; None: JUDGE_TEMPLATE. A reply
    without a number scores 0. Raises MeshwrightError if the template is unusable or the server does not
    answer.
    """

    def __init__(self, url: str, template: Path | None) -> None:
        self._base = base_of(url, "--judge")
        self._template = read_text(template, MeshwrightError) if template else JUDGE_TEMPLATE
        if "{answer}" not in self._template:
            raise MeshwrightError(f"--judge-template {template}: has no {{answer}}")
        self.unread = 0
        self._model: str | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float]:
        texts = [self._prompt(row, answer) for row, answer in zip(rows, answers, strict=True)]
        replies = asyncio.run(self._replies(texts))
        numbers = [_NUMBER.search(reply) for reply in replies]
        self.unread += sum(number is None for number in numbers)
        return [float(number[0]) if number else 0.0 for number in numbers]

    def _prompt(self, row: Mapping[str, Any], answer: str) -> str:
        prompt = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
        values = {**row, "prompt": prompt, "answer": answer}

        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise MeshwrightError(
                    f"--judge-template: {match[0]} is no key of the row; keys: {', '.join(row)}"
                )
            return str(values[match[1]])

        return re.sub(r"\{(\w+)\}", value, self._template)

    async def _replies(self, texts: Sequence[str]) -> list[str]:
        import httpx

        gate = asyncio.Semaphore(_AT_ONCE)
        async with httpx.AsyncClient(base_url=self._base, timeout=_SECONDS, trust_env=False) as http:

            async def reply(text: str) -> str:
                async with gate:
                    body = {
                        "model": self._model,
                        "messages": [{"role": "user", "content": text}],
                        "temperature": 0,
                        "max_tokens": _JUDGE_TOKENS,
                    }
                    response = (await http.post("/v1/chat/completions", json=body)).raise_for_status()
                    return response.json()["choices"][0]["message"]["content"] or ""

            try:
                if self._model is None:
                    models = (await http.get("/v1/models")).raise_for_status().json()
                    self._model = models["data"][0]["id"]
                return await asyncio.gather(*map(reply, texts))
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                raise MeshwrightError(
                    f"--judge {self._base}: gives no score: {type(error).__name__}: {error}"
                ) from error
