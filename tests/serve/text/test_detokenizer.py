"""Tokens to text: whole characters, exact joins, stop strings that never show."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.mock import byte_tokenizer
from tokenizers import decoders, models

from meshwright.serve.text.detokenizer import Detokenizer, StopStrings, TextStream

BYTES = byte_tokenizer()


def byte_fallback_decoder() -> tokenizers.Tokenizer:
    """The decoder of SentencePiece models: a leading space marks a word, rare bytes are <0xNN>."""
    words = ["▁hello", "▁world", "é", "ab"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="ab")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(decoder, tokens, prompt=()):
    detokenizer = Detokenizer(decoder, prompt)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


def test_a_character_of_four_tokens_arrives_whole():
    assert pieces(BYTES, BYTES.encode("a😀é!")) == ["a", "", "", "", "😀", "", "é", "!", ""]


@given(st.text(max_size=120))
def test_pieces_join_to_the_text_and_hold_no_half_character(text):
    emitted = pieces(BYTES, BYTES.encode(text) if text else ())
    assert "".join(emitted) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in emitted)


@given(st.lists(st.integers(0, 255), max_size=120))
def test_pieces_join_to_the_decoded_whole_for_any_bytes(tokens):
    assert "".join(pieces(BYTES, tokens)) == BYTES.decode(tokens)


def test_bytes_that_never_become_a_character_are_shown_in_the_end():
    [half, *_] = BYTES.encode("😀")
    assert pieces(BYTES, [half, *BYTES.encode("ok")]) == ["", "\ufffdo", "k", ""]
    assert pieces(BYTES, [half]) == ["", "\ufffd"]


def test_a_prompt_cut_within_a_character_is_completed():
    *prompt, last = BYTES.encode("a😀")
    assert pieces(BYTES, [last], prompt) == ["😀", ""]


def test_a_word_after_the_prompt_keeps_its_space():
    decoder = byte_fallback_decoder()
    assert decoder.decode([1]) == "world"
    assert pieces(decoder, [1, 0], prompt=[0]) == [" world", " hello", ""]


def test_fallback_bytes_arrive_as_whole_characters():
    decoder = byte_fallback_decoder()
    tokens = [0] + [4 + byte for byte in "😀é".encode()] + [3]
    assert pieces(decoder, tokens) == ["hello", "", "", "", "😀", "", "é", "ab", ""]


def test_a_cut_character_of_fallback_bytes_is_replaced_once():
    decoder = byte_fallback_decoder()
    for text, right in (("😀é", "😀�"), ("👋", "�")):
        cut = [4 + byte for byte in text.encode()[:-1]]
        emitted = Detokenizer(decoder, (), lambda token: bytes([token - 4]))
        assert "".join(map(emitted.push, cut)) + emitted.finish() == right


def test_a_long_run_of_fallback_bytes_arrives_character_by_character():
    text = "日本語の文章です" * 20
    emitted = pieces(byte_fallback_decoder(), [4 + byte for byte in text.encode()])
    assert "".join(emitted) == text
    assert all(len(piece) <= 1 for piece in emitted)


def test_a_long_answer_is_decoded_in_short_windows():
    longest = 0

    class Watched:
        def decode(self, tokens):
            nonlocal longest
            longest = max(longest, len(tokens))
            return BYTES.decode(tokens)

    text = "naïve 😀 " * 100
    assert "".join(pieces(Watched(), BYTES.encode(text))) == text
    assert longest < 40


def cut(stops, chunks):
    """What StopStrings lets through of `chunks`, and whether it stopped."""
    strings, shown = StopStrings(stops), ""
    for chunk in chunks:
        shown += strings.push(chunk)
        if strings.stopped:
            return shown, True
    return shown + strings.finish(), False


def cut_by_hand(stops, text):
    """The first prefix of `text` that ends in a stop string, without it; the longest one if several do."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "chunks", "shown", "stopped"),
    [
        ([], ["any", "thing"], "anything", False),
        (["\n\n"], ["a\n", "\nb"], "a", True),
        (["\n\n"], ["a\n", "b\n"], "a\nb\n", False),
        (["END"], ["xE", "N", "D y"], "x", True),
        (["END"], ["xE", "NE", "ND"], "xEN", True),
        (["abc", "b"], ["a", "bc"], "a", True),  # "b" is complete before "abc"
        (["abc", "b"], ["abc"], "a", True),
        (["bc", "abc"], ["abc"], "", True),  # both are complete at once: the longer
        (["aab"], ["aaa", "b"], "a", True),
    ],
)
def test_stop_strings_across_pieces(stops, chunks, shown, stopped):
    assert cut(stops, chunks) == (shown, stopped)


abc = st.text("abc", max_size=12)


@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.lists(abc, max_size=6))
def test_the_cut_does_not_depend_on_the_pieces(stops, chunks):
    assert cut(stops, chunks) == cut_by_hand(stops, "".join(chunks))


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(abc, max_size=6))
def test_nothing_is_shown_that_a_stop_string_could_still_claim(stops, chunks):
    strings, shown = StopStrings(stops), ""
    for chunk in chunks:
        if strings.stopped:
            break
        shown += strings.push(chunk)
    if not strings.stopped:
        assert "".join(chunks).startswith(shown)
        held = "".join(chunks)[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_text_stream_stops_in_text_that_was_held_as_bytes():
    half = BYTES.encode("😀")[0]
    text = TextStream(BYTES, (), ["\ufffd"])
    assert [text.push(token) for token in (*BYTES.encode("hi"), half)] == ["h", "i", ""]
    assert (text.finish(), text.stopped) == ("", True)
