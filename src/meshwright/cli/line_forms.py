"""Changes to the pieces of a command line as a whole: join, convert to our units, complete."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import ceil, log2, prod
from pathlib import Path

from meshwright.cli.line_pieces import Command, Piece
from meshwright.cli.other_values import LISTS, RUN_TOKENS, SLICE
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import GPUS_OF_A_HOST, chip_of, everyday, load, specs, usual

AXES = "XYZ"  # of meshes in the notation


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with repeated options joined, and with --given as a part of --layout if there is one.

    An inferred value gives way to a typed one. Options whose values cannot be joined stay, and the command
    refuses them.
    """
    has_layout = any(piece.option == "--layout" for piece in pieces)
    given = {piece.option for piece in pieces if not piece.is_example}
    pieces = [piece for piece in pieces if not (piece.is_example and piece.option in given)]
    typed = {piece.option for piece in pieces if not piece.is_other} - {"", "--hardware", *LISTS}
    pieces = [piece for piece in pieces if not (piece.is_other and piece.option in typed)]
    made: list[Piece] = []
    for piece in pieces:
        if has_layout and piece.option == "--given":
            piece = replace(piece, option="--layout")
        at = next((at for at, each in enumerate(made) if piece.option and each.option == piece.option), None)
        joined = None if at is None else _both(made[at], piece)
        if at is None or joined is None:
            made.append(piece)
        else:
            made[at] = joined
    return made


def _both(first: Piece, second: Piece) -> Piece | None:
    """One piece for two pieces of the same option; None if their values exclude each other."""
    are_other = first.is_other and second.is_other
    if first.option == "--tensor" and are_other:  # a server's tensor and pipeline parallelism
        degrees = first.value, second.value
        is_known = all(map(str.isdecimal, degrees))
        return replace(first, value=str(prod(map(int, degrees)))) if is_known else None
    if first.option == "--url" and are_other:  # --host and --port
        return replace(first, value=_url_of(first.value, second.value))
    if first.value == second.value:
        return first
    if first.option == "--hardware" and (first.is_other or second.is_other):
        typed, other = (first, second) if second.is_other else (second, first)
        return replace(second, value=_machine_of(typed.value, other.value))
    if first.option not in LISTS:
        return None
    words: dict[str, str] = {}
    for word in (*first.value.split(","), *second.value.split(",")):
        name = word.partition("=")[0] if re.fullmatch(r"\w+=[^=]*", word) else word
        if words.setdefault(name, word) != word:
            return None
    return replace(first, value=",".join(words.values()))


def _url_of(first: str, second: str) -> str:
    """The address of a host and of a port at localhost, in either order.

    >>> _url_of("10.0.0.1", "http://localhost:8000"), _url_of("http://localhost:80", "localhost")
    ('http://10.0.0.1:8000', 'http://localhost:80')
    """
    port = next((match[1] for each in (first, second) if (match := re.search(r":(\d+)$", each))), "8000")
    host = next((each for each in (first, second) if not each.endswith(f":{port}")), "localhost")
    return f"{host if '//' in host else f'http://{host}'}:{port}"


def _machine_of(first: str, second: str) -> str:
    """One machine of two: the hosts of one and the chips per host of the other.

    first: the typed one. h100 counts as no name, since options of other programs that count chips become
    `h100:N`.

    >>> _machine_of("h100:4x8", "a100:4"), _machine_of("h200", "h100:16"), _machine_of("h100:4x8", "h100x8")
    ('a100:4x4', 'h200:16', 'h100:4x8')
    >>> _machine_of("h100:32", "h100:4x8"), _machine_of("h100:1x8", "h100:2x8")
    ('h100:4x8', 'h100:2x8')
    >>> _machine_of("v5e:16x16", "2*v5p:4x4x4")
    '2*v5e:16x16'
    """
    first, second = usual(first), usual(second)
    for machine, other in ((first, second), (second, first)):
        slices, star, example = machine.partition("*")
        if star and example == SLICE:
            return f"{slices}*{other}"
    (name, _, sizes), (other, _, others) = first.partition(":"), second.partition(":")
    for machine, chip_name, other_name in ((first, name, other), (second, other, name)):
        # The number of hosts, here as `h100:NxM`, follows from the chips of a torus.
        if other_name == "h100" and ":" in machine and _is_of_torus(chip_name):
            return machine
    chip = other if name == "h100" else name
    if "x" in others and sizes:
        # The number of the typed machine counts the chips of one host, a larger one all chips.
        hosts, each = int(others.partition("x")[0]), sizes.rpartition("x")[2]
        is_of_all = "x" not in sizes and int(each) > GPUS_OF_A_HOST and int(each) % hosts == 0
        return f"{chip}:{hosts}x{int(each) // hosts if is_of_all else each}"
    by_host = next((each for each in (sizes, others) if "x" in each), "")
    plain = next((each for each in (others, sizes) if each and "x" not in each), "")
    return (
        f"{chip}:{by_host.partition('x')[0]}x{plain}" if by_host and plain else f"{chip}:{plain or by_host}"
    )


