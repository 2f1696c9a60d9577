"""Faults that a command finds only when it runs, in a line that its parser accepts."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.line_pieces import Command, Piece, by_option
from meshwright.errors import MeshwrightError, PlanError


def run_fault(command: Command, pieces: Sequence[Piece]) -> str:
    """The error of a command that refuses a combination of options or values; empty if it accepts them."""
    given = by_option(pieces)
    try:
        if command.path in (("shard",), ("collective",)):
            _check_expression(command, given)
        elif command.path[0] == "plan":
            _check_plan(command, given)
        elif command.path in (("compare",), ("audit",)):
            _check_files(pieces)
        elif command.path == ("report",):
            _check_page(given)
        elif command.path == ("export",):
            _check_run(given.get("", ""))
    except (MeshwrightError, OSError, ValueError) as error:
        return str(error) or "?"
    return ""


def _check_expression(command: Command, given: dict[str, str]) -> None:
    """Raise MeshwrightError for an expression of mw shard or mw collective that does not parse."""
    text = given.get("", "")
    if command.path == ("shard",):
        from meshwright.cli.shard import parse_shard
        from meshwright.notation.written import is_chain

        if not is_chain(text):
            parse_shard(text)
    else:
        from meshwright.cli.collective import parse_collective
        from meshwright.notation.parse import parse_mesh

        parse_collective(text, parse_mesh(given.get("--mesh", "")))


def _check_plan(command: Command, given: dict[str, str]) -> None:
    """Raise MeshwrightError for a layout that the model or the chips exclude, or --days without --tokens."""
    if "--days" in given and "--tokens" not in given:
        raise PlanError("--days needs the length of the run; add --tokens 1T")
    if {"--set", "--model"} <= given.keys():
        from meshwright.cli.console import load_model_with

        load_model_with(given["--model"], given["--set"])
    if not {"--layout", "--model"} <= given.keys():
        return
    from meshwright.hardware.catalog import load
    from meshwright.layout.layout_checks import layout_for
    from meshwright.models.presets import load_model
    from meshwright.plan.degrees import check_chips

    config = load_model(given["--model"])
    layout = layout_for(config, given["--layout"])
    if command.path == ("plan", "train") and "," not in (machine := given.get("--hardware", "")):
        check_chips(load(machine), layout, config)


def _check_files(pieces: Sequence[Piece]) -> None:
    """Raise MeshwrightError for an argument that is not a file, FILE.py:FUNCTION or MODEL@HARDWARE."""
    for piece in pieces:
        is_named = (
            "@" in piece.value or ".py:" in piece.value or Path(piece.value).suffix in (".toml", ".json")
        )
        is_file = not piece.value.startswith("http") and Path(piece.value).exists()
        if not (piece.option or is_named or is_file):
            raise PlanError(f"{piece.value} is no file")


def _check_run(name: str) -> None:
    """Raise PlanError for a model's name or a file of weights, which are no runs to export."""
    from meshwright.cli.value_kinds import is_in_usual_folder, is_model

    if not Path(name).is_dir() and (Path(name).suffix or (is_model(name) and not is_in_usual_folder(name))):
        raise PlanError(f"{name} is no run")


def _check_page(given: dict[str, str]) -> None:
    from meshwright.files import check_page

    for option in ("-o", "--output"):
        if path := given.get(option):
            check_page(Path(path))
