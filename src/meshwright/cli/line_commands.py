"""The commands that a wrong line may mean, each with the words that are left for it."""

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from meshwright.cli.commands import command_in
from meshwright.cli.line_intents import meant_lines
from meshwright.cli.line_options import PLACEHOLDER
from meshwright.cli.line_pieces import Command
from meshwright.cli.other_values import RUN_TOKENS
from meshwright.cli.other_words import ALIKE, command_here, command_of_words, no_command, subcommand_here
from meshwright.cli.value_kinds import is_corpus, is_engine, is_launcher, is_machine, is_model

_STARTING = {"start", "up", "now", "launch"}  # verbs after a command: server start
# Words after `mw bench` that mean a prediction if the line has a model and no server's --url.
_PREDICTED = {"throughput", "latency", "decode", "prefill", "inference"}
# Training programs, each with a pattern of the names of its scripts. NeMo's script has Megatron's name too.
_PROGRAMS = {
    "nemo": r"megatron_gpt_pretraining", "megatron": r"pretrain_\w+\.py|megatron",
    "maxtext": r"(?i:maxtext)", "torchtitan": "torchtitan",
}  # fmt: skip
# The usual command of a group, for a line that names none.
_USUAL = {"plan": "train", "bench": "serve"}


@cache
def command_at(path: tuple[str, ...]) -> Command | None:
    """The command with this path, such as ("plan", "train"); None if there is none."""
    if not path[0].isidentifier():
        return None
    command = command_in(path[0])
    inner = getattr(command, "commands", None)
    if inner:
        command = inner.get(path[1]) if len(path) == 2 else None
    elif len(path) != 1:
        return None
    return None if command is None else Command(path, command)


@cache
def every_command(commands: tuple[str, ...]) -> tuple[Command, ...]:
    """The commands of these modules, and of their groups."""
    paths = []
    for name in commands:
        inner = getattr(command_in(name), "commands", None) or {}
        paths += [(name, each) for each in inner] or [(name,)]
    return tuple(command for path in paths if (command := command_at(path)))


def candidates(words: Sequence[str], commands: Collection[str]) -> Iterator[tuple[Command, list[str]]]:
    """The commands that the first words name or mean, the likeliest first, each with the other words."""
    named = [word for word in words[:3] if not word.startswith("-")]
    if (compared := _of_machines(words)) and (command := command_at(("plan", "train"))):
        yield command, compared
    yield from filter(None, (of_typed(line) for line in _other_lines(words)))
    for path in (tuple(named[1::-1]), tuple(named[:1]), tuple(named[:2])):
        if path and path[0] in commands and (command := command_at(path)):
            rest = list(words)
            for word in path:
                rest.remove(word)
            yield command, rest
    if named and named[0] not in commands:
        yield from _of_another_first(named[0], words, commands)
    elif named and command_at(tuple(named[:1])) is None:
        yield from _of_group(named[0], words)


# Options that mw fit answers and mw model does not: `model llama-3-8b --gpu h100`.
_FIT_OPTIONS = {
    "--dtype", "--weights-dtype", "--bits", "--gpu", "--hardware", "--vram", "--memory",
}  # fmt: skip
_BATCHES = {"--batch", "--batch-size", "--batch-sizes", "--concurrency", "--max-num-seqs"}
_RANGE = re.compile(r"(\d+)(?:(?::|-|\.\.)(\d+)|((?:,\d+)+))")


def _other_lines(words: Sequence[str]) -> Iterator[list[str]]:
    """Lines of another command that words after the typed command ask for."""
    if words[0] == "model" and _FIT_OPTIONS & set(words):
        yield ["fit", *words[1:]]
    yield from _of_first_word(words)
    if is_launcher(words[0]):  # `megatron --tp 8`
        yield ["plan", "train", "--for", *words]
    if list(words[:2]) == ["hardware", "compare"] and (compared := _of_machines(words[1:])):
        yield ["plan", "train", *compared]
    if words[0] == "compare" and "--models" in words[:-1]:
        at = words.index("--models")
        words = [*words[:at], *words[at + 1].split(","), *words[at + 2 :]]
    models = [word for word in words[1:] if is_model(word)] if words[0] == "compare" else []
    bare = [word for word in words[1:] if is_machine(word)] if len(models) > 1 else []
    if len(models) > 1 and "--hardware" not in words and len(bare) == 1:
        words = [*(word for word in words if word not in bare), "--hardware", *bare]
    if len(models) > 1 and "--hardware" in words[:-1]:  # mw compare takes MODEL@MACHINE
        at = words.index("--hardware")
        named = [f"{word}@{words[at + 1]}" if word in models else word for word in words]
        yield [*named[:at], *named[at + 2 :]]
    if words[0] == "serve" and len(words) > 1 and is_engine(words[1]):  # `serve vllm MODEL`
        is_named = any(not word.startswith("-") or word in ("--checkpoint", "--model") for word in words[2:])
        yield ["serve", *words[2:]] if is_named else ["plan", "serve", "--engine", *words[1:]]
    if list(words[:2]) == ["plot", "roofline"] and "--model" in words:  # of a model's matmuls
        yield ["plot", "strategies", *words[2:]]
    if list(words[:2]) in (["plot", "loss"], ["plot", "metrics"]) and not words[-1].startswith("-"):
        yield ["report", words[-1]]  # of a run
    named = next((word for word in words[:-1] if word in _BATCHES), "")
    if list(words[:2]) == ["plan", "serve"] and named:
        at = words.index(named)
        if batches := _batches(words[at + 1]):  # mw plan serve prices one batch
            yield ["plot", "decode", *words[2:at], "--batches", batches, *words[at + 2 :]]


