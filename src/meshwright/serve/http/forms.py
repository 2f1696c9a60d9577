"""The two shapes of an answer: text completions and chat completions, whole and in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.serve.generation import Delta

Json = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One whole answer."""

    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Head:
    """The fields that every chunk of one answer repeats."""

    id: str
    created: int
    model: str

    @staticmethod
    def new(prefix: str, model: str) -> "Head":
        return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def write(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class Form(Protocol):
    """How an endpoint writes its answers."""

    def opening(self, index: int) -> list[Json]:
        """Chunks that come before the first token of the answer at `index`."""
        ...

    def chunk(self, delta: Delta) -> Json: ...

    def last(self) -> Json:
        """A chunk without choices, for the usage."""
        ...

    def body(self, choices: Sequence[Choice]) -> Json: ...


@dataclass(frozen=True)
class CompletionForm:
    """`/v1/completions`. echoes: for each answer the prompt's text, "" unless echo was asked for."""

    head: Head
    echoes: Sequence[str]

    def opening(self, index: int) -> list[Json]:
        return [self.chunk(Delta(index, self.echoes[index]))] if self.echoes[index] else []

    def chunk(self, delta: Delta) -> Json:
        return self.head.write("text_completion", [_text(delta.index, delta.text, delta.finish_reason)])

    def last(self) -> Json:
        return self.head.write("text_completion", [])

    def body(self, choices: Sequence[Choice]) -> Json:
        texts = [
            _text(index, self.echoes[index] + choice.text, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return self.head.write("text_completion", texts)


def _text(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


@dataclass(frozen=True)
class ChatForm:
    """`/v1/chat/completions`."""

    head: Head

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def chunk(self, delta: Delta) -> Json:
        return self._chunk(delta.index, {"content": delta.text} if delta.text else {}, delta.finish_reason)

    def last(self) -> Json:
        return self.head.write("chat.completion.chunk", [])

    def body(self, choices: Sequence[Choice]) -> Json:
        messages = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self.head.write("chat.completion", messages)

    def _chunk(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self.head.write("chat.completion.chunk", [choice])
