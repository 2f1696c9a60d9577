"""Log-probabilities as OpenAI's API writes them, of completions and of chats."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from meshwright.serve.engine.request import TokenScore
from meshwright.serve.text.generation import AnswerToken
from meshwright.serve.text.tokenizer import Tokenizer

Json = dict[str, Any]
# JSON has no infinity; impossible tokens get vLLM's value.
_LEAST = -9999.0


@dataclass(frozen=True)
class TokenNames:
    """Tokens as text, or as `token_id:5` where as_ids."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def text(self, token: int) -> str:
        """The token's own characters; bytes that are only a part of one become U+FFFD."""
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")


def completion_logprobs(
    names: TokenNames,
    prompt: Sequence[int],
    scores: Sequence[TokenScore],
    tokens: Sequence[AnswerToken],
    start: int,
) -> Json:
    """The `logprobs` object of a text completion.

    prompt: prompt tokens to include; all but the first have scores. start: character offset of the answer in
    the whole text.
    """
    entries = [_unscored(names, prompt[0])] if prompt else []
    entries += [_entry_of(names, score) for score in (*scores, *(token.score for token in tokens))]
    lengths = [len(names.text(token)) for token in prompt]
    offsets = [0, *accumulate(lengths)][: len(lengths)] + [start + token.offset for token in tokens]
    return {
        "tokens": [name for name, _, _ in entries],
        "token_logprobs": [logprob for _, logprob, _ in entries],
        "top_logprobs": [top for _, _, top in entries],
        "text_offset": offsets,
    }


def _unscored(names: TokenNames, token: int) -> tuple[str, None, None]:
    return names.name(token), None, None


def _entry_of(names: TokenNames, score: TokenScore) -> tuple[str, float, Json]:
    # The token itself is listed even if it is not among the likeliest.
    top: Json = {}
    for token, logprob in (*score.top, (score.token, score.logprob)):
        top.setdefault(names.name(token), _finite(logprob))
    return names.name(score.token), _finite(score.logprob), top


def chat_logprobs(names: TokenNames, tokens: Sequence[AnswerToken]) -> Json:
    """The `logprobs` object of a chat completion."""
    content = []
    for token in tokens:
        top = [_entry(names, other, logprob) for other, logprob in token.score.top]
        content.append(_entry(names, token.score.token, token.score.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(names: TokenNames, token: int, logprob: float) -> Json:
    return {
        "token": names.name(token),
        "logprob": _finite(logprob),
        "bytes": list(names.tokenizer.token_bytes(token)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