def _of_first_word(words: Sequence[str]) -> Iterator[list[str]]:
    """The lines for `budget 100000 --model M`, a run that the money pays, and for `benchmark --url U`."""
    if words[0] == "budget" and len(words) > 1 and re.fullmatch(r"\$?\d[\d.,]*[kKmM]?", words[1]):
        tokens = [] if "--tokens" in words else ["--tokens", RUN_TOKENS]
        yield ["plan", "train", *words[2:], *tokens, "--budget", words[1]]
    if words[0] in ("benchmark", "loadtest") and {"--url", "--base-url", "--endpoint"} & set(words):
        yield ["bench", "serve", *words[1:]]


def _batches(text: str) -> str:
    """A list of batches, or the powers of two of a range, joined by commas; "" for other text.

    >>> _batches("1:64"), _batches("1,8"), _batches("8")
    ('1,2,4,8,16,32,64', '1,8', '')
    """
    match = _RANGE.fullmatch(text)
    if match is None or match[3]:
        return text if match else ""
    first, last = int(match[1]), int(match[2])
    powers = (2**power for power in range(last.bit_length()))
    return ",".join(map(str, dict.fromkeys([first, *(each for each in powers if first < each < last), last])))


def _of_group(name: str, words: Sequence[str]) -> Iterator[tuple[Command, list[str]]]:
    """The commands of a group such as `plan` that the words name, then its usual one."""
    inner = list(command_in(name).commands)
    if name == "bench" and "--model" in words and "--url" not in words and words[1] in _PREDICTED:
        yield from filter(None, (of_typed(["plan", "serve", *words[2:]]),))
    for word in words[1:]:
        if command := command_at((name, subcommand_here(word, inner) or word)):
            at = words.index(word)
            begins = at - 1 if words[at - 1].startswith("--") and "=" not in words[at - 1] else at
            yield command, [*words[1:begins], *words[at + 1 :]]
    usual = _USUAL.get(name, "")
    if name == "launch":
        usual = "local" if {"-n", "-np", "--processes"} & set(words) else "slurm"
    if command := command_at((name, usual)):
        yield command, [word for word in words if word != name]


def _of_another_first(
    first: str, words: Sequence[str], commands: Collection[str]
) -> Iterator[tuple[Command, list[str]]]:
    """The commands that a line may mean if its first word names none."""
    programs = list(_of_programs(words))
    yield from programs
    if programs:
        return
    yield from filter(None, (of_typed(line) for line in meant_lines(words)))
    if first in ("list", "ls", "show", "all") and len(words) > 1 and (named := _named(words[1], commands)):
        yield named, list(words[2:])
    ours = (command_here(first, commands) or command_of_words(first, commands)).split()[1:]
    typo = [] if no_command(first) else get_close_matches(first, list(commands), n=1, cutoff=ALIKE)
    if ours == ["collective"] and (command := command_at(("collective",))):
        yield command, list(words)  # the name of a collective is a part of its expression
    rest = [word for word in words if word != first]
    if ours:  # `list models`, `show hardware`: both words mean the command
        synonyms = {word for word in rest if command_here(word, commands).split()[1:] == ours}
        rest = [word for word in rest if word not in {*ours, *synonyms}]
    yield from filter(None, (_of_another_name(line, rest) for line in (ours, typo) if line))
    yield from _of_topics(words, commands)