def _is_of_torus(name: str) -> bool:
    from meshwright.hardware.chip import Torus

    with suppress(MeshwrightError, OSError):
        return isinstance(chip_of(name).network, Torus)
    return False


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
_ANSWER = 512  # most tokens of the answer, if a line gives only the length of the context
_LEAST_RUN_TOKENS = 1_000_000_000  # of a run; fewer are the batch of a step
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
    given = {each.option: each.value for each in pieces}
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

    given = {piece.option: piece.value for piece in pieces}
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
    given = {each.option: each.value for each in _in_tokens(pieces)}
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


def launched(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw launch. If they have a plan in place of a command, the command is mw train."""
    command = [piece for piece in pieces if not piece.option]
    first = command[0].value if command else ""
    words = ("--", "mw", "train") if first.endswith(".toml") else ("--", "mw") if first == "train" else ()
    before = [Piece("", word) for word in words]
    return [*(piece for piece in pieces if piece.option), *before, *command]


def on_all_chips(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces with a machine as large as their mesh, and a layout with replicas (data) on all chips.

    A training layout with a pipeline but without microbatches becomes --given.
    """
    from meshwright.errors import HardwareError, LayoutError
    from meshwright.layout.short import DEGREES, read_words

    machine = next((piece.value for piece in pieces if piece.option == "--hardware"), "")
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    if machine and mesh and ":" not in usual(machine):
        sized = f"{machine}:{_num_devices(mesh)}"
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


def _num_devices(mesh: str) -> int:
    return prod(int(size) for size in re.findall("=([0-9]+)", mesh))


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
    given = {piece.option: piece.value for piece in pieces}
    if ".py:" not in given.get("", "") or "--mesh" not in given:
        return list(pieces)
    kept = [piece for piece in pieces if piece.option != "--mesh"]
    if "--hardware" in given:
        return kept
    return [*kept, Piece("--hardware", f"cpu:{_num_devices(given['--mesh'])}")]


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
        pieces = [*pieces, Piece("--phase", "generate")]
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


# Options of mw plan serve that one step does not take.
_OF_REQUESTS = {
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
    if given.keys() & _OF_REQUESTS:
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
        return f"h100:{_num_devices(mesh)}"
    if "--mesh" in names and (of_machine := _mesh_of_machine(pieces)):
        return of_machine
    if "--hardware" in names and command.path in (("plan", "train"), ("plan", "serve")):
        return f"h100:{_num_chips('h100', pieces, command)}"
    example = next(filter(None, map(command.example_of, names)), "")
    return _within_context(example, pieces) if "--seq-len" in names else example


def _mesh_of_machine(pieces: Sequence[Piece]) -> str:
    """The mesh of the line's machine with the axes of its expression; "" without a machine.

    Axes are those of the machine's topology, or all chips are one if its letter is no axis of the topology.
    """
    given = {piece.option: piece.value for piece in pieces}
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

    given = {piece.option: piece.value for piece in pieces}
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
    given = {piece.option: piece.value for piece in pieces}
    is_of_step = "--phase" in given and not given.keys() & _OF_REQUESTS
    if at is None or (command.path == ("plan", "serve") and not is_of_step):
        return list(pieces)
    typed = [usual(spec) for spec in specs(pieces[at].value)]
    machines = list(map(_with_its_chip, typed))
    with suppress(MeshwrightError, OSError, ValueError):
        bare = [spec for spec in machines if ":" not in spec and not spec.endswith(".toml")]
        number = max((_num_chips(spec, pieces, command) for spec in bare), default=0)
        if command.path == ("plan", "serve") and "--layout" in given:  # one step of one layout
            number = _num_devices(given["--layout"])
        if bare or machines != typed:
            sized = ",".join(f"{spec}:{number}" if spec in bare else spec for spec in machines)
            return [*pieces[:at], replace(pieces[at], value=sized), *pieces[at + 1 :]]
    return list(pieces)


def _of_one_sequence(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with a batch of at least one sequence: 8k tokens are 8,000, and a length of 8k is 8,192."""
    from meshwright.units import parse_count, parse_length

    given = {piece.option: piece.value for piece in pieces}
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

    given = {piece.option: piece.value for piece in pieces}
    if {"--model", "--seq-len"} <= given.keys() and "max_seq_len" not in given.get("--set", ""):
        with suppress(MeshwrightError, OSError):
            length = parse_length(given["--seq-len"])
            if length > load_model(given["--model"]).max_seq_len:
                return merged([*pieces, Piece("--set", f"max_seq_len={length}")])
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
    given = {piece.option: piece.value for piece in pieces}
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
