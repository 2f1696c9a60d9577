"""Amounts in a sentence, each with its role: tokens, days, dollars, users, requests, lengths, memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.cli.other_values import dtype_here
from meshwright.dtypes import KNOWN
from meshwright.hardware.prices import AN_HOUR

Role = Literal[
    "price", "budget", "hourly", "rate", "users", "prompt", "answer", "context", "batch", "tokens", "epochs",
    "latency", "tpot", "days", "dtype", "memory",
]  # fmt: skip
_NUMBER = r"\d[\d,_]*(?:\.\d+)?(?:e\d+)?"
# A number, perhaps with a factor: 15T, 500 thousand.
_COUNT = rf"(?P<n>{_NUMBER}(?:\s?(?:thousand|million|billion|trillion)|[kmbt]i?)?)"
_MONEY = (
    rf"(?:[$€]\s?(?P<n>{_NUMBER}\s?(?:thousand|million|k|m|b)?)(?:\s?(?:usd|eur))?"
    rf"|(?P<m>{_NUMBER}\s?(?:thousand|million|k|m)?)\s?(?:usd|eur|euros?|dollars?|bucks))"
)
_HOURLY = rf"\s?{AN_HOUR}"
_PERIOD = r"(?P<period>seconds?|secs?|s|minutes?|min|hours?|hr|h|days?|d|weeks?|months?)\b"
_SECONDS = "(?:ms|milliseconds?|secs?|seconds?|s)"
_REQUESTS = r"(?:requests?|reqs?|queries|prompts|calls|chats|messages)"
_LENGTH = rf"(?P<n>{_NUMBER}[km]?)"
_ANSWERS, _PROMPTS = "(?:outputs?|answers?|responses?|completions?|replies)", "(?:inputs?|prompts?)"
_CONTEXTS = r"(?:context|ctx|seq(?:uences?|[-\s]len(?:gth)?)?\s?(?:length)?)"
# The patterns of amounts. An earlier pattern takes the words before a later one is tried.
_FORMS: tuple[tuple[Role, str], ...] = (
    ("hourly", _MONEY + _HOURLY),
    ("budget", _MONEY),
    ("rate", rf"{_COUNT}\s?{_REQUESTS}?\s?(?:/|\b(?:per|an|a|every|each)\b)\s?{_PERIOD}"),
    ("rate", rf"{_COUNT}\s?(?P<unit>rps|qps|rpm)\b"),
    ("rate", rf"{_COUNT}\s?(?P<period>daily|hourly)\s{_REQUESTS}"),
    (
        "users",
        rf"{_COUNT}\s(?:concurrent\s|simultaneous\s|parallel\s|daily\s|active\s)*"
        r"(?:users?|people|customers|clients|employees|developers|students|sessions|streams)\b",
    ),
    ("answer", rf"{_LENGTH}[-\s]?(?:tokens?[-\s])?(?:out|{_ANSWERS})\b"),
    ("answer", rf"\b{_ANSWERS}\s(?:of\s)?{_LENGTH}(?:[-\s]tokens?)?\b"),
    ("prompt", rf"{_LENGTH}[-\s]?(?:tokens?[-\s])?(?:in|{_PROMPTS})\b"),
    ("prompt", rf"\b{_PROMPTS}\s(?:of\s)?{_LENGTH}(?:[-\s]tokens?)?\b"),
    ("batch", rf"\bbatch(?:[-\s]size)?\s(?:of\s)?(?P<n>{_NUMBER}[km]?)\b(?:\s(?P<unit>tokens?))?"),
    ("context", rf"\b(?:context|ctx|seq(?:uence)?)[-\s]?(?:len(?:gth)?|size|window)?\s(?:of\s)?{_LENGTH}\b"),
    ("context", rf"{_LENGTH}[-\s]?(?:tokens?[-\s])?{_CONTEXTS}\b"),
    ("tokens", rf"{_COUNT}[-\s]?(?:tokens?|toks?)\b"),
    ("tokens", r"(?P<n>\d+(?:\.\d+)?t)\b"),  # 15T, of a run
    ("epochs", rf"(?P<n>{_NUMBER})\s?(?:epochs?|passes)\b"),
    ("tpot", rf"\b(?:tpot|itl|per\stoken)\s(?:of\s|under\s)?(?P<n>{_NUMBER}\s?{_SECONDS})\b"),
    ("latency", rf"(?P<n>{_NUMBER}\s?{_SECONDS})\b"),
    ("days", rf"(?P<n>{_NUMBER})\s?(?P<unit>minutes?|min|hours?|hrs?|h|days?|weeks?|months?)\b"),
    ("dtype", rf"\b(?P<n>{'|'.join(map(re.escape, KNOWN))}|[48][-\s]?bits?)\b"),
    ("memory", r"(?P<n>\d+)\s?gi?b\b(?:\sof\s(?:v?ram|memory))?"),
)  # fmt: skip
_MOST_OF_A_CHIP = 50.0  # dollars an hour; a higher price is taken for the whole machine's
FACTORS = {"thousand": "k", "million": "M", "billion": "B", "trillion": "T"}


@dataclass(frozen=True)
class Amount:
    """An amount of a sentence: its role, its value in our form, and the words that stated it."""

    role: Role
    value: str
    words: str


def amounts_of(text: str) -> tuple[list[Amount], str]:
    """The amounts of a sentence, in its order, and the text without them.

    >>> amounts_of("on 15T tokens in 2 weeks at $2/hour")[0][1:]
    [Amount(role='days', value='14', words='2 weeks'), Amount(role='price', value='2', words='$2/hour')]
    >>> [each.value for each in amounts_of("1000 users, 5M requests per month, 2k prompts")[0]]
    ['1000', '5M/month', '2k']
    """
    amounts: list[tuple[int, Amount]] = []
    for role, form in _FORMS:
        while match := re.search(rf"(?<![\w.]){form}", text, re.I):
            amounts.append((match.start(), _amount(role, match)))
            # Blanks, so that the matches after it keep their places.
            text = text[: match.start()] + " " * len(match[0]) + text[match.end() :]
    return [amount for _, amount in sorted(amounts, key=lambda each: each[0])], " ".join(text.split())


def _amount(role: Role, match: re.Match[str]) -> Amount:
    """The amount of a match of a pattern of `_FORMS`, in the form that our options take."""
    groups = match.groupdict()
    value = _plain(groups.get("n") or groups.get("m") or "")
    period, unit = groups.get("period") or "", groups.get("unit") or ""
    if role == "hourly":
        from meshwright.units import parse_count

        is_of_all = not groups.get("chip") and parse_count(value.partition(".")[0] or "1") > _MOST_OF_A_CHIP
        role = "hourly" if is_of_all else "price"
    elif role == "rate":
        value += {"daily": "/day", "hourly": "/hour", "rpm": "/min"}.get(period or unit.lower(), "")
        value += f"/{_singular(period)}" if period and "/" not in value else ""
    elif role == "days":
        from meshwright.units import parse_days

        minutes = unit.lower().startswith("min")
        days = parse_days(value) / 1440 if minutes else parse_days(f"{value}{_singular(unit)}")
        value = f"{days:.4g}"
    elif role == "batch" and unit:
        value += " tokens"
    elif role == "dtype":
        value = dtype_here(value) or value
    elif role in ("latency", "tpot"):
        value = re.sub(r"\s|illiseconds?|ec(ond)?s?$", "", value)
    return Amount(role, value, match[0].strip())


def _plain(number: str) -> str:
    """A number without separators, with a suffix in place of a word: `500 thousand` is 500k."""
    text = number.strip().replace(",", "").replace("_", "")
    for word, suffix in FACTORS.items():
        text = re.sub(rf"\s?{word}$", suffix, text, flags=re.I)
    return text


def _singular(unit: str) -> str:
    """A unit of time as `parse_rate` and `parse_days` take it."""
    plain = unit.lower().removesuffix("s") if len(unit) > 1 else unit.lower()
    return {"hr": "hour", "sec": "second"}.get(plain, plain)


def each_word(text: str) -> Iterator[str]:
    """The words of a sentence without the punctuation at their ends."""
    for word in text.split():
        if plain := word.strip("?,;!\"'()").rstrip("."):
            yield plain
