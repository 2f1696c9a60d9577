"""Turns HTTP requests into engine requests: prompts to tokens, fields to sampling parameters."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.errors import RequestError
from meshwright.models.families.family import ToolFormat
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import NewConstraint, Request, SamplingParams
from meshwright.serve.http.embeddings import EmbeddingsRequest
from meshwright.serve.http.protocol import ChatRequest, CompletionRequest, Message, Tool, ToolChoice
from meshwright.serve.text.grammar import Grammars
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.text.tools import format_of_template

Asked = CompletionRequest | ChatRequest
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Asking:
    """Makes requests of one engine and its tokenizer.

    Texts are tokenised in threads, because a long text would delay all other streams. A text that cannot fit
    the context is refused without tokenising it.
    """

    engine: Engine
    tokenizer: Tokenizer

    async def prompts(
        self, asked: CompletionRequest | EmbeddingsRequest, param: str = "prompt"
    ) -> list[Tokens]:
        """The prompts' tokens. Raises RequestError for one that is too long or has an unknown token.

        param: the field of the prompts.
        """

        def tokens_of(prompt: str | list[int]) -> Tokens:
            if isinstance(prompt, str):
                tokens = self.encode(prompt, add_special_tokens=asked.add_special_tokens, param=param)
            else:
                self.check_ids(param, prompt)
                tokens = tuple(prompt)
            return _truncated(tokens, asked.truncate_prompt_tokens)

        return await asyncio.to_thread(lambda: [tokens_of(prompt) for prompt in asked.prompts])

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> Tokens:
        """Tokens of `text`; raises RequestError if it has too many characters for the context."""
        self.check_length(len(text), param)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_length(self, num_chars: int, param: str) -> None:
        """Raise RequestError if a text of `num_chars` characters cannot fit the context."""
        longest = self.engine.context * self.tokenizer.longest_token_chars
        if num_chars > longest:
            raise RequestError(
                f"{param} has {num_chars} characters, more than {self.engine.context} tokens can be"
                f" ({longest}); send a shorter one",
                param=param,
                code="context_length_exceeded",
            )

    async def chat_prompt(self, asked: ChatRequest) -> Tokens:
        """The tokens of a conversation, tools included."""
        tools = asked.offered_tools
        if tools and self.tool_format is None:
            raise RequestError(
                "the model's chat template has no tools, or in a form that is not understood"
                " (understood: Hermes and Qwen, Mistral, Llama 3)",
                param="tools",
            )
        tokens = await self.conversation(asked.messages, tools, asked.chat_template_kwargs)
        return _truncated(tokens, asked.truncate_prompt_tokens)

    async def conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), context: dict[str, Any] | None = None
    ) -> Tokens:
        """The tokens that ask for the next message."""
        said = [message.as_template_reads() for message in messages]
        self.check_length(sum(len(message["content"]) for message in said), "messages")
        names = (context or {}) | ({"tools": [tool.as_template_reads() for tool in tools]} if tools else {})
        return await asyncio.to_thread(self.tokenizer.encode_chat, said, **names)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None if its template has none."""
        source = self.tokenizer.chat.source
        return format_of_template(source) if self.tokenizer.chat.reads_tools else None

    async def requests(self, asked: Asked, prompts: Sequence[Tokens]) -> list[Request]:
        """The requests for each prompt, in order.

        Answer i of any prompt has seed + i, for any other prompts and fields.
        """
        self.check_ids("logit_bias", [token for token, _ in asked.biases()])
        self.check_ids("allowed_token_ids", asked.allowed_token_ids or ())
        constraint = await self._constraint(asked)
        scores_prompt = isinstance(asked, CompletionRequest) and asked.echo and asked.logprobs is not None
        if scores_prompt:
            await asyncio.to_thread(self.engine.prepare_reads)
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        ends = frozenset() if asked.ignore_eos else self.tokenizer.eos_ids
        return [
            Request(
                prompt,
                asked.limit,
                self._sampling(asked, (seed + answer) % 2**32),
                ends | frozenset(asked.stop_token_ids),
                new_constraint=constraint,
                scores_prompt=scores_prompt,
                priority=asked.priority,
            )
            for prompt in prompts
            for answer in range(asked.num_sampled)
        ]

    def _sampling(self, asked: Asked, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),  # vLLM's -1 means all
            min_p=asked.min_p,
            seed=seed,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=asked.biases(),
            allowed_ids=tuple(asked.allowed_token_ids) if asked.allowed_token_ids else None,
            min_tokens=asked.min_tokens,
            top_logprobs=asked.num_top or 0,
        )

    async def _constraint(self, asked: Asked) -> NewConstraint | None:
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
        return await asyncio.to_thread(self._grammars.constraint, kind, source, param)

    def _forced_call(self, asked: ChatRequest) -> dict[str, Any] | None:
        """The JSON schema of allowed tool calls; None if the model may answer freely."""
        if not is_forced(asked) or self.tool_format is None:
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

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.engine.vocab_size)

    def check_ids(self, param: str, tokens: Sequence[int]) -> None:
        """Raises RequestError for a token that the model does not know."""
        wrong = next((token for token in tokens if token >= self.engine.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} is not in the vocabulary of {self.engine.vocab_size} tokens", param=param
            )


def is_forced(asked: ChatRequest) -> bool:
    """Whether the answer must be the call of a tool."""
    return asked.tool_choice == "required" or isinstance(asked.tool_choice, ToolChoice)


def _truncated(tokens: Tokens, num_kept: int | None) -> Tokens:
    """The last `num_kept` tokens, as vLLM's truncate_prompt_tokens keeps them."""
    return tokens if num_kept is None else tokens[-num_kept:]
