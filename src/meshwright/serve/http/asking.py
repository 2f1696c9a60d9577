"""Turns the parsed body of an HTTP request into engine requests."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Request, SamplingParams
from meshwright.serve.http.reading import Asked, Read
from meshwright.serve.text.bad_words import without_words
from meshwright.serve.text.grammar import Grammars
from meshwright.serve.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Asking:
    """Makes requests of one engine and its tokenizer."""

    engine: Engine
    tokenizer: Tokenizer

    async def requests(self, read: Read[Asked], prompts: Sequence[Tokens], client: str) -> list[Request]:
        """The client's requests for each prompt, in order.

        Answer i of any prompt has seed + i, for any other prompts and fields.
        """
        asked = read.asked
        constraint = None
        if read.grammar is not None:
            constraint = await asyncio.to_thread(self._grammars.constraint, read.grammar)
        if read.bad_words:
            constraint = without_words(read.bad_words, self.engine.vocab_size, constraint)
        echoes_scores = read.texts is not None and asked.num_top is not None
        scores_prompt = echoes_scores or asked.prompt_logprobs is not None
        if scores_prompt:
            await asyncio.to_thread(self.engine.prepare_reads)
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        ends = frozenset() if asked.ignore_eos else self.tokenizer.eos_ids
        first = _sampling(asked, seed % 2**32)
        samplings = [replace(first, seed=(seed + answer) % 2**32) for answer in range(asked.num_sampled)]
        stop_ids = ends | frozenset(asked.stop_token_ids)
        return [
            Request(
                prompt,
                asked.limit,
                sampling,
                stop_ids,
                new_constraint=constraint,
                scores_prompt=scores_prompt,
                priority=asked.priority,
                client=client,
            )
            for prompt in prompts
            for sampling in samplings
        ]

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.engine.vocab_size)


def _sampling(asked: Asked, seed: int) -> SamplingParams:
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
        top_logprobs=asked.num_scored,
    )
