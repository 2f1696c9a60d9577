"""The requests of the OpenAI API that this server takes, and a 400 for every field it does not.

A field is taken, or it is harmless (it changes no answer), or it is refused by name; none is ignored
in silence. A field of OpenAI's that we lack may still be sent with the value that means "off".
"""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from meshwright.errors import RequestError, nearest

# Fields that change no answer.
_HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})


def _described(expected: str) -> WrapValidator:
    """One message for a union, where pydantic would give one for each member."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("described", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(validate)


Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Prompt = Annotated[
    str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1)],
    _described("a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"),
]
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=4)],
    _described("a string or a list of up to 4 strings, none of them empty"),
]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields we lack, each with the values (beside null) that ask for nothing.
    off: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """`data` without fields that are null, harmless or off."""
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None}
        return {name: value for name, value in kept.items() if not cls._is_off(name, value)}

    @classmethod
    def _is_off(cls, name: str, value: Any) -> bool:
        if name in _HARMLESS:
            return True
        if name not in cls.off:
            return False
        if value in cls.off[name]:
            return True
        allowed = " or ".join(json.dumps(value) for value in cls.off[name])
        hint = f"leave it out or send {allowed}" if allowed else "leave it out"
        raise RequestError(f"{name} is not supported; {hint}", param=name, code="unsupported_parameter")


class StreamOptions(_Object):
    include_usage: bool = False
    off = {"include_obfuscation": (False,)}


class _Generation(_Object):
    """What completions and chat completions share. top_k and ignore_eos are vLLM's."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    seed: int | None = None
    stop: Stop = []
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "_Generation":
        if self.stream_options and not self.stream:
            raise RequestError("stream_options is only for stream = true", param="stream_options")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}


class CompletionRequest(_Generation):
    prompt: Prompt
    max_tokens: int | None = Field(16, ge=1)
    echo: bool = False
    off = _OFF | {"best_of": (1,), "logprobs": (), "suffix": ("",)}

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]


class TextPart(_Object):
    type: Literal["text"]
    text: str


class Message(_Object):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], _described("a string or a list of parts of type text")]
    name: str | None = None
    off = {"tool_calls": ([],), "function_call": (), "refusal": (), "audio": (), "annotations": ([],)}

    def as_template_reads(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": "".join(parts), **named}


class ChatRequest(_Generation):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    off = _OFF | {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
    }

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError(
                "max_tokens and max_completion_tokens mean the same; send one", param="max_tokens"
            )
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


R = TypeVar("R", bound=_Generation)


def parse(kind: type[R], body: bytes) -> R:
    """The request in `body`; RequestError 400 that names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0], kind) from None


def _request_error(error: ErrorDetails, kind: type[_Generation]) -> RequestError:
    if error["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {error.get('ctx', {}).get('error')}", code="invalid_json")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if not param:
        return RequestError("the body must be a JSON object")
    if error["type"] == "extra_forbidden":
        hint = nearest(str(error["loc"][-1]), list(kind.model_fields)) if len(error["loc"]) == 1 else ""
        return RequestError(
            _sentence(f"{param} is not a known field", hint), param=param, code="unknown_parameter"
        )
    if error["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_required_parameter")
    message = error["msg"][0].lower() + error["msg"][1:]
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _sentence(fact: str, hint: str) -> str:
    return f"{fact}; {hint}" if hint else fact
