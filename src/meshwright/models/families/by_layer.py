"""Keys of config.json whose values differ from layer to layer, read as variants of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import Extra, Variant
from meshwright.models.families.family import Part

_Reader = Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]]


@dataclass(frozen=True)
class ByLayer:
    """Keys that one function reads together into the fields of layers. Files with them are not written."""

    reader: _Reader
    keys: Mapping[str, tuple[str, ...]]

    @property
    def parts(self) -> Mapping[str, Part]:
        return {key: Part(fields) for key, fields in self.keys.items()}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        return self.reader(given, fields, name)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


def by_layer(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields that most layers have, and variants for the others.

    >>> by_layer([{"d_ff": 8}, {"d_ff": 4}, {"d_ff": 8}])
    {'d_ff': 8, 'variants': (Variant(layers=(1,), values=(('d_ff', 4),)),)}
    """
    layers: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for number, fields in enumerate(each):
        layers.setdefault(tuple(sorted(fields.items())), []).append(number)
    most = max(layers, key=lambda one: len(layers[one]))
    rest = (one for one in layers if one is not most)
    variants = (Variant(tuple(layers[one]), tuple(pair for pair in one if pair not in most)) for one in rest)
    return {**dict(most), "variants": tuple(variants)}


def matrix(name: str, letters: str, fan_in: str, *, in_layers: bool = True, **sizes: int) -> Extra:
    """A matrix that a token is multiplied with over the letters `fan_in`."""
    return Extra(name, letters, tuple(sizes.items()), fan_in, in_layers)


def vector(name: str, letters: str, *, in_layers: bool = True, **sizes: int) -> Extra:
    """Weights that no product reads, such as a norm's scale or a table."""
    return Extra(name, letters, tuple(sizes.items()), "", in_layers)


def listed(given: Mapping[str, Any], key: str, default: Any, num_layers: int) -> list[Any]:
    """A value for each layer: of the key, which has a list or one value, or the default."""
    value = given.get(key)
    value = default if value is None else value
    return list(value)[:num_layers] if isinstance(value, list | tuple) else [value] * num_layers


def hyper_connections(streams: int, gates: int, scales: int) -> tuple[Extra, ...]:
    """The weights that mix the streams of the residual, before and after each part of a layer.

    gates: weights that a part has for each token; scales: numbers that multiply them. Source: Zhu et al.,
    "Hyper-Connections", https://arxiv.org/abs/2409.19606.
    """
    return tuple(
        extra
        for part in ("attention", "mlp")
        for extra in (
            matrix(f"{part}_streams", "Dok", "D", o=streams, k=gates),
            vector(f"{part}_streams_norm", "k", k=gates),
            vector(f"{part}_streams_norm_scale", "v", v=scales),
        )
    )


def joined_streams(streams: int) -> tuple[Extra, ...]:
    """The weights that join the streams of the residual after the last layer."""
    return (
        vector("streams_head", "oDz", in_layers=False, o=streams, z=streams),
        vector("streams_head_norm", "o", in_layers=False, o=streams),
        vector("streams_head_norm_scale", "q", in_layers=False, q=1),
    )
