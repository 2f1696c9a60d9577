"""Numbers read from text with suffixes, and formatted with units. SI; bytes are decimal."""

import re
from decimal import Decimal
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A number, or an array with one for each of many layouts or batches. A string, as planning imports no numpy.
Numeric: TypeAlias = "float | NDArray[Any]"

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_IN_WORDS = {"thousand": "k", "million": "m", "billion": "b", "trillion": "t"}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# Lengths of sequences are usually powers of two, so their k is 1,024.
_LENGTHS = {"": 1, "k": 2**10, "m": 2**20}


def parse_count(text: str | int) -> int:
    """An integer: `4M` is 4,000,000, `32k` is 32,000, `32Ki` is 32,768.

    >>> parse_count("4M"), parse_count("1.5k"), parse_count("32Ki"), parse_count("15 trillion tokens")
    (4000000, 1500, 32768, 15000000000000)
    >>> parse_count("128x8192"), parse_count("1,048,576")
    (1048576, 1048576)
    """
    if re.fullmatch(r"\s*[1-9][\w,]*(\s*[x*]\s*[1-9][\w,]*)+\s*", str(text)):
        return prod(map(parse_count, re.split(r"[x*]", str(text))))
    return _parse(text, _SUFFIXES, "4194304, 4M (4e6), 32k (32e3) or 32Ki (32768)")


def parse_length(text: str | int) -> int:
    """A length of a sequence: `8k` is 8,192, `1M` is 1,048,576.

    >>> parse_length("8k"), parse_length("8Ki"), parse_length("131072")
    (8192, 8192, 131072)
    """
    return _parse(text, _LENGTHS, "4096, 8k (8192) or 1M (1048576)")


def parse_share(text: str | float) -> float:
    """A share below 1: `10%` and `0.1` are a tenth.

    >>> parse_share("10%"), parse_share("0.25"), parse_share("10 percent")
    (0.1, 0.25, 0.1)
    """
    number = re.sub(r"\s*(pct|percent)$", "%", str(text).strip())
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if re.fullmatch(r"[0-9.]+ ?[kmgt]i?b", number.lower()):
        raise MeshwrightError(
            f"{text!r} is not a share; write 10%, or bound the memory: --given 'memory<=70GB'"
        )
    if not 0 <= share < 1:
        raise MeshwrightError(f"{text!r} is not a share; write 10% or 0.1, below 100%")
    return share


_TIMES = {
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
}
# A number without a unit that is larger than this was meant in milliseconds, or is a mistake.
_MOST_PER_TOKEN, _MOST_TO_FIRST = 1.0, 60.0


def parse_seconds(text: str | float) -> float:
    """Seconds: `0.03` and `30ms` are the same.

    >>> parse_seconds("30ms"), parse_seconds("0.5"), parse_seconds("1.5s"), parse_seconds("2 minutes")
    (0.03, 0.5, 1.5, 120.0)
    """
    match = re.fullmatch(
        r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)(?:e(-?[0-9]{1,3}))?\s*([a-zµ]*)\s*", str(text).lower()
    )
    factor = match and _TIMES.get(match[3] or "s")
    if rate := re.fullmatch(
        r"\s*(\d+\.?\d*)\s*(?:tok|tokens|t)?\s*(?:/|per)\s*s(?:ec)?\s*", str(text).lower()
    ):
        raise MeshwrightError(f"{text!r} is a rate; write its time, {1e3 / float(rate[1]):g}ms")
    if match and match[3] == "m":
        raise MeshwrightError(f"{text!r} may be minutes or milliseconds; write {match[1]}min or {match[1]}ms")
    if not match or not factor:
        raise MeshwrightError(f"{text!r} is not a time; write 0.03 (seconds), 30ms or 2s")
    return float(f"{match[1]}e{match[2] or 0}") * factor


def parse_seconds_per_token(text: str | float) -> float:
    """Seconds for each token. Raises MeshwrightError for a number above 1 without a unit."""
    return _with_a_unit_above(_MOST_PER_TOKEN, text)


