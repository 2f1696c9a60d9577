"""Calls of tools in an answer's text, as the common families of models write them.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated        Hermes, Qwen
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]                      Mistral
    llama     {"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>         Llama 3

Which one a model writes is told from its chat template.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.serve.text.detokenizer import StopStrings


@dataclass(frozen=True)
class Call:
    """A tool's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls. markers: what a call begins with; bare: or the answer is JSON itself."""

    name: str
    markers: tuple[str, ...]
    argument_keys: tuple[str, ...]
    end: str = ""
    bare: bool = False

    def parse(self, text: str) -> list[Call] | None:
        """The calls in `text`, which begins with a marker or is JSON; None if it is no call after all."""
        for mark in (*self.markers, self.end):
            text = text.replace(mark, "\n") if mark else text
        calls: list[Call] = []
        for value in _json_values(text):
            for call in value if isinstance(value, list) else [value]:
                if (found := self._call(call)) is None:
                    return None
                calls.append(found)
        return calls or None

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = next((value[key] for key in self.argument_keys if key in value), {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return Call(value["name"], text)


HERMES = ToolFormat("hermes", ("<tool_call>",), ("arguments", "parameters"), end="</tool_call>")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), ("arguments", "parameters"))
LLAMA = ToolFormat("llama", ("<|python_tag|>",), ("parameters", "arguments"), bare=True)
FORMATS = (HERMES, MISTRAL, LLAMA)


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template teaches; None if it is none of these."""
    for known in FORMATS:
        if any(marker in source for marker in known.markers):
            return known
    # Templates of Llama 3.1 and later spell the form out, and name the role of a tool's answer.
    return LLAMA if "ipython" in source and '"parameters"' in source else None


def _json_values(text: str) -> list[Any]:
    """The JSON values in `text`, with blanks or semicolons between; [None] if it holds anything else."""
    decoder, found = json.JSONDecoder(), []
    position = _skip(text, 0)
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return [None]
        found.append(value)
        position = _skip(text, position)
    return found


def _skip(text: str, position: int) -> int:
    match = re.compile(r"[\s;]*").match(text, position)
    return match.end() if match else position


class ToolText:
    """Separates what an answer says from the calls it makes, as its text arrives in pieces.

    forced: the answer was held to the JSON of one call, without markers.
    """

    def __init__(self, form: ToolFormat, *, forced: bool) -> None:
        self._form = form
        self._before_calls = StopStrings(form.markers)
        self._text = ""
        self._num_said = self._num_pushed = 0
        self._is_call = forced

    def push(self, piece: str) -> str:
        """The part of the text that is certainly no call."""
        self._text += piece
        if not self._is_call and self._form.bare and self._text.lstrip()[:1] in ("{", "["):
            self._is_call = True
        if self._is_call or (self._form.bare and not self._text.strip()):
            return ""
        said = self._before_calls.push(self._text[self._num_pushed :])
        self._is_call = self._before_calls.stopped
        self._num_pushed = len(self._text)
        self._num_said += len(said)
        return said

    def finish(self) -> tuple[str, Sequence[Call]]:
        """The rest: text, and the calls. What looks like a call and is none is text."""
        rest = self._text[self._num_said :]
        calls = self._form.parse(rest) if self._is_call else None
        return ("", calls) if calls else (rest, ())
