"""Values of other programs' options in our units, which other options of the line decide."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import prod

from meshwright.cli.line_merging import merged
from meshwright.cli.line_pieces import Command, Piece, by_option
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import load

# Options of other programs whose conversion needs the values of other options of the line, so that it waits
# until all are read. By the option of ours that they become: a name in the meantime, and their names.
_DEFERRED = {
    "--given": {
        "--micro-batch-size": (
            "micro-batch-size",
            "mbs",
            "train-micro-batch-size-per-gpu",
            "local-batch-size",
        ),
        "--layers-per-virtual-stage": (
            "num-layers-per-virtual-pipeline-stage",
            "num-layers-per-virtual-stage",
        ),
    },
    "--tokens": {
        "--run-samples": ("train-samples", "num-train-samples", "total-samples"),
        "--run-steps": ("train-iters", "max-steps", "train-steps", "training-steps", "steps", "iterations"),
    },
}

RUN_LENGTHS = tuple(_DEFERRED["--tokens"])

# The text by which an offered line shows that a deferred option was converted.
SHOWN_DEFERRED = {
    "--micro-batch-size": "microbatches=",
    "--layers-per-virtual-stage": "schedule=",
    "--run-samples": "--tokens ",
    "--run-steps": "--tokens ",
}


def deferred_option(given: str, command: Command) -> str:
    """The name of a deferred option until `converted` replaces it; empty for other options.

    >>> from meshwright.cli.line_commands import command_at
    >>> deferred_option("--mbs", command_at(("plan", "train")))
    '--micro-batch-size'
    """
    plain = given.lstrip("-").rpartition(".")[2].replace("_", "-").lower()
    tables = [names for ours, names in _DEFERRED.items() if ours in command.options]
    return next((name for names in tables for name, theirs in names.items() if plain in theirs), "")


def converted(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with values in our units that other values decide; without them if those are missing.

    Batches in sequences become tokens, the size of a microbatch the number of microbatches, and `all` of an
    axis the number of chips.
    """
    return [
        _with_degrees(piece, pieces)
        for piece in merged([each for piece in _in_tokens(pieces) for each in _undeferred(piece, pieces)])
    ]


def _with_degrees(piece: Piece, pieces: Sequence[Piece]) -> Piece:
    """A layout with a number in place of an axis's `all`; other pieces unchanged.

    `fsdp=all` is the chips over the degrees of the other axes. `expert=all` is all chips, and the ones that
    data and pipe leave become tensor.
    """

    if "=all" not in piece.value:
        return piece
    given = by_option(pieces)
    with suppress(MeshwrightError, KeyError):
        chips = load(given["--hardware"]).num_chips
        if "expert=all" not in piece.value:
            others = prod(_degree(axis, given) for axis in ("data", "fsdp", "tensor", "pipe", "context"))
            return replace(piece, value=piece.value.replace("=all", f"={chips // others}"))
        words = [word for word in piece.value.split(",") if word != "expert=all"]
        left = chips // prod(_degree(axis, given) for axis in ("data", "tensor", "pipe"))
        tensor = [f"tensor={left}"] if left > 1 and "tensor=" not in piece.value else []
        return replace(piece, value=",".join([*words, *tensor, f"expert={chips}"]))
    return piece


def _in_tokens(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with a batch of sequences converted to tokens; without it if their length is not given."""
    from meshwright.units import parse_length

    given = by_option(pieces)
    accumulated = re.search(r"microbatches=(\d+)", given.get("--given", ""))
    made = []
    for piece in pieces:
        if piece.is_sequences and "--seq-len" in given:
            with suppress(MeshwrightError):
                factor = Fraction(piece.value) * parse_length(given["--seq-len"])
                if piece.of_a_device:
                    factor *= load(given.get("--hardware", "")).num_chips
                    factor *= int(accumulated[1]) if accumulated else 1
                made.append(Piece(piece.option, str(factor)))
        elif not piece.is_sequences:
            made.append(piece)
    return made


def _undeferred(piece: Piece, pieces: Sequence[Piece]) -> list[Piece]:
    """A deferred option as options of ours, [] if it cannot be converted; other pieces unchanged."""
    given = by_option(_in_tokens(pieces))
    converters = {
        "--micro-batch-size": _microbatches,
        "--layers-per-virtual-stage": _interleave,
        "--run-samples": _run_of_samples,
        "--run-steps": _run_of_steps,
    }
    if piece.option not in converters:
        return [piece]
    with suppress(MeshwrightError, ValueError, KeyError, ZeroDivisionError):
        return [replace(each, is_other=True) for each in converters[piece.option](piece.value, given)]
    return []


def _degree(axis: str, given: Mapping[str, str]) -> int:
    """The degree of an axis that --given or --layout fixes; 1 if they do not."""
    words = f"{given.get('--given', '')},{given.get('--layout', '')}"
    return int(match[1]) if (match := re.search(rf"\b{axis}=(\d+)", words)) else 1


def _microbatches(size: str, given: Mapping[str, str]) -> list[Piece]:
    """The microbatches a step, as a word of a layout, for `size` sequences a microbatch of each replica.

    A line without a batch gets the batch of one microbatch a replica. [] if the number or the batch is not
    whole. As in Megatron, an axis without a degree in the line has degree 1.
    """
    from meshwright.units import parse_count, parse_length

    replicas = Fraction(
        load(given["--hardware"]).num_chips,
        prod(_degree(axis, given) for axis in ("tensor", "pipe", "context")),
    )
    if "--batch-tokens" not in given:
        batch = replicas * int(size) * parse_length(given["--seq-len"])
        return [Piece("--batch-tokens", f"{batch}")] if batch.denominator == 1 else []
    sequences = Fraction(parse_count(given["--batch-tokens"]), parse_length(given["--seq-len"]))
    number = sequences / replicas / int(size)
    return [_layout_words(given, f"microbatches={number}")] if number.denominator == 1 else []


def _interleave(layers: str, given: Mapping[str, str]) -> list[Piece]:
    """The schedule with chunks of `layers` layers, several to a stage; [] if they do not divide the model."""
    from meshwright.models.presets import load_model

    stages = _degree("pipe", given)
    number = Fraction(load_model(given["--model"]).num_layers, stages * int(layers))
    if number.denominator != 1 or stages == 1:
        return []
    schedule = f"schedule=interleaved,interleave={number}" if number > 1 else "schedule=1f1b"
    return [_layout_words(given, schedule)]


def _run_of_samples(samples: str, given: Mapping[str, str]) -> list[Piece]:
    """The tokens of a run of a number of sequences."""
    from meshwright.units import parse_count, parse_length

    return [Piece("--tokens", f"{parse_count(samples) * parse_length(given['--seq-len'])}")]


def _run_of_steps(steps: str, given: Mapping[str, str]) -> list[Piece]:
    """The tokens of a run of a number of batches."""
    from meshwright.units import parse_count

    return [Piece("--tokens", f"{parse_count(steps) * parse_count(given['--batch-tokens'])}")]


def _layout_words(given: Mapping[str, str], words: str) -> Piece:
    """Words of a layout as a piece of --layout if the line has one, otherwise of --given."""
    return Piece("--layout" if "--layout" in given else "--given", words)
