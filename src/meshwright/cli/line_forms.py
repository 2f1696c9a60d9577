"""Pieces of a command line in a form that their command accepts together."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path

from meshwright.cli.line_examples import OF_REQUESTS, num_devices_of
from meshwright.cli.line_merging import merged
from meshwright.cli.line_pieces import Command, Piece, by_option
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import load, usual

_ANSWER = 512  # most tokens of the answer, if a line gives only the length of the context
_LEAST_RUN_TOKENS = 1_000_000_000  # of a run; fewer are the batch of a step


def on_all_chips(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces with a machine as large as their mesh, and a layout with replicas (data) on all chips.

    A training layout with a pipeline but without microbatches becomes --given.
    """
    from meshwright.errors import HardwareError, LayoutError
    from meshwright.layout.short import DEGREES, read_words

    machine = next((piece.value for piece in pieces if piece.option == "--hardware"), "")
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    if machine and mesh and ":" not in usual(machine):
        sized = f"{machine}:{num_devices_of(mesh)}"
        pieces = [replace(each, value=sized) if each.option == "--hardware" else each for each in pieces]
    made = []
    for piece in pieces:
        if piece.option == "--layout":
            with suppress(HardwareError, LayoutError, ValueError):  # the last: a degree that is no number
                words, num_chips = read_words(piece.value), load(machine).num_chips
                num_devices = prod(int(str(words.get(axis, 1))) for axis in DEGREES if axis != "expert")
                left = num_chips // num_devices if num_devices > 0 else 0
                if left > 1 and left * num_devices == num_chips and not {"data", "fsdp"} & set(words):
                    # --fix tensor=8 states a part of the layout, and leaves the rest to the search.
                    is_part = piece.is_other and command.path == ("plan", "train")
                    piece = (
                        replace(piece, option="--given")
                        if is_part
                        else replace(piece, value=f"data={left},{piece.value}")
                    )
                # With one microbatch a pipeline is idle, so the search finds their number.
                if command.path == ("plan", "train") and not _is_whole(words):
                    piece = replace(piece, option="--given")
        made.append(piece)
    return made


def _is_whole(words: Mapping[str, object]) -> bool:
    """Whether the words of a layout have no pipeline, or the number of its microbatches."""
    return int(str(words.get("pipe", 1))) == 1 or "microbatches" in words


