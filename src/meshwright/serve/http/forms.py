"""The shapes of an answer: text completions and chat completions, whole and in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from meshwright.models.families.tool_formats import ToolFormat
from meshwright.serve.engine.request import TokenScore
from meshwright.serve.http.logprobs import TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from meshwright.serve.http.long_json import LazyList, lazy_list
from meshwright.serve.text.answer_tokens import AnswerTokens
from meshwright.serve.text.generation import Delta
from meshwright.serve.text.tools import Call, ToolText

Json = dict[str, Any]


@dataclass
class Choice:
    """One whole answer, joined from its pieces."""

    text: str = ""
    finish_reason: str | None = None
    tokens: AnswerTokens = field(default_factory=AnswerTokens)
    prompt: Sequence[TokenScore] = ()

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.tokens.extend(delta.tokens)
        self.prompt = self.prompt or delta.prompt

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, the ranking of best_of."""
        return self.tokens.mean_logprob


@dataclass(frozen=True)
class Head:
    """The fields that every chunk of one answer repeats."""

    id: str
    created: int
    model: str

    @staticmethod
    def new(prefix: str, model: str) -> "Head":
        return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def write(self, kind: str, choices: list[Json] | LazyList) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class AnswerForm(Protocol):
    """How an endpoint writes its answers. ends_with_done: `[DONE]` ends a stream of them."""

    ends_with_done: ClassVar[bool]

    def opening(self, index: int) -> list[Json]:
        """Chunks that come before the first token of the answer at `index`."""
        ...

    def chunks(self, delta: Delta) -> list[Json]: ...

    def closing(self, usage: Json, *, asked: bool) -> list[Json]:
        """Chunks after the last piece; asked: whether the client wants the usage."""
        ...

    def body(self, choices: Sequence[Choice], usage: Json) -> Json: ...


@dataclass(frozen=True)
class Echo:
    """A prompt to be repeated before its answer."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CompletionForm:
    """`/v1/completions`.

    echoes: the prompt of each answer if the request has echo, otherwise None. num_sampled: answers sampled
    for each prompt. num_choices: answers returned, the likeliest first. logprobs: whether to return them.
    prompt_top: alternatives to list with each token of the prompt; None: without the prompt's logprobs.
    """

    head: Head
    names: TokenNames
    echoes: Sequence[Echo | None]
    num_sampled: int = 1
    num_choices: int = 1
    logprobs: bool = False
    prompt_top: int | None = None
    ends_with_done: ClassVar[bool] = True
    _begun: set[int] = field(default_factory=set)

    def opening(self, index: int) -> list[Json]:
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        # The prompt comes with the first token, as its log-probabilities do.
        begins = delta.index not in self._begun
        self._begun.add(delta.index)
        choice = Choice(delta.text, delta.finish_reason, AnswerTokens(delta.tokens), delta.prompt)
        return [self._write([self._choice(delta.index, delta.index, choice, begins=begins)])]

    def closing(self, usage: Json, *, asked: bool) -> list[Json]:
        return [self._write([]) | {"usage": usage}] if asked else []

    def body(self, choices: Sequence[Choice], usage: Json) -> Json:
        kept: list[tuple[int, Choice]] = []
        for first in range(0, len(choices), self.num_sampled):
            group = list(enumerate(choices))[first : first + self.num_sampled]
            if self.num_choices < self.num_sampled:
                group = sorted(group, key=lambda entry: -entry[1].mean_logprob)
            kept += group[: self.num_choices]
        choices_sent = lazy_list(len(kept), lambda: (self._choice(i, *entry) for i, entry in enumerate(kept)))
        return self._write(choices_sent) | {"usage": usage}

    def _write(self, choices: list[Json] | LazyList) -> Json:
        return self.head.write("text_completion", choices)

    def _choice(self, number: int, index: int, choice: Choice, *, begins: bool = True) -> Json:
        echo = self.echoes[index]
        choices_sent = echo if begins else None
        logprobs = None
        if self.logprobs:
            logprobs = completion_logprobs(
                self.names,
                choices_sent.tokens if choices_sent else (),
                choice.prompt if choices_sent else (),
                choice.tokens,
                len(echo.text) if echo else 0,
            )
        written: Json = {
            "index": number,
            "text": (choices_sent.text if choices_sent else "") + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if self.prompt_top is not None:
            written["prompt_logprobs"] = prompt_logprobs(self.names, self.prompt_top, choice.prompt)
        return written


@dataclass(frozen=True)
class ChatForm:
    """`/v1/chat/completions`. tools: the format of calls in the text; None without tools.

    forced_tool: whether the answer must be one tool call. prompt_top: as in CompletionForm.
    """

    head: Head
    names: TokenNames
    logprobs: bool = False
    tools: ToolFormat | None = None
    forced_tool: bool = False
    prompt_top: int | None = None
    ends_with_done: ClassVar[bool] = True
    _texts: dict[int, ToolText] = field(default_factory=dict)

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def chunks(self, delta: Delta) -> list[Json]:
        text, calls, reason = delta.text, (), delta.finish_reason
        if self.tools is not None:
            text, calls = self._separate(self.tools, delta)
        content: Json = {"content": text} if text else {}
        if calls:
            content["tool_calls"] = [{"index": number} | _call(call) for number, call in enumerate(calls)]
            reason = _reason(reason)
        if not content and not reason and not (self.logprobs and delta.tokens):
            return []
        logprobs = chat_logprobs(self.names, delta.tokens) if self.logprobs else None
        return [self._chunk(delta.index, content, reason, logprobs)]

    def _separate(self, tools: ToolFormat, delta: Delta) -> tuple[str, Sequence[Call]]:
        text = self._texts.setdefault(delta.index, ToolText(tools, forced=self.forced_tool))
        text_pushed = text.push(delta.text)
        if delta.finish_reason is None:
            return text_pushed, ()
        rest, calls = text.finish()
        return text_pushed + rest, calls

    def closing(self, usage: Json, *, asked: bool) -> list[Json]:
        return [self.head.write("chat.completion.chunk", []) | {"usage": usage}] if asked else []

    def body(self, choices: Sequence[Choice], usage: Json) -> Json:
        choices_sent = lazy_list(len(choices), lambda: (self._choice(*entry) for entry in enumerate(choices)))
        written = self.head.write("chat.completion", choices_sent) | {"usage": usage}
        if self.prompt_top is not None:
            scores = choices[0].prompt if choices else ()
            written["prompt_logprobs"] = prompt_logprobs(self.names, self.prompt_top, scores)
        return written

    def _choice(self, index: int, choice: Choice) -> Json:
        text, calls = choice.text, ()
        if self.tools is not None:
            text, calls = self._separate(self.tools, Delta(index, text, "stop"))
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.names, choice.tokens) if self.logprobs else None,
            "finish_reason": _reason(choice.finish_reason) if calls else choice.finish_reason,
        }

    def _chunk(
        self, index: int, delta: Json, finish_reason: str | None, logprobs: Json | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.head.write("chat.completion.chunk", [choice])


def _reason(reason: str | None) -> str:
    """The finish reason of an answer with calls: `length` if the last one is cut."""
    return "length" if reason == "length" else "tool_calls"


def _call(call: Call) -> Json:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
