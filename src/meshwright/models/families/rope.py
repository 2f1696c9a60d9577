"""Rotary settings in config.json: `rope_theta` and `rope_scaling`, or the one table of transformers 5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import RopeKind, RopeScaling
from meshwright.models.families.family import Part

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
# The fields that each kind uses.
_FIELDS: dict[str, tuple[str, ...]] = {
    "llama3": _LLAMA3,
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": _YARN,
    "longrope": ("factor", "original_max_seq_len", "attention_factor", "short_factor", "long_factor"),
}
_PARTS = {
    "rope_theta": Part(("rope_theta",)),
    "rope_scaling": Part(("rope_scaling",), (dict,)),
    "rope_parameters": Part(("rope_theta", "rope_scaling"), (dict,)),
    "rope_local_base_freq": Part(("rope_theta_local",)),
    "partial_rotary_factor": Part(("rotary_dim",), (int, float)),
    "rotary_dim": Part(("rotary_dim",), (int,)),
    "rotary_pct": Part(("rotary_dim",), (int, float)),
    "rotary_emb_base": Part(("rope_theta",), (int, float)),
    "original_max_position_embeddings": Part(("rope_scaling",), (int,)),
}


@dataclass(frozen=True)
class Rope:
    """The group of rotary keys.

    theta: the base if the file has none. local_theta: the base of local layers, if theirs differs.
    temperature: queries have one that grows with their positions. local_is_plain: local layers have no
    scaling, and the same base unless the file says another. share: the default of partial_rotary_factor, the
    part of a head that positions turn; None if the family's class does not read that key. share_key: its name
    in files.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    share: float | None = None
    temperature: bool = False
    local_is_plain: bool = False
    share_key: str = "partial_rotary_factor"

    @property
    def parts(self) -> Mapping[str, Part]:
        return _PARTS

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        settings, local = _tables(given, name)
        theta = settings.get("rope_theta", given.get("rope_theta"))
        theta = given.get("rotary_emb_base", self.theta) if theta is None else theta
        if settings.get("alpha") and settings.get("rope_type", settings.get("type")) == "dynamic":
            # A constant stretches the base, at every length (Hunyuan).
            theta *= settings["alpha"] ** (fields["d_head"] / (fields["d_head"] - 2))
            settings = {}
        read: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(settings, given, fields, name)}
        if beta := settings.get("llama_4_scaling_beta"):
            if not self.temperature:
                raise ModelError(f"{name}: llama_4_scaling_beta = {beta!r} is not supported; leave it out")
            read["temperature_slope"] = beta
            read["temperature_floor"] = settings["original_max_position_embeddings"]
        if self.local_theta is not None:
            read["rope_theta_local"] = local.get(
                "rope_theta", given.get("rope_local_base_freq", self.local_theta)
            )
        elif self.local_is_plain and fields.get("sliding_window"):
            local_theta = local.get("rope_theta", read["rope_theta"])
            if read["rope_scaling"] or local_theta != read["rope_theta"]:
                read["rope_theta_local"] = local_theta
        share = settings.get(
            "partial_rotary_factor", given.get("partial_rotary_factor", given.get("rotary_pct"))
        )
        if share is None and self.share is not None:
            rotary_dim = given.get("rotary_dim")
            share = self.share if rotary_dim is None else rotary_dim / fields["d_head"]
        if share is not None and share != 1.0 and "mla" not in fields:
            if self.share is None:
                raise ModelError(f"{name}: partial_rotary_factor = {share!r} is not supported; fits: 1.0")
            read["rotary_dim"] = _rotary_dim(share, fields["d_head"], name)
        return read

    def has_theta(self, given: Mapping[str, Any]) -> bool:
        """Whether a file gives the base, in a key or in a table."""
        tables = [each for key in ("rope_scaling", "rope_parameters") if (each := given.get(key))]
        inner = [each for table in tables for each in table.values() if isinstance(each, Mapping)]
        bases = ("rope_theta", "rotary_emb_base")
        return any(table.get(key) is not None for table in (given, *tables, *inner) for key in bases)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """In the form that transformers 4 and 5 both take."""
        written: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
        if scaling := model.rope_scaling:
            written["rope_scaling"] = {"rope_type": scaling.kind} | {
                _SCALING[ours]: list(value) if isinstance(value, tuple) else value
                for ours in _FIELDS[scaling.kind]
                if (value := getattr(scaling, ours)) is not None
            }
            if self.temperature and model.temperature_floor == scaling.original_max_seq_len:
                written["rope_scaling"]["llama_4_scaling_beta"] = model.temperature_slope
        if model.rope_theta_local is not None and self.local_is_plain:
            scaling_table = written.pop("rope_scaling") or {"rope_type": "default"}
            return {
                "rope_parameters": {
                    "full_attention": scaling_table | {"rope_theta": written.pop("rope_theta")},
                    "sliding_attention": {"rope_type": "default", "rope_theta": model.rope_theta_local},
                }
            } | written
        if model.rope_theta_local is not None:
            written["rope_local_base_freq"] = model.rope_theta_local
        if self.share is not None:
            written[self.share_key] = (model.rotary_dim or model.d_head) / model.d_head
        return written


