"""The tokenizer of a checkpoint folder: text to tokens and back, end tokens, chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import tokenizers

from meshwright.errors import CheckpointError, RequestError, in_a_line
from meshwright.files import half_of_a_pair
from meshwright.models.chat import ChatTemplate, json_object, load_chat_template, special_tokens
from meshwright.models.tokenizer_file import is_of_tokenizers, read_tokenizer
from meshwright.serve.workers.timed_stages import begin_stage

# Time limits in a worker. A prompt of a million tokens takes two seconds to tokenise.
_TEMPLATE_SECONDS, _TOKENIZER_SECONDS = 1.0, 5.0
_MOST_END_IDS = 1000


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` with what serving needs to know about it.

    eos_ids: tokens that end an answer. start_id: the token an empty prompt starts from, if any.
    """

    tokenizer: tokenizers.Tokenizer
    eos_ids: frozenset[int] = frozenset()
    start_id: int | None = None
    chat: ChatTemplate = field(default_factory=ChatTemplate)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Tokens of a prompt, with the special tokens that the tokenizer adds, such as BOS."""
        begin_stage("the tokenizer", _TOKENIZER_SECONDS)
        return self._or_start(self.ids(prompt, add_special_tokens=add_special_tokens))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **context: Any) -> tuple[int, ...]:
        """Tokens of a conversation; its template writes the special tokens itself.

        context: further names that the template may read, such as tools.
        """
        return self.encode_chat_text(self.chat_text(messages, **context))

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, continues: bool = False, **context: object
    ) -> str:
        """The text of a conversation. continues: end it with the last message's content."""
        begin_stage("the chat template", _TEMPLATE_SECONDS)
        text = self.chat.render(messages, **context)
        return _until_content(text, messages[-1]["content"]) if continues else text

    def encode_chat_text(self, text: str) -> tuple[int, ...]:
        """Tokens of the text of a conversation."""
        begin_stage("the tokenizer", _TOKENIZER_SECONDS)
        return self._or_start(self.ids(text, add_special_tokens=False))

    def ids(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Tokens of `text`, perhaps none. Other threads run meanwhile."""
        # `encode` holds the interpreter until it is done, which is seconds for a long text; this does not.
        try:
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if not is_of_tokenizers(error):
                raise
            if fault := half_of_a_pair(text):
                raise RequestError(f"the text is not Unicode: {fault}") from error
            raise RequestError(f"the tokenizer fails on the text: {in_a_line(error)}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.tokenizer.decode(tokens)

    def with_special(self) -> "Tokenizer":
        """This tokenizer with a `decode` that writes special tokens too."""
        return _WithSpecial(self.tokenizer, self.eos_ids, self.start_id, self.chat)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token: the name of a special token, empty for an unknown one."""
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added_ids:
            return name.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF.get(char, 0xFF) for char in name)
        if len(name) == 6 and name.startswith("<0x"):  # SentencePiece's byte fallback
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    def token_text(self, token: int) -> str:
        """The token's own characters; bytes that are only a part of one become U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.token_bytes(token).decode("utf-8", "replace")
        return text

    @cached_property
    def _texts(self) -> dict[int, str]:
        """Texts by token, kept since log-probabilities need hundreds of thousands of them a second."""
        return {}

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of the longest token; n tokens have at most n times this length."""
        return max((len(name) for name in self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))

    def _or_start(self, tokens: Sequence[int]) -> tuple[int, ...]:
        if tokens:
            return tuple(tokens)
        if self.start_id is None:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        return (self.start_id,)


def _until_content(text: str, content: str) -> str:
    """The text of a conversation as far as its last message, as transformers cuts it to be continued."""
    stripped = content.strip()
    start = text.rfind(stripped)
    if start < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the last message, so that its text has no end "
            "to continue from",
            param="continue_final_message",
        )
    # A template that keeps the blanks after a message has them in the prompt too.
    kept = content.lstrip() if text[start:].startswith(content.lstrip()) else stripped
    return text[:start] + kept


class _WithSpecial(Tokenizer):
    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (Radford et al. 2019).

    Printable bytes keep their characters; other bytes have the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint in Hugging Face format.

    Reads tokenizer.json, and where they exist tokenizer_config.json and chat_template.jinja (template,
    special tokens), generation_config.json and config.json (`eos_token_id`).
    Raises CheckpointError if tokenizer.json is missing or any of them cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no tokenizer.json; serving text needs one next to the weights")
    tokenizer = read_tokenizer(path, CheckpointError)
    config = json_object(folder / "tokenizer_config.json")
    special = special_tokens(config)
    eos_ids = _eos_ids(folder, tokenizer, special)
    bos_id = tokenizer.token_to_id(special.get("bos_token", ""))
    return Tokenizer(
        tokenizer,
        eos_ids=eos_ids,
        start_id=bos_id if bos_id is not None else min(eos_ids, default=None),
        chat=load_chat_template(folder),
    )


def _eos_ids(folder: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = json_object(folder / name).get("eos_token_id")
        if ids is not None:
            return _checked_ids(folder / name, ids)
    eos_id = tokenizer.token_to_id(special.get("eos_token", ""))
    return frozenset() if eos_id is None else frozenset([eos_id])


def _checked_ids(path: Path, value: object) -> frozenset[int]:
    """The tokens of `eos_token_id`: one or a list. Raises CheckpointError for others."""
    ids: list[Any] = value if isinstance(value, list) else [value]
    wrong = next((each for each in ids if type(each) is not int or not 0 <= each < 2**31), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: eos_token_id has {brief(wrong)}, which is no token")
    if len(ids) > _MOST_END_IDS:
        raise CheckpointError(f"{path}: eos_token_id has {len(ids):,} tokens, more than {_MOST_END_IDS}")
    return frozenset(ids)
