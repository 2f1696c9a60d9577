"""From a request's body to tokens and a checked grammar: the work on text that clients control.

A server does it in worker processes (`meshwright.serve.workers`), so this module knows no engine.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic_core import to_json

from meshwright.errors import RequestError
from meshwright.models.families.tool_formats import ToolFormat
from meshwright.serve.engine.limits import check_length
from meshwright.serve.http import embeddings
from meshwright.serve.http.embeddings import EmbeddingsRequest
from meshwright.serve.http.logprobs import TokenNames
from meshwright.serve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    RequestObject,
    TokenizeRequest,
    Tool,
    ToolChoice,
    parse,
)
from meshwright.serve.http.responses import ResponsesRequest
from meshwright.serve.text.bad_words import tokens_of_words
from meshwright.serve.text.grammar import Grammars
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.text.tools import format_of_template

# Scores of prompts in an answer, of some 40 bytes each.
_MOST_SCORES = 2_000_000
Asked = CompletionRequest | ChatRequest
R = TypeVar("R", bound=RequestObject)
A = TypeVar("A", bound=RequestObject, covariant=True)


@dataclass(frozen=True)
class Read(Generic[A]):
    """A request without its texts, which are now tokens.

    prompts: int32 tokens of each. texts: the prompts as text, if the request has echo. grammar: the compiled
    form of the answer's grammar. tools: the format of tool calls; None without tools. bad_words: tokens of
    the words that the answer may not have. response: the request as /v1/responses has it.
    """

    asked: A
    prompts: list["array[int]"]
    texts: list[str] | None = None
    grammar: str | None = None
    tools: ToolFormat | None = None
    is_forced: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    response: ResponsesRequest | None = None


@dataclass(frozen=True)
class Reader:
    """Reads requests to one model.

    context: maximum tokens of a prompt and its answer. vocab_size, embedding_size: of the model.
    max_answers: maximum answers of a request. takes_priorities: whether requests may have priorities.
    """

    tokenizer: Tokenizer
    model_name: str
    context: int
    vocab_size: int
    embedding_size: int
    max_answers: int
    takes_priorities: bool = False

    def prepare(self) -> None:
        """Compile the chat template, so that a server with a wrong one does not start."""
        self.tokenizer.chat.check()
        _ = self.tokenizer.longest_token_chars

    def completion(self, body: bytes) -> Read[CompletionRequest]:
        asked = self._parse(CompletionRequest, body)
        texts = asked.prompts
        if len(texts) * asked.num_sampled > self.max_answers:
            raise RequestError(
                f"{len(texts) * asked.num_sampled} answers in one request, but the server holds at most "
                f"{self.max_answers}",
                param="n",
            )
        prompts = self._prompts(asked, texts, "prompt", asked.limit or 0)
        # The engine checks this too, but only after it has prepared all answers to the prompt (`n`).
        check_length(max(map(len, prompts)), self.context, self.context - (asked.limit != 0))
        _check_scores(asked, prompts)
        self._check_lists(asked)
        grammar = self._grammar(asked)
        echoed = [text if isinstance(text, str) else self.tokenizer.decode(text) for text in texts]
        return Read(
            _small(asked, prompt="", bad_words=[]),
            prompts,
            echoed if asked.echo else None,
            grammar,
            bad_words=tokens_of_words(asked.bad_words, self.tokenizer),
        )

    def chat(self, body: bytes) -> Read[ChatRequest]:
        return self._chat(self._parse(ChatRequest, body))

    def response(self, body: bytes) -> Read[ChatRequest]:
        asked = self._parse(ResponsesRequest, body)
        return replace(self._chat(asked.as_chat()), response=asked.model_copy(update={"input": ""}))

    def embeddings(self, body: bytes) -> Read[EmbeddingsRequest]:
        asked = self._parse(EmbeddingsRequest, body)
        embeddings.check_request(asked, self.embedding_size)
        prompts = self._prompts(asked, asked.prompts, "input")
        embeddings.check_lengths(prompts, self.context)
        return Read(_small(asked, input=""), prompts)

    def embeddings_body(self, asked: EmbeddingsRequest, vectors: np.ndarray, num_tokens: int) -> bytes:
        """The answer of embeddings f32[inputs, D] as JSON."""
        return to_json(embeddings.body(asked, self.model_name, vectors, num_tokens))

    def tokenize(self, body: bytes) -> bytes:
        """The answer of /tokenize as JSON."""
        asked = self._parse(TokenizeRequest, body)
        if asked.messages is not None:
            tokens = self._conversation(asked.messages)
        else:
            text = asked.prompt or ""
            self._check_length(len(text), "prompt")
            tokens = self.tokenizer.ids(text, add_special_tokens=asked.add_special_tokens)
        names = TokenNames(self.tokenizer)
        strings = [names.text(token) for token in tokens] if asked.return_token_strs else None
        content = {"tokens": list(tokens), "count": len(tokens)}
        return to_json(content | {"max_model_len": self.context, "token_strs": strings})

    def detokenize(self, body: bytes) -> str:
        asked = self._parse(DetokenizeRequest, body)
        self._check_ids("tokens", asked.tokens)
        if len(asked.tokens) > self.context:
            raise _too_many("tokens", len(asked.tokens), self.context)
        return self.tokenizer.with_special().decode(asked.tokens)

    def _parse(self, kind: type[Any], body: bytes) -> Any:
        asked = parse(kind, body)
        name = self.model_name if asked.model is None else asked.model  # /tokenize may leave it out
        if name != self.model_name:
            raise unknown_model(name, self.model_name)
        if getattr(asked, "priority", 0) and not self.takes_priorities:
            raise RequestError(
                f"priority = {asked.priority}: this server answers in the order of arrival; leave it out, or "
                "start the server with --scheduling-policy priority",
                param="priority",
                code="unsupported_parameter",
            )
        return asked

    def _prompts(
        self,
        asked: CompletionRequest | EmbeddingsRequest,
        texts: Sequence[str | list[int]],
        param: str,
        num_answered: int = 0,
    ) -> list["array[int]"]:
        """The prompts' tokens. Raises RequestError for one that is too long or has an unknown token.

        num_answered: maximum tokens of the answer.
        """
        num_kept = self._num_kept(asked.truncate_prompt_tokens, num_answered)
        prompts = []
        for text in texts:
            if isinstance(text, str):
                text_read = self._shortened(text, num_kept, param)
                tokens = self.tokenizer.encode(text_read, add_special_tokens=asked.add_special_tokens)
            else:
                self._check_ids(param, text)
                tokens = text
            prompts.append(array("i", tokens if num_kept is None else tokens[-num_kept:]))
        return prompts

    def _num_kept(self, truncation: int | None, num_answered: int) -> int | None:
        """Tokens of a prompt to keep, its last, as vLLM's truncate_prompt_tokens has them; None: all."""
        return max(self.context - max(num_answered, 1), 1) if truncation == -1 else truncation

    def _shortened(self, text: str, num_kept: int | None, param: str) -> str:
        """`text`, or enough of its end for `num_kept` tokens; RequestError if it is too long to read."""
        if num_kept is None:
            self._check_length(len(text), param)
            return text
        # Some tokens more, since the first one of the rest may be cut.
        return text[-(num_kept + 16) * self.tokenizer.longest_token_chars :]

    def _chat(self, asked: ChatRequest) -> Read[ChatRequest]:
        tools = asked.offered_tools
        if tools and self.tool_format is None:
            raise RequestError(
                "the model's chat template has no tools, or in a form that is not understood"
                " (understood: Hermes and Qwen, Mistral, Llama 3)",
                param="tools",
            )
        num_kept = self._num_kept(asked.truncate_prompt_tokens, asked.limit or 0)
        tokens = self._conversation(
            asked.messages,
            tools,
            {"add_generation_prompt": asked.add_generation_prompt} | asked.chat_template_kwargs,
            num_kept=num_kept,
            continues=asked.continue_final_message,
        )
        prompt = array("i", tokens if num_kept is None else tokens[-num_kept:])
        _check_scores(asked, [prompt])
        self._check_lists(asked)
        return Read(
            _small(asked, messages=[], tools=[], chat_template_kwargs={}, bad_words=[]),
            [prompt],
            grammar=self._grammar(asked),
            tools=self.tool_format if tools else None,
            is_forced=_is_forced(asked),
            bad_words=tokens_of_words(asked.bad_words, self.tokenizer),
        )

    def _conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        context: dict[str, Any] | None = None,
        *,
        num_kept: int | None = None,
        continues: bool = False,
    ) -> Sequence[int]:
        """The tokens that ask for the next message, or with `continues` for the rest of the last.

        num_kept: tokens at the end that are used; None: all.
        """
        num_parts = sum(len(each.content) if isinstance(each.content, list) else 1 for each in messages)
        if num_parts > self.context:  # each is a token at least
            raise _too_many("messages", num_parts, self.context)
        read = [message.as_template_reads() for message in messages]
        if num_kept is None:
            self._check_length(sum(len(message["content"]) for message in read), "messages")
        names = (context or {}) | ({"tools": [tool.as_template_reads() for tool in tools]} if tools else {})
        text = self.tokenizer.chat_text(read, continues=continues, **names)
        return self.tokenizer.encode_chat_text(
            text if num_kept is None else self._shortened(text, num_kept, "messages")
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None if its template has none."""
        source = self.tokenizer.chat.source
        return format_of_template(source) if self.tokenizer.chat.reads_tools else None

    def _grammar(self, asked: Asked) -> str | None:
        """The grammar of the answer, from the requested format or forced tool call; None if free."""
        call = self._forced_call(asked) if isinstance(asked, ChatRequest) else None
        forms = asked.forms
        if call:
            forms.append(("tools", "json_schema", call))
        if len(forms) > 1:
            raise RequestError(f"{forms[0][0]} and a required tool exclude one another", param=forms[0][0])
        if not forms:
            return None
        if asked.ignore_eos:
            raise RequestError(f"{forms[0][0]} ends the answer, which ignore_eos forbids", param="ignore_eos")
        [(param, kind, source)] = forms
        return self._grammars.checked(kind, source, param, has_blanks=asked.has_blanks)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab_size)

    def _forced_call(self, asked: ChatRequest) -> dict[str, Any] | None:
        """The JSON schema of allowed tool calls; None if the model may answer freely."""
        if not _is_forced(asked) or self.tool_format is None:
            return None
        choice, key = asked.tool_choice, self.tool_format.argument_keys[0]
        functions = [tool.function for tool in asked.tools]
        if isinstance(choice, ToolChoice):
            functions = [function for function in functions if function.name == choice.function.name]
        return {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": function.name},
                        key: function.parameters or {"type": "object"},
                    },
                    "required": ["name", key],
                    "additionalProperties": False,
                }
                for function in functions
            ]
        }

    def _check_length(self, num_chars: int, param: str) -> None:
        """Raise RequestError if a text of `num_chars` characters cannot fit the context."""
        longest = self.context * self.tokenizer.longest_token_chars
        if num_chars > longest:
            raise RequestError(
                f"{param} has {num_chars} characters, more than {self.context} tokens can be"
                f" ({longest}); send a shorter one",
                param=param,
                code="context_length_exceeded",
            )

    def _check_lists(self, asked: Asked) -> None:
        """Check that lists of tokens are in the vocabulary and no longer than it."""
        lists = {
            "logit_bias": [token for token, _ in asked.biases()],
            "allowed_token_ids": asked.allowed_token_ids or (),
            "stop_token_ids": asked.stop_token_ids,
        }
        for param, tokens in lists.items():
            if len(tokens) > self.vocab_size:
                raise RequestError(
                    f"{param} has {len(tokens)} items, more than the vocabulary's {self.vocab_size} tokens",
                    param=param,
                )
            if param != "stop_token_ids":  # others of another model do no harm
                self._check_ids(param, tokens)

    def _check_ids(self, param: str, tokens: Sequence[int]) -> None:
        """Raise RequestError for a token that the model does not know."""
        if tokens and max(tokens) >= self.vocab_size:
            wrong = next(token for token in tokens if token >= self.vocab_size)
            raise RequestError(
                f"token {wrong} is not in the vocabulary of {self.vocab_size} tokens", param=param
            )


def unknown_model(name: str, served: str) -> RequestError:
    """The refusal of a request to another model."""
    return RequestError(
        f"model {name!r} is not served here; this server has {served!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _is_forced(asked: ChatRequest) -> bool:
    """Whether the answer must be the call of a tool."""
    return asked.tool_choice == "required" or isinstance(asked.tool_choice, ToolChoice)


def _check_scores(asked: Asked, prompts: Sequence["array[int]"]) -> None:
    """Raise RequestError if an answer would report too many scores of prompts, which take gigabytes."""
    echoed = asked.num_top if isinstance(asked, CompletionRequest) and asked.echo else None
    of_token = sum(1 + num_top for num_top in (echoed, asked.prompt_logprobs) if num_top is not None)
    num_scores = of_token * asked.num_sampled * sum(map(len, prompts))
    if num_scores > _MOST_SCORES:
        raise RequestError(
            f"the answer would have {num_scores} log-probabilities of prompts, and may have {_MOST_SCORES}; "
            "ask for fewer tokens, answers or alternatives",
            param="logprobs" if asked.prompt_logprobs is None else "prompt_logprobs",
        )


def _too_many(param: str, number: int, context: int) -> RequestError:
    return RequestError(
        f"{param} has {number} items, but the context holds {context} tokens",
        param=param,
        code="context_length_exceeded",
    )


def _small(asked: R, **empty: Any) -> R:
    """`asked` with these values, and without a grammar."""
    forms = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
    grammars = {name: None for name in (*forms, "guided_grammar") if name in type(asked).model_fields}
    return asked.model_copy(update=grammars | empty)
