"""The requests of the OpenAI API that this server takes, and a 400 for every field it does not.

A field is taken, or it is harmless (it changes no answer), or it is refused by name; none is ignored
in silence. A field of OpenAI's that we lack may still be sent with the value that means "off".
"""

import json
import re
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
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from meshwright.errors import RequestError, nearest
from meshwright.serve.engine.request import NUM_TOP
from meshwright.serve.text.grammar import GrammarKind

# Fields that change no answer.
_HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "cache_salt",
        "guided_decoding_backend",
    )
)
# Fields of vLLM's generation that this server lacks, with the values that change nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "guided_whitespace_pattern": (),
    "guided_json_object": (False,),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}


def _described(expected: str) -> WrapValidator:
    """One message for a union, where pydantic would give one for each member."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("described", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(validate)


# Larger numbers have no use, and messages with thousands of digits.
MAX_COUNT = 2**63
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
PromptField = Annotated[
    str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1)],
    _described("a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"),
]


def prompts_of(prompt: PromptField) -> list[str | list[int]]:
    """The prompts, each a text or a list of tokens."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]  # pyright: ignore[reportReturnType]
    return list(prompt)  # pyright: ignore[reportReturnType]


StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=4)],
    _described("a string or a list of up to 4 strings, none of them empty or longer than 1,000 characters"),
]


class RequestObject(BaseModel):
    """A JSON object whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Unsupported fields, with the values (other than null) that change nothing and are accepted.
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


class StreamOptions(RequestObject):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    off = {"include_obfuscation": (False,)}


Bias = Annotated[float, Field(ge=-100, le=100)]


class JsonSchemaSpec(RequestObject):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = True


class ResponseFormat(RequestObject):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "response_format.json_schema comes with type json_schema, and only with it",
                param="response_format",
            )
        return self


class StructuredOutputs(RequestObject):
    """vLLM's `structured_outputs`: one form, and whether JSON has blanks between its parts."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    off = {
        "disable_fallback": (False, True),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }


# Tokens of a prompt to keep, its last; -1 keeps the tokens that the context has room for.
Truncation = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1, lt=MAX_COUNT)] | None,
    _described("-1, or an integer of at least 1"),
]


