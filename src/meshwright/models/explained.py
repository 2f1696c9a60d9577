"""A config.json key by key: read into which field, ignored or refused, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from reprlib import repr as brief
from typing import Any, Literal

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Fixed, Ignored, Key, Part, Rule
from meshwright.models.hf import field_of, read_fitting
from meshwright.models.recognised import is_harmless, is_missing, recognised, refusal, rules_of
from meshwright.models.towers import count_towers

_Verdict = Literal["read", "default", "ignored", "refused", "unknown", "missing"]


@dataclass(frozen=True)
class ExplainedKey:
    """One key: its value in the file, and its meaning in words.

    verdict: read, or a default because the file has no such key; ignored, since it changes neither shapes
    nor mathematics; refused; unknown, and ignored with a warning; missing.
    """

    key: str
    value: Any
    verdict: _Verdict
    meaning: str


@dataclass(frozen=True)
class ConfigExplanation:
    """The family of a config.json and the meaning of its keys. error: why no model can be read from it."""

    family: Family
    keys: tuple[ExplainedKey, ...]
    error: str | None


def explain_config(config: Mapping[str, Any], name: str) -> ConfigExplanation:
    """The meaning of every key of an HF `config.json`; ModelError if its family is not known."""
    family, given = recognised(config, name)
    rules = rules_of(family, given)
    lines = [
        ExplainedKey(key, given.get(key), "missing", f"{' and '.join(rule.all_fields)}: every file needs it")
        for key, rule in family.keys.items()
        if isinstance(rule, Key) and is_missing(given, key, rule)
    ]
    lines += [
        ExplainedKey(key, value, "refused", why)
        for key, value in given.items()
        if (why := refusal(family, key, value, rules.get(key)))
    ]
    model, error = None, None
    if lines:
        error = f"{name}: {lines[0].key} is {lines[0].verdict}"
    else:
        try:
            model = read_fitting(given, family, name)
        except ModelError as fault:
            error = str(fault)
    explained = {line.key for line in lines}
    for key, value in given.items():
        if key not in explained:
            line = _line(key, value, rules.get(key), model)
            is_cause = error is not None and f" {key} = " in error
            lines.append(replace(line, verdict="refused", meaning=error) if is_cause else line)
    if model is not None:
        towers = count_towers(config, model.d_model).by_table
        lines = [line for line in lines if line.key not in towers]
        lines += [
            ExplainedKey(key, config.get(key), "read", f"tower_params = {params}")
            for key, params in towers.items()
        ]
    return ConfigExplanation(family, (*lines, *_defaults(family, given, model)), error)


def _line(key: str, value: object, rule: Rule | Part | None, model: ModelConfig | None) -> ExplainedKey:
    match rule:
        case None if is_harmless(key, value):
            return ExplainedKey(key, value, "ignored", "off, a factor of 1, or of training: changes nothing")
        case None:
            return ExplainedKey(key, value, "unknown", "ignored, with a warning")
        case Ignored():
            return ExplainedKey(key, value, "ignored", rule.why)
        case Fixed():
            return ExplainedKey(key, value, "read", "as its class computes it; another value is refused")
        case Part():
            return ExplainedKey(key, value, "read", _fields(rule.fields, model))
        case Key():
            return ExplainedKey(key, value, "read", _fields(rule.all_fields, model))


def _defaults(family: Family, given: Mapping[str, Any], model: ModelConfig | None) -> Iterator[ExplainedKey]:
    for key, rule in family.keys.items():
        if isinstance(rule, Key) and not rule.needed and not {key, *rule.also} & {*given}:
            yield ExplainedKey(key, None, "default", _fields(rule.all_fields, model))


def _fields(paths: tuple[str, ...], model: ModelConfig | None) -> str:
    """`d_model = 4096`; without a model, the names of the fields."""
    return ", ".join(f"{path} = {_shown(field_of(model, path))}" if model else path for path in paths)


def _shown(value: object) -> str:
    """The value; of a table, the fields that have no default value."""
    if not is_dataclass(value):
        return repr(value)
    changed = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
    return f"{type(value).__name__}({', '.join(f'{name}={brief(each)}' for name, each in changed.items())})"
