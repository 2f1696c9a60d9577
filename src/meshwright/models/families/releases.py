"""Published models of a family: their sizes, and the parameters that their publishers state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A published model: fields of ModelConfig, and the parameters that its publisher states.

    params: to the unit, or as printed ("671B"). active: the parameters that one token uses, as printed. file:
    keys of its config.json in place of fields.
    """

    fields: Mapping[str, Any]
    params: int | str | None = None
    active: str | None = None
    file: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Release:
    """Models that were published together. shared: fields of ModelConfig that all of them have."""

    source: str
    models: Mapping[str, Preset]
    shared: Mapping[str, Any] = field(default_factory=dict)


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


def by_letter(sizes: str, *, in_file: bool = False) -> dict[str, Any]:
    """Fields of ModelConfig from sizes by letter. in_file: keys of config.json instead.

    >>> by_letter("L=12, D=12_288"), by_letter("L=12", in_file=True)
    ({'num_layers': 12, 'd_model': 12288}, {'num_hidden_layers': 12})
    """
    pairs = (size.split("=") for size in sizes.split(", ") if size)
    return {_LETTERS[letter][in_file]: int(size) for letter, size in pairs}


def preset(
    sizes: str = "", params: int | str | None = None, active: str | None = None, **fields: Any
) -> Preset:
    """A Preset with sizes by letter: K is N if it is left out, and H is D / N.

    >>> preset("L=12, D=768", "0.1B", tied_embeddings=True).fields
    {'num_layers': 12, 'd_model': 768, 'tied_embeddings': True}
    """
    return Preset(by_letter(sizes) | fields, params, active)


def release(
    source: str, models: Mapping[str, Preset], shared: Mapping[str, Any] | None = None
) -> tuple[Release, ...]:
    """The releases of a family whose models were all published together."""
    return (Release(source, models, shared or {}),)


def published(
    sizes: str = "", params: int | str | None = None, active: str | None = None, **keys: Any
) -> Preset:
    """A Preset given by its config.json. sizes: by letter, the values of usual keys; keys: the others."""
    return Preset({}, params, active, by_letter(sizes, in_file=True) | keys)


def mixture(num_experts: int, experts_per_token: int, d_ff: int, **more: Any) -> dict[str, Any]:
    """The `moe` of a preset."""
    return {"num_experts": num_experts, "experts_per_token": experts_per_token, "d_ff": d_ff, **more}