def parse_seconds_to_first_token(text: str | float) -> float:
    """Seconds to the first token. Raises MeshwrightError for a number above 60 without a unit."""
    return _with_a_unit_above(_MOST_TO_FIRST, text)


# Seconds of the periods of rates and prices. Clouds bill a month as 730 hours, a twelfth of a year.
SECONDS_OF = {
    "": 1,
    "s": 1,
    "sec": 1,
    "second": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
    "week": 7 * 86400,
    "month": 730 * 3600,
}
_LEAST_RATE, _MOST_RATE = 1e-3, 1e9


def parse_rate(text: str | float) -> float:
    """Requests per second: `20`, `20/s`, `20 rps` and `1200/min` are the same.

    >>> parse_rate("20"), parse_rate("20 rps"), parse_rate("1200 rpm"), parse_rate("72e3/h")
    (20.0, 20.0, 20.0, 20.0)
    >>> parse_rate("2.628M/month")
    1.0
    """
    number = r"[0-9][0-9_,]*\.?[0-9]*(?:e[0-9]{1,2})?|\.[0-9]+"
    form = rf"({number})([km]?)(?:rps|qps|req(?:uests?)?)?(?:/|per)?([a-z]*)"
    match = re.fullmatch(form, str(text).lower().replace(" ", "").replace("rpm", "/min"))
    if not match or match[3] not in SECONDS_OF:
        raise MeshwrightError(f"{text!r} is not a rate; write 20 (requests per second), 20/s or 1200/min")
    if decimal := decimal_comma(str(text)):
        raise MeshwrightError(f"{text!r} has a decimal comma; write {decimal}")
    rate = float(match[1].replace("_", "").replace(",", "")) * _SUFFIXES[match[2]] / SECONDS_OF[match[3]]
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise MeshwrightError(f"{text!r} is out of range; it must be at least {_LEAST_RATE:g} a second")
    return rate


def parse_days(text: str | float) -> float:
    """Days: `30`, `30d` and `30 days` are the same, and `2 weeks` are 14.

    >>> parse_days("30"), parse_days("30d"), parse_days("2 weeks"), parse_days("36h"), parse_days("12 months")
    (30.0, 30.0, 14.0, 1.5, 365.0)
    """
    match = re.fullmatch(
        r"([0-9]+\.?[0-9]*|\.[0-9]+)(d|days?|w|weeks?|months?|h|hours?)?", str(text).lower().replace(" ", "")
    )
    if not match or not 0 < float(match[1]) < _MOST_RATE:
        raise MeshwrightError(f"{text!r} is not a number of days; write 30, 30d or 2w")
    period = {"m": "month", "w": "week", "h": "hour", "d": "day"}[(match[2] or "d")[0]]
    return float(match[1]) * SECONDS_OF[period] / SECONDS_OF["day"]


def _with_a_unit_above(most: float, text: str | float) -> float:
    seconds, number = parse_seconds(text), str(text).strip()
    if seconds > most and number[-1].isdigit():
        raise MeshwrightError(f"{number} has no unit and would be seconds; write {number}ms, or {number}s")
    return seconds


def _parse(text: str | int, suffixes: dict[str, int], examples: str) -> int:
    number = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)\.?[0-9]*(?:e[0-9]{1,4})?"
    form = rf"\s*({number})\s*([a-z]*?)\s*(?:tokens|tok)?\s*"
    match = re.fullmatch(form, str(text).lower())
    factor = match and (suffixes | _BINARY).get(_IN_WORDS.get(match[2], match[2]))
    if not match or not factor:
        if decimal := decimal_comma(str(text)):
            raise MeshwrightError(f"{text!r} has a decimal comma; write {decimal}")
        is_list = re.fullmatch(r"\w+(,\s*\w+)+", str(text))
        if within := re.fullmatch(r"[a-z=]+(\d+)", str(text)):
            examples = within[1]
        raise MeshwrightError(
            f"{text!r} is not a count{', but several' if is_list else ''}; write {examples}"
        )
    value = Decimal(match[1].replace("_", "").replace(",", "")) * factor
    if value > 10**18 or value != int(value) or value < 1:
        plain = str(text).replace(".", "")
        hint = f"; write {plain}" if re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+", str(text)) else ""
        raise MeshwrightError(f"{text!r} is not a positive whole number below 1e18{hint}")
    return int(value)


