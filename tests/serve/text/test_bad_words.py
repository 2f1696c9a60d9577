"""Tokens of forbidden words."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.errors import RequestError
from meshwright.serve.text.bad_words import tokens_of_words


def test_too_many_tokens_are_refused_before_the_rest_is_read():
    texts = list[str]()

    def ids(text: str, *, add_special_tokens: bool) -> list[int]:
        texts.append(text)
        return [1] * len(text)

    tokenizer: Any = SimpleNamespace(ids=ids)
    assert tokens_of_words(["ab", "c"], tokenizer) == ((1, 1), (1,))
    texts.clear()
    with pytest.raises(RequestError, match="more than 20,000 tokens"):
        tokens_of_words(["a" * 15_000] * 1000, tokenizer)
    assert len(texts) == 4, "two forms of two words"
