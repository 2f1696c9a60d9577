"""A model whose answers are worked by hand, and a tokenizer with one token a byte."""

import threading
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from meshwright.serve.sampling import NUM_TOP
from meshwright.serve.scoring import Scores
from meshwright.serve.tokenizer import Tokenizer

EOS = 256
VOCAB_SIZE = 300

Rule = Callable[[list[int], list[int]], int]
"""The most likely token after (prompt, answer so far)."""


def count_up(prompt: list[int], answer: list[int]) -> int:
    """3 4 -> 5 6 7 ..."""
    return ([*prompt, *answer][-1] + 1) % VOCAB_SIZE


def script(*tokens: int) -> Rule:
    """The same answer to every prompt, then EOS for ever."""
    return lambda prompt, answer: tokens[len(answer)] if len(answer) < len(tokens) else EOS


class MockRunner:
    """Keeps the tokens of each slot as a cache would, and checks the protocol while it is used.

    spread: the most likely token's lead in nats; small ones leave room for sampling.
    gate: closed, it holds the device thread before the next step.
    """

    def __init__(
        self, rule: Rule = count_up, *, num_slots: int = 2, context: int = 64, spread: float = 20.0
    ) -> None:
        self.num_slots, self.context, self.vocab_size = num_slots, context, VOCAB_SIZE
        self.rule, self.spread = rule, spread
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.prompts: list[list[int]] = [[] for _ in range(num_slots)]
        self.answers: list[list[int]] = [[] for _ in range(num_slots)]
        self.batches: list[int] = []
        self.prefilled: list[list[int]] = []

    def prefill(self, slot: int, tokens: list[int]):
        self._turn()
        assert 0 < len(tokens) < self.context
        self.prompts[slot], self.answers[slot] = list(tokens), []
        self.prefilled.append(list(tokens))
        return self._logits(slot)

    def generate(self, tokens: np.ndarray, positions: np.ndarray):
        self._turn()
        assert tokens.dtype == positions.dtype == np.int32
        assert tokens.shape == positions.shape == (self.num_slots,)
        self.batches.append(int((positions > 0).sum()))
        return jnp.stack(
            [self._step(slot, *row) for slot, row in enumerate(zip(tokens, positions, strict=True))]
        )

    def _step(self, slot: int, token: int, position: int):
        if position == 0:  # nobody's slot
            assert token == 0
            return jnp.zeros(self.vocab_size)
        assert position == len(self.prompts[slot]) + len(self.answers[slot]) < self.context
        self.answers[slot].append(int(token))
        return self._logits(slot)

    def _logits(self, slot: int):
        logits = np.zeros(self.vocab_size, np.float32)
        logits[self.rule(self.prompts[slot], self.answers[slot])] = self.spread
        return jnp.asarray(logits)

    def prepare_scores(self, num_tokens: int) -> None:
        assert 0 < num_tokens < self.context

    def scores(self, tokens: list[int]) -> Scores:
        """As if each prefix were a prompt whose answer begins."""
        logits = np.zeros((len(tokens) - 1, self.vocab_size))
        for position in range(len(tokens) - 1):
            logits[position, self.rule(tokens[: position + 1], [])] = self.spread
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        top_ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :NUM_TOP]
        own = np.array(tokens[1:], int)[:, None]
        return Scores(
            np.take_along_axis(logprobs, own, -1)[:, 0], top_ids, np.take_along_axis(logprobs, top_ids, -1)
        )

    def _turn(self) -> None:
        self.gate.wait(30)
        if self.failure:
            raise self.failure


def byte_tokenizer() -> Tokenizer:
    """Every byte is one token, so a character of several bytes is several tokens; 256 is <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.token_to_id("<eos>") == EOS
    return Tokenizer(tokenizer, eos_ids=frozenset([EOS]), start_id=EOS)


def says(text: str) -> Rule:
    """A model that answers `text` and stops."""
    return script(*byte_tokenizer().encode(text))
