"""Published models by name, and `load_model`. catalog/*.toml holds a family each, with its source."""

import tomllib
from importlib import resources
from pathlib import Path

from meshwright.errors import ModelError, nearest
from meshwright.models.config import ModelConfig
from meshwright.models.files import model_from_dict, read_model


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
    raise ModelError(f"model {spec!r} is neither a preset nor a path; {nearest(spec.lower(), list(PRESETS))}")


def _read_catalog() -> dict[str, ModelConfig]:
    """Every model of the catalog: its own fields, and those that its family shares."""
    presets: dict[str, ModelConfig] = {}
    for file in sorted((resources.files("meshwright.models") / "catalog").iterdir(), key=lambda f: f.name):
        family = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, fields in family["models"].items():
            presets[name] = model_from_dict({"name": name, **family.get("shared", {}), **fields}, file.name)
    return presets


PRESETS = _read_catalog()
