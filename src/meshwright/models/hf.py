"""Models as Hugging Face's `config.json` describes them, read and written by the rules of `families/`."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.files import well_formed
from meshwright.models.config import TABLES, ModelConfig, check_config_value
from meshwright.models.families import PLAINEST, families, load_family
from meshwright.models.families.family import Family, Fixed, Key
from meshwright.models.families.rope import Rope
from meshwright.models.mixers import MIXERS
from meshwright.models.recognised import is_harmless, is_missing, recognised, refusal, rules_of, value_of
from meshwright.models.stored import stored_dtype
from meshwright.models.towers import count_towers
from meshwright.models.unquantised import unquantised


def from_hf(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The ModelConfig of an HF `config.json`.

    Raises ModelError naming every missing key at once, or the class, the option or the key that is not
    supported and changes the mathematics. Warns of keys that it does not know.
    """
    family, given = recognised(config, name)
    rules = rules_of(family, given)
    if missing := [key for key, rule in family.keys.items() if is_missing(given, key, rule)]:
        raise ModelError(f"{name}: config.json lacks {', '.join(missing)}")
    for key, value in given.items():
        if why := refusal(family, key, value, rules.get(key)):
            raise ModelError(f"{name}: {why}")
    if unknown := sorted(key for key, v in given.items() if key not in rules and not is_harmless(key, v)):
        warnings.warn(f"{name}: config.json keys not known and ignored: {', '.join(unknown)}", stacklevel=2)
    with well_formed(f"{name}: config.json", ModelError):
        model = read_fitting(given, family, name)
    if taken := _defaults_taken(given, family, model):
        defaults = ", ".join(f"{key} = {value!r}" for key, value in taken.items())
        warnings.warn(f"{name}: config.json lacks keys, whose defaults hold: {defaults}", stacklevel=2)
    towers = count_towers(config, model.d_model)
    if towers.assumed:
        counted_as = "a plain tower, without parts of its own such as a resampler"
        warnings.warn(f"{name}: {', '.join(towers.assumed)} counted as {counted_as}", stacklevel=2)
    if towers.uncounted:
        warnings.warn(f"{name}: {', '.join(towers.uncounted)} not counted in memory", stacklevel=2)
    kept = unquantised(config, model, family)
    return replace(model, tower_params=towers.params, stored_dtype=stored_dtype(config), unquantised=kept)


