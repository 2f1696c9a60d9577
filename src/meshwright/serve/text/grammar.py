"""Answers of a given form: JSON schemas, regular expressions and grammars, followed token by token.

llguidance (Microsoft, MIT) keeps the parser; a mask of the tokens that may come next goes to the sampler.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import numpy as np

from meshwright.errors import RequestError
from meshwright.serve.engine.request import NewConstraint
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.workers.timed_stages import begin_stage

# Blanks between the parts of JSON: one, or a new line with its indentation. Otherwise a model that likes
# new lines writes them until max_tokens.
_BLANKS = r" |\n {0,32}|\n\t{1,16}"
# The schema of a large API compiles in 0.2 s.
_SECONDS = 2.0

GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammars:
    """Compiles grammars over the tokens of one tokenizer, for a model with `vocab_size` logits."""

    tokenizer: Tokenizer
    vocab_size: int

    def checked(self, kind: GrammarKind, source: Any, param: str, *, has_blanks: bool = True) -> str:
        """The compiled text of a JSON schema, a regular expression, or a grammar in Lark's form.

        has_blanks: whether JSON may have blanks between its parts.
        May take seconds, and crash on a deep grammar: for worker processes. Raises RequestError, naming the
        field `param`, if `source` is no such thing, or the tokenizer has no token that ends an answer.
        """
        begin_stage("the grammar", _SECONDS)
        matcher = _llguidance().LLMatcher
        if not self.tokenizer.eos_ids:
            raise RequestError(
                f"{param} needs a token that ends the answer, and the model's tokenizer has none", param=param
            )
        try:
            if kind == "json_schema":
                blanks = {"whitespace_pattern": _BLANKS} if has_blanks else {"whitespace_flexible": False}
                grammar = matcher.grammar_from_json_schema(json.dumps(source), overrides=blanks)
            else:
                write = matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_lark
                grammar = write(str(source))
            fault = matcher.validate_grammar(grammar, self._tokens)
            if not fault:
                # All that the server does with it first happens here.
                compiled = matcher(self._tokens, grammar)
                first = compiled.deep_copy()
                allowed = _unpacked(first.compute_bitmask(), self.vocab_size)
                if (
                    allowed.any() and not first.is_stopped()
                ):  # an error in the mask appears with the next token
                    first.consume_token(int(allowed.argmax()))
                fault = first.get_error()
                del compiled, first
        except ValueError as error:
            grammar, fault = "", str(error)
        if fault:
            # The state of the parser, which follows, says nothing to a client.
            reason = " ".join(fault.partition("<state>")[0].split())[:300]
            if reason == "NoExtensionBias":
                reason = "no text has this form"
            raise RequestError(f"{param}: {reason}", param=param, code="invalid_value")
        return grammar

    def constraint(self, grammar: str) -> NewConstraint:
        """Makes constraints to the compiled text of a grammar; may take as long as `checked`.

        Other threads run meanwhile.
        """
        # Quietly: clients could fill the log.
        compiled = _llguidance().LLMatcher(self._tokens, grammar, log_level=0)
        # The first mask may take a second, which would otherwise delay a step. Copies share its automaton.
        compiled.deep_copy().compute_bitmask()
        return lambda: _Matcher(compiled.deep_copy(), self.vocab_size, min(self.tokenizer.eos_ids))

    @cached_property
    def _tokens(self) -> Any:
        text = self.tokenizer.tokenizer.to_str()
        return _llguidance().LLTokenizer(
            text, n_vocab=self.vocab_size, eos_token=sorted(self.tokenizer.eos_ids)
        )


def _unpacked(bitmask: bytes, vocab_size: int) -> np.ndarray:
    """bool[V] of a mask of the library."""
    bits = np.frombuffer(bitmask, np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


def _llguidance() -> Any:
    """The library, which takes a moment to load and which most servers never need."""
    return import_module("llguidance")


class _Matcher:
    """A Constraint that only the end token follows once the form is complete, or cannot be."""

    def __init__(self, matcher: Any, vocab_size: int, eos_id: int) -> None:
        self._matcher, self._vocab_size, self._eos_id = matcher, vocab_size, eos_id

    def allowed(self) -> np.ndarray:
        if not self._matcher.is_stopped() and not self._matcher.is_error():
            allowed = _unpacked(self._matcher.compute_bitmask(), self._vocab_size)
            if allowed.any():
                return allowed
        return np.arange(self._vocab_size) == self._eos_id

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
