"""The command line for a sentence without options, from the model, machines and amounts that it names."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.cli.amounts import Amount, Role, amounts_of, each_word
from meshwright.cli.line_values import layout_here
from meshwright.cli.other_notation import is_collective
from meshwright.cli.other_values import RUN_TOKENS
from meshwright.cli.spoken_names import SIZE, of_this_size, preset_alike, preset_of_size, size_note
from meshwright.cli.value_kinds import is_layout, is_machine, is_model
from meshwright.hardware.catalog import NUMBER_WORDS, everyday, usual

_LONGEST_NAME, _FEWEST_WORDS = 5, 3  # words of a name, and of a sentence
_LEAST_DIGITS = 4  # of a card's name without letters: 4090
# Words that ask for a command, by command. The amounts of `_ROLES_OF` ask for one too.
_ASKS_FOR = {
    ("plan", "serve"): "serve serving inference host hosting deploy deployment chatbot api endpoint service "
    "latency throughput",
    ("plan", "train"): "train training pretrain pretraining cost costs layout price cheaper cheapest faster "
    "fastest long scratch mfu budget expensive",
    ("fit",): "fit fits run memory vram oom enough big lora qlora finetune fine-tune finetuning tune which "
    "best gpu card laptop",
    ("model",): "params parameters flops count info show describe size intensity arithmetic",
}
_ROLES_OF: dict[tuple[str, ...], tuple[Role, ...]] = {
    ("plan", "serve"): ("rate", "users", "prompt", "answer", "latency", "tpot"),
    ("plan", "train"): ("tokens", "days", "batch", "budget", "price"),
}
# The options for amounts, by command. A value replaces {}.
_OPTIONS: dict[tuple[str, ...], dict[Role, str]] = {
    ("plan", "train"): {
        "tokens": "--tokens {}", "days": "--smallest --days {}", "price": "--price {}",
        "context": "--seq-len {}", "dtype": "--weights-dtype {}", "budget": "--budget {}",
        "hourly": "--max-price-per-hour {}",
    },
    ("plan", "serve"): {
        "rate": "--rate {}", "users": "--rate {}/min", "latency": "--ttft {}", "tpot": "--tpot {}",
        "price": "--price {}",
        "hourly": "--max-price-per-hour {}", "prompt": "--prompt-tokens {}", "answer": "--output-tokens {}",
        "dtype": "--weights-dtype {}",
    },
    ("fit",): {"context": "--seq-len {}"},
    ("model",): {"context": "--seq-len {}", "tokens": "--tokens {}", "dtype": "--kv-dtype {}"},
}  # fmt: skip
# Why a command has no option for an amount, by role and command; None stands for all other commands.
_REASONS: dict[Role, dict[tuple[str, ...] | None, str]] = {
    "budget": {None: "mw plan train --tokens 1T --budget 50k bounds the price of a run"},
    "epochs": {None: "a plan counts tokens, --tokens; mw train has --epochs"},
    "dtype": {None: "every type is shown"},
}
_BETWEEN = "|"  # replaces a name, so that the words before and after it are not read as one amount
_SPEED = {"tokens", "second"}  # both words: tokens per second
_PRICE_OF_TOKENS = {"per", "million", "tokens"}  # all three words: per million tokens
_QUESTIONS = {"how", "which", "what", "can", "is", "cost"}
_COMPUTERS = {"macbook", "imac", "colab", "kaggle", "laptop"}  # machines without the names of their chips
_HARDWARE: tuple[str, ...] = ("hardware",)
# Words about models, which mw fit shows for a machine if the sentence names none.
_ASKS_FOR_MODELS = {
    "model", "models", "biggest", "largest", "fit", "fits", "run", "finetune", "tune", "train",
}  # fmt: skip
_ROOFLINES = {"roofline", "rooflines", "roof"}  # first words of lines that ask for a plot
_COUNTED_BY_MODEL = {"intensity", "flops", "flop"}  # figures that only mw model shows
# Words that ask whether a model fits. Without them a sentence with several machines asks which is faster.
_ASKS_WHETHER_IT_FITS = {"fit", "fits", "run", "memory", "vram", "oom", "enough"}
# Commands that take files and folders. In a sentence with a model and amounts they ask for a plan.
MEANS_PLANS = "compare", "serve", "train"
_HOW_MANY = {"how", "many"}
_COUNTED = re.compile(r"(\d+)x?", re.I)
_CHIPS = re.compile(r"(gpu|chip|tpu|card|accelerator|node|host)s?", re.I)


@dataclass(frozen=True)
class Sentence:
    """The model, machines and amounts that a sentence names.

    is_of_size: the sentence has the model's size, but not its name; `model` is a preset of that size.
    has_several_models: the sentence names more than one model; `model` is the first.
    """

    model: str
    machines: tuple[str, ...]
    amounts: tuple[Amount, ...]
    is_of_size: bool = False
    has_several_models: bool = False


def read(words: Sequence[str]) -> Sentence:
    """The model, machines and amounts in the words of a sentence.

    >>> sentence = read("fit a 13b on my 3090".split())
    >>> sentence.model, sentence.is_of_size, sentence.machines
    ('llama-2-13b', True, ('3090',))
    """
    spoken = [NUMBER_WORDS.get(word.lower(), word) for word in each_word(" ".join(words))]
    machines: list[str] = []
    model, of_size, left, at, has_several = "", "", list[str](), 0, False
    while at < len(spoken):
        name, kind, count = _named(spoken[at:])
        if kind == "machine":
            machines.append(name)
        elif kind == "model":
            has_several = has_several or model not in ("", name)
            model = model or name
        elif (size := SIZE.fullmatch(spoken[at])) and not of_size:
            of_size = of_this_size(size[1], left[-1] if left else "")
        left += [_BETWEEN] if kind else spoken[at : at + 1]
        at += count
    amounts, text = amounts_of(" ".join(left))
    others = [word for word in text.split() if word != _BETWEEN]
    machines = [*dict.fromkeys(_counted(machines, others))]
    memory = next((amount.value for amount in amounts if amount.role == "memory"), "")
    if memory and not machines:
        machines = list(everyday(f"{memory}GB")[:1])
    is_of_size = bool(of_size and not model)
    return Sentence(model or of_size, tuple(machines), tuple(amounts), is_of_size, has_several)


def _named(words: Sequence[str]) -> tuple[str, str, int]:
    """The name that the words begin with, its kind, and its number of words; ("", "", 1) if there is none.

    Kinds are "machine" and "model".
    """
    from meshwright.models.presets import PRESETS

    for count in range(min(_LONGEST_NAME, len(words)), 0, -1):
        part = [re.sub(r"(?<=\d)s$", "", word) for word in words[:count]]
        spec = usual(" ".join(part))
        if count == 2 and part[0].isdigit() and is_machine(part[1]):  # 2 4090
            return f"{part[1]}:{part[0]}", "machine", count
        is_changed = spec != " ".join(part)
        is_bare_number = count == 1 and spec.isdigit() and len(spec) < _LEAST_DIGITS
        if (count == 1 or is_changed or not part[0].isalpha()) and is_machine(spec) and not is_bare_number:
            return usual(spec), "machine", count
        if count == 1 and part[0].lower() in _COMPUTERS:
            return everyday(part[0])[0], "machine", count
        name = preset_alike("-".join(part).lower())
        name = preset_of_size(name) or name
        if name in PRESETS or (
            count == 1 and any(letter.isdigit() for letter in name) and is_model(words[0])
        ):
            return name if name in PRESETS else words[0], "model", count
    return "", "", 1


def _counted(machines: Sequence[str], others: list[str]) -> Iterator[str]:
    """The machines with a number of chips such as `8 gpus`, which is removed from `others`."""
    at = next((n for n, word in enumerate(others[1:], 1) if _CHIPS.fullmatch(word)), 0)
    number = _COUNTED.fullmatch(others[at - 1]) if at else None
    if number is not None:
        del others[at - 1 : at + 1]
    for machine in machines or (["h100"] if number else []):
        yield f"{machine}:{number[1]}" if number and ":" not in machine else machine


def line_of(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """The words of the line that a sentence asks for, the command first; [] if it names too little.

    >>> line_of("how many h100 to train llama-3-70b on 2T tokens in 30 days".split(), ["plan"])
    ['plan', 'train', '--model', 'llama-3-70b', '--hardware', 'h100', '--tokens', '2T', '--smallest', \
'--days', '30']
    >>> line_of("can I run a 13b on my 3090?".split(), ["fit"])
    ['fit', 'llama-2-13b', '--hardware', '3090']
    """
    if len(words) < _FEWEST_WORDS or any(word.startswith("-") for word in words) or is_collective(words[0]):
        return []
    sentence = read(words)
    is_question = bool(_QUESTIONS & {word.lower() for word in words})
    names_much = bool(sentence.machines or sentence.amounts or is_question or words[0] in commands)
    if sentence.has_several_models or not names_much:
        return []
    path = _command(words, sentence, commands)
    if path == _HARDWARE:
        return ["hardware", sentence.machines[0]]
    if not path or not (
        sentence.model or len(sentence.machines) > 1 or (path == ("fit",) and sentence.machines)
    ):
        return []
    model = [sentence.model] if path in (("fit",), ("model",)) else ["--model", sentence.model]
    line = [*path, *(model if sentence.model else [])]
    if sentence.machines and path != ("model",):
        line += ["--hardware", ",".join(sentence.machines)]
    line += [word for amount in sentence.amounts for word in option_of(amount, path)]
    if layout := [word for word in words if is_layout(word) and path == ("plan", "train")]:
        line += ["--layout", ",".join(map(layout_here, layout))]
    if "--budget" in line and "--tokens" not in line:
        line += ["--tokens", RUN_TOKENS]
    if path == ("plan", "train") and _asks_how_many(words) and "--smallest" not in line:
        line.append("--smallest")
    return line


def option_of(amount: Amount, path: tuple[str, ...]) -> list[str]:
    """The option and value of a command for an amount; [] if it has none."""
    if amount.role in _OPTIONS.get(path, {}):
        return _OPTIONS[path][amount.role].format(amount.value).split()
    if amount.role == "batch" and path == ("plan", "train"):
        number, _, unit = amount.value.partition(" ")
        return ["--batch-tokens" if unit else "--global-batch-size", number]
    if amount.role == "batch" and path == ("model",) and " " not in amount.value:
        return ["--batch", amount.value]
    return []


def _asks_how_many(words: Sequence[str]) -> bool:
    return {word.lower() for word in words} >= _HOW_MANY


def _command(words: Sequence[str], sentence: Sentence, commands: Collection[str]) -> tuple[str, ...]:
    """The command that a sentence begins with or asks for; () if none is known."""
    named = tuple(word.lower() for word in words[:2])
    if named in _OPTIONS or named[:1] in _OPTIONS:
        return named if named in _OPTIONS else named[:1]
    if (named[0] in commands and named[0] not in (*MEANS_PLANS, "plan")) or named[0] in _ROOFLINES:
        return ()
    spoken = {word.lower() for word in each_word(" ".join(words))}
    roles = {amount.role for amount in sentence.amounts}
    if any(map(is_layout, words)):
        return "plan", "train"
    scores = {path: len(spoken & set(asking.split())) for path, asking in _ASKS_FOR.items()}
    for path, asking in _ROLES_OF.items():
        scores[path] += 2 * len(roles & set(asking))
    if _asks_how_many(words):
        scores[("plan", "train")] += 1
    if spoken & set(_ASKS_FOR[("plan", "serve")].split()) or spoken >= _SPEED or spoken >= _PRICE_OF_TOKENS:
        scores[("plan", "serve")] += 3  # outweighs `cost`, a word of training in other sentences
    if spoken & _COUNTED_BY_MODEL:
        scores[("model",)] += 4  # outweighs a batch and tokens, which alone ask for training
    if len(sentence.machines) > 1 and not spoken & _ASKS_WHETHER_IT_FITS:
        scores[("fit",)] = 0
    if not sentence.model and len(sentence.machines) == 1 and words[0] != "fit":
        return ("fit",) if spoken & _ASKS_FOR_MODELS else _HARDWARE
    if "dtype" in roles and not spoken & {"kv", "cache"}:
        scores[("model",)] = 0  # weights of a type are of mw fit
        scores[("fit",)] += 1
    best = max(scores, key=lambda path: scores[path])
    if not scores[best] and sentence.model and len(sentence.machines) == 1:
        return ("fit",)
    return best if scores[best] else ("plan", "train") if len(sentence.machines) > 1 else ()


def notes_of_sentence(words: Sequence[str], path: tuple[str, ...]) -> Mapping[str, str]:
    """Notes on the amounts that a command's line leaves out or takes with an assumption, by their words."""
    sentence = read(words)
    roles = {amount.role for amount in sentence.amounts}
    notes = {}
    for amount in sentence.amounts:
        if amount.role == "users" and path == ("plan", "serve"):
            notes[amount.words] = f"{amount.words}: at a request a minute of each, which --rate changes"
        elif amount.role == "budget" and path == ("plan", "train") and "tokens" not in roles:
            notes[amount.words] = f"{amount.words}: of a run of {RUN_TOKENS} tokens, which --tokens changes"
        elif amount.role == "memory" and sentence.machines and path != ("model",):
            notes[amount.words] = f"{amount.words}: {sentence.machines[0]} has that memory"
        elif amount.role not in (*_OPTIONS.get(path, {}), "batch"):
            notes[amount.words] = f"{amount.words}: {_reason(amount.role, path)}"
    if sentence.is_of_size:
        notes[sentence.model] = size_note(sentence.model)
    return notes


def _reason(role: Role, path: tuple[str, ...]) -> str:
    """Why a command's line leaves out an amount."""
    reasons = _REASONS.get(role, {})
    return reasons.get(path) or reasons.get(None) or f"mw {' '.join(path)} has no option for it"
