"""Rotary settings in HF's `config.json`: `rope_theta` and `rope_scaling`, or transformers 5's one table."""

from collections.abc import Mapping
from typing import Any, get_args

from meshwright.errors import ModelError
from meshwright.models.architectures import Architecture
from meshwright.models.config import ModelConfig, RopeKind, RopeScaling

ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
_YARN = (
    "factor", "original_max_seq_len", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
    "mscale_all_dim",
)  # fmt: skip
# What counts of each kind.
_FIELDS: dict[str, tuple[str, ...]] = {
    "llama3": _LLAMA3,
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": _YARN,
    "longrope": ("factor", "original_max_seq_len", "attention_factor", "short_factor", "long_factor"),
}


def read_rope(
    config: Mapping[str, Any], architecture: Architecture, fields: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """The fields of a ModelConfig that say how positions turn queries and keys."""
    if architecture.traits.get("positions", "rope") != "rope":
        return {}
    settings, local = _tables(config)
    theta = settings.get("rope_theta", config.get("rope_theta"))
    read: dict[str, Any] = {
        "rope_theta": architecture.rope_theta if theta is None else theta,
        "rope_scaling": _scaling(settings, config, fields, name),
    }
    if architecture.model_type == "gemma3_text":
        read["rope_theta_local"] = local.get("rope_theta", config.get("rope_local_base_freq", 10_000.0))
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        read["rotary_dim"] = _rotary_dim(share, fields["d_head"], name)
    return read


def _rotary_dim(share: Any, d_head: int, name: str) -> int:
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelError(f"{name}: partial_rotary_factor = {share!r} must be a number above 0, at most 1")
    return int(d_head * share)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_rope` reads, in the form that transformers 4 and 5 both take."""
    if config.positions != "rope":
        return {}
    written: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if scaling := config.rope_scaling:
        written["rope_scaling"] = {"rope_type": scaling.kind} | {
            _SCALING[ours]: list(value) if isinstance(value, tuple) else value
            for ours in _FIELDS[scaling.kind]
            if (value := getattr(scaling, ours)) is not None
        }
    if config.rope_theta_local is not None:
        written["rope_local_base_freq"] = config.rope_theta_local
    if config.rotary_dim is not None:
        written["partial_rotary_factor"] = config.rotary_dim / config.d_head
    return written


def _tables(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of global and of local layers; the latter is empty where all have the same."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(settings.get("full_attention"), Mapping):
        return settings["full_attention"], settings.get("sliding_attention") or {}
    return settings, {}


def _scaling(
    settings: Mapping[str, Any], config: Mapping[str, Any], fields: Mapping[str, Any], name: str
) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return None
    kind = "longrope" if kind == "su" else kind
    if kind not in get_args(RopeKind):
        known = ", ".join(map(repr, ("default", *get_args(RopeKind))))
        raise ModelError(f"{name}: rope_type {kind!r} is not supported; fits: {known}")
    given = {ours: settings.get(_SCALING[ours]) for ours in _FIELDS[kind]}
    if kind in ("yarn", "longrope"):
        original = config.get("original_max_position_embeddings", fields["max_seq_len"])
        given["original_max_seq_len"] = given["original_max_seq_len"] or original
    if kind == "longrope" and given["factor"] is None:
        given["factor"] = _stretch(fields["max_seq_len"], given["original_max_seq_len"], name)
    needed = {"llama3": _LLAMA3, "longrope": ("factor", "short_factor", "long_factor")}.get(kind, ("factor",))
    if missing := [_SCALING[ours] for ours in needed if given[ours] is None]:
        raise ModelError(f"{name}: rope scaling lacks {', '.join(missing)}")
    return RopeScaling(**{ours: value for ours, value in given.items() if value is not None}, kind=kind)


def _stretch(max_seq_len: Any, original: Any, name: str) -> float:
    if not (isinstance(max_seq_len, int) and isinstance(original, int) and original > 0):
        raise ModelError(
            f"{name}: original_max_position_embeddings = {original!r} must be a whole number above 0"
        )
    return max_seq_len / original
