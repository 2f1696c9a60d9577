"""Models as Hugging Face's `config.json` describes them, read and written by the rules of `families/`."""

import warnings
from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

from meshwright.errors import ModelError
from meshwright.files import well_formed
from meshwright.models.config import TABLES, ModelConfig, check_value
from meshwright.models.families import PLAINEST, families, load_family, naming
from meshwright.models.families.common import EVERY_FILE, OTHER_MODELS
from meshwright.models.families.family import Family, Fixed, Key, Part, Rule


def from_hf(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The ModelConfig of an HF `config.json`.

    Raises ModelError naming every missing key at once, or the class, the option or the key that is not
    supported and changes the mathematics. Warns of keys that it does not know.
    """
    family, given = recognised(config, name)
    rules = rules_of(family)
    if missing := [key for key, rule in family.keys.items() if is_missing(given, key, rule)]:
        raise ModelError(f"{name}: config.json lacks {', '.join(missing)}")
    for key, value in given.items():
        if why := refusal(family, key, value, rules.get(key)):
            raise ModelError(f"{name}: {why}")
    if unknown := sorted(key for key in given if key not in rules):
        warnings.warn(f"{name}: config.json keys not known and ignored: {', '.join(unknown)}", stacklevel=2)
    with well_formed(f"{name}: config.json", ModelError):
        return read_fitting(given, family, name)


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
    plainest = map(load_family, PLAINEST)
    first_family = (load_family(config.family),) if config.family else ()
    for candidate in (*plainest, *first_family, *families()):
        written = _write(config, candidate)
        if written is not None and _reads_back(written, candidate, config):
            return candidate, written
    raise ModelError(f"{config.name}: no Hugging Face architecture has this combination of features")


# Reading


def recognised(config: Mapping[str, Any], name: str) -> tuple[Family, dict[str, Any]]:
    """The family of a file, and its keys, or of its `text_config` if the model also sees or hears.

    The file of a model that also speaks has its `text_config` within its `thinker_config`. Keys of a table
    within the file are called `table.key` if the family has rules for them.
    """
    thinker = config.get("thinker_config")
    _check_kind(name, "thinker_config", thinker, (dict,))
    config = thinker or config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        wrapper, inner = config.get("model_type"), text.get("model_type")
        candidates = [f for f in naming(str(inner)) if inner in f.model_types]
        candidates += [f for f in naming(str(wrapper)) if wrapper in f.wrappers]
        if not candidates:
            raise _unsupported(name, f"model_type {wrapper!r}")
        tied = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
        known = {key: value for key, value in text.items() if value is not None and key != "architectures"}
        config = {"model_type": candidates[0].model_types[0]} | tied | known
    family = _family(config, name)
    given = dict(config)
    for table in {key.partition(".")[0] for key in family.keys if "." in key}:
        inner = given.pop(table, None) or {}
        _check_kind(name, table, inner, (dict,))
        given |= {f"{table}.{key}": value for key, value in inner.items()}
    return family, given


def _family(config: Mapping[str, Any], name: str) -> Family:
    """The family of the class that the file lists, otherwise of its model type."""
    _check_kind(name, "architectures", config.get("architectures"), (list,))
    _check_kind(name, "model_type", config.get("model_type"), (str,))
    model_type = config.get("model_type", "llama")
    for listed in config.get("architectures") or []:
        candidates = [f for f in naming(str(listed)) if listed in f.class_names]
        if not candidates:
            return _alike(config, name, f"architecture {listed}")
        return next((f for f in candidates if model_type in f.model_types), candidates[0])
    candidates = [f for f in naming(str(model_type)) if model_type in f.model_types]
    return candidates[0] if candidates else _alike(config, name, f"model_type {model_type!r}")


def _alike(config: Mapping[str, Any], name: str, unknown: str) -> Family:
    """The family that a file of an unknown class looks like: it has a rule for every key, most of its own.

    Warns of the assumption. Raises ModelError if every family lacks a rule for some key that may change the
    model, or refuses a value.
    """
    if config.get("is_encoder_decoder") or config.get("model_type") in _OTHER_MATHEMATICS:
        raise _unsupported(name, unknown)
    known = {key for key in config if key not in EVERY_FILE}
    best: tuple[tuple[int, int, int], Family] | None = None
    fewest: tuple[int, Family, list[str]] | None = None
    for family in families():
        rules = rules_of(family)
        if any(is_missing(config, key, rule) for key, rule in family.keys.items()):
            continue
        refused = [key for key in known if refusal(family, key, config[key], rules.get(key))]
        odd = sorted({*refused, *(key for key in known if key not in rules)})
        if odd:
            fewest = min(fewest or (len(odd), family, odd), (len(odd), family, odd), key=lambda each: each[0])
            continue
        # A family that runs before one that is planned only; then the most keys, and the fewest properties.
        fit = (int(family.is_written), sum(key in family.keys for key in known), -len(family.sets))
        best = max(best or (fit, family), (fit, family), key=lambda each: each[0])
    if best is None and fewest is not None and fewest[0] <= _FEW:
        _, family, odd = fewest
        raise ModelError(
            f"{name}: {unknown} is not known. It would be read as {family.name} ({family.title}) but for "
            f"{', '.join(f'{key} = {brief(config[key])}' for key in odd)}, which may change the model; "
            "leave out what does not, or write the model as a TOML"
        )
    if best is None:
        raise _unsupported(name, unknown)
    _, family = best
    warnings.warn(
        f"{name}: {unknown} is not known; all its keys are those of {family.name} ({family.title}), as which "
        "it is read: norms, activation and positions are assumed to be that family's",
        stacklevel=2,
    )
    return family


# Types of transformers whose keys say less than their class computes.
_OTHER_MATHEMATICS = ("bert-generation",)
# A file with more keys that no family has is not explained key by key.
_FEW = 6


def _unsupported(name: str, what: str) -> ModelError:
    known = ", ".join(each.class_names[0] for each in families())
    return ModelError(f"{name}: {what} is not supported; supported: {known}")


def rules_of(family: Family) -> dict[str, Rule | Part]:
    """The rule of every key that the family's files may have."""
    rules: dict[str, Rule | Part] = {**EVERY_FILE, **OTHER_MODELS}
    for table in {key.partition(".")[0] for key in family.keys if "." in key}:
        rules |= {f"{table}.{key}": rule for key, rule in EVERY_FILE.items()}
    for group in family.groups:
        rules |= group.parts
    for rule in family.keys.values():
        rules |= dict.fromkeys(rule.also if isinstance(rule, Key) else (), rule)
    return {**rules, **family.keys}


def is_missing(given: Mapping[str, Any], key: str, rule: Rule) -> bool:
    """Whether the file lacks a key that it needs."""
    return isinstance(rule, Key) and rule.needed and _value(given, key, rule) is None


def refusal(family: Family, key: str, value: Any, rule: Rule | Part | None) -> str | None:
    """Why a key with this value cannot be read; None if it can."""
    if isinstance(rule, Part) and value is not None and rule.kinds and not isinstance(value, rule.kinds):
        return f"{key} = {value!r} must be {_words(rule.kinds)}"
    if not isinstance(rule, Fixed) or rule.fits(value):
        return None
    if rule is OTHER_MODELS.get(key):
        return (
            f"{key} = {value!r} changes what the model computes, and {family.class_names[0]} is read without "
            f"it; fits: {key} = {rule.values[0]!r}"
        )
    return f"{key} = {value!r} is not supported; fits: {rule.values[0]!r}"


def _words(kinds: tuple[type, ...]) -> str:
    return "a number" if float in kinds else f"a {kinds[0].__name__}"


def _check_kind(name: str, key: str, value: Any, kinds: tuple[type, ...]) -> None:
    if value is not None and not isinstance(value, kinds):
        raise ModelError(f"{name}: {key} = {value!r} must be {_words(kinds)}")


def read_fitting(given: Mapping[str, Any], family: Family, name: str) -> ModelConfig:
    """The model of keys that were found to fit."""
    fields = _simple_fields(given, family, name)
    for group in family.groups:
        fields |= group.read(given, fields, name)
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
            check_value(field, value, name)
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
    value = _value(given, key, rule)
    if value is None:
        return None
    try:
        return rule.form.read(value)
    except ValueError as error:
        raise ModelError(f"{name}: {key} = {value!r} is not supported; fits: {error}") from error


def _value(given: Mapping[str, Any], key: str, rule: Key) -> Any:
    for name in (key, *rule.also):
        if given.get(name) is not None:
            return given[name]
    return None if rule.null_is_none and key in given else rule.default


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
    written: dict[str, Any] = {
        "architectures": [family.class_names[0]],
        "model_type": family.model_types[0],
    }
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
    """The value of a field, which a key names as `moe.d_ff` if it is one of a table."""
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
