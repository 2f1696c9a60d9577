"""Published models of a family, read from the TOML of its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.files import parse_toml


@dataclass(frozen=True)
class Preset:
    """A published model: its values, and the parameters that its publisher states.

    params: to the unit, or as printed ("671B"). active: the parameters that one token uses, as printed.
    """

    values: Mapping[str, Any]
    params: int | str | None = None
    active: str | None = None


@dataclass(frozen=True)
class Release:
    """Models that were published together, by name, with the source of their sizes.

    shared: values that all of them have. config_json: values are keys of config.json; otherwise they are
    fields of ModelConfig. Without num_kv_heads, K is N; without d_head, H is D / N.
    """

    source: str
    models: Mapping[str, Preset]
    shared: Mapping[str, Any] = field(default_factory=dict)
    config_json: bool = False


# By letter, the field of ModelConfig and the usual key of config.json.
_LETTERS = {
    "L": ("num_layers", "num_hidden_layers"),
    "D": ("d_model", "hidden_size"),
    "F": ("d_ff", "intermediate_size"),
    "N": ("num_heads", "num_attention_heads"),
    "K": ("num_kv_heads", "num_key_value_heads"),
    "H": ("d_head", "head_dim"),
    "V": ("vocab_size", "vocab_size"),
}


def read_releases(family: str) -> tuple[Release, ...]:
    """The releases of a family, in the order of its file; none if it has no file.

    The file's own `shared` holds for every release in it.
    """
    file = Path(__file__).with_name(f"{family}.toml")
    if not file.exists():
        return ()
    data = parse_toml(file.read_text(encoding="utf-8"))
    return tuple(_release(table, data.get("shared", {})) for table in data["releases"])


def _release(table: dict[str, Any], shared: dict[str, Any]) -> Release:
    in_file = table.get("config_json", False)
    models = {name: _preset(values, in_file) for name, values in table["models"].items()}
    shared = shared | _by_letter(table.get("shared", {}), in_file)
    return Release(**table | {"models": models, "shared": shared})  # a misspelt key is an error


def _preset(values: Mapping[str, Any], in_file: bool) -> Preset:
    stated = {key: values[key] for key in ("params", "active") if key in values}
    return Preset(
        _by_letter({key: value for key, value in values.items() if key not in stated}, in_file), **stated
    )


def _by_letter(values: Mapping[str, Any], in_file: bool) -> dict[str, Any]:
    """The values, with a field of ModelConfig for each letter in `sizes`. in_file: a key of config.json.

    >>> _by_letter({"sizes": "L=12, D=12_288", "norm_eps": 1e-6}, False)
    {'num_layers': 12, 'd_model': 12288, 'norm_eps': 1e-06}
    """
    sizes = dict(size.split("=") for size in values["sizes"].split(", ")) if "sizes" in values else {}
    by_letter = {_LETTERS[letter][in_file]: int(size) for letter, size in sizes.items()}
    return by_letter | {key: value for key, value in values.items() if key != "sizes"}
