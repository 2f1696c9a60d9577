"""Answers held to a JSON schema, a regular expression or a grammar, whatever the model would say."""

import json

import numpy as np
import pytest
from tests.serve.mock import EOS, VOCAB_SIZE, byte_tokenizer

from meshwright.errors import RequestError
from meshwright.serve.text.grammar import GrammarKind, Grammars
from meshwright.serve.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, VOCAB_SIZE)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def constraint(kind: GrammarKind, source: object, param: str = "field", grammars: Grammars = GRAMMARS):
    return grammars.constraint(grammars.checked(kind, source, param))


def follow(constraint, rng: np.random.Generator, limit: int = 200) -> str:
    """A random walk through what is allowed, up to the end token."""
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = np.flatnonzero(constraint.allowed())
        assert allowed.size
        token = EOS if EOS in allowed else int(rng.choice(allowed))
        constraint.accept(token)
        if token == EOS:
            break
        tokens.append(token)
    assert np.flatnonzero(constraint.allowed()).tolist() == [EOS] or len(tokens) == limit
    return TOKENIZER.decode(tokens)


def test_every_walk_through_a_schema_is_such_an_object():
    new = constraint("json_schema", SCHEMA, "response_format")
    texts = {follow(new(), np.random.default_rng(seed)) for seed in range(10)}
    whole = [text for text in texts if text.rstrip().endswith("}")]
    assert len(whole) > 3
    for text in whole:
        assert set(json.loads(text)) == {"n"} and isinstance(json.loads(text)["n"], int)


def test_regular_expressions_and_choices():
    assert follow(constraint("regex", "ab{3}", "guided_regex")(), np.random.default_rng(0)) == "abbb"
    new = constraint("lark", 'start: "yes" | "né\\"in"', "guided_choice")
    found = {follow(new(), np.random.default_rng(seed)) for seed in range(20)}
    assert found == {"yes", 'né"in'}


@pytest.mark.parametrize(
    ("kind", "source"), [("json_schema", {"type": "objec"}), ("regex", "(a"), ("lark", "start: nothing")]
)
def test_what_is_no_grammar_is_refused(kind, source):
    with pytest.raises(RequestError, match=r"^field: ") as error:
        constraint(kind, source, "field")
    assert error.value.param == "field" and "\n" not in str(error.value)


def test_without_an_end_token_nothing_can_be_held():
    endless = Grammars(Tokenizer(TOKENIZER.tokenizer), VOCAB_SIZE)
    with pytest.raises(RequestError, match="needs a token that ends the answer"):
        constraint("regex", "a", "guided_regex", endless)
