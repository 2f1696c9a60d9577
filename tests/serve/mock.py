"""A model whose answers are worked by hand, and a tokenizer with one token a byte."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from meshwright.models.layer_kinds import Window
from meshwright.serve.device.sampling import NUM_TOP, batch_edits, batch_rows, sample
from meshwright.serve.engine.batch import CACHED, PENDING, Batch, SequenceWork, WorkOutput
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.pages import NO_PAGE, Move
from meshwright.serve.engine.request import Request, SamplingParams, TokenScore
from meshwright.serve.text.tokenizer import Tokenizer

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


async def tokens_of(engine: Engine, *requests: Request) -> list[list[int]]:
    """The answers to requests that are sent together."""
    answers: list[list[int]] = [[] for _ in requests]
    with engine.submit(*requests) as stream:
        async for event in stream:
            answers[event.index].append(event.token)
    return answers


def answer_to(rule: Rule, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(rule(list(prompt), answer))
    return answer


class MockRunner:
    """Keeps tokens in pages as a cache would, and checks the protocol while it is used.

    spread: the most likely token's lead in nats; small ones leave room for sampling.
    gate: closed, it holds the device thread before the next step.
    batches: how many tokens each step took of each of its sequences. prefilled: the prompts, once computed.
    num_generated: tokens sampled. num_accepted: pages that another runner filled.
    """

    def __init__(
        self,
        rule: Rule = count_up,
        *,
        num_slots: int = 2,
        context: int = 64,
        spread: float = 20.0,
        page_size: int = 4,
        num_pages: int | None = None,
        chunk: int = 1024,
        window: Window | None = None,
        num_host_pages: int = 0,
    ) -> None:
        pages = num_slots * -(-context // page_size) if num_pages is None else num_pages
        self.limits = Limits(
            num_slots, context, page_size, pages, chunk, block=4, num_host_pages=num_host_pages
        )
        if window is not None:  # no more than one sequence may need at once
            of_step = -(-min(chunk, context) // page_size) + (window.size + page_size - 2) // page_size + 1
            self.limits = replace(self.limits, window=window, num_window_pages=of_step)
        self.vocab_size, self.embedding_size, self.idle_seconds = VOCAB_SIZE, 3, None
        self.rule, self.spread = rule, spread
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.last = [0] * num_slots
        self.cache: dict[tuple[int, int], int] = {}
        self.window_cache: dict[tuple[int, int], int] = {}
        self.host: dict[int, list[int | None]] = {}
        self.num_moved = {"out": 0, "in": 0}
        self.num_generated = 0
        self.num_accepted = 0
        self.batches: list[list[int]] = []
        self.prefilled: list[list[int]] = []
        self.is_prepared = False

    def run(self, batch: Batch) -> "_Read":
        self.gate.wait(30)
        if self.failure:
            raise self.failure
        slots = [work.slot for work in batch.works]
        assert batch.works and len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.limits.num_slots))
        self.move(batch.moves)
        self.batches.append([len(work.tokens) for work in batch.works])
        for work in batch.works:
            self._write(work)
        rows = [row for work in batch.works for row in self._logits(work)]
        self.num_generated += len(rows)
        chosen = iter(self._choose(batch, rows))
        sampled = [[next(chosen) for _ in range(work.num_samples)] for work in batch.works]
        for work, tokens in zip(batch.works, sampled, strict=True):
            if len(tokens) == 1:
                self.last[work.slot] = tokens[0].token
        return _Read([self._output(*pair) for pair in zip(batch.works, sampled, strict=True)])

    def _output(self, work: SequenceWork, tokens: list[TokenScore]) -> WorkOutput:
        if work.reads is None:
            return WorkOutput(tokens)
        assert self.is_prepared, "prepare_reads() comes first"
        seen = self._seen(work, work.start + len(work.tokens))
        if work.reads == "embedding":
            return WorkOutput(tokens, embedding=embedding_of(seen))
        prompt, num_top = work.sequence.request.prompt, work.sequence.request.sampling.top_logprobs
        scored = prompt[: work.start + 1 + len(work.tokens)]
        assert seen[: len(scored)] == list(scored[: len(seen)])
        return WorkOutput(tokens, self.scores(list(scored), num_top)[work.start :])

    def _seen(self, work: SequenceWork, end: int) -> list[int]:
        size = self.limits.page_size
        return [self.cache[work.pages[i // size], i % size] for i in range(end)]

    def _write(self, work: SequenceWork) -> None:
        prompt = list(work.sequence.request.prompt)
        if work.start < len(prompt) <= work.start + len(work.tokens):
            self.prefilled.append(prompt)
        for position, token in enumerate(work.tokens, work.start):
            page = work.pages[position // self.limits.page_size]
            assert 0 <= page < self.limits.num_pages
            known = self.last[work.slot] if token == PENDING else token
            self.cache[page, position % self.limits.page_size] = known
            if self.limits.window:
                page = work.window_pages[position // self.limits.page_size]
                assert 0 <= page < self.limits.num_window_pages
                self.window_cache[page, position % self.limits.page_size] = known

    def _logits(self, work: SequenceWork) -> list[np.ndarray]:
        size, num_prompt = self.limits.page_size, len(work.sequence.request.prompt)
        end = work.start + len(work.tokens)
        assert end <= self.limits.context
        seen = self._seen(work, end)
        if self.limits.window:
            first = max(0, self.limits.window.first(work.start))
            there = [self.window_cache[work.window_pages[i // size], i % size] for i in range(first, end)]
            assert there == seen[first:], "a token sees less of its window than it should"
        rows = []
        for behind in range(work.num_samples, 0, -1):
            known = seen[: end - behind + 1]
            assert known[:num_prompt] == list(work.sequence.request.prompt)
            rows.append(self.logits(known[:num_prompt], known[num_prompt:]))
        return rows

    def logits(self, prompt: list[int], answer: list[int]) -> np.ndarray:
        logits = np.zeros(self.vocab_size, np.float32)
        logits[self.rule(prompt, answer)] = self.spread
        return logits

    def _choose(self, batch: Batch, rows: list[np.ndarray]) -> list[TokenScore]:
        if not rows:
            return []
        params, edits, positions = [], [], []
        for work in batch.works:
            end = work.start + len(work.tokens)
            params += [work.sequence.request.sampling] * work.num_samples
            edits += [work.sequence.edits] * work.num_samples
            positions += range(end - work.num_samples + 1, end + 1)
        # As many rows every time, so that sampling is compiled once.
        missing = -len(rows) % 8
        logits = np.stack([*rows, *[np.zeros(self.vocab_size, np.float32)] * missing])
        params += [SamplingParams(0.0)] * missing
        changed = batch_edits(list(zip(params, [*edits, *[None] * missing], strict=True)), self.vocab_size)
        found = sample(logits, batch_rows(params, [*positions, *[0] * missing]), changed)
        tokens, logprobs, top_ids, tops = (np.asarray(x).tolist() for x in found)
        return [
            TokenScore(tokens[i], logprobs[i], tuple(zip(top_ids[i], tops[i], strict=True))[: p.top_logprobs])
            for i, p in enumerate(params[: len(rows)])
        ]

    def export(self, pages: Sequence[int], snapshot: int = NO_PAGE) -> list[list[int | None]]:
        size = self.limits.page_size
        return [[self.cache.get((page, place)) for place in range(size)] for page in pages]

    def accept(self, pages: Sequence[int], exported: object, snapshot: int = NO_PAGE) -> None:
        assert isinstance(exported, list) and len(pages) == len(exported)
        for page, tokens in zip(pages, exported, strict=True):
            if page != CACHED:
                self.num_accepted += 1
                self.cache.update({(page, place): token for place, token in enumerate(tokens)})

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            assert not move.of_states
            assert 0 <= move.host_page < self.limits.num_host_pages and 0 <= move.page < self.limits.num_pages
            if move.is_out:
                [self.host[move.host_page]] = self.export([move.page])
                # What is read there before somebody writes is an error.
                for place in range(self.limits.page_size):
                    del self.cache[move.page, place]
            else:
                self.accept([move.page], [self.host.pop(move.host_page)])
            self.num_moved["out" if move.is_out else "in"] += 1

    def prepare_reads(self) -> None:
        self.is_prepared = True

    def scores(self, tokens: list[int], num_top: int = NUM_TOP) -> list[TokenScore]:
        """As if each prefix were a prompt whose answer begins."""
        scores = []
        for position, token in enumerate(tokens[1:]):
            logits = np.zeros(self.vocab_size)
            logits[self.rule(tokens[: position + 1], [])] = self.spread
            logprobs = logits - np.log(np.exp(logits).sum())
            top = np.argsort(-logprobs, kind="stable")[:num_top].tolist()
            likeliest = tuple((one, float(logprobs[one])) for one in top)
            scores.append(TokenScore(token, float(logprobs[token]), likeliest))
        return scores


def embedding_of(tokens: Sequence[int]) -> np.ndarray:
    """The embedding of a prompt, in which each of its tokens counts."""
    vector = np.array([len(tokens), tokens[-1], sum(i * token for i, token in enumerate(tokens, 1))])
    return (vector / np.linalg.norm(vector)).astype(np.float32)


class _Read:
    def __init__(self, outputs: list[WorkOutput]) -> None:
        self._outputs = outputs

    def read(self) -> list[WorkOutput]:
        return self._outputs


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
