"""Numbers as people write them, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_count,
    parse_seconds,
    parse_seconds_per_token,
    parse_seconds_to_first_token,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4M", 4_000_000),
        ("32k", 32_000),
        ("32Ki", 32_768),
        ("1.5k", 1500),
        ("4_194_304", 4_194_304),
        ("4,194,304", 4_194_304),
        (" 16 B ", 16_000_000_000),
        ("16G", 16_000_000_000),
        ("2T", 2_000_000_000_000),
        ("3e6", 3_000_000),
        (7, 7),
    ],
)
def test_counts(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "four", "4X", "-4", "1e-3", "1e99999", "0x10", "nan", "inf"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        parse_count(text)
    assert str(caught.value) == (
        f"{text!r} is not a count; write 4194304, 4M (4e6), 32k (32e3) or 32Ki (32768)"
    )


@pytest.mark.parametrize("text", ["0", "1.5", "1e19", "2000000T"])
def test_counts_that_nothing_has(text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        parse_count(text)
    assert str(caught.value) == f"{text!r} is not a positive whole number below 1e18"


@given(st.integers(1, 10**12), st.sampled_from(["", "k", "Ki"]))
def test_whole_numbers_are_read_exactly(number: int, suffix: str) -> None:
    assert parse_count(f"{number}{suffix}") == number * {"": 1, "k": 1000, "Ki": 1024}[suffix]


@pytest.mark.parametrize(("text", "count"), [("9007199254740993", 9007199254740993), ("4.02k", 4020)])
def test_numbers_that_a_float_cannot_hold(text: str, count: int) -> None:
    assert parse_count(text) == count


@given(st.integers(4, 39), st.sampled_from("kMBT"))
def test_a_formatted_count_reads_back(quarters: int, suffix: str) -> None:
    """1k to 9.75T in quarters, which floats hold."""
    text = f"{quarters / 4:g}{suffix}"
    assert format_count(parse_count(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(70.6e9), "70.6B"),
        (format_count(4_000_000), "4M"),
        (format_count(1.2e13), "12T"),
        (format_count(999), "999"),
        (format_bytes(1.3e9), "1.3 GB"),
        (format_bytes(4.2e13), "42 TB"),
        (format_bytes(999), "999 B"),
        (format_bytes(-2500), "-2.5 kB"),
        (format_seconds(2.29e-11), "22.9 ps"),
        (format_seconds(5.85e-9), "5.85 ns"),
        (format_seconds(-669e-9), "-669 ns"),
        (format_seconds(11.6e-6), "11.6 us"),
        (format_seconds(0.3), "300 ms"),
        (format_seconds(2.5), "2.5 s"),
        (format_seconds(1370.4), "1,370 s"),
        (format_seconds(3 * 3600), "3 h"),
        (format_seconds(17 * 86400), "17 days"),
        (format_seconds(0), "0 s"),
    ],
)
def test_formats(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(999_999), "1M"),
        (format_count(999.7), "1k"),
        (format_bytes(999_999), "1 MB"),
        (format_bytes(999.7), "1 kB"),
        (format_seconds(0.9999), "1 s"),
        (format_seconds(0.9999e-3), "1 ms"),
        (format_seconds(0.9999e-6), "1 us"),
        (format_seconds(0.9999e-9), "1 ns"),
    ],
)
def test_a_value_that_rounds_to_the_next_unit_takes_it(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30ms", 0.03), ("0.03", 0.03), (".5", 0.5), ("2 s", 2), ("1.5min", 90), ("1e-2", 0.01)],
)
def test_times(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "30 msec", "ms", ""])
def test_texts_that_are_no_times(text):
    with pytest.raises(MeshwrightError, match=r"is not a time; write 0\.03"):
        parse_seconds(text)


def test_a_large_number_per_token_needs_a_unit():
    assert parse_seconds_per_token("30s") == 30
    with pytest.raises(MeshwrightError, match="30 has no unit and would be seconds; write 30ms, or 30s"):
        parse_seconds_per_token("30")
    assert parse_seconds_to_first_token("30") == 30
