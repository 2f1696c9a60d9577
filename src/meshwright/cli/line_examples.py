"""Examples for options that a line lacks: a machine that holds its model, lengths, a checkpoint."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, log2, prod

from meshwright.cli.line_pieces import Command, Piece, by_option
from meshwright.cli.other_notation import AXES
from meshwright.cli.other_values import RUN_TOKENS
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import chip_of, everyday, load, specs, usual

# Examples for lines that lack them: the lengths of requests that arrive at a rate, and a checkpoint.
_LENGTHS_AT_A_RATE = {"--prompt-tokens": "1k", "--output-tokens": "256"}
_CHECKPOINT = "runs/demo"

# An example of a machine: its chips at least, the seconds of its run at most, the model's bytes a parameter
# (bf16 weights; for training also a bf16 gradient, and weights and two moments in float32), the share of the
# memory that these may take, and the MFU of the run.
_LEAST_CHIPS = {"train": 8, "serve": 1}
_RUN_SECONDS = 30 * 86_400
_PARAMETER_BYTES = {"train": 16, "serve": 2}
_MEMORY_SHARE, _MFU = 0.5, 0.4

# Options of mw plan serve that one step does not take.
OF_REQUESTS = {
    "--rate",
    "--ttft",
    "--tpot",
    "--ttft-p95",
    "--tpot-p95",
    "--lengths",
    "--trace",
    "-o",
    "--output",
}


def num_devices_of(mesh: str) -> int:
    """The devices of the text of a mesh or a layout: the product of its sizes."""
    return prod(int(size) for size in re.findall("=([0-9]+)", mesh))


def _example(names: Sequence[str], pieces: Sequence[Piece], command: Command) -> str:
    """A value for an option that a line lacks: a machine for its mesh, or an example from the help."""
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    if "--tokens" in names:
        return RUN_TOKENS
    if "--data" in names:
        return "chats.jsonl"
    if any(piece.option == "--rate" for piece in pieces) and (length := _LENGTHS_AT_A_RATE.get(names[-1])):
        return length
    if "--checkpoint" in names:
        return _CHECKPOINT
    if "--model" in names and (preset := _of_sizes(pieces)):
        return preset
    if "--hardware" in names and any(piece.option == "--smallest" for piece in pieces):
        return "h100"  # a chip, since its number is searched
    if "--hardware" in names and mesh:
        return f"h100:{num_devices_of(mesh)}"
    if "--mesh" in names and (of_machine := _mesh_of_machine(pieces)):
        return of_machine
    if "--hardware" in names and command.path in (("plan", "train"), ("plan", "serve")):
        return f"h100:{_num_chips('h100', pieces, command)}"
    example = next(filter(None, map(command.example_of, names)), "")
    return _within_context(example, pieces) if "--seq-len" in names else example


def _mesh_of_machine(pieces: Sequence[Piece]) -> str:
    """The mesh of the line's machine with the axes of its expression; "" without a machine.

    It has the axes of the machine's topology; if the expression has any other letter, its first letter has
    all chips.
    """
    given = by_option(pieces)
    letters = re.findall(r"_\{?([A-Z](?:,[A-Z])*)", given.get("", ""))
    named = list(dict.fromkeys(letter for each in letters for letter in each if letter in AXES)) or [AXES[0]]
    with suppress(MeshwrightError):
        machine = load(given.get("--hardware", ""))
        sizes = dict(zip(AXES, (size for size in machine.dims if size > 1), strict=False))
        sizes = sizes if set(named) <= sizes.keys() else {named[0]: machine.num_chips}
        return ",".join(f"{name}={size}" for name, size in sizes.items())
    return ""


def _num_chips(name: str, pieces: Sequence[Piece], command: Command) -> int:
    """The power of two of chips that hold the line's model and end its run in a month.

    A rough example, without a plan: by the bytes and the shares above.
    """
    from meshwright.models.count import count_params
    from meshwright.models.presets import load_model
    from meshwright.units import parse_count

    given = by_option(pieces)
    chip, use = chip_of(name), command.path[1]
    chips = float(_LEAST_CHIPS[use])
    with suppress(MeshwrightError, OSError):
        params = count_params(load_model(given.get("--model") or command.example_of("--model")))
        chips = max(chips, _PARAMETER_BYTES[use] * params.total / (_MEMORY_SHARE * chip.hbm_bytes))
        if use == "train" and "--tokens" in given:
            flops = 6 * params.active * parse_count(given["--tokens"])
            chips = max(chips, flops / (_RUN_SECONDS * _MFU * chip.flops("bf16")))
    return 2 ** ceil(log2(chips))


def _with_its_chip(spec: str) -> str:
    """A Mac or a laptop as its one chip; other machines unchanged.

    >>> _with_its_chip("macbook"), _with_its_chip("h100:8")
    ('m4-max:1', 'h100:8')
    """
    chips = everyday(spec) if re.match(r"(i?mac|macbook|laptop)\b", spec, re.I) else ()
    return f"{chips[0]}:1" if chips else spec


def with_numbers(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces with a number of chips for each chip that --hardware names bare: the same for all."""
    at = next((at for at, piece in enumerate(pieces) if piece.option == "--hardware"), None)
    given = by_option(pieces)
    is_of_step = "--phase" in given and not given.keys() & OF_REQUESTS
    if at is None or (command.path == ("plan", "serve") and not is_of_step):
        return list(pieces)
    typed = [usual(spec) for spec in specs(pieces[at].value)]
    machines = list(map(_with_its_chip, typed))
    with suppress(MeshwrightError, OSError, ValueError):
        bare = [spec for spec in machines if ":" not in spec and not spec.endswith(".toml")]
        number = max((_num_chips(spec, pieces, command) for spec in bare), default=0)
        if command.path == ("plan", "serve") and "--layout" in given:  # one step of one layout
            number = num_devices_of(given["--layout"])
        if bare or machines != typed:
            sized = ",".join(f"{spec}:{number}" if spec in bare else spec for spec in machines)
            return [*pieces[:at], replace(pieces[at], value=sized), *pieces[at + 1 :]]
    return list(pieces)