class _Generation(RequestObject):
    """What completions and chat completions share; the second half is vLLM's, as are its meanings."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = None
    stop: Stop = []
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=MAX_COUNT)
    max_completion_tokens: int | None = Field(None, ge=1, lt=MAX_COUNT)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Bias] = {}
    response_format: ResponseFormat | None = None

    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    min_tokens: int = Field(0, ge=0, lt=MAX_COUNT)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=1000)
    truncate_prompt_tokens: Truncation = None
    prompt_logprobs: int | None = Field(None, ge=0, le=NUM_TOP)
    return_tokens_as_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "_Generation":
        if self.stream_options and not self.stream:
            raise RequestError("stream_options is only for stream = true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> "_Generation":
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> "_Generation":
        both = {"max_tokens", "max_completion_tokens"} <= self.model_fields_set
        if both and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = {self.max_completion_tokens} "
                "mean the same; send one, or one number for both",
                param="max_tokens",
            )
        if self.limit is not None and self.min_tokens > self.limit:
            raise RequestError(
                f"min_tokens = {self.min_tokens} is more than max_tokens = {self.limit}", param="min_tokens"
            )
        return self

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer; None: limited only by the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _one_form(self) -> "_Generation":
        if len(self.forms) > 1:
            names = " and ".join(name for name, _, _ in self.forms)
            raise RequestError(f"{names} ask for two forms of one answer; send one", param=self.forms[1][0])
        return self

    @model_validator(mode="after")
    def _bias_of_tokens(self) -> "_Generation":
        wrong = next((token for token in self.logit_bias if not re.fullmatch(r"[0-9]{1,9}", token)), None)
        if wrong is not None:
            raise RequestError(f"logit_bias: {wrong!r} is not a token id", param="logit_bias")
        return self

    @property
    def forms(self) -> list[tuple[str, GrammarKind, Any]]:
        """Constraints on the answer, at most one: (field, kind of grammar, source)."""
        grammars: list[tuple[str, GrammarKind, Any]] = []
        if self.response_format and self.response_format.type != "text":
            spec = self.response_format.json_schema
            grammars.append(("response_format", "json_schema", spec.schema_ if spec else {"type": "object"}))
        structured = self.structured_outputs or StructuredOutputs.model_validate({})
        for prefix, json_, regex, choice, grammar in (
            ("guided_{}", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
            (
                "structured_outputs.{}",
                {"type": "object"} if structured.json_object else structured.json_,
                structured.regex,
                structured.choice,
                structured.grammar,
            ),
        ):
            if json_ is not None:
                name = prefix.format("json")
                grammars.append(
                    (name, "json_schema", _json_object(json_, name) if isinstance(json_, str) else json_)
                )
            if regex is not None:
                grammars.append((prefix.format("regex"), "regex", regex))
            if choice is not None:
                grammars.append((prefix.format("choice"), "lark", _one_of(choice)))
            if grammar is not None:
                grammars.append((prefix.format("grammar"), "lark", grammar))
        return grammars

    @property
    def has_blanks(self) -> bool:
        """Whether JSON answers may have blanks between their parts."""
        return not (self.structured_outputs and self.structured_outputs.disable_any_whitespace)

    @property
    def num_scored(self) -> int:
        """Alternatives that sampling reports: the most that the answer or the prompt is to show."""
        return max(self.num_top or 0, self.prompt_logprobs or 0)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_top(self) -> int | None:
        """Alternatives to report with each token; None: not even its own log-probability."""
        raise NotImplementedError

    @property
    def num_sampled(self) -> int:
        """Answers to generate for each prompt."""
        return self.n

    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), bias) for token, bias in self.logit_bias.items())


def _one_of(choices: list[str]) -> str:
    """A grammar in Lark's form.

    Choices of a terminal are one automaton. As choices of a rule they would be items of a row, 2,000 at most.
    """
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def _json_object(text: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{param} is not JSON: {error}", param=param) from error
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be a JSON object", param=param)
    return value


class CompletionRequest(_Generation):
    prompt: PromptField
    max_tokens: int | None = Field(16, ge=0, lt=MAX_COUNT)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=NUM_TOP)
    best_of: int | None = Field(None, ge=1, le=128)
    add_special_tokens: bool = True
    off = _OFF | {"suffix": ("",), "prompt_embeds": ()}

    @model_validator(mode="after")
    def _sensible(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of = {self.best_of} is fewer than n = {self.n}", param="best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise RequestError("best_of cannot be streamed: all answers must be known first", param="best_of")
        if self.limit == 0 and not self.echo:
            raise RequestError("max_tokens = 0 answers nothing unless echo is true", param="max_tokens")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.prompt)

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def num_sampled(self) -> int:
        return self.best_of or self.n


class TextPart(RequestObject):
    type: Literal["text"]
    text: str


class FunctionCall(RequestObject):
    name: str
    arguments: str


class ToolCall(RequestObject):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestObject):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None, _described("a string or a list of parts of type text")
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    off = {"function_call": (), "refusal": (), "audio": (), "annotations": ([],)}

    @model_validator(mode="before")
    @classmethod
    def _content_is_there(cls, data: Any) -> Any:
        # Only a message that calls tools may say nothing.
        if (
            isinstance(data, dict)
            and "role" in data
            and data.get("content") is None
            and not data.get("tool_calls")
        ):
            raise PydanticCustomError("missing_content", "content is missing")
        return data

    def as_template_reads(self) -> dict[str, Any]:
        content = self.content or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        message: dict[str, Any] = {"role": self.role, "content": "".join(parts)}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [_call_as_template_reads(call) for call in self.tool_calls]
        return message


def _call_as_template_reads(call: ToolCall) -> dict[str, Any]:
    # Templates of Hugging Face models write arguments as JSON themselves.
    arguments = _json_object(call.function.arguments or "{}", "messages.tool_calls.function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


class FunctionSpec(RequestObject):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(RequestObject):
    type: Literal["function"]
    function: FunctionSpec

    def as_template_reads(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class NamedFunction(RequestObject):
    name: str


class ToolChoice(RequestObject):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(_Generation):
    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=NUM_TOP)
    tools: list[Tool] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice,
        _described('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
    ] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    off = _OFF | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "include_reasoning": (True,),
        "echo": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
    }

    @model_validator(mode="after")
    def _continues_or_answers(self) -> "ChatRequest":
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message, and add_generation_prompt begins another;"
                " send add_generation_prompt = false",
                param="continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is only for logprobs = true", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _chosen_tool_exists(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise RequestError("tool_choice = required needs tools", param="tool_choice")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools;"
                f" {nearest(self.tool_choice.function.name, names) if names else 'there are none'}",
                param="tool_choice",
            )
        return self

    @property
    def num_top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes to the model."""
        return [] if self.tool_choice == "none" else self.tools


class TokenizeRequest(RequestObject):
    """vLLM's /tokenize, of a prompt or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send prompt or messages, one of them", param="prompt")
        return self


class DetokenizeRequest(RequestObject):
    model: str | None = None
    tokens: list[TokenId]


_LARGE_BYTES, _MOST_FIELDS = 64_000, 200
R = TypeVar("R", bound=RequestObject)


def parse(kind: type[R], body: bytes) -> R:
    """The request in `body`; RequestError 400 that names the first field at fault."""
    _check_number_of_fields(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0], kind) from None


def _check_number_of_fields(body: bytes) -> None:
    # Each unknown field makes an error object: 500,000 of them take ten seconds.
    if len(body) < _LARGE_BYTES:
        return
    try:
        content = from_json(body)
    except ValueError:
        return
    if isinstance(content, dict) and len(content) > _MOST_FIELDS:
        raise RequestError(f"the body has {len(content)} fields; send at most {_MOST_FIELDS}")


def _request_error(error: ErrorDetails, kind: type[RequestObject]) -> RequestError:
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
    if error["type"] == "missing_content":
        return RequestError(
            f"{param}.content is missing", param=f"{param}.content", code="missing_required_parameter"
        )
    if error["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_required_parameter")
    message = error["msg"][0].lower() + error["msg"][1:]
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _sentence(fact: str, hint: str) -> str:
    return f"{fact}; {hint}" if hint else fact
