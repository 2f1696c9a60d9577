"""Lines of two commands: download a checkpoint and use it, or plan a model and train it."""

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.cli.line_conversions import RUN_LENGTHS
from meshwright.cli.line_pieces import Command, Piece, by_option
from meshwright.cli.spoken_names import environment
from meshwright.cli.value_kinds import is_corpus, is_in_usual_folder, may_be_on_the_hub

# Options that take a folder, each with the arguments of `hf download` for models or data sets.
_DOWNLOADED = {
    "--checkpoint": (),
    "--from": (),
    "--draft-checkpoint": (),
    "--data": ("--repo-type", "dataset"),
}
_OWN_MODEL = "tiny"  # the preset to change if a line gives only sizes
# For the example of a plan: the most tokens of a sequence, and the sequences of a step.
_LONGEST_SEQUENCE, _SEQUENCES = 4096, 16


def downloaded(pieces: Sequence[Piece], given: Collection[str]) -> tuple[list[Piece], list[str]]:
    """The pieces with folders in place of names on the Hugging Face hub, and the lines that download them.

    given: the options of the typed line; others are examples, and are not downloaded.

    >>> downloaded([Piece("--checkpoint", "org/name")], ["--checkpoint"])[1]
    ['hf download org/name --local-dir name']
    >>> downloaded([Piece("--from", "llama-3-8b")], ["--from"])[1]
    ['hf download meta-llama/Meta-Llama-3-8B --local-dir Meta-Llama-3-8B']
    """
    from meshwright.models.repositories import repository_of

    made, lines = [], []
    for piece in pieces:
        is_model = piece.option in _DOWNLOADED and piece.option != "--data" and not Path(piece.value).exists()
        name = repository_of(piece.value) if is_model else piece.value
        owner, _, folder = name.rpartition("/")
        is_path = is_in_usual_folder(name) or Path(owner).exists()
        if piece.option in {*_DOWNLOADED} & {*given} and may_be_on_the_hub(name) and not is_path:
            words = ["hf", "download", name, *_DOWNLOADED[piece.option], "--local-dir", folder]
            lines.append(shlex.join(words))
            piece = replace(piece, value=folder)
        made.append(piece)
    return made, lines


def parted(pieces: Sequence[Piece], training: Command, planning: Command) -> tuple[list[Piece], list[Piece]]:
    """The pieces of `mw plan train`, and of `mw train`, for a line of mw train that names a preset.

    Both are empty if the line names no preset, fine-tunes, or continues a run.
    """
    from meshwright.cli.line_options import replaced

    of_plan: list[Piece] = []
    of_run: list[Piece] = []
    for piece in pieces:
        is_elsewhere = piece.option in training.options or environment(piece.option, piece.value)
        planned = None if is_elsewhere else replaced(piece, planning)
        if planned and planned[0].option in RUN_LENGTHS:  # mw train takes --steps instead
            planned = None
        if piece.option in planning.options and piece.option not in training.options:
            planned = [piece]
        if piece.option and planned:
            of_plan += [replace(each, is_other=True) for each in planned]
        else:
            is_text = not piece.option and is_corpus(piece.value)
            of_run.append(replace(piece, option="--data") if is_text else piece)
    options = {piece.option for piece in of_plan}
    is_of_text = "--data" in {piece.option for piece in of_run} and {"--batch-tokens", "--seq-len"} & options
    if ("--set" in options or is_of_text) and "--model" not in options:  # sizes of a model without a name
        length = next((piece.value for piece in of_plan if piece.option == "--seq-len"), "")
        longer = [Piece("--set", f"max_seq_len={length}")] if length else []
        of_plan += [Piece("--model", _OWN_MODEL), *longer, *_own_heads(of_plan)]
    if not _is_of_preset(of_plan) or {"--from", "--lora", "--rl", "--run"} & {each.option for each in of_run}:
        return [], []
    return [*of_plan, *_examples(of_plan), Piece("-o", "plan.toml")], [Piece("", "plan.toml"), *of_run]


def _own_heads(pieces: Sequence[Piece]) -> list[Piece]:
    """As many KV heads as --set gives query heads: the number in `_OWN_MODEL` may not divide them."""
    sizes = ",".join(piece.value for piece in pieces if piece.option == "--set")
    heads = re.search(r"\bnum_heads=(\d+)", sizes)
    return [Piece("--set", f"num_kv_heads={heads[1]}")] if heads and "num_kv_heads" not in sizes else []


def _is_of_preset(pieces: Sequence[Piece]) -> bool:
    """Whether the model of a plan is a preset that is trained whole, without LoRA."""
    from meshwright.models.presets import PRESETS

    model = next((piece.value for piece in pieces if piece.option == "--model"), "")
    is_adapted = any("lora" in piece.value for piece in pieces if piece.option == "--set")
    return model.lower() in PRESETS and not Path(model).exists() and not is_adapted


def _examples(pieces: Sequence[Piece]) -> list[Piece]:
    """Examples of the machine, sequence length and batch that a plan lacks: this machine's CPUs."""
    from meshwright.models.presets import load_model

    given = by_option(reversed(pieces))  # the first value of each
    longest = min(load_model(given["--model"].lower()).max_seq_len, _LONGEST_SEQUENCE)
    length = int(given["--seq-len"]) if given.get("--seq-len", "").isdecimal() else longest
    batch = f"{_SEQUENCES * length}"
    usual = {"--hardware": "cpu:8", "--seq-len": f"{length}", "--batch-tokens": batch}
    return [Piece(name, value) for name, value in usual.items() if name not in given]
