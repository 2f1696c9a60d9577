"""Arguments of mw audit in the form that it takes: FILE.py:FUNCTION, or a file of HLO."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.line_pieces import Piece
from meshwright.cli.other_files import step_of

# Options of other programs for the function of a script.
_FUNCTIONS = {"--fn", "--function", "--func", "--entry", "--entrypoint"}


def of_audit(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw audit, with `train.py step` and `train.py --function step` as train.py:step."""
    made: list[Piece] = []
    for piece in pieces:
        script = next((at for at, each in enumerate(made) if each.value.endswith(".py")), None)
        is_function = piece.option in _FUNCTIONS or not piece.option
        if script is not None and is_function and piece.value.isidentifier():
            made[script] = Piece("", f"{made[script].value}:{piece.value}")
        else:
            made.append(piece if piece.option else _program(piece.value))
    return [_with_function(piece) for piece in made]


def _with_function(piece: Piece) -> Piece:
    """A script's path with its step function, as FILE:FUNCTION; other pieces unchanged."""
    if piece.option or not piece.value.endswith(".py"):
        return piece
    script = Path(piece.value)
    return Piece("", f"{piece.value}:{step_of(script) if script.is_file() else 'step'}")


def _program(name: str) -> Piece:
    """A program of mw audit in its own form: `train.step` as train.py:step, a file of HLO as --hlo."""
    module, _, function = name.rpartition(".")
    if Path(name).suffix in (".txt", ".hlo") and Path(name).is_file():
        return Piece("--hlo", name)
    is_script = function != "py" and function.isidentifier() and Path(f"{module}.py").is_file()
    return Piece("", f"{module}.py:{function}" if is_script else name)
