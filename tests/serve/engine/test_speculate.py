"""Guesses by n-grams: found where the text repeats itself, and left off where they do not pay."""

from meshwright.serve.engine.request import Request
from meshwright.serve.engine.sequence import TokenSequence
from meshwright.serve.engine.speculate import NgramDrafter


def sequence(*tokens: int) -> TokenSequence:
    return TokenSequence(Request(tokens), max_tokens=100, index=0, emit=lambda _: None)


def test_the_last_place_with_the_longest_match_is_followed():
    drafter = NgramDrafter(3, lambda _: 1.0)
    text = sequence(1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8, 8, 1, 2, 3)
    assert drafter.draft(text) == [4, 5, 6]  # 1 2 3, not the later 2 3
    text.tokens = [*text.tokens, 7]
    assert drafter.draft(text) == [8, 8, 1]
    text.tokens = [*text.tokens, 99]
    assert drafter.draft(text) == []


def test_what_repeats_its_end_is_found_in_itself():
    text = sequence(5, 5, 5)
    assert NgramDrafter(2, lambda _: 1.0).draft(text) == [5]


def test_guesses_stop_where_they_do_not_pay_and_are_tried_again():
    drafter = NgramDrafter(3, lambda num_sequences: 1.5 * num_sequences)
    assert drafter.pays(1)
    assert not drafter.pays(8)  # 12 times as long for at most 4 tokens
    again = next(number for number in range(1000) if drafter.pays(1))
    assert 200 < again < 300
    for _ in range(200):
        drafter.verified(3, 0)
    assert not drafter.pays(1)