def _of_topics(words: Sequence[str], commands: Collection[str]) -> Iterator[tuple[Command, list[str]]]:
    """The commands for single words of a question that names no model or machine: help me choose a gpu."""
    if any(word.startswith("-") for word in words):
        return
    for word in words[1:]:
        if (name := command_here(word, commands).split()[1:2]) and (command := command_at((name[0],))):
            yield command, []


def _named(word: str, commands: Collection[str]) -> Command | None:
    """The command that the word after a verb such as `list` names; None if it names none alone."""
    ours = word if word in commands else command_here(word, commands).removeprefix("mw ")
    return command_at((ours,)) if ours in commands else None


def of_typed(line: Sequence[str]) -> tuple[Command, list[str]] | None:
    """The command that a line begins with, and its other words."""
    for length in (2, 1):
        if command := command_at(tuple(line[:length])):
            return command, list(line[length:])
    return None


def _of_programs(words: Sequence[str]) -> Iterator[tuple[Command, list[str]]]:
    """The commands that do the same as another program's line: vllm serve, torchrun script.py, ..."""
    first, *rest = words
    if first in ("python", "python3") and "-m" in rest[:-1]:
        first, rest = rest[rest.index("-m") + 1], rest[rest.index("-m") + 2 :]
    scripts = [word for word in rest if word.endswith(".py")]
    if first in ("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "python", "python3") and scripts:
        after = rest[rest.index(scripts[0]) + 1 :]
        if after and (command := command_at(("plan", "train"))):
            yield command, [*(word for word in rest[: rest.index(scripts[0])] if word != "launch"), *after]
    program = next((name for name, scripts in _PROGRAMS.items() if re.search(scripts, first)), "")
    if program and (command := command_at(("plan", "train"))):
        yield command, rest if "--for" in rest else ["--for", program, *rest]
    if any(name in first for name in ("vllm", "sglang", "trtllm")):
        if rest[:2] == ["bench", "serve"] and (command := command_at(("bench", "serve"))):
            yield command, rest[2:]
        elif command := command_at(("serve",)):
            yield command, [word for word in rest if word != "serve"]


def _of_another_name(line: Sequence[str], rest: Sequence[str]) -> tuple[Command, list[str]] | None:
    """The command of an example line, and its other words: the given ones (`rest`), then the example's.

    The first given word takes the place of DIR or RUN in the example if it is a folder; otherwise the
    example's words are left out. None if the example cannot be completed.
    """
    if line[0].startswith("-") or not line[0].islower():  # mw --install-completion, mw CMD --help
        return None
    path = tuple(line[:2]) if line[0] in ("plan", "bench", "launch", "plot") else tuple(line[:1])
    command = command_at(path)
    if command is None and rest:  # bench serve, for benchmark serve
        inner = getattr(command_in(path[0]), "commands", {})
        meant = subcommand_here(rest[0], list(inner))
        named = [meant] if meant else get_close_matches(rest[0], list(inner), n=1, cutoff=ALIKE)
        command, rest = command_at((path[0], *named)), rest[1:]
    extra = [word for word in line[len(path) :] if not (is_corpus(word) and any(map(is_corpus, rest)))]
    rest = [word for word in rest if word not in _STARTING]
    if command is None or "--" in extra:  # the words after -- are another command's
        return None
    if PLACEHOLDER.search(" ".join(extra)):
        if not rest:
            return None
        if "--run" in extra and "--run" in rest:  # resume --run DIR
            return command, [*rest, *(word for word in extra[2:] if word not in rest)]
        if not Path(rest[0]).is_dir() and not ("--resume" in extra and re.fullmatch(r"\w[\w./-]*", rest[0])):
            return command, list(rest)
        extra, rest = [rest[0] if PLACEHOLDER.fullmatch(word) else word for word in extra], rest[1:]
    return command, [*rest, *extra]


def _of_machines(words: Sequence[str]) -> list[str]:
    """The words of mw plan train for `mw compare` of machines, which compares plans; [] for other words."""
    if words[0] != "compare":
        return []
    each = (word for word in words[1:] if not word.endswith(".toml"))
    listed = [word for word in each if all(map(is_machine, word.split(",")))]
    machines = [machine for word in listed for machine in word.split(",")]
    rest = [word for word in words[1:] if word not in (*listed, "--hardware")]
    models = [] if "--model" in rest else [word for word in rest if is_model(word)]
    if not machines or len(models) > 1 or not (models or "--model" in rest or len(machines) > 1):
        return []
    if models and (at := rest.index(models[0])) and rest[at - 1].startswith("--"):
        del rest[at - 1]  # `--for llama-3-70b`
    model = ["--model", models[0]] if models else []
    return ["--hardware", ",".join(machines), *model, *(word for word in rest if word not in models)]