def of_its_command(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces in a form that the command accepts together.

    An option that came from another program is renamed or left out if the rest of the line excludes it.
    """
    given = {piece.option for piece in pieces}
    if "--host" in given and "--port" in command.options and "--port" not in given:
        pieces = [each for piece in pieces for each in _address(piece)]
    if command.path[0] == "plan":
        pieces = [
            replace(piece, value=_plan_file(piece.value)) if piece.option in ("-o", "--output") else piece
            for piece in pieces
        ]
    match command.path:
        case ("train",):
            return _of_training(pieces)
        case ("plan", "train"):
            return _of_training_plan(pieces)
        case ("plan", "serve"):
            return _of_serving_plan(pieces)
        case ("audit",):
            return _of_script(pieces)
        case ("report",):
            return [_as_page(piece) for piece in pieces]
    return list(pieces)


def _of_script(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw audit. A script has its own mesh, so --mesh becomes a machine with its devices."""
    given = by_option(pieces)
    if ".py:" not in given.get("", "") or "--mesh" not in given:
        return list(pieces)
    kept = [piece for piece in pieces if piece.option != "--mesh"]
    if "--hardware" in given:
        return kept
    return [*kept, Piece("--hardware", f"cpu:{num_devices_of(given['--mesh'])}")]


def _of_training_plan(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw plan train: --days with --smallest, and a few --tokens as --batch-tokens."""
    given = {piece.option for piece in pieces}
    if {"--layout", "--for"} <= given:  # one layout is not ranked
        pieces = [piece for piece in pieces if piece.option != "--for"]
    if "--tokens" in given and "--batch-tokens" not in given:
        pieces = [_as_batch(piece) for piece in pieces]
    if {"--days", "--tokens"} <= given and "--smallest" not in given:
        pieces = [*pieces, Piece("--smallest")]
    return _of_one_sequence(_with_context(pieces))


def _of_serving_plan(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw plan serve: of requests, or of one step.

    --ttft-p95 and --tpot-p95 need --rate, and --context and --batch need --phase.
    """
    given = {piece.option for piece in pieces}
    if "--batch" in given and "--phase" not in given:
        pieces = [*pieces, Piece("--phase", "generate", is_other=True)]
        given.add("--phase")
    if {"--prompt-tokens", "--output-tokens"} <= given:
        pieces = _of_batch(pieces)
    elif "--prompt-tokens" in given:
        pieces = _with_answers(pieces)
    elif "--phase" not in given:
        pieces = [each for piece in pieces for each in _lengths_of(piece)]
    given = {piece.option for piece in pieces}
    if "--phase" not in given:
        of_step = ("--context", "--batch")
        pieces = [piece for piece in pieces if not (piece.is_other and piece.option in of_step)]
    if "--rate" not in given:
        means = {"--ttft-p95": "--ttft", "--tpot-p95": "--tpot"}
        pieces = [replace(piece, option=means.get(piece.option, piece.option)) for piece in pieces]
    return list(pieces)


def _as_page(piece: Piece) -> Piece:
    """The file of a report as HTML; other pieces, and paths without a name such as `.`, unchanged."""
    is_file = piece.option in ("-o", "--output") and Path(piece.value).name != ""
    return replace(piece, value=str(Path(piece.value).with_suffix(".html"))) if is_file else piece


def _as_batch(piece: Piece) -> Piece:
    """--tokens as --batch-tokens if they are too few for a run; other pieces unchanged."""
    from meshwright.units import parse_count

    with suppress(MeshwrightError):
        if piece.option == "--tokens" and parse_count(piece.value) < _LEAST_RUN_TOKENS:
            return replace(piece, option="--batch-tokens")
    return piece


def _with_answers(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with --output-tokens in place of another program's context: the context less the prompt."""
    from meshwright.units import parse_length

    given = {piece.option: piece for piece in pieces}
    context = given.get("--context")
    with suppress(MeshwrightError):
        if context is not None and context.is_other:
            answer = parse_length(context.value) - parse_length(given["--prompt-tokens"].value)
            if answer > 0:
                kept = [piece for piece in pieces if piece.option != "--context"]
                return _of_batch([*kept, Piece("--output-tokens", f"{answer}")])
    return list(pieces)


def _lengths_of(piece: Piece) -> list[Piece]:
    """Another program's context as --prompt-tokens and --output-tokens; other pieces unchanged."""
    from meshwright.units import parse_length

    if piece.option != "--context" or not piece.is_other:
        return [piece]
    with suppress(MeshwrightError):
        context = parse_length(piece.value)
        answer = min(_ANSWER, context // 2)
        return [Piece("--prompt-tokens", f"{context - answer}"), Piece("--output-tokens", f"{answer}")]
    return [piece]


def _of_batch(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of requests and of another program's batch, as one step at the length of the requests.

    If the line has an option that only a plan of requests takes, it stays such a plan, without the phase.
    """
    from meshwright.units import parse_length

    given = {piece.option: piece for piece in pieces}
    if "--phase" not in given or not given["--phase"].is_other:
        return list(pieces)
    if given.keys() & OF_REQUESTS:
        return [piece for piece in pieces if piece.option != "--phase"]
    lengths = "--prompt-tokens", "--output-tokens"
    with suppress(MeshwrightError):
        context = sum(parse_length(given[name].value) for name in lengths)
        kept = [piece for piece in pieces if piece.option not in (*lengths, "--context")]
        return [*kept, Piece("--context", str(context))]
    return list(pieces)


def _of_training(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw train with a model to fine-tune as --from, and a text alone as the argument."""
    from meshwright.cli.value_kinds import is_checkpoint, is_corpus

    given = {piece.option for piece in pieces}
    made = []
    for piece in pieces:
        if not piece.option and "--from" not in given and "--rl" not in given and len(given) > 1:
            is_model = not is_corpus(piece.value) and not piece.value.endswith(".toml")
            piece = Piece("--from", piece.value) if is_model and is_checkpoint(piece.value) else piece
            given.add(piece.option)
        elif not piece.option and "--from" in given and "--data" not in given and is_corpus(piece.value):
            piece = Piece("--data", piece.value)
        elif piece.option == "--data" and is_corpus(piece.value) and not given & {"", "--from", "--resume"}:
            piece = Piece("", piece.value)
        made.append(piece)
    return (
        sorted(made, key=lambda piece: bool(piece.option))
        if {piece.option for piece in made} != given
        else made
    )


def _plan_file(path: str) -> str:
    """The plan.toml of a folder, or of a file with another suffix."""
    return f"{path}plan.toml" if path.endswith("/") else re.sub(r"(\w)(\.\w+)?$", r"\1.toml", path)


def _address(piece: Piece) -> list[Piece]:
    """A host with its port as two options; other pieces unchanged."""
    host, colon, port = piece.value.partition(":")
    is_both = piece.option == "--host" and colon and port.isdigit()
    return [replace(piece, value=host), Piece("--port", port)] if is_both else [piece]


def _of_one_sequence(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with a batch of at least one sequence: 8k tokens are 8,000, and a length of 8k is 8,192."""
    from meshwright.units import parse_count, parse_length

    given = by_option(pieces)
    with suppress(MeshwrightError, KeyError):
        length = parse_length(given["--seq-len"])
        if parse_count(given["--batch-tokens"]) < length:
            batch = Piece("--batch-tokens", f"{length}")
            return [batch if piece.option == batch.option else piece for piece in pieces]
    return list(pieces)


def _with_context(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with the model's context changed if a typed --seq-len is longer."""
    from meshwright.models.presets import load_model
    from meshwright.units import parse_length

    given = by_option(pieces)
    if {"--model", "--seq-len"} <= given.keys() and "max_seq_len" not in given.get("--set", ""):
        with suppress(MeshwrightError, OSError):
            length = parse_length(given["--seq-len"])
            if length > load_model(given["--model"]).max_seq_len:
                return merged([*pieces, Piece("--set", f"max_seq_len={length}")])
    return list(pieces)
