"""OpenAI's /v1/responses in its basic form: text in, text out, whole or streamed; nothing is stored."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from meshwright.errors import RequestError
from meshwright.serve.http.forms import Choice, Json
from meshwright.serve.http.protocol import MAX_COUNT, ChatRequest, Message, RequestObject
from meshwright.serve.text.generation import Delta


class InputText(RequestObject):
    type: Literal["input_text", "output_text", "text"]
    text: str
    off: ClassVar = {"annotations": ([],), "logprobs": ([],)}


class InputItem(RequestObject):
    """A message of the conversation; items of a response's output are accepted unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None

    def as_message(self) -> Message:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return Message(role=self.role, content="".join(parts))


class ResponsesRequest(RequestObject):
    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=MAX_COUNT)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    stream: bool = False
    off: ClassVar = {
        "store": (False,),
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True, False),
        "previous_response_id": (),
        "truncation": ("disabled",),
        "background": (False,),
        "include": ([],),
        "text": ({"format": {"type": "text"}},),
        "service_tier": ("auto", "default"),
    }

    def as_chat(self) -> ChatRequest:
        """The request as one of the chat endpoint."""
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += [item.as_message() for item in self.input]
        if not messages:
            raise RequestError("input is empty; send a text or at least one message", param="input")
        options = {"stream": True, "stream_options": {}} if self.stream else {}
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                **options,
            }
        )


@dataclass
class ResponsesForm:
    """The events and the body of one response, which has one message of one part."""

    head: Json
    item_id: str
    ends_with_done: ClassVar[bool] = False
    _text: str = ""
    _reason: str | None = None
    _number: int = field(default=-1)

    @classmethod
    def new(cls, model: str, asked: ResponsesRequest) -> "ResponsesForm":
        head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "metadata": {},
            "error": None,
            "store": False,
        }
        return cls(head, f"msg_{uuid.uuid4().hex}")

    def opening(self, index: int) -> list[Json]:
        item = {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        return [
            self._event("response.created", response=self._response("in_progress", [], None)),
            self._event("response.in_progress", response=self._response("in_progress", [], None)),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        self._text += delta.text
        self._reason = delta.finish_reason
        if not delta.text:
            return []
        return [self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=[])]

    def closing(self, usage: Json, *, asked: bool) -> list[Json]:
        whole = self.body([Choice(self._text, self._reason)], usage)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return [
            self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(self._text)),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(kind, response=whole),
        ]

    def body(self, choices: Sequence[Choice], usage: Json) -> Json:
        [choice] = choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        item = {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(choice.text)],
        }
        return self._response(status, [item], usage)

    def _response(self, status: str, output: list[Json], usage: Json | None) -> Json:
        counted = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = {"status": status, "output": output, "usage": counted, "incomplete_details": incomplete}
        return self.head | ended

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number} | content


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
