"""Calls of tools in an answer's text, by the format that the chat template teaches."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.models.families import families
from meshwright.models.families.tool_formats import ToolFormat
from meshwright.serve.text.detokenizer import StopStrings


@dataclass(frozen=True)
class Call:
    """A tool's name, and its arguments as JSON text."""

    name: str
    arguments: str


def format_of_template(source: str) -> ToolFormat | None:
    """The format of the families' that a chat template teaches; None if it is none of them."""
    formats = sorted(
        {family.tool_calls for family in families() if family.tool_calls},
        key=lambda form: (form.bare, form.name),
    )
    for form in formats:
        if any(marker in source for marker in form.markers):
            return form
    spelt_out = (form for form in formats if form.in_template)
    return next((form for form in spelt_out if all(word in source for word in form.in_template)), None)


def calls_in(text: str, form: ToolFormat) -> list[Call] | None:
    """The calls in `text`, which begins with a marker or is JSON; None if it is no call after all."""
    for mark in (*form.markers, form.end):
        text = text.replace(mark, "\n") if mark else text
    calls: list[Call] = []
    for value in _json_values(text):
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = next((call[key] for key in form.argument_keys if key in call), {})
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(call["name"], as_text))
    return calls or None


def _json_values(text: str) -> list[Any]:
    """The JSON values in `text`, with blanks or semicolons between; [None] if it holds other text."""
    decoder, values = json.JSONDecoder(), []
    position = _skip(text, 0)
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return [None]
        values.append(value)
        position = _skip(text, position)
    return values


def _skip(text: str, position: int) -> int:
    match = re.compile(r"[\s;]*").match(text, position)
    return match.end() if match else position


def _cut_call(text: str, form: ToolFormat) -> list[Call]:
    """The call that the start of its JSON has, with as much of the arguments; none before its name ends."""
    keys = "|".join(map(re.escape, form.argument_keys))
    match = re.match(rf'\s*\{{\s*"name"\s*:\s*"([^"]*)"(?:\s*,\s*"(?:{keys})"\s*:\s*(.*))?', text, re.DOTALL)
    return [Call(match[1], match[2] or "")] if match else []


class ToolText:
    """Separates an answer's text from its calls of tools, as pieces of it arrive.

    forced: the answer was held to the JSON of one call, without markers.
    """

    def __init__(self, form: ToolFormat, *, forced: bool) -> None:
        self._form = form
        self._before_calls = StopStrings(form.markers)
        self._text = ""
        self._num_returned = self._num_pushed = 0
        self._is_call = self._is_forced = forced

    def push(self, piece: str) -> str:
        """The text so far that is no call and was not returned before."""
        self._text += piece
        if not self._is_call and self._form.bare and self._text.lstrip()[:1] in ("{", "["):
            self._is_call = True
        if self._is_call or (self._form.bare and not self._text.strip()):
            return ""
        answer = self._before_calls.push(self._text[self._num_pushed :])
        self._is_call = self._before_calls.stopped
        self._num_pushed = len(self._text)
        self._num_returned += len(answer)
        return answer

    def finish(self) -> tuple[str, Sequence[Call]]:
        """The rest of the text, and the calls. A broken call is text, but for a forced one that is cut."""
        rest = self._text[self._num_returned :]
        calls = calls_in(rest, self._form) if self._is_call else None
        if self._is_forced and not calls:
            return "", _cut_call(rest, self._form)
        return ("", calls) if calls else (rest, ())
