"""Prompts of a JSONL file, in the order of a run.

    {"prompt": "3 1 2 ->", "answer": "1 2 3"}
    {"messages": [{"role": "user", "content": "Sort 3 1 2"}], "answer": "1 2 3"}

Other keys are for the reward.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import DataError, RequestError
from meshwright.files import file_sha256, half_of_a_pair, parse_json
from meshwright.serve.text.tokenizer import Tokenizer, load_tokenizer
from meshwright.train.bpe import BESIDE_TOKENIZER, end_of_text_id, load_bpe, tokenizer_file, train_tokenizer

PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A line of the file: its number from 1, the object, and the tokens of its prompt."""

    number: int
    row: dict[str, Any]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a step and of the step after it.

    example: the index of the first prompt in the order of the run.
    """

    example: int
    now: Sequence[Prompt]
    following: Sequence[Prompt]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run, as the Source of `train.loop`. There is no validation."""

    directory: Path
    fingerprint: str
    seq_len: int
    tokenizer: Tokenizer
    end_of_text_id: int
    prompts: tuple[Prompt, ...]
    validations: tuple[str, ...] = ()
    evaluations: tuple[str, ...] = ()

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"

    def rows(self, split: str) -> np.ndarray:
        raise KeyError(split)

    def batches(self, batch_sequences: int, seed: int, rows: Sequence[int]) -> "PromptBatches":
        """The batches of a seed; `rows` are all, since one process rolls out."""
        return PromptBatches(self.prompts, batch_sequences, seed)


class PromptBatches:
    """Batches of prompts by the index of their first; each epoch has an order of its own."""

    def __init__(self, prompts: Sequence[Prompt], size: int, seed: int) -> None:
        self._prompts, self._size, self._seed = prompts, size, seed
        self._orders: dict[int, np.ndarray] = {}

    def at(self, example: int) -> PromptBatch:
        return PromptBatch(example, self._from(example), self._from(example + self._size))

    def _from(self, example: int) -> list[Prompt]:
        return [self._prompt(index) for index in range(example, example + self._size)]

    def _prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        if epoch not in self._orders:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
            self._orders = {one: other for one, other in self._orders.items() if one >= epoch - 1}
            self._orders[epoch] = order
        return self._prompts[self._orders[epoch][place]]


def prepare_prompts(
    source: str, directory: Path, *, vocab_size: int, seq_len: int, output_tokens: int, tokenizer: Path | None
) -> PromptSet:
    """The prompts in `directory` if a run has stored them there, otherwise of `source`.

    tokenizer: a tokenizer.json; None trains a BPE on the prompts. Raises DataError for a line that is no
    prompt, or too long.
    """
    is_new = not (directory / PROMPTS).is_file()
    if is_new:
        rows = list(_rows(Path(source)))
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / "tokenizer.json"
        if tokenizer is None:
            train_tokenizer((json.dumps(row, ensure_ascii=False) for _, row in rows), vocab_size).save(
                str(target)
            )
        else:
            for name in (tokenizer.name, *BESIDE_TOKENIZER):
                if (tokenizer.parent / name).is_file():
                    shutil.copyfile(tokenizer.parent / name, directory / name)
    end = end_of_text_id(load_bpe(tokenizer_file(str(directory))), directory / "tokenizer.json")
    made = load_tokenizer(directory)
    if made.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {directory}: has {made.vocab_size} tokens, and the model V = {vocab_size}; "
            "give the model's own with --tokenizer"
        )
    prompts = []
    for number, row in _rows(Path(source) if is_new else directory / PROMPTS):
        try:
            tokens = _tokens(made, row)
        except RequestError as error:
            raise DataError(f"{source} line {number}: {error}") from None
        if len(tokens) + output_tokens > seq_len:
            raise DataError(
                f"{source} line {number}: {len(tokens)} tokens and a rollout of {output_tokens} exceed rows "
                f"of T = {seq_len}; fits: --output-tokens {seq_len - len(tokens)}"
            )
        prompts.append(Prompt(number, row, tokens))
    if is_new:  # only prompts without a fault are stored, so that a repaired file is read
        shutil.copyfile(source, directory / PROMPTS)
    fingerprint = file_sha256(directory / PROMPTS)
    return PromptSet(directory, fingerprint, seq_len, made, end, tuple(prompts))


def _tokens(tokenizer: Tokenizer, row: dict[str, Any]) -> tuple[int, ...]:
    if "messages" in row:
        return tokenizer.encode_chat(row["messages"])
    return tokenizer.encode(row["prompt"])


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with the numbers of their lines. Raises DataError."""
    count = 0
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--data {path}: cannot be read ({error})") from None
    # Not `splitlines`, which also cuts at U+2028 and the like within a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path} line {number}: is not JSON ({error})") from None
        if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or _is_chat(row)):
            raise DataError(f'{path} line {number}: write {{"prompt": TEXT}} or {{"messages": [...]}}')
        if fault := half_of_a_pair(json.dumps(row, ensure_ascii=False)):
            raise DataError(f"{path} line {number}: {fault}")
        count += 1
        yield number, row
    if not count:
        raise DataError(f"--data {path}: has no prompts")


def _is_chat(row: dict[str, Any]) -> bool:
    messages = row.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages)
    )