def family_of(config: Mapping[str, Any], name: str) -> Family:
    """The family of an HF `config.json`; ModelError if none is known."""
    return recognised(config, name)[0]


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of the HF model that computes the same; `from_hf` reads it back.

    Written as the plainest family that can, then as the model's own, then as any other. Raises ModelError
    if none can.
    """
    return _written(config)[1]


def written_family(config: ModelConfig) -> Family:
    """The family as which `to_hf` writes the model."""
    return _written(config)[0]


def _written(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    config = replace(config.text, unquantised=())  # the written files have wide weights
    plainest = map(load_family, PLAINEST)
    first_family = (load_family(config.family),) if config.family else ()
    for candidate in (*plainest, *first_family, *families()):
        written = _write(config, candidate)
        if written is not None and _reads_back(written, candidate, config):
            return candidate, written
    raise ModelError(f"{config.name}: no Hugging Face architecture has this combination of features")


# Reading

# Fields that change what a model computes, whatever its family, and that have defaults.
_DECIDING = ("num_kv_heads", "norm_eps", "activation", "tied_embeddings")


def _defaults_taken(given: Mapping[str, Any], family: Family, model: ModelConfig) -> dict[str, Any]:
    """The keys of `_DECIDING` fields and of the rotary base that a file lacks, with the default of each."""
    taken = {
        key: field_of(model, field) if rule.default is None else rule.default
        for key, rule in family.keys.items()
        if isinstance(rule, Key) and not rule.null_is_none and not rule.needed
        for field in rule.all_fields
        if field in _DECIDING and all(given.get(each) is None for each in (key, *rule.also))
    }
    if any(isinstance(group, Rope) and not group.has_theta(given) for group in family.groups):
        taken["rope_theta"] = model.rope_theta
    return taken


def read_fitting(given: Mapping[str, Any], family: Family, name: str) -> ModelConfig:
    """The model of keys that were found to fit."""
    fields = _simple_fields(given, family, name)
    for group in family.groups:
        fields |= group.read(given, fields, name)
    if not {"state", "both"} & {*(fields.get("mixers") or ())}:
        fields |= dict.fromkeys(MIXERS)
    return ModelConfig(name=name, family=family.name, **fields)


def _simple_fields(given: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """The fields of the keys that are read one by one, and of sizes that follow from them."""
    flat = dict(family.sets)
    for key, rule in family.keys.items():
        if isinstance(rule, Key):
            flat |= dict.fromkeys(rule.all_fields, _read_key(given, key, rule, name))
    fields: dict[str, Any] = {field: value for field, value in flat.items() if "." not in field}
    for table, kind in TABLES.items():
        if inner := {f.partition(".")[2]: v for f, v in flat.items() if f.startswith(f"{table}.")}:
            fields[table] = kind(**inner)
    for field, value in fields.items():
        if field not in _FOLLOW or value is not None:
            check_config_value(field, value, name)
    if mla := fields.get("mla"):
        fields["d_head"] = mla.nope_dim + mla.rope_dim
    if fields.get("num_kv_heads") is None:
        fields["num_kv_heads"] = fields["num_heads"]
    if fields.get("d_ff") is None:
        fields["d_ff"] = 4 * fields["d_model"]
    fields["d_head"] = fields.get("d_head") or _default_d_head(name, fields)
    return fields


# They follow from other fields if the file has none.
_FOLLOW = ("num_kv_heads", "d_ff", "d_head")


def _read_key(given: Mapping[str, Any], key: str, rule: Key, name: str) -> Any:
    value = value_of(given, key, rule)
    if value is None:
        return None
    try:
        return rule.form.read(value)
    except ValueError as error:
        raise ModelError(f"{name}: {key} = {value!r} is not supported; fits: {error}") from error


def _default_d_head(name: str, sizes: Mapping[str, Any]) -> int:
    d_model, num_heads = sizes["d_model"], sizes["num_heads"]
    if d_model % num_heads:
        raise ModelError(
            f"{name}: hidden_size = {d_model} does not divide over num_attention_heads = {num_heads}; "
            "add head_dim"
        )
    return d_model // num_heads


# Writing


def _write(config: ModelConfig, family: Family) -> dict[str, Any] | None:
    """`config` in the keys of one family, perhaps not all of it; None for another kind of model."""
    if not family.is_written:
        return None
    for table in TABLES:
        if family.has(table) != (getattr(config, table) is not None) and table not in family.optional:
            return None
    if any(family.groups_name(mixer) and getattr(config, mixer) is None for mixer in MIXERS):
        return None
    written: dict[str, Any] = {"architectures": [family.class_names[0]], "model_type": family.model_types[0]}
    for key, rule in family.keys.items():
        if isinstance(rule, Fixed):
            written[key] = rule.values[0]
        elif isinstance(rule, Key) and _has_table(config, rule.all_fields[0]):
            written[key] = rule.form.write(field_of(config, rule.all_fields[0]), config)
    for group in family.groups:
        written |= group.write(config)
    return _nested(written)


def _has_table(config: ModelConfig, path: str) -> bool:
    """Whether the model has the table that the field is in, if it is in one."""
    table, _, _ = path.rpartition(".")
    return not table or getattr(config, table) is not None


def field_of(config: ModelConfig, path: str) -> Any:
    """The value of a field, such as `d_model` or, of a table, `moe.d_ff`."""
    table, _, field = path.rpartition(".")
    return getattr(getattr(config, table) if table else config, field)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Keys `table.key` as tables."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        table, _, inner = key.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[inner] = value
    return nested


def _reads_back(written: Mapping[str, Any], family: Family, config: ModelConfig) -> bool:
    try:
        return read_fitting(recognised(written, config.name)[1], family, config.name) == config
    except ModelError:
        return False