def decimal_comma(text: str) -> str:
    """A number with a decimal comma, written with a point; empty for other text.

    >>> decimal_comma("1,5T"), decimal_comma("2,50 EUR"), decimal_comma("1,048,576"), decimal_comma("8,16,32")
    ('1.5T', '2.50 EUR', '', '')
    """
    match = re.fullmatch(r"(\D*(?:0|[1-9])),(\d{1,2}(?:[^\d,].*)?)", text.strip())
    return f"{match[1]}.{match[2]}" if match else ""


_SIZES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes with a unit: `70GB` is 70e9, `70GiB` is 70 x 2^30.

    >>> parse_bytes("70GB"), parse_bytes("1.5 GiB")
    (70000000000, 1610612736)
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([a-z]+)\s*", text.lower())
    if not match or match[2] not in _SIZES:
        raise MeshwrightError(f"{text!r} is not a size; write 70GB or 65GiB")
    return round(float(match[1]) * _SIZES[match[2]])


def divisors(number: int) -> list[int]:
    """The divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def whole(figure: Numeric) -> Any:
    """The nearest whole number, or an array of them.

    >>> whole(2.6)
    3
    """
    return round(figure) if isinstance(figure, float | int) else figure.round()


def format_count(value: float) -> str:
    """`value` in three digits with a decimal suffix: 70.6G as `70.6B`.

    >>> format_count(70.6e9), format_count(4_000_000), format_count(512)
    ('70.6B', '4M', '512')
    """
    return _with_unit(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))) or f"{value:.3g}"


def format_number_of(number: int, noun: str) -> str:
    """`number` and its noun, in the plural unless the number is 1.

    >>> format_number_of(1, "chip"), format_number_of(4096, "chip")
    ('1 chip', '4,096 chips')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def and_more(number: int) -> str:
    """The end of a list that leaves out `number` of its entries; "" if it leaves out none.

    >>> and_more(2), and_more(0)
    (' and 2 more', '')
    """
    return f" and {number} more" if number > 0 else ""


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str | None:
    """Three digits in the largest unit that gives at least 1 after rounding, None if there is none."""
    for factor, suffix in units:
        digits = f"{value / factor:.3g}"
        if abs(float(digits)) >= 1:
            return digits + suffix
    return None


def format_bytes(value: float) -> str:
    """`value` bytes with a decimal unit: `1.3 GB`.

    >>> format_bytes(1.3e9), format_bytes(17)
    ('1.3 GB', '17 B')
    """
    units = ((1e15, " PB"), (1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
    return _with_unit(value, units) or f"{value:.0f} B"


def format_joules(value: float) -> str:
    """`value` joules with a decimal unit.

    >>> format_joules(207_000), format_joules(17)
    ('207 kJ', '17 J')
    """
    return _with_unit(value, ((1e12, " TJ"), (1e9, " GJ"), (1e6, " MJ"), (1e3, " kJ"))) or f"{value:.3g} J"


def format_seconds(value: float) -> str:
    """`value` seconds with a unit by its size: `20.2 ns`, `11.6 us`, `300 ms`, `2.5 s`, `17 days`.

    >>> format_seconds(20.2e-9), format_seconds(11.6e-6), format_seconds(0.3), format_seconds(17 * 86400)
    ('20.2 ns', '11.6 us', '300 ms', '17 days')
    """
    if value == 0:
        return "0 s"
    if value >= 999.5 * 86400:
        return f"{value / 86400:,.0f} days"
    if value >= 2 * 86400:
        return f"{value / 86400:.3g} days"
    if value >= 2 * 3600:
        return f"{value / 3600:.3g} h"
    if value >= 999.5:
        return f"{value:,.0f} s"
    units = ((1, " s"), (1e-3, " ms"), (1e-6, " us"), (1e-9, " ns"))
    return _with_unit(value, units) or f"{round(value * 1e12, 4):.3g} ps"
