"""The parameters of a command from declared options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.main import get_command

from meshwright.cli.command_options import OptionsOf, command
from meshwright.cli.main import named_values
from meshwright.options import REQUIRED, option
from meshwright.units import parse_count


@dataclass(frozen=True)
class Settings:
    data: str | tuple[str, ...] = option(REQUIRED, help="The data.")
    kind: Literal["a", "b"] = option("a", help="A choice.")
    rate: float = option(0.5, least=0, help="A rate.")
    seed: int = option(0, least=0, help="A seed.")
    quiet: bool = option(False, help="Print less.")


@dataclass(frozen=True)
class Limits:
    keys: frozenset[str] = option(frozenset(), flag="--key", help="A key.", env="TEST_KEYS")
    files: tuple[Path, ...] = option((), flag="--file", help="A file.", unset="none")
    size: int | None = option(None, parser=parse_count, help="A size.")
    cached: bool = option(True, help="Cache.")
    kept: Literal["x", "y"] = option("x", help="Another choice.", after="output")


def run(*arguments: str) -> dict[str, Any]:
    """The arguments that the function gets."""
    app, got = typer.Typer(add_completion=False, rich_markup_mode=None), {}

    @command(app)
    def main(
        *,
        given: Annotated[dict[str, object], OptionsOf(Settings, given=True)],
        limits: Limits,
        output: Path | None = option(None, flag="-o --output", help="Write here."),
        ratio: float = option(0.5, least=0, most=1, help="A ratio."),
    ) -> None:
        """Do it."""
        got.update(locals())

    named_values(get_command(app)).main(list(arguments), prog_name="it", standalone_mode=False)
    got.pop("got", None)
    return got


def test_dataclasses_are_made_of_their_options(monkeypatch: pytest.MonkeyPatch):
    got = run("--key", "k", "--file", "a", "--file", "b", "--size", "4k", "--no-cached", "--kept", "y")
    assert got["limits"] == Limits(frozenset({"k"}), (Path("a"), Path("b")), 4000, False, "y")
    assert run() == {"given": {}, "limits": Limits(), "output": None, "ratio": 0.5}
    monkeypatch.setenv("TEST_KEYS", "a b")
    assert run()["limits"].keys == {"a", "b"}


def test_a_dict_has_only_options_that_were_given():
    assert run("--data", "d", "--rate", "0", "-o", "f")["given"] == {"data": "d", "rate": 0.0}
    got = run("--data", "d", "--data", "e", "--quiet", "--seed", "3", "--kind", "c")
    assert got["given"] == {"data": ("d", "e"), "quiet": True, "seed": 3, "kind": "c"}


def test_help_has_the_declared_order_and_defaults(capsys: pytest.CaptureFixture):
    run("--help")
    rows = [
        " ".join(line.split()) for line in capsys.readouterr().out.partition("Options:\n")[2].splitlines()
    ]
    assert rows[:-1] == [
        "--data DATA The data.",
        "--kind a|b A choice. [default: a]",
        "--rate X A rate. [default: 0.5]",
        "--seed N A seed. [default: 0]",
        "--quiet Print less.",
        "--key KEY A key. [env var: TEST_KEYS]",
        "--file FILE A file. [default: none]",
        "--size N A size.",
        "--cached / --no-cached Cache. [default: cached]",
        "-o, --output PATH Write here.",
        "--kept x|y Another choice. [default: x]",
        "--ratio X A ratio. [default: 0.5]",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "-1"], "-1 is out of range; it must be a finite number, at least 0"),
        (["--size", "x"], "'x' is not a count"),
        (["--ratio", "2"], "2 is out of range; it must be a finite number, from 0 to 1"),
        (["--kept", "z"], "'z' is not one of 'x', 'y'"),
    ],
)
def test_bad_values_name_the_option(arguments: list[str], message: str):
    with pytest.raises(typer.TyperException) as raised:
        run(*arguments)
    text = raised.value.format_message()
    assert arguments[0] in text and message in text


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--size", "1", "--size", "2"], "--size is given twice"),
        (["-o", "a", "--output=b", "-o", "c"], "--output is given 3 times"),
        (["--cached", "--no-cached"], "--cached is given twice"),
    ],
)
def test_the_last_value_of_an_option_counts_with_a_note(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*words)
    assert capsys.readouterr().err == f"mw: warning: {name}; the last value counts\n"
    assert run("--quiet", "--quiet")["given"] == {"quiet": True}
