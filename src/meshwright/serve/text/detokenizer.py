"""Tokens to text, a token at a time: no half characters, no leaked stop strings."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol


class Decoder(Protocol):
    def decode(self, tokens: Sequence[int], /) -> str: ...


# What decoding yields for bytes that are not, or not yet, UTF-8.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so at most three at the end of a text are still waiting for more.
_MAX_PENDING = 3
# Tokens of context that the next one is decoded with: a leading space is only a space after something.
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Text of a growing list of tokens, whose pieces join to the decoded whole.

    token_bytes: the bytes of a token, which show a cut character as one.
    """

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int], token_bytes: Callable[[int], bytes] | None = None
    ) -> None:
        self._decoder, self._token_bytes = decoder, token_bytes
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._emitted = ""
        self._take()

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        self._window.append(token)
        piece = self._take()
        self._shrink()
        return piece

    def finish(self) -> str:
        """The remaining text at the end of the tokens."""
        text = self._decoder.decode(self._window)
        if text.startswith(self._emitted):
            return self._cut_once(text[len(self._emitted) :])
        return _REPLACEMENT  # byte fallback: the last character is cut

    def _cut_once(self, rest: str) -> str:
        # Byte fallback writes U+FFFD for each byte of a cut character, instead of one for all.
        if self._token_bytes is None or not rest or set(rest) != {_REPLACEMENT}:
            return rest
        return b"".join(map(self._token_bytes, self._window[-len(rest) :])).decode("utf-8", "replace")

    def _take(self) -> str:
        text = self._decoder.decode(self._window)
        num_pending = len(text) - len(text.rstrip(_REPLACEMENT))
        # Byte fallback turns a whole run of bytes into U+FFFD while its last character is cut short, what
        # was emitted included; then all of it waits.
        if num_pending > _MAX_PENDING and text.startswith(self._emitted):
            num_pending = _MAX_PENDING
        piece = text[len(self._emitted) : len(text) - num_pending]
        if piece:
            self._emitted = text[: len(text) - num_pending]
        return piece

    def _shrink(self) -> None:
        # Decoding a window again and again stays linear in the answer only if the window stays short.
        if len(self._window) < 4 * _CONTEXT_TOKENS:
            return
        for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_PENDING + 1):
            text = self._decoder.decode(self._window[-num_tokens:])
            if _REPLACEMENT not in text:  # neither end of the new window splits a character
                self._window, self._emitted = self._window[-num_tokens:], text
                return


class StopStrings:
    """Cuts a text before the first complete stop string, for any division of the text into pieces.

    keeps: cut after the stop string instead.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops, self._keeps = tuple(stops), keeps
        self._num_matched = [0] * len(stops)  # characters of each stop string that end the text so far
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that no stop string can claim any more; sets `stopped` on a match."""
        if not self._stops:
            return piece
        text = self._held + piece
        matches = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if matches:
            end, minus_length = min(matches)
            self.stopped, self._held = True, ""
            return text[: end if self._keeps else end + minus_length]
        num_held = max(self._matched(number, piece) for number in range(len(self._stops)))
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The remaining text, withheld as a possible start of a stop string."""
        held, self._held = self._held, ""
        return held

    def _matched(self, number: int, piece: str) -> int:
        """Length of the longest end of the text, now with `piece`, that a stop string begins with."""
        stop, count = self._stops[number], self._num_matched[number]
        shorter = _failure_lengths(stop)
        for character in piece:
            while count and stop[count] != character:
                count = shorter[count - 1]
            count += stop[count] == character
        self._num_matched[number] = count
        return count


@lru_cache(64)
def _failure_lengths(text: str) -> list[int]:
    """For each prefix of the text, the length of its longest proper prefix that is also its suffix.

    This is the failure function of Knuth, Morris and Pratt's search.
    """
    lengths, count = [0], 0
    for character in text[1:]:
        while count and text[count] != character:
            count = lengths[count - 1]
        count += text[count] == character
        lengths.append(count)
    return lengths


class TextStream:
    """The text of one answer from its tokens.

    num_decoded: characters of the tokens so far, held-back ones included. num_shown: those given out.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(decoder, prompt, token_bytes)
        self._stops = StopStrings(stops, keeps=keeps_stop)
        self.num_decoded = self.num_shown = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; no token may follow."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """The text that `token` makes certain, perhaps none."""
        return self._show(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest of the text, now that no token follows."""
        text = self._show(self._detokenizer.finish())
        if not self.stopped:
            held = self._stops.finish()
            self.num_shown += len(held)
            text += held
        return text

    def _show(self, piece: str) -> str:
        self.num_decoded += len(piece)
        text = self._stops.push(piece)
        self.num_shown += len(text)
        return text
