"""Sampling: the distribution it draws from, and on what a draw depends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from meshwright.serve.device.sampling import (
    NUM_TOP,
    Edits,
    Guesses,
    Needs,
    Sampled,
    SampledRows,
    sample,
)

pytestmark = pytest.mark.usefixtures("strict_dtypes")

V = 8
LOGITS = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], np.float32))


def sampled(
    logits: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    top_p: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    min_p: ArrayLike = 0.0,
    seeds: ArrayLike = 0,
    positions: ArrayLike = 0,
    num_top: ArrayLike = 0,
    edits: Edits | None = None,
    guesses: Guesses | None = None,
) -> Sampled:
    """One draw a row of `logits`, each other parameter given once or for each row."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    columns = (
        (temperature, np.float32),
        (top_p, np.float32),
        (top_k, np.int32),
        (min_p, np.float32),
        (seeds, np.uint32),
        (positions, np.int32),
        (num_top, np.int32),
    )
    rows = SampledRows(*(np.broadcast_to(np.asarray(value, dtype), len(logits)) for value, dtype in columns))
    return Sampled(*map(np.asarray, sample(logits, rows, edits, None, guesses)))  # pyright: ignore[reportArgumentType]


def draw(logits: ArrayLike, **params) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and their log-probabilities."""
    found = sampled(logits, **params)
    return np.asarray(found.tokens), np.asarray(found.logprobs)


def frequencies(num_draws=20_000, **params):
    tokens, _ = draw(np.tile(LOGITS, (num_draws, 1)), positions=np.arange(num_draws), **params)
    return np.bincount(tokens, minlength=V) / num_draws


# Four standard errors of a frequency over 20,000 draws: 4 * sqrt(0.25 / 20000).
TOLERANCE = 0.0142


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_softmax_of_the_tempered_logits(temperature):
    expected = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    np.testing.assert_allclose(frequencies(temperature=temperature), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 100}, 8),
        ({"top_p": 0.0}, 1),
        ({"top_p": 0.39}, 1),
        ({"top_p": 0.41}, 2),
        ({"top_p": 0.7}, 3),
        ({"top_k": 2, "top_p": 0.61}, 1),  # of 0.4 and 0.25, the first is already 0.615
        ({"top_k": 2, "top_p": 0.62}, 2),
        ({"top_p": 1.0}, 8),
        ({"min_p": 0.0}, 8),
        ({"min_p": 0.3}, 3),  # 0.15 of 0.4 is 0.375, 0.1 is 0.25
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.2, "top_k": 2}, 2),
    ],
)
def test_top_k_and_then_top_p_keep_the_most_likely_tokens(params, kept):
    expected = np.where(np.arange(V) < kept, np.exp(LOGITS), 0)
    np.testing.assert_allclose(frequencies(**params), expected / expected.sum(), atol=TOLERANCE)


def kept_by_sorting(logits, top_p, top_k):
    """Top-k and top-p by the textbook: sort, then add up."""
    order = np.argsort(-logits)[: top_k or V]
    probabilities = np.exp(logits[order]) / np.exp(logits[order]).sum()
    num_kept = int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1
    return set(order[: num_kept if top_p < 1 else V].tolist())


@settings(max_examples=30)
@given(
    logits=st.permutations([i * 0.4 - 1.5 for i in range(V)]),
    top_p=st.floats(0, 1, width=32),
    top_k=st.integers(0, V),
)
def test_the_kept_tokens_are_those_of_a_sort(logits, top_p, top_k):
    tokens, _ = draw(
        np.tile(logits, (500, 1)), temperature=8.0, top_p=top_p, top_k=top_k, positions=np.arange(500)
    )
    assert set(tokens.tolist()) == kept_by_sorting(np.array(logits) / 8.0, top_p, top_k)


def test_equal_logits_are_kept_together():
    tokens, _ = draw(np.tile([1.0, 3.0, 3.0, 0.0], (200, 1)), top_k=1, positions=np.arange(200))
    assert set(tokens.tolist()) == {1, 2}


def test_temperature_zero_takes_the_most_likely_token_whatever_the_seed():
    tokens, logprobs = draw(np.tile(LOGITS, (50, 1)), temperature=0.0, seeds=np.arange(50))
    assert set(tokens) == {0}
    np.testing.assert_allclose(logprobs, np.log(0.4), rtol=1e-5)


def test_a_tiny_temperature_is_greedy_and_not_nan():
    logits = np.array([3e4, -3e4, 2.9e4, 0.0], np.float32)
    tokens, logprobs = draw(np.tile(logits, (50, 1)), temperature=1e-30, seeds=np.arange(50))
    assert set(tokens) == {0}
    assert np.isfinite(logprobs).all()


def test_the_logprob_is_that_of_the_unmodified_logits():
    tokens, logprobs = draw(np.tile(LOGITS + 7, (64, 1)), temperature=2.0, top_k=4, seeds=np.arange(64))
    assert len(set(tokens)) > 1
    np.testing.assert_allclose(logprobs, LOGITS[tokens], rtol=1e-4)


def test_logits_that_are_not_finite_show_in_the_logprob():
    _, logprobs = draw([[0.0, np.nan], [0.0, np.inf], [0.0, 1.0]], temperature=1.0)
    assert np.isfinite(logprobs).tolist() == [False, False, True]


rows = st.fixed_dictionaries(
    {
        "logits": st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "top_k": st.integers(0, V),
        "min_p": st.sampled_from([0.0, 0.1, 0.5]),
        "seeds": st.integers(0, 2**32 - 1),
        "positions": st.integers(0, 10_000),
    }
)


@settings(max_examples=60)
@given(st.lists(rows, min_size=4, max_size=4), st.integers(0, 3), st.permutations(range(4)))
def test_a_row_does_not_depend_on_its_neighbours(batch, probe, order):
    def tokens(chosen):
        columns = {name: [row[name] for row in chosen] for name in chosen[0]}
        return draw(columns.pop("logits"), **columns)[0]

    together = tokens(batch)
    assert tokens([batch[i] for i in order]).tolist() == [together[i] for i in order]
    assert tokens([batch[probe]]) == together[probe]


def test_seeds_and_positions_each_change_the_draw():
    flat = np.zeros((64, 64), np.float32)
    by_seed, _ = draw(flat, seeds=np.arange(64))
    by_position, _ = draw(flat, positions=np.arange(64))
    assert len(set(by_seed)) > 30 and len(set(by_position)) > 30
    assert by_seed.tolist() != by_position.tolist()


def edits_of(num_rows: int = 1, **changed: ArrayLike) -> Edits:
    """Edits that change nothing but what is given, the same for each row."""
    plain = {
        "counts": np.zeros(V, np.int32),
        "prompt": np.zeros(V, bool),
        "bias": np.zeros(V, np.float32),
        "repetition": np.float32(1),
        "presence": np.float32(0),
        "frequency": np.float32(0),
    }
    assert set(changed) <= set(plain)
    columns = {name: np.asarray(changed.get(name, value), value.dtype) for name, value in plain.items()}
    return Edits(**{name: np.broadcast_to(c, (num_rows, *c.shape)) for name, c in columns.items()})


COUNTS = np.array([2, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, LOGITS),
        ({"counts": COUNTS, "presence": 1.5}, LOGITS - 1.5 * (COUNTS > 0)),
        ({"counts": COUNTS, "frequency": 0.5}, LOGITS - 0.5 * COUNTS),
        ({"bias": np.arange(V)}, LOGITS + np.arange(V)),
        # All of these logits are negative, so dividing would make them likelier.
        ({"counts": COUNTS, "repetition": 2.0}, np.where(COUNTS > 0, 2 * LOGITS, LOGITS)),
        ({"prompt": np.arange(V) == 2, "repetition": 2.0}, np.where(np.arange(V) == 2, 2 * LOGITS, LOGITS)),
    ],
)
def test_frequencies_follow_the_edited_logits(changed, expected):
    num_draws = 20_000
    logits, positions = np.tile(LOGITS, (num_draws, 1)), np.arange(num_draws)
    found = sampled(logits, positions=positions, edits=edits_of(num_draws, **changed))
    shares = np.bincount(found.tokens, minlength=V) / num_draws
    np.testing.assert_allclose(shares, np.exp(expected) / np.exp(expected).sum(), atol=TOLERANCE)
    # The log-probability stays that of the unmodified logits.
    np.testing.assert_allclose(found.logprobs, LOGITS[np.asarray(found.tokens)], rtol=1e-4)


def test_positive_logits_are_divided_by_the_repetition_penalty():
    found = sampled([3.0, 2.0, 1.0], temperature=0.0, edits=edits_of_three(repetition=2.0, counts=[1, 0, 0]))
    assert found.tokens.tolist() == [1]


def edits_of_three(repetition: float, counts: list[int]) -> Edits:
    zeros, one = np.zeros((1, 3), np.float32), np.zeros(1, np.float32)
    return Edits(np.array([counts], np.int32), zeros > 0, zeros, np.array([repetition], np.float32), one, one)


def test_a_forbidden_token_is_never_drawn_even_where_it_is_most_likely():
    bias = np.where(np.arange(V) == 0, -np.inf, 0.0)
    logits = np.tile(LOGITS, (500, 1))
    drawn, _ = draw(logits, positions=np.arange(500), edits=edits_of(500, bias=bias))
    assert 0 not in drawn
    assert draw(LOGITS, temperature=0.0, edits=edits_of(bias=bias))[0].tolist() == [1]


def test_the_likeliest_tokens_are_reported_where_a_row_asks():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    found = sampled(logits, temperature=[0.0, 1.0, 1.0], num_top=[0, 5, 0], edits=None)
    expected = logits[1] - np.log(np.exp(logits[1]).sum())
    order = np.argsort(-expected)[:NUM_TOP]
    assert found.top_ids[1].tolist() == order.tolist()
    np.testing.assert_allclose(found.top_logprobs[1], expected[order], rtol=1e-5, atol=1e-6)
    small = sampled(LOGITS, num_top=3)
    assert small.top_ids[0, :V].tolist() == list(range(V)) and small.top_logprobs[0, V] == -np.inf


_ROWS = {  # temperature, top_p, top_k, min_p, num_top
    "greedy": (0.0, 0.5, 2, 0.1, 0),
    "drawn": (0.7, 1.0, 0, 0.0, 0),
    "filtered": (1.3, 0.8, 3, 0.01, 0),
    "with alternatives": (0.0, 1.0, 0, 0.0, 2),
}


@pytest.mark.parametrize("names", [["greedy"], ["greedy", "drawn"], ["drawn", "filtered"], [*_ROWS]])
def test_a_program_for_what_rows_need_gives_what_finds_it_on_the_device(names: list[str]) -> None:
    """Or a program for more."""
    rows = _rows(*names)
    asked = Needs.of(rows)
    logits = np.random.default_rng(3).normal(size=(len(names), 50)).astype(np.float32)
    wanted = sample(logits, rows)
    for needs in (one for one in Needs.all() if all(np.array(one) >= np.array(asked))):
        found = sample(logits, rows, needs=needs)
        for ours, theirs in zip(found if asked.top else found[:2], wanted, strict=asked.top):
            np.testing.assert_array_equal(ours, theirs)
    assert asked in Needs.all()


def _rows(*names: str) -> SampledRows:
    columns = zip(*(_ROWS[name] for name in names), strict=True)
    kinds = np.float32, np.float32, np.int32, np.float32, np.int32
    temperature, top_p, top_k, min_p, num_top = (
        np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)
    )
    seeds, positions = np.arange(len(names), dtype=np.uint32), np.arange(len(names), dtype=np.int32)
    return SampledRows(temperature, top_p, top_k, min_p, seeds, positions, num_top)


def test_what_rows_need() -> None:
    assert Needs.of(_rows("greedy")) == (False, False, False)  # whose filters change nothing
    assert Needs.of(_rows("greedy", "drawn")) == (True, False, False)
    assert Needs.of(_rows("drawn", "filtered")) == (True, True, False)
    assert Needs.of(_rows("with alternatives", "drawn")) == (True, False, True)


def test_two_models_draw_the_same_token_as_often_as_the_coupling_says():
    """With shared noise at least (1 - d) / (1 + d) of the draws agree, and none is biased.

    d: the total variation distance of p and q; 1 - d is the most that any rule reaches. A greedy guess agrees
    with the probability of the token that q prefers.
    """
    num_draws, p = 20_000, np.exp(LOGITS) / np.exp(LOGITS).sum()
    q = np.array([0.3, 0.35, 0.1, 0.12, 0.05, 0.05, 0.02, 0.01], np.float32)
    places = np.arange(num_draws)
    answers, _ = draw(np.tile(LOGITS, (num_draws, 1)), positions=places)
    guesses, _ = draw(np.tile(np.log(q), (num_draws, 1)), positions=places)
    agreed, distance = np.mean(answers == guesses), 0.5 * np.abs(p - q).sum()
    assert (1 - distance) / (1 + distance) - TOLERANCE < agreed < 1 - distance + TOLERANCE
    assert agreed > p[np.argmax(q)] + 0.3
    np.testing.assert_allclose(np.bincount(answers, minlength=V) / num_draws, p, atol=TOLERANCE)
    np.testing.assert_allclose(np.bincount(guesses, minlength=V) / num_draws, q, atol=TOLERANCE)


# Logits of a draft model that likes other tokens than LOGITS does.
DRAFT = np.roll(LOGITS, 2) / 1.5


def tempered(logits: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
    scaled = logits / temperature
    kept = scaled >= np.sort(scaled)[::-1][(top_k or V) - 1]
    weights = np.where(kept, np.exp(scaled), 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.0, 4)])
def test_the_ratio_test_keeps_the_distribution_and_accepts_as_the_paper_says(temperature, top_k):
    """Drafts from q are accepted with probability sum(min(p, q)); results have distribution p."""
    num_draws = 40_000
    how = {"temperature": temperature, "top_k": top_k, "positions": np.arange(num_draws)}
    of_draft = np.tile(DRAFT, (num_draws, 1))
    drafts, _ = draw(of_draft, **how)
    tokens, _ = draw(np.tile(LOGITS, (num_draws, 1)), guesses=Guesses(drafts, of_draft), **how)
    p, q = tempered(LOGITS, temperature, top_k), tempered(DRAFT, temperature, top_k)
    counts, expected = np.bincount(tokens, minlength=V), num_draws * p
    assert not counts[p == 0].any()
    chi_square = np.sum((counts - expected)[p > 0] ** 2 / expected[p > 0])
    assert chi_square < 24.3, "the 99.9th percentile for 7 degrees of freedom; fewer tokens have a lower one"
    accepted = np.mean(tokens == drafts)
    assert accepted == pytest.approx(np.minimum(p, q).sum(), abs=0.01)  # four standard errors
    coupled, _ = draw(np.tile(LOGITS, (num_draws, 1)), **how)
    assert np.mean(coupled == drafts) < accepted + 0.01


def test_rows_without_a_guess_are_drawn_as_without_guesses():
    logits = np.tile(LOGITS, (64, 1))
    guesses = Guesses(np.full(64, -1, np.int32), np.zeros((64, V), np.float32))
    how = {"positions": np.arange(64), "temperature": np.where(np.arange(64) % 2, 1.0, 0.0)}
    np.testing.assert_array_equal(draw(logits, guesses=guesses, **how), draw(logits, **how))


def test_a_guess_of_the_same_distribution_is_always_accepted():
    logits = np.tile(LOGITS, (512, 1))
    drafts, _ = draw(logits, positions=np.arange(512))
    tokens, _ = draw(logits, positions=np.arange(512), guesses=Guesses(drafts, logits))
    np.testing.assert_array_equal(tokens, drafts)
