"""Log-probabilities as OpenAI's API writes them, of completions and of chats."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from meshwright.serve.engine.request import TokenScore
from meshwright.serve.http.long_json import LazyList, lazy_list
from meshwright.serve.text.generation import AnswerToken
from meshwright.serve.text.tokenizer import Tokenizer

Json = dict[str, Any]
# JSON has no infinity; impossible tokens get vLLM's value.
_LEAST = -9999.0


@dataclass(frozen=True)
class TokenNames:
    """Tokens as text, or as `token_id:5` if as_ids.

    num_top: maximum alternatives listed with a token of the answer; None: all that were reported.
    """

    tokenizer: Tokenizer
    as_ids: bool = False
    num_top: int | None = None

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def text(self, token: int) -> str:
        return self.tokenizer.token_text(token)


def completion_logprobs(
    names: TokenNames,
    prompt: Sequence[int],
    scores: Sequence[TokenScore],
    tokens: Collection[AnswerToken],
    start: int,
) -> Json:
    """The `logprobs` object of a text completion.

    prompt: prompt tokens to include; all but the first have scores. start: character offset of the answer in
    the whole text.
    """
    first = prompt[:1]
    count = len(first) + len(scores) + len(tokens)

    def scored() -> Iterator[TokenScore]:
        return chain(scores, (token.score for token in tokens))

    def offsets() -> Iterator[int]:
        lengths = (len(names.text(token)) for token in prompt[:-1])
        return chain(accumulate(lengths, initial=0) if prompt else (), (start + x.offset for x in tokens))

    def with_first(
        entry: Callable[[TokenScore], Any], of_first: Callable[[int], Any]
    ) -> list[Any] | LazyList:
        return lazy_list(count, lambda: chain(map(of_first, first), map(entry, scored())))

    return {
        "tokens": with_first(lambda score: names.name(score.token), names.name),
        "token_logprobs": with_first(lambda score: _finite(score.logprob), lambda _: None),
        "top_logprobs": with_first(lambda score: _likeliest(names, score), lambda _: None),
        "text_offset": lazy_list(count, offsets),
    }


def _likeliest(names: TokenNames, score: TokenScore) -> Json:
    # The token itself is listed even if it is not among the likeliest.
    top: Json = {}
    for token, logprob in (*score.top[: names.num_top], (score.token, score.logprob)):
        top.setdefault(names.name(token), _finite(logprob))
    return top


def chat_logprobs(names: TokenNames, tokens: Collection[AnswerToken]) -> Json:
    """The `logprobs` object of a chat completion."""

    def content() -> Iterator[Json]:
        for token in tokens:
            top = [_entry(names, other, logprob) for other, logprob in token.score.top[: names.num_top]]
            yield _entry(names, token.score.token, token.score.logprob) | {"top_logprobs": top}

    return {"content": lazy_list(len(tokens), content), "refusal": None}


def prompt_logprobs(
    names: TokenNames, num_top: int | None, scores: Sequence[TokenScore]
) -> list[Any] | LazyList | None:
    """vLLM's `prompt_logprobs`: None for the first token, then an object by token id; None if not asked for.

    A token that is not among the reported alternatives has no rank.
    """
    if num_top is None:
        return None
    return lazy_list(1 + len(scores), lambda: chain([None], (_ranked(names, x, num_top) for x in scores)))


def _ranked(names: TokenNames, score: TokenScore, num_top: int) -> Json:
    ranks = {token: rank for rank, (token, _) in enumerate(score.top, start=1)}
    entries = {score.token: score.logprob} | dict(score.top[:num_top])
    return {
        str(token): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token),
            "decoded_token": names.text(token),
        }
        for token, logprob in entries.items()
    }


def _entry(names: TokenNames, token: int, logprob: float) -> Json:
    return {
        "token": names.name(token),
        "logprob": _finite(logprob),
        "bytes": list(names.tokenizer.token_bytes(token)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
