"""Lines of two commands: download a checkpoint and use it, or plan a model and train it."""

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.cli.line_pieces import Command, Piece
from meshwright.cli.value_kinds import is_corpus, is_run

# Options that take a folder, each with the arguments of `hf download` for models or data sets.
_DOWNLOADED = {
    "--checkpoint": (),
    "--from": (),
    "--draft-checkpoint": (),
    "--data": ("--repo-type", "dataset"),
}
# Repositories of presets on the Hugging Face hub, whose names differ from the presets' by owner and case.
_REPOSITORIES = {
    "meta-llama": "Llama-2-7b-hf Llama-2-13b-hf Llama-2-70b-hf Meta-Llama-3-8B Meta-Llama-3-70B Llama-3.1-8B "
    "Llama-3.1-70B Llama-3.1-405B Llama-3.2-1B Llama-3.2-3B",
    "mistralai": "Mistral-7B-v0.1 Mixtral-8x7B-v0.1 Mixtral-8x22B-v0.1",
    "Qwen": "Qwen2.5-0.5B Qwen2.5-1.5B Qwen2.5-3B Qwen2.5-7B Qwen2.5-14B Qwen2.5-32B Qwen2.5-72B Qwen3-0.6B "
    "Qwen3-1.7B Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B",
    "google": "gemma-2b gemma-7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b-pt gemma-3-4b-pt "
    "gemma-3-12b-pt gemma-3-27b-pt",
    "openai-community": "gpt2 gpt2-medium gpt2-large gpt2-xl",
    "openai": "gpt-oss-20b gpt-oss-120b",
    "deepseek-ai": "DeepSeek-V2-Lite DeepSeek-V3 DeepSeek-R1",
    "HuggingFaceTB": "SmolLM2-135M SmolLM2-360M SmolLM2-1.7B",
    "microsoft": "phi-2 phi-4",
    "EleutherAI": "pythia-160m pythia-1.4b pythia-6.9b pythia-12b gpt-neox-20b gpt-j-6b",
    "allenai": "OLMo-2-1124-7B OLMo-2-1124-13B",
}
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
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
    made, lines = [], []
    for piece in pieces:
        is_model = piece.option in _DOWNLOADED and piece.option != "--data" and not Path(piece.value).exists()
        name = repository_of(piece.value) if is_model else piece.value
        owner, _, folder = name.rpartition("/")
        is_path = is_run(name) or Path(owner).exists()
        if piece.option in {*_DOWNLOADED} & {*given} and _HUB.fullmatch(name) and not is_path:
            words = ["hf", "download", name, *_DOWNLOADED[piece.option], "--local-dir", folder]
            lines.append(shlex.join(words))
            piece = replace(piece, value=folder)
        made.append(piece)
    return made, lines


def repository_of(model: str) -> str:
    """The repository on the Hugging Face hub of a preset; another name as it is.

    >>> repository_of("qwen3-8b"), repository_of("mistral-7b"), repository_of("runs/demo")
    ('Qwen/Qwen3-8B', 'mistralai/Mistral-7B-v0.1', 'runs/demo')
    """
    from meshwright.models.presets import on_the_hub

    for owner, names in _REPOSITORIES.items():
        for name in names.split():
            if model.lower() in (name.lower(), on_the_hub(name)):
                return f"{owner}/{name}"
    return model


def parted(pieces: Sequence[Piece], training: Command, planning: Command) -> tuple[list[Piece], list[Piece]]:
    """The pieces of `mw plan train`, and of `mw train`, for a line of mw train that names a preset.

    Both are empty if the line names no preset, fine-tunes, or continues a run.
    """
    from meshwright.cli.line_options import replaced

    of_plan: list[Piece] = []
    of_run: list[Piece] = []
    for piece in pieces:
        planned = None if piece.option in training.options else replaced(piece, planning)
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
        of_plan += [Piece("--model", _OWN_MODEL), *longer]
    if not _is_of_preset(of_plan) or {"--from", "--lora", "--rl", "--run"} & {each.option for each in of_run}:
        return [], []
    return [*of_plan, *_examples(of_plan), Piece("-o", "plan.toml")], [Piece("", "plan.toml"), *of_run]


def _is_of_preset(pieces: Sequence[Piece]) -> bool:
    """Whether the model of a plan is a preset that is trained whole, without LoRA."""
    from meshwright.models.presets import PRESETS

    model = next((piece.value for piece in pieces if piece.option == "--model"), "")
    is_adapted = any("lora" in piece.value for piece in pieces if piece.option == "--set")
    return model.lower() in PRESETS and not Path(model).exists() and not is_adapted


def _examples(pieces: Sequence[Piece]) -> list[Piece]:
    """Examples of the machine, sequence length and batch that a plan lacks: this machine's CPUs."""
    from meshwright.models.presets import load_model

    given = {piece.option: piece.value for piece in reversed(pieces)}  # the first value of each
    longest = min(load_model(given["--model"].lower()).max_seq_len, _LONGEST_SEQUENCE)
    length = int(given["--seq-len"]) if given.get("--seq-len", "").isdecimal() else longest
    batch = f"{_SEQUENCES * length}"
    usual = {"--hardware": "cpu:8", "--seq-len": f"{length}", "--batch-tokens": batch}
    return [Piece(name, value) for name, value in usual.items() if name not in given]
