"""Weights that quantised files store unquantised, as config.json lists their modules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import Unquantised
from meshwright.models.families.family import Family
from meshwright.models.parameters import parameters, stacked_layers
from meshwright.models.stored import declared_quantisation, stored_dtype

# The keys of quantization_config that list modules, by method: transformers and AWQ, compressed-tensors and
# ModelOpt, vLLM, ModelOpt, Quark, bitsandbytes.
_KEYS = (
    *("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude"),
    "llm_int8_skip_modules",
)


def unquantised(config: Mapping[str, Any], model: ModelConfig, family: Family) -> tuple[Unquantised, ...]:
    """The matrices that a quantised checkpoint stores unquantised; empty if config.json lists no modules.

    The embedding is always among them.
    """
    dtype, declared = stored_dtype(config), declared_quantisation(config) or {}
    listed = next((declared[key] for key in _KEYS if isinstance(declared.get(key), list)), None)
    if dtype is None or listed is None:
        return ()
    patterns = [_pattern(entry) for entry in listed if isinstance(entry, str)]
    return tuple(
        Unquantised(dtype, path, count)
        for path, modules in _modules(model, family)
        if (count := sum(path == "embed" or _is_listed(module, patterns) for module in modules))
    )


def _modules(model: ModelConfig, family: Family) -> Iterator[tuple[str, Sequence[str]]]:
    """Each matrix by its path, with the names of its modules, one for each layer."""
    tables = {**family.tensors, **family.variants(model)}
    for path, param in parameters(model).items():
        stack, _, name = path.rpartition("/")
        tensor = tables.get(path) or tables.get(name)
        if param.init == "normal" and tensor is not None:
            layers = sorted(stacked_layers(model, stack)) if stack else [0]
            module = _of_text(tensor.name.removesuffix(".weight"))
            yield path, [module.format(*[tensor.first + n, 0][: module.count("{}")]) for n in layers]


def _of_text(name: str) -> str:
    """A module's name without the prefix of the language model in a larger one."""
    return re.sub(r"^.*?(?=\blayers?\.)", "", name)


def _pattern(entry: str) -> re.Pattern[str]:
    """A listed name as an expression: `re:...` as it is, `*` as any text, other names as whole parts.

    >>> [bool(_pattern(each).search("layers.3.mlp.up_proj")) for each in ("mlp", "re:.*up_proj$", "up")]
    [True, True, False]
    """
    if entry.startswith("re:"):
        return re.compile(entry[3:])
    if "*" in entry:
        return re.compile(".*".join(map(re.escape, _of_text(entry).split("*"))))
    return re.compile(rf"(^|\.){re.escape(_of_text(entry))}(\.|$)")


def _is_listed(module: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    return any(pattern.search(module) for pattern in patterns)