def _rotary_dim(share: Any, d_head: int, name: str) -> int:
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelError(f"{name}: partial_rotary_factor = {share!r} must be a number above 0, at most 1")
    return int(d_head * share)


def _tables(given: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of global and of local layers; the latter is empty if all layers have the same.

    Raises ModelError if two keys of the file disagree: transformers 4 and 5 do not read the same one.
    """
    old, new, theta = given.get("rope_scaling"), given.get("rope_parameters"), given.get("rope_theta")
    settings = new or old or {}
    if isinstance(settings.get("full_attention"), Mapping):
        return settings["full_attention"], settings.get("sliding_attention") or {}
    if old and new and any(new.get(key) != value for key, value in old.items()):
        raise ModelError(f"{name}: rope_scaling = {old!r} contradicts rope_parameters = {new!r}; fits: one")
    if theta is not None and settings.get("rope_theta", theta) != theta:
        raise ModelError(
            f"{name}: rope_theta = {theta!r} contradicts {settings['rope_theta']!r} in its table; fits: one"
        )
    return settings, {}


def _scaling(
    settings: Mapping[str, Any], given: Mapping[str, Any], fields: Mapping[str, Any], name: str
) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind in ("default", "mrope"):  # the sections of mrope have equal positions in text
        if "rope_type" not in settings and "type" not in settings and settings.get("factor") is not None:
            raise ModelError(f"{name}: rope scaling has factor = {settings['factor']!r}, but no rope_type")
        return None
    kind = "longrope" if kind == "su" else kind
    if kind not in get_args(RopeKind):
        known = ", ".join(map(repr, ("default", *get_args(RopeKind))))
        raise ModelError(f"{name}: rope_type {kind!r} is not supported; fits: {known}")
    read = {ours: settings.get(_SCALING[ours]) for ours in _FIELDS[kind]}
    if kind in ("yarn", "longrope"):
        original = given.get("original_max_position_embeddings", fields["max_seq_len"])
        read["original_max_seq_len"] = read["original_max_seq_len"] or original
    if kind == "longrope" and read["factor"] is None:
        read["factor"] = _stretch(fields["max_seq_len"], read["original_max_seq_len"], name)
    needed = {"llama3": _LLAMA3, "longrope": ("factor", "short_factor", "long_factor")}.get(kind, ("factor",))
    if missing := [_SCALING[ours] for ours in needed if read[ours] is None]:
        raise ModelError(f"{name}: rope scaling lacks {', '.join(missing)}")
    return RopeScaling(**{ours: value for ours, value in read.items() if value is not None}, kind=kind)


def _stretch(max_seq_len: Any, original: Any, name: str) -> float:
    if not (isinstance(max_seq_len, int) and isinstance(original, int) and original > 0):
        raise ModelError(
            f"{name}: original_max_position_embeddings = {original!r} must be a whole number above 0"
        )
    return max_seq_len / original
