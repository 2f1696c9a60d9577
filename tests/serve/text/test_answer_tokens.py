"""Tokens of an answer as arrays: the same tokens, and no objects that a garbage collection visits."""

import gc

import pytest

from meshwright.serve.engine.request import TokenScore
from meshwright.serve.text.answer_tokens import AnswerTokens
from meshwright.serve.text.generation import AnswerToken


def test_tokens_are_kept_as_they_were() -> None:
    tokens = [
        AnswerToken(TokenScore(5, -0.1, ((5, -0.1), (7, float("-inf")))), 0),
        AnswerToken(TokenScore(2**31, -1.5), 3),
        AnswerToken(TokenScore(7, -0.3, ((1, -0.2),)), 3),
    ]
    kept = AnswerTokens(tokens[:1])
    kept.extend(tokens[1:])
    assert list(kept) == tokens and len(kept) == 3 and tokens[2] in kept
    assert kept.mean_logprob == pytest.approx((-0.1 - 1.5 - 0.3) / 3)
    assert list(AnswerTokens()) == [] and AnswerTokens().mean_logprob == 0


def test_garbage_collections_do_not_visit_them() -> None:
    kept = AnswerTokens()
    gc.collect()
    before = len(gc.get_objects())
    kept.extend(AnswerToken(TokenScore(i, -0.5, ((i, -0.5),)), i) for i in range(1000))
    assert len(gc.get_objects()) - before < 100 and len(kept) == 1000
