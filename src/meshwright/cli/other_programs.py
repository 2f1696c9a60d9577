"""Settings and scripts of other programs: their programs, and the lines of mw that do the same."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.files import read_text

_TRAIN, _SERVE, _TUNE = ("plan", "train"), ("plan", "serve"), ("train",)
# Phrases for files of other programs. Each has the keys or words that identify the file, and the command of
# mw that does the same, () if there is none. The first match counts.
_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a Kubernetes manifest, which kubectl apply -f takes; mw launch k8s -- mw train plan.toml writes one": (
        "apiVersion", (),
    ),
    "a Docker Compose file, which docker compose up takes": ("services", ()),
    "DeepSpeed's settings": ("zero_optimization train_micro_batch_size_per_gpu deepspeed", _TRAIN),
    "MaxText's settings": ("ici_fsdp_parallelism per_device_batch_size base_output_directory", _TRAIN),
    "torchtitan's settings": ("parallelism job_config", _TRAIN),
    "accelerate's settings": ("distributed_type compute_environment fsdp_config", _TRAIN),
    "NeMo's settings": ("tensor_model_parallel_size num_nodes trainer", _TRAIN),
    "axolotl's settings": ("base_model sequence_len", _TUNE),
    "settings of a fine-tuning run": (
        "model_name_or_path per_device_train_batch_size finetuning_type", _TUNE,
    ),
    "vLLM's settings": ("max_num_seqs max-num-seqs gpu-memory-utilization", _SERVE),
    "the log of a transformers run": ("log_history", ()),
    "a LoRA adapter's settings; merge it into its base model first (PEFT's merge_and_unload)": (
        "peft_type", (),
    ),
    "a tokenizer; name its folder": ("added_tokens tokenizer_class", ()),
    "a profiler's trace; to audit a program, type mw audit --hlo FILE.txt --hardware h100 with its HLO (XLA_"
    "FLAGS=--xla_dump_to=DIR writes it)": ("traceEvents", ()),
    "an index of weights; name its folder": ("weight_map", ()),
    "a script for SLURM; mw launch slurm -- mw train plan.toml writes one": ("#SBATCH", _TRAIN),
    "a script that serves": ("vllm sglang.launch_server trtllm-serve", _SERVE),
    "a script that starts training": (
        "torchrun srun deepspeed pretrain_gpt.py accelerate python python3", _TRAIN,
    ),
}  # fmt: skip
_SCRIPTS = (".sh", ".sbatch", ".slurm", ".bash", ".job", ".cmd", ".ps1", ".bat")
_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", "")
_MOST_BYTES = 200_000
_PAIR = re.compile(r"^\s*(?:- )?[\"']?([A-Za-z][\w.-]*)[\"']?[ \t]*[:=][ \t]*(.*?)[ \t]*$", re.M)
_OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:[ =]+(?!-)([^\s\\]+))?")


def whose(path: Path) -> tuple[str, tuple[str, ...], list[str]]:
    """A phrase for another program's file, the command of mw that does the same, and its settings as options.

    The phrase is empty for other files. The command is () if mw has none.
    """
    suffix = path.suffix.lower()
    if suffix not in (*_SCRIPTS, *_SETTINGS) or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return "", (), []
    with suppress(MeshwrightError, ValueError, UnicodeError):
        text = read_text(path, MeshwrightError)
        pairs = list(_pairs_of(text, suffix))
        names = {name for name, _ in pairs} | (
            set(re.findall(r"[#\w./-]+", text)) if suffix in _SCRIPTS else set()
        )
        names |= {part for name in names for part in name.split("/")}
        for phrase, (keys, command) in _FILES.items():
            if names & set(keys.split()):
                return phrase, command, [word for pair in pairs for word in _as_option(*pair)]
    return "", (), []


def _pairs_of(text: str, suffix: str) -> Iterator[tuple[str, str]]:
    """The names that a file sets, with their values. Names of groups have none."""
    if suffix in _SCRIPTS:
        yield from _OPTION.findall(re.sub(r"^\s*#(?!SBATCH).*$", "", text, flags=re.M))
    elif text.lstrip()[:1] == "{":
        yield from _leaves(json.loads(text))
    else:
        yield from ((name, "") for name in re.findall(r"^\s*\[([\w.]+)\]", text, re.M))
        for name, value in _PAIR.findall(text):
            # axolotl's list of data sets has a path for each.
            yield "data" if name == "path" else name, value.partition(" #")[0].strip().strip("\"'")


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """`_pairs_of` for parsed JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), ""
            yield from _leaves(inner, str(key))
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield name, str(value)


def _as_option(name: str, value: str) -> Collection[str]:
    """A setting as words of a command line; () for a value that is unset, or no single word."""
    is_plain = (
        value
        and not re.search(r"[\[\]{}$]", value)
        and value.lower() not in ("null", "none", "false", "auto")
    )
    return (f"--{name}", value) if is_plain else ()
