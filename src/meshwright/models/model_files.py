"""Models described by a file: HF's config.json, or a TOML of ModelConfig's fields."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from meshwright.errors import ModelError, nearest
from meshwright.files import parse_json, parse_toml, read_text
from meshwright.models.config import ALL_TABLES, ModelConfig
from meshwright.models.families.family import Family
from meshwright.models.hf import family_of, from_hf, to_hf
from meshwright.models.stored import declared_quantisation

# The model type of a config.json in our own form.
_OWN_TYPE = "meshwright"


def read_model(path: Path) -> ModelConfig:
    """The model that a config.json, a folder holding one, or a TOML of ModelConfig's fields describes.

    Raises ModelError if the file cannot be read, does not parse, or lacks keys.
    """
    file = path / "config.json" if path.is_dir() else path
    data = read_object(file)
    if file.suffix == ".toml":
        return model_from_dict({"name": file.stem} | data, str(file))
    if _is_own_form(data):
        return model_from_dict(data["model"], str(file))
    return from_hf(with_quantisation(data, file.parent), model_name(file))


def with_quantisation(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """A folder's config.json; if it lacks a table of quantisation, with that of ModelOpt's own file."""
    file = folder / "hf_quant_config.json"
    if declared_quantisation(config) is not None or not file.is_file():
        return config
    return {**config, "quantization_config": read_object(file).get("quantization")}


def read_family(folder: Path) -> Family | None:
    """The family of a checkpoint folder's config.json; None if it has none, or one in our own form."""
    file = folder / "config.json"
    if not file.is_file() or _is_own_form(data := read_object(file)):
        return None
    return family_of(data, model_name(file))


def model_name(file: Path) -> str:
    """The name of a model that a file describes: its folder's for a config.json, otherwise its own."""
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON or TOML file; ModelError if there is none."""
    try:
        text = read_text(file, ModelError)
        data = parse_toml(text) if file.suffix == ".toml" else parse_json(text)
    except ValueError as error:  # both parsers' errors are ValueErrors
        raise ModelError(f"{file}: does not parse: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file}: holds a {type(data).__name__}, not an object")
    return data


def _is_own_form(data: Mapping[str, Any]) -> bool:
    return data.get("model_type") == _OWN_TYPE and isinstance(data.get("model"), dict)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, which `read_model` reads.

    Hugging Face's form if one of their classes computes the same, otherwise our own: ModelConfig's fields
    under `model`.
    """
    try:
        return to_hf(config)
    except ModelError:
        return {"model_type": _OWN_TYPE, "model": asdict(config)}


def model_from_dict(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The ModelConfig with the fields in `values`. ModelError if one is unknown or missing."""
    values = dict(values)
    for name, kind in ALL_TABLES.items():
        if (table := values.get(name)) is None or isinstance(table, kind):
            continue
        if not isinstance(table, dict):
            raise ModelError(f"{where}: {name} = {brief(table)} must be a table [{name}]")
        _check_keys(kind, table, f"{where}: [{name}]")
        values[name] = kind(**table)
    _check_keys(ModelConfig, values, where)
    return ModelConfig(**values)


# Keys of config.json and of other programs, each with the key of a TOML here.
_OTHER_KEYS = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), "d_model"),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "hidden_dim"), "d_ff"),
    **dict.fromkeys(("head_dim", "kv_channels"), "d_head"),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "layers"), "num_layers"),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head"), "num_heads"),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_query_groups"), "num_kv_heads"),
    **dict.fromkeys(("max_position_embeddings", "max_seq_length", "context_length", "n_ctx"), "max_seq_len"),
    **dict.fromkeys(("vocab", "n_vocab"), "vocab_size"),
    "tie_word_embeddings": "tied_embeddings",
}


def field_here(key: str) -> str | None:
    """The ModelConfig field for a key of other programs; None if none is known.

    >>> field_here("hidden_size"), field_here("layers")
    ('d_model', 'num_layers')
    """
    return _OTHER_KEYS.get(key)


def _check_keys(kind: type, values: Mapping[str, Any], where: str) -> None:
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            ours = field_here(key)
            hint = f"write {ours}" if ours in known else nearest(key, known)
            raise ModelError(f"{where}: {key!r} is unknown; {hint}")
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [key for key in needed if key not in values]:
        raise ModelError(f"{where} lacks {', '.join(missing)}")
