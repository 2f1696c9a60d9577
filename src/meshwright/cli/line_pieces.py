"""A command line taken apart into options and arguments, and the command that reads them."""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import typer

from meshwright.dtypes import Use
from meshwright.errors import MeshwrightError

_OPTION = re.compile(r"--\w|-[A-Za-z]")  # the beginning of an option: --4bit, -m
# Options of number types and their uses.
_USES: dict[str, Use] = {
    "--weights-dtype": "weights",
    "--kv-dtype": "cache",
    "--compute-dtype": "activations",
}
# Commands that need the number of chips of each machine in --hardware, as all of mw plot do.
_WITH_NUMBERS = ("plan", "train"), ("plan", "rl")
# Commands of mw that several processes may run: `mw launch local -- train plan.toml` lacks the `mw`.
LAUNCHED = "train", "serve", "bench", "audit", "generate"


@dataclass(frozen=True)
class Piece:
    """An option with its value, or an argument, whose `option` is empty.

    is_other: replaces an option of another program. is_sequences: the value counts sequences, while the
    option takes tokens. of_a_device: it counts the sequences of one device. is_example: the value was
    not typed, but is an example in the words that replace an option.
    """

    option: str
    value: str = ""
    is_other: bool = False
    is_sequences: bool = False
    of_a_device: bool = False
    is_example: bool = False

    @property
    def words(self) -> list[str]:
        return [word for word in (self.option, self.value) if word]


@dataclass(frozen=True)
class Command:
    """A command of `mw` with its parameters, by its path, such as `plan train`."""

    path: tuple[str, ...]
    command: Any = field(hash=False, compare=False)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The parameters by all names of the options."""
        return {
            name: param
            for param in self.command.params
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }

    @cached_property
    def arguments(self) -> list[Any]:
        return [param for param in self.command.params if param.param_type_name == "argument"]

    @property
    def required(self) -> list[str]:
        """The names of the required options, the last of each."""
        return [param.opts[-1] for param in self.options.values() if param.required]

    @property
    def most_arguments(self) -> float:
        return sum(float("inf") if param.nargs == -1 else param.nargs for param in self.arguments)

    def takes_value(self, option: str) -> bool:
        return option in self.options and not self.options[option].is_flag

    def fault(self, option: str, value: str) -> str:
        """The message about a value that the option refuses; empty if it takes the value."""
        try:
            needs_number = self.path in _WITH_NUMBERS or self.path[0] == "plot"
            check_value(option, value, needs_number=needs_number)
            self.command.make_context(self.path[-1], [option, value])
        except (MeshwrightError, OSError, ValueError) as error:
            return str(error) or "?"
        except typer.TyperException as error:
            # The parser has read this value before it reports missing options.
            return "" if type(error).__name__ == "MissingParameter" else error.message
        return ""

    def parses(self, words: Sequence[str]) -> bool:
        try:
            self.command.make_context(self.path[-1], list(words))
        except (typer.TyperException, MeshwrightError, typer.Exit):
            return False
        return True

    def example_of(self, option: str) -> str:
        """The value of an option in the examples of the command's help; for "" the first argument."""
        for line in (self.command.help or "").replace("\\\n", " ").splitlines():
            if line.strip().startswith("mw "):
                words = shlex.split(line.strip())[1 + len(self.path) :]
                for piece in pieces_of(words, self):
                    if piece.option == option:
                        return piece.value
        return ""


def by_option(pieces: Iterable[Piece]) -> dict[str, str]:
    """The value of each option, the last one if it is repeated; "" has the last argument."""
    return {piece.option: piece.value for piece in pieces}


def check_value(option: str, value: str, *, needs_number: bool) -> None:
    """Raise MeshwrightError for a value that a command refuses only when it runs.

    needs_number: the command needs the number of chips of a machine.
    """
    if option == "--hardware":
        from meshwright.hardware.catalog import chip_of, load, specs, usual

        for spec in specs(value):
            is_chip = ":" not in usual(spec) and not needs_number
            chip_of(usual(spec)) if is_chip else load(spec)
    elif option in _CHECKS:
        _CHECKS[option](value)
    elif use := _USES.get(option):
        from meshwright.dtypes import named, types_for

        for name in value.split(","):
            if named(name) not in types_for(use):
                raise MeshwrightError(f"{option} {name}: fits: {', '.join(types_for(use))}")


def _check_model(value: str) -> None:
    from meshwright.models.presets import load_model

    load_model(value)


def _check_layout(value: str) -> None:
    from meshwright.layout.short import clean_words, read_words, whole_form

    whole_form(clean_words(read_words(value)))


def _check_conditions(value: str) -> None:
    from meshwright.plan.given import memory_limit, parse_conditions

    parse_conditions(memory_limit(value)[0])


def _check_engine(value: str) -> None:
    from meshwright.engines.serving_engine import ENGINES

    _ = ENGINES[value]


def _check_launcher(value: str) -> None:
    from meshwright.programs.launcher import LAUNCHERS

    _ = LAUNCHERS[value]


def _check_optimizer(value: str) -> None:
    from meshwright.optimizers import OPTIMIZERS

    if value not in OPTIMIZERS:
        raise MeshwrightError(f"--optimizer {value}: fits: {', '.join(OPTIMIZERS)}")


def _check_sizes(value: str) -> None:
    from meshwright.notation.parse import parse_sizes

    parse_sizes(value)


def _check_price(value: str) -> None:
    from meshwright.hardware.prices import parse_prices

    parse_prices(value, ["the chip"])


def _check_target(value: str) -> None:
    from meshwright.cli.other_values import is_chip
    from meshwright.hardware.catalog import chip

    if value != value.lower():
        raise MeshwrightError(f"--target {value}: write {value.lower()}")
    if is_chip(value):
        raise MeshwrightError(f"--target {value}: it is a kind of chips; write {chip(value).kind}")


def pieces_of(words: Sequence[str], command: Command) -> list[Piece]:
    """The options and arguments of a line; an unknown option takes the next word as its value."""
    pieces, at = [], 0
    while at < len(words):
        word, at = words[at], at + 1
        name, equals, value = word.partition("=")
        follows = at < len(words) and not _OPTION.match(words[at])
        if equals and f"--{name.replace('_', '-')}" in command.options:
            pieces.append(Piece(f"--{name.replace('_', '-')}", value))
        elif equals and any(name == param.name for param in command.arguments):
            pieces.append(Piece("", value))
        elif not _OPTION.match(word):
            pieces.append(Piece("", word))
        elif equals and name.startswith("--"):
            pieces.append(Piece(name, value))
        elif word in command.options and not command.takes_value(word):
            pieces.append(Piece(word))
        elif follows:
            pieces.append(Piece(word, words[at]))
            at += 1
        else:
            pieces.append(Piece(word))
    return pieces


# The checks of options' values.
_CHECKS: dict[str, Callable[[str], None]] = {
    "--model": _check_model,
    "--layout": _check_layout,
    "--given": _check_conditions,
    "--engine": _check_engine,
    "--for": _check_launcher,
    "--target": _check_target,
    "--mesh": _check_sizes,
    "--dims": _check_sizes,
    "--price": _check_price,
    "--optimizer": _check_optimizer,
}
