"""Published models by name, from the families' releases, and `load_model`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families import families, naming
from meshwright.models.families.family import Family
from meshwright.models.families.releases import Preset, Release
from meshwright.models.hf import from_hf
from meshwright.models.model_files import model_from_dict, read_model
from meshwright.models.stored import dtype_in_name


def load_model(spec: str) -> ModelConfig:
    """The model that `spec` names: a preset, a config.json, a checkpoint folder, or a TOML.

    Raises ModelError for an unknown preset (naming the nearest) or a faulty file.

    >>> load_model("llama-3-70b").num_layers
    80
    """
    if spec.lower() in PRESETS:
        return PRESETS[spec.lower()]
    path = Path(spec)
    if path.exists() or path.suffix in (".json", ".toml"):
        return read_model(path)
    name, stored = on_the_hub(spec), dtype_in_name(spec)
    if stored and f"{name}-{stored}" in PRESETS:
        return PRESETS[f"{name}-{stored}"]
    if name in PRESETS:
        return replace(PRESETS[name], stored_dtype=stored) if stored else PRESETS[name]
    raise ModelError(f"model {spec!r} is neither a preset nor a path; {_like(spec)}")


_ALIKE, _LEAST_WITHIN = 0.75, 4  # difflib's ratio of names that are offered; characters within a name
# Models whose sizes are not published.
_CLOSED = ("gpt-4", "gpt4", "gpt-5", "gpt5", "o1", "o3", "claude", "gemini", "chatgpt", "gpt-3.5")


def _like(spec: str) -> str:
    """A hint for an unknown name of a model.

    In order of preference, it names presets with the same letters and digits, presets that begin with them,
    presets of that size, presets of that family and size, or names with a similar spelling.
    """
    if spec.lower().startswith(_CLOSED):
        return "its sizes are not published: take an open model, or a TOML of your own"

    if "," in spec and all(on_the_hub(name.strip()) in PRESETS for name in spec.split(",")):
        return "it is one model; mw compare MODEL@HARDWARE MODEL@HARDWARE compares several"

    if spec.lower().endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth")):
        return "give the folder that has its config.json"

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9.]|meta|instruct|chat$|base$|hf$", "", text.lower())

    wanted = plain(spec.rpartition("/")[2])
    without_endings = plain(on_the_hub(spec))  # llama3.18b for llama3.1-8b-q4
    same = [name for name in PRESETS if plain(name) in (wanted, without_endings)]
    is_size = re.fullmatch(r"\d+(\.\d+)?[bm]", wanted) is not None
    longer_names = [name for name in PRESETS if plain(name).startswith(wanted) and not is_size]
    of_size = [name for name in PRESETS if is_size and wanted in name.split("-")]
    # Names such as llama-8b, which leave out the version.
    family = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?[bm])", wanted)
    of_family = [
        name for name in PRESETS if family and name.startswith(family[1]) and name.endswith(f"-{family[2]}")
    ]
    if wanted and (presets := same or longer_names or of_size or of_family):
        return f"did you mean {' or '.join(presets[:4])}?"
    if within := [name for name in PRESETS if len(wanted) >= _LEAST_WITHIN and wanted in plain(name)]:
        return f"did you mean {' or '.join(within[:4])}?"
    close = get_close_matches(spec.lower(), PRESETS, n=2, cutoff=_ALIKE)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}mw model lists the presets; of another model give its config.json"


def on_the_hub(spec: str) -> str:
    """The name of a Hugging Face repository as presets are named: without its owner and its tuning.

    >>> on_the_hub("meta-llama/Meta-Llama-3-8B-Instruct"), on_the_hub("Qwen/Qwen3-32B")
    ('llama-3-8b', 'qwen3-32b')
    """
    name = spec.lower().rpartition("/")[2].replace("llama-3.3", "llama-3.1")
    name = re.sub(r"^(meta-|nvidia-|c4ai-)", "", name)
    name = re.sub(_TUNING, "", name)
    for pattern, same in _SAME:
        name = re.sub(pattern, same, name)
    return name


# Ends of names that say how a model was tuned or stored.
_TUNING = (
    r"(-(instruct|it|chat|base(-\d+k)?|hf|pt|think|thinking|reasoning|exp|terminus|nvfp4|fp8|bf16|awq|gptq|"
    r"int4|q\d(_\w+)?|gguf|[48]bit|w4a16|v0\.\d|\d{4}|\d{2}-\d{4}))+$"
)
# Models with the sizes of a preset under another name.
_SAME = (
    (r"^deepseek-r1-distill-llama-", "llama-3.1-"),
    (r"^deepseek-r1-distill-qwen-", "qwen2.5-"),
    (r"^qwen2\.5-coder-", "qwen2.5-"),
    (r"^qwq-", "qwen2.5-"),
    (r"^qwen3\.6-", "qwen3.5-"),
    (r"^(nano-?gpt|gpt-?2-small)$", "gpt2"),
    (r"^deepseek-v3\.1$", "deepseek-v3"),
    (r"^ring-", "ling-"),
    (r"^mistral-nemo$", "mistral-nemo-12b"),
    (r"^(mistral-small-3\.[12]-24b|magistral-small|devstral-small)$", "mistral-small-3.1-24b"),
    (r"^(llama-4-\w+)-17b-\d+e$", r"\1"),
    (r"^vicuna-", "llama-2-"),
    (r"^gpt-?3$", "gpt-3-175b"),
    (r"^phi-4-plus$", "phi-4"),
    (r"^ai21-jamba-mini", "jamba-v0.1"),
    (r"^ai21-jamba(-large|-1\.\d-large|-large-1\.\d)$", "jamba-1.5-large"),
    (r"^olmo-2-\d{4}-", "olmo-2-"),
    (r"^glm-4\.5v$", "glm-4.5-air"),
)


class _Presets(Mapping[str, ModelConfig]):
    """Every preset by name; one is made, and its family imported, when it is asked for.

    `in` makes none: it looks the name up in the files of the families that mention it.
    """

    def __init__(self) -> None:
        self._made: dict[str, ModelConfig] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._made or any(
            name in release.models for family in naming(str(name)) for release in family.releases
        )

    def __getitem__(self, name: str) -> ModelConfig:
        if name not in self._made:
            for family in naming(name):
                self._made |= presets_of(family)
        return self._made[name]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for family in families() for release in family.releases for name in release.models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def presets_of(family: Family) -> dict[str, ModelConfig]:
    """The published models of one family."""
    return {
        name: _config(family, name, release, preset)
        for release in family.releases
        for name, preset in release.models.items()
    }


def _config(family: Family, name: str, release: Release, preset: Preset) -> ModelConfig:
    if release.config_json:
        return from_hf({"model_type": family.model_types[0], **release.shared, **preset.values}, name)
    fields: dict[str, Any] = {"name": name, "family": family.name, **release.shared, **preset.values}
    fields.setdefault("num_kv_heads", fields["num_heads"])
    fields.setdefault("d_head", fields["d_model"] // fields["num_heads"])
    for path, value in family.sets.items():
        table, _, field = path.rpartition(".")
        if table:
            fields[table] = {field: value, **fields[table]}
        else:
            fields.setdefault(field, value)
    return model_from_dict(fields, name)


PRESETS = _Presets()
