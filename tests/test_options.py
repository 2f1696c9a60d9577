"""Options that dataclasses declare: their texts and bounds."""

from dataclasses import dataclass
from math import inf, nan
from typing import Any, Literal

import pytest

from meshwright.errors import MeshwrightError
from meshwright.options import REQUIRED, check_options, option, options_of, parse_dtype
from meshwright.units import parse_count


@dataclass(frozen=True)
class Settings:
    data: str = option(REQUIRED, help="The data.")
    steps: int | None = option(None, parser=parse_count, help="Last step.")
    keep: int = option(2, least=1, most=9, help="Checkpoints.")
    rate: float = option(0.5, above=0, help="Peak rate.")
    share: float = option(0.0, least=0, most=1, metavar="SHARE", help="A share.")
    from_: Literal["a", "b"] = option("a", help="Start.")
    dtype: str = option("bf16", parser=parse_dtype, help="A dtype.")
    derived: int = 3

    def __post_init__(self) -> None:
        check_options(self)


def test_names_and_metavars():
    options = options_of(Settings)
    assert {name: (each.flag, each.metavar) for name, each in options.items()} == {
        "data": ("--data", ""),
        "steps": ("--steps", "N"),
        "keep": ("--keep", "N"),
        "rate": ("--rate", "X"),
        "share": ("--share", "SHARE"),
        "from_": ("--from", ""),
        "dtype": ("--dtype", "DTYPE"),
    }
    assert options["steps"].kind is int and options["from_"].choices == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "4k", 4000),
        ("keep", "9", 9),
        ("keep", "x", "'x' is not a whole number"),
        ("keep", "0", "0 is out of range; it must be from 1 to 9"),
        ("keep", "9" * 400, "it must be from 1 to 9"),
        ("rate", "1e-3", 1e-3),
        ("rate", "nan", "nan is out of range; it must be a finite number, at least 0"),
        ("rate", "inf", "inf is out of range"),
        ("share", "1.5", "1.5 is out of range; it must be a finite number, from 0 to 1"),
        ("dtype", "f23", "dtype 'f23' is unknown"),
    ],
)
def test_texts(name: str, text: str, value: object):
    declared = options_of(Settings)[name]
    if not isinstance(value, str):
        assert declared.parse(text) == value
        return
    with pytest.raises(MeshwrightError, match=value):
        declared.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": 0}, "--keep 0 is below 1"),
        ({"keep": 10}, "--keep 10 is above 9"),
        ({"rate": 0.0}, "--rate 0 is not above 0"),
        ({"rate": inf}, "--rate inf is not above 0 and finite"),
        ({"rate": nan}, "--rate nan is not above 0"),
        ({"share": -0.5}, "--share -0.5 is not a number from 0 up"),
        ({"from_": "c"}, "--from 'c' is unknown; known: a, b"),
    ],
)
def test_values_of_python_are_checked(values: dict[str, Any], message: str):
    with pytest.raises(MeshwrightError) as raised:
        Settings(**{"data": "d", **values})
    assert str(raised.value) == message