def _of_sizes(pieces: Sequence[Piece]) -> str:
    """The preset with all sizes that --set gives, at least its layers and width; "" if none has them."""
    from meshwright.models.presets import PRESETS

    words = ",".join(piece.value for piece in pieces if piece.option == "--set")
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)\b", words)}
    if not {"num_layers", "d_model"} <= sizes.keys():
        return ""
    alike = (
        name
        for name, config in PRESETS.items()
        if all(getattr(config, field, None) == size for field, size in sizes.items())
    )
    return next(alike, "")


def _within_context(length: str, pieces: Sequence[Piece]) -> str:
    """The example `length` of a sequence, or the context of the line's model if that is shorter."""
    from meshwright.models.presets import load_model
    from meshwright.units import parse_length

    model = next((piece.value for piece in pieces if piece.option == "--model"), "")
    with suppress(MeshwrightError, OSError):
        longest = load_model(model).max_seq_len
        return length if parse_length(length) <= longest else f"{longest}"
    return length


def lacking(pieces: Sequence[Piece], command: Command) -> list[str]:
    """The options that a command asks for when it runs, though its parser does not."""
    given = by_option(pieces)
    if command.path == ("plan", "serve"):
        by_phase = {"generate": ["--context"], "prefill": ["--prompt-tokens"]}
        lengths = [] if {"--lengths", "--trace"} & set(given) else ["--prompt-tokens", "--output-tokens"]
        return [name for name in by_phase.get(given.get("--phase", ""), lengths) if name not in given]
    if command.path == ("plan", "train") and "--days" in given:
        return [name for name in ("--tokens",) if name not in given]
    if command.path == ("train",) and "--from" in given and not {"--data", "--run", "--resume"} & set(given):
        return ["--data"]
    if command.path == ("bench", "serve"):
        return [] if {"--url", "--plan"} & given.keys() else ["--url"]
    if command.path == ("compare",) and any(0 < piece.value.count("@") < 3 for piece in pieces):
        return [name for name in ("--batch-tokens", "--seq-len") if name not in given]
    return []


def completed(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces, with examples of the required options and arguments that the line lacks."""
    given = {piece.option for piece in pieces}
    made = list(pieces)
    for param in command.command.params:
        if not param.required or given & set(getattr(param, "opts", ())):
            continue
        name = param.opts[-1] if param.param_type_name == "option" else ""
        if not name and pieces and command.path[0] in ("generate", "serve"):
            continue  # the user's text cannot be guessed
        is_text = any(not piece.option and " " in piece.value for piece in pieces)
        if name == "--checkpoint" and any(not piece.option for piece in pieces) and not is_text:
            continue
        names = param.opts if name else [""]
        if name not in given and (value := _example(names, made, command)):
            made.insert(0 if not name else len(made), Piece(name, value))
    for name in lacking(made, command):
        if value := _example([name], made, command):
            made.append(Piece(name, value))
    return made
