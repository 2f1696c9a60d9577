"""The command meant by a line whose first word is no command, from its verb and the things it names."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.cli.other_values import VERBS
from meshwright.cli.other_words import QLORA, command_of_words
from meshwright.cli.value_kinds import is_corpus, is_in_usual_folder, is_machine, is_model

_WEIGHTS = "folder", "model"  # kinds of things with weights
# Verbs, with the line that carries them out for each kind of thing. {} is the thing.
_LINES: dict[str, dict[str, str]] = {
    "show inspect explain view print describe open cat see read display summary info": {
        "plan": "compare {}",
        "script": "audit {}:step",
        "table": "validate {}",
        "folder": "report {}",
        "model": "model {}",
        "machine": "hardware {}",
    },
    "optimize optimise improve speedup accelerate faster autotune tune": {
        "plan": "tune {}",
        "script": "audit {}:step",
        "model": "plan train --model {}",
    },
    "best recommend suggest fastest time speed": {"model": "plan train --model {}"},
    "profile trace measure debug analyze analyse lint": {
        "script": "audit {}:step",
        "plan": "audit {}",
    },
    "simulate loadtest": {"plan": "bench serve --plan {}"},
    "run start execute go": {"plan": "train {}", "script": "audit {}:step", "text": "train {}"},
    "chat complete ask infer": dict.fromkeys(_WEIGHTS, "generate --checkpoint {} 'Once upon a time'"),
    "finetune fine-tune sft adapt": dict.fromkeys(_WEIGHTS, "train --from {}"),
    "lora peft": dict.fromkeys(_WEIGHTS, "train --from {} --lora 16"),
    "qlora": dict.fromkeys(_WEIGHTS, f"train --from {{}} {QLORA}"),
    "price cost prices pricing costs": {
        "plan": "compare {}",
        "model": "plan train --model {}",
        "machine": "hardware {}",
    },
    "convert import": {"folder": "export {}"},
    "eval evaluate perplexity ppl": {"folder": "report {}"},
    "status progress state health loss": {"folder": "report {}", "plan": "compare {}"},
    "cheapest cheap": {"model": "plan train --smallest --model {}"},
    "energy carbon power watts emissions co2": {"plan": "compare {}"},
    "roofline rooflines roof": {"machine": "plot roofline {}", "model": "plot strategies --model {}"},
    "peak peaks": {"machine": "hardware {}"},
}
# Lines, each with questions that ask for it: a sentence with all words of a question. The first match counts.
_QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plan serve --model {}", ("cost serve",)),
    ("plan train --model {}", ("cost train", "how much cost")),
    ("plan serve --model {}", ("tokens second",)),
    ("plan train --smallest --model {}", ("how many",)),
    ("plan train --model {}", ("which layout",)),
    ("fit {}", ("which gpu", "which gpus", "is big", "is enough")),
    ("plan train --model {}", ("how fast", "how long")),
    ("fit {}", ("will fit", "does fit", "do need", "enough for", "how much", "can", "what")),
)
_SHOWN_BY = {"model": "model", "machine": "hardware"}  # commands that show a thing of that kind
_FIRST_OF_QUESTIONS = {question.split()[0] for _, questions in _QUESTIONS for question in questions}
# Words that only join names and numbers in a sentence.
FILLERS = {"the", "on", "for", "with", "using", "of", "to", "and", "vs", "versus", "against", "please"}
_OF_NAMES = {"model", "hardware", "fit", "support"}  # commands whose argument is a name
_REQUESTS = {"requests", "request", "req", "reqs", "queries", "prompts", "calls"}
_PERIODS = {"second", "sec", "minute", "min", "hour", "day"}
_PLAIN = re.compile(r"[a-z'?]+", re.I)  # a word of a sentence, without figures


def without_fillers(words: Sequence[str]) -> list[str]:
    """The words without FILLERS, except the first word, and without a verb after a command for a name.

    >>> without_fillers(["plan", "train", "llama-3-8b", "on", "h100:8"])
    ['plan', 'train', 'llama-3-8b', 'h100:8']
    >>> without_fillers(["model", "info", "llama-3-8b"])
    ['model', 'llama-3-8b']
    >>> without_fillers(["--rate", "1000", "per", "minute"])
    ['--rate', '1000/minute']
    """
    kept: list[str] = []
    for before, word in zip(("-", *words), words, strict=False):
        if before in _OF_NAMES and word in VERBS and kept == [before]:
            continue
        if before == "--resume" and word.lower() in ("latest", "last", "auto"):
            continue
        is_rate = before.lower() in ("per", "a", "an") and word.lower() in _PERIODS
        if is_rate and len(kept) > 2 and kept[-2].lower() in _REQUESTS and kept[-3][:1].isdigit():
            kept[-3:] = ["--rate", f"{kept[-3]}/{word}"]  # 20 requests per second
        elif is_rate and len(kept) > 1 and kept[-2][:1].isdigit():
            kept[-2:] = [f"{kept[-2]}/{word}"]  # 1000 per minute
        elif word.lower() not in FILLERS or before.startswith("-"):
            kept.append(word)
    return kept


def kind_of(word: str) -> str:
    """The kind of thing that a word names: a plan, script, table, folder, text, machine or model; or "".

    A path without a suffix counts as a folder, even if it does not exist.
    """
    path = Path(word)
    for suffixes, kind in (((".toml",), "plan"), ((".py",), "script"), ((".csv",), "table")):
        if path.suffix in suffixes:
            return kind
    if is_corpus(word):
        return "text"
    if path.is_dir():
        return "folder"
    if is_machine(word):
        return "machine"
    is_path = re.fullmatch(r"[\w.~-]*/[\w./-]*", word) is not None and not path.suffix
    if is_path and (is_in_usual_folder(word) or not is_model(word)):
        return "folder"
    return "model" if is_model(word) else ""


def _filled(line: str, word: str) -> list[str]:
    """The words of a line with {} replaced by a word, which may have blanks or quotes."""
    return [part.replace("{}", word) for part in shlex.split(line)]


def _of_names(words: Sequence[str]) -> Iterator[list[str]]:
    """The lines for words that begin with a name, and for an unknown word with one: `layers llama-3-70b`."""
    first, last = kind_of(words[0]), kind_of(words[-1])
    is_unknown = len(words) == 2 and not command_of_words(words[0], ())
    if first in ("model", "machine"):
        yield ["fit" if first == "model" else "hardware", *words]
    elif is_unknown and last in _SHOWN_BY:
        yield [_SHOWN_BY[last], words[-1]]


def meant_lines(words: Sequence[str]) -> Iterator[list[str]]:
    """The lines that a verb with a thing, or a question, may mean; the likeliest first.

    >>> list(meant_lines(["inspect", "plan.toml"])), list(meant_lines(["how", "many", "gpus", "for", "gpt2"]))
    ([['compare', 'plan.toml']], [['plan', 'train', '--smallest', '--model', 'gpt2']])
    """
    verb = words[0].lower()
    lines = next((each for verbs, each in _LINES.items() if verb in verbs.split()), {})
    if "model" in lines and {"serve", "serving", "inference", "host", "hosting"} & set(words):
        lines = {**lines, "model": "plan serve --model {}"}
    for at, word in enumerate(words[1:], 1):
        if (line := lines.get(kind_of(word))) and not words[at - 1].startswith("-"):
            rest = [*words[1:at], *words[at + 1 :]]
            yield [*_filled(line, word), *rest]
            named = [each for each in rest if not _PLAIN.fullmatch(each) or kind_of(each)]
            if named != rest:
                yield [*_filled(line, word), *named]  # without words of a sentence
            known = [each for each in named if each.startswith("-") or kind_of(each)]
            if known != named:
                yield [*_filled(line, word), *known]
            return
    if "--model" in words[:-1] and "model" in lines:
        at = words.index("--model")
        yield [*_filled(lines["model"], words[at + 1]), *words[1:at], *words[at + 2 :]]
        return
    yield from _of_names(words)
    spoken = {word.lower().rstrip("?") for word in words}
    asked = next(
        (line for line, questions in _QUESTIONS if any(spoken >= set(each.split()) for each in questions)), ""
    )
    named = [
        word.rstrip("?")
        for word in words
        if not _PLAIN.fullmatch(word) or kind_of(word) in ("model", "machine")
    ]
    model = next((word for word in named if not word.startswith("-") and kind_of(word) == "model"), "")
    machines = [word for word in named if kind_of(word) == "machine"]
    # which is faster for llama-3-8b, h100:8 or a100:8?
    if model and len(machines) > 1 and words[0].lower() in ("which", "what", "is"):
        yield ["plan", "train", "--hardware", ",".join(machines), "--model", model]
    if asked and model and words[0].lower() in _FIRST_OF_QUESTIONS:
        named.remove(model)
        known = [word for word in named if kind_of(word)]
        yield [*_filled(asked, model), *named]
        if known != named:
            yield [*_filled(asked, model), *known]
