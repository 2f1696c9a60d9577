"""Answers to files and folders of the wrong kind: their kind, and the kind that the command takes."""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from meshwright.cli.value_kinds import may_be_on_the_hub
from meshwright.errors import MeshwrightError
from meshwright.files import parse_json, parse_toml, read_text

_PLAN, _CHIP, _MODEL, _WEIGHTS, _DATA = "plan", "chip", "model", "weights", "data"
# Phrases for the kinds of files that commands take.
_TAKEN = {
    _PLAN: "a plan.toml, which mw plan train and mw plan serve write with -o plan.toml",
    _CHIP: "a machine such as h100:8, or the .toml of a chip",
    _MODEL: "a preset such as llama-3-8b, a config.json or its folder",
    _WEIGHTS: "a run of mw train, or the folder of a Hugging Face model: config.json and *.safetensors",
    _DATA: "a text (.txt, .md, .py), .jsonl or .parquet file, or a folder of them",
}
# Kinds that some command takes, each with a phrase that says where to write it.
_OURS = {
    _PLAN: "is a plan, which mw train, mw audit and mw compare take",
    _CHIP: "describes a chip; type --hardware {path}:8",
    _MODEL: "describes a model; type --model {path}",
}
# Files that no command reads, by their suffixes, with a way to get a file that is read.
_FOREIGN = {
    (".yaml", ".yml"): "is YAML, which no command reads",
    (".csv", ".tsv", ".xls", ".xlsx"): "is a table; write its rows as JSON lines with a 'text' field",
    (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz"): "is compressed; unpack it first",
    (".pdf", ".docx", ".doc", ".epub", ".odt"): "is a document; write its text to a .txt file first",
    (".gguf", ".ggml"): "is in llama.cpp's format; take the model's Hugging Face folder",
    (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".h5", ".npz", ".onnx"): (
        "is in a format that is not read; save the model with save_pretrained(DIR, safe_serialization=True)"
    ),
    (".safetensors",): "has weights only; name the folder that has it and config.json",
    (".ipynb",): "is a notebook; save it as .py, then mw audit NAME.py:step",
}
_BY_OPTION = {
    "--model": {_MODEL}, "--hardware": {_CHIP}, "--checkpoint": {_WEIGHTS}, "--from": {_WEIGHTS},
    "--draft-checkpoint": {_WEIGHTS}, "--data": {_DATA}, "--eval": {_DATA}, "--plan": {_PLAN},
}  # fmt: skip
# What commands take without an option.
_BY_COMMAND = {
    "train": {_PLAN, _DATA}, "serve": {_PLAN}, "audit": {_PLAN}, "tune": {_PLAN}, "compare": {_PLAN},
    "model": {_MODEL}, "fit": {_MODEL}, "support": {_MODEL},
    "hardware": {_CHIP}, "export": {_WEIGHTS}, "quantize": {_WEIGHTS},
}  # fmt: skip


def other_file(args: Sequence[str], message: str) -> str:
    """The answer to a command line with a file of another kind, if `message` is about it; otherwise empty.

    args: the words after `mw`. message: the fault that the command reported.
    """
    command = args[0] if args else ""
    for before, arg in pairwise(args):
        name, _, value = arg.partition("=") if arg.startswith("--") else (before, "", arg)
        taken = _BY_OPTION.get(name) or (set() if name.startswith("-") else _BY_COMMAND.get(command, set()))
        if taken - {_CHIP, _PLAN} and (elsewhere := _elsewhere(value, name)):
            return f"{value}: {elsewhere}"
        if taken and value and value in message and (answer := _of_another_program(Path(value), args)):
            return f"{value}: {answer}"
        if taken and value and value in message and (kind := _kind_of(Path(value), taken)):
            what = _OURS.get(kind, kind).format(path=value)
            takes = ", or ".join(_TAKEN[each] for each in sorted(taken, key=list(_TAKEN).index))
            taker = name if name.startswith("--") else f"mw {command}"
            return f"{value}: {what}; {taker} takes {takes}"
    return ""


def program_file(args: Sequence[str]) -> str:
    """The answer to a command line that names another program's settings or script; otherwise empty."""
    for arg in args:
        if arg.endswith((".py", ".jsonl")):
            continue  # which commands of mw take
        if answer := _of_another_program(Path(arg.rpartition("=")[2]), args):
            return f"{arg}: {answer}"
    return ""


def _of_another_program(path: Path, args: Sequence[str]) -> str:
    """The answer to another program's settings or script, with the line of mw that does the same.

    args: the words after `mw`; the line keeps their options.
    """
    from meshwright.cli.corrected_line import line_of_settings
    from meshwright.cli.other_programs import whose

    with suppress(OSError, ValueError):
        if not path.is_file() or (path.suffix in (".toml", ".json") and _of_file(path)):
            return ""
        if path.suffix == ".py":
            return _of_script(path)
        phrase, command, options = whose(path)
        named = {str(path)} | {
            before for before, arg in pairwise(args) if arg == str(path) and before[:2] == "--"
        }
        others = [arg for arg in args if arg not in named]
        line = line_of_settings(command, [*others, *options]) if command else ""
        takes = f"; type {line or ' '.join(('mw', *command))}" if command else ""
        return f"{phrase}{takes}"
    return ""


def _of_script(path: Path) -> str:
    """The answer to a script in place of a plan: how to audit its step, or its first function."""
    return f"is a script; to audit one of its functions type mw audit {path}:{step_of(path)}"


def step_of(script: Path) -> str:
    """The function of a script with `step` in its name, otherwise its first one."""
    functions = re.findall(r"^def (\w+)", read_text(script, MeshwrightError), re.M)
    return next((name for name in functions if "step" in name), next(iter(functions), "step"))


def _elsewhere(value: str, option: str) -> str:
    """A hint for a missing file: how to download it, or to name several files; empty without a hint."""
    if value.startswith(("http://", "https://")):
        return "is an address; download it first: curl -LO, then name the file"
    path = Path(value)
    if drive := re.match(r"([A-Za-z]):[\\/]", value):
        rest = value[2:].replace("\\", "/")
        return f"is a path of Windows; inside WSL write /mnt/{drive[1].lower()}{rest}"
    if "\\" in value and (posix := Path(value.replace("\\", "/"))).exists():
        return f"here a path has / between folders; write {posix}"
    if path.exists() or path.parent.exists():
        files = value.replace(",", " ").split()
        several = option in ("--data", "--eval") and len(files) > 1 and not path.exists()
        return f"is several; write {' '.join(f'{option} {file}' for file in files)}" if several else ""
    if option == "--model" or not may_be_on_the_hub(value):
        return ""
    form = " --repo-type dataset" if option in ("--data", "--eval") else ""
    folder = value.rpartition("/")[2]
    named = f"{option} {folder}" if option.startswith("--") else folder
    return (
        f"there is no such path; if it is a name on the Hugging Face hub, type hf download {value}{form} "
        f"--local-dir {folder}, then {named}"
    )


def _kind_of(path: Path, taken: Collection[str]) -> str:
    """The kind of a file that is not `taken`, or a phrase for one that no command reads; otherwise empty."""
    with suppress(OSError, ValueError):
        kind = _of_folder(path, taken) if path.is_dir() else _of_file(path) if path.is_file() else ""
        return "" if kind in taken else kind
    return ""


def _of_folder(folder: Path, taken: Collection[str]) -> str:
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names:
        return "is a LoRA adapter without its base model; merge them first (PEFT's merge_and_unload)"
    if _DATA in taken:
        return ""
    weights = sorted(
        name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
    )
    if "config.json" not in names and weights:
        return f"has {weights[0]} and no config.json; add the config.json of its model"
    if "config.json" in names and not any(name.endswith(".safetensors") for name in weights):
        return _foreign(weights[0]) if weights and _MODEL not in taken else ""
    return ""


def _of_file(path: Path) -> str:
    if foreign := _foreign(path.name):
        return foreign
    with suppress(MeshwrightError, ValueError):
        text = read_text(path, MeshwrightError)
        if path.suffix == ".json" or (path.suffix == ".toml" and text.lstrip()[:1] == "{"):
            return _of_object(path, parse_json(text))
        if path.suffix == ".toml":
            return _of_toml(set(parse_toml(text)))
    return ""


def _of_object(path: Path, values: object) -> str:
    keys = set(values) if isinstance(values, dict) else set()
    if {"candidates", "best"} & keys:
        plan = path.with_suffix(".toml")
        near = f"; the plan is {plan}" if plan.is_file() and plan != path else ""
        return f"is the document of a plan, in JSON{near}"
    return _MODEL if {"model_type", "hidden_size", "architectures"} & keys else ""


def _of_toml(keys: set[str]) -> str:
    if {"layout", "workload"} <= keys:
        return _PLAN
    if {"flops_per_second", "hbm_bytes", "network", "hbm_bytes_per_second"} & keys:
        return _CHIP
    return _MODEL if {"d_model", "num_layers", "num_heads"} & keys else ""


def _foreign(name: str) -> str:
    lower = name.lower()
    return next((words for endings, words in _FOREIGN.items() if lower.endswith(endings)), "")
