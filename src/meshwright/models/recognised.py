"""The family of a `config.json`: by its class, its type, its text model's type, or its keys."""

import re
import warnings
from collections.abc import Iterable, Mapping
from reprlib import repr as brief
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.families import PLAINEST, families, load_family, naming
from meshwright.models.families.family import Family, Fixed, Ignored, Key, Part, Rule
from meshwright.models.families.keys import EVERY_FILE, OTHER_MODELS

# Tables that hold the text model of one that also sees, hears or speaks, by their names in files of the hub.
_TEXT_TABLES = ("thinker_config", "text_config", "llm_config", "language_config")
# Keys of the parts that see, hear or speak.
_OF_TOWERS = re.compile(
    r"(vision|visual|image|img|video|audio|speech|tts|vit|mm|vq|qformer|perceiver|projector|patch|pixel|slice|"
    r"query_num|num_image|im|boi|eoi|boa|eoa|deepstack|embd_layer|"
    r"spatial|temporal|force_image|max_dynamic|min_dynamic)(_|$)|"
    r".*_(vision|image|video|audio|mm)(_|$)"
)
# Keys of training, of kernels, of tokenizers.
_HARMLESS = re.compile(
    r"_|.*(dropout|drop_path|_loss|initializer|_std$|token_id|token_index|tokenizer|flash|kernel|training|"
    r"checkpointing|_dtype|torch|fp16|bf16|fp32|fusion|version|num_labels|template|capacity|jitter|use_cache)"
)
# Other names of sizes, in files of classes that are not known.
_SYNONYMS = {
    name: key
    for key, names in {
        "num_hidden_layers": ("num_layers", "n_layer", "n_layers", "num_transformer_layers"),
        "hidden_size": ("n_embd", "d_model", "dim", "model_dim", "hidden_dim_size", "embed_dim"),
        "intermediate_size": ("ffn_hidden_size", "ffn_dim", "hidden_dim", "n_inner", "d_ff", "mlp_dim"),
        "num_attention_heads": ("n_head", "n_heads", "num_heads"),
        "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
        "head_dim": ("kv_channels", "d_head", "attention_head_dim", "attention_head_size"),
        "vocab_size": ("padded_vocab_size", "n_vocab"),
        "max_position_embeddings": (
            "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length", "model_max_length",
            "context_length", "max_context_length", "max_position_embedding",
        ),
        "rms_norm_eps": (
            "norm_eps", "rmsnorm_eps", "layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon",
        ),
        "rope_theta": ("rotary_emb_base", "rope_base", "rotary_base"),
        "hidden_act": ("activation_function", "hidden_activation", "activation"),
        "tie_word_embeddings": ("weight_tying", "share_input_output_layers"),
    }.items()
    for name in names
}  # fmt: skip
# Of files that give no longest context.
_ANY_LENGTH = 131_072
# Types of transformers whose keys say less than their class computes.
_OTHER_MATHEMATICS = ("bert-generation", "git")
# Classes whose files describe a model of another family if a key has a value.
_OTHERWISE: Mapping[str, tuple[tuple[str, Any, str], ...]] = {
    # DeepSeek-OCR and DeepSeek-VL2 say DeepSeek-V2.
    "deepseek_v2": (("use_mla", False, "deepseek"), ("topk_method", "noaux_tc", "deepseek_v3"))
}
# Ends of classes that have the layers of a language model and another head.
_OTHER_HEADS = re.compile(r"(Model|For(Sequence|Token)Classification|ForQuestionAnswering)$")
# Families that come first if several fit a file.
_PLAIN = (*PLAINEST, "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
# A file with more keys that no family has is not explained key by key.
_FEW = 6


def recognised(config: Mapping[str, Any], name: str) -> tuple[Family, dict[str, Any]]:
    """The family of a file, and its keys; of a multimodal model, the text model's.

    Keys of a table within the file are called `table.key` if the family has rules for them.
    """
    text, outer = _text_of(config, name)
    family, given = _family_of_text(text, outer, name) if outer else _family(text, name)
    for key, value, other in _OTHERWISE.get(family.name, ()):
        if given.get(key) == value and key in given:
            family = load_family(other)
            break
    for table in {key.partition(".")[0] for key in family.keys if "." in key}:
        inner = given.pop(table, None) or {}
        _check_kind(name, table, inner, (dict,))
        given |= {f"{table}.{key}": value for key, value in inner.items()}
    return family, given


def _text_of(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The table with the text model, and the keys around it; the file itself and none if it has no table."""
    outer: dict[str, Any] = {}
    while (table := next((t for t in _TEXT_TABLES if config.get(t) is not None), None)) is not None:
        inner = config[table]
        _check_kind(name, table, inner, (dict,))
        outer |= {key: value for key, value in config.items() if key != table}
        config = inner
    return config, outer


def _family_of_text(
    text: Mapping[str, Any], outer: Mapping[str, Any], name: str
) -> tuple[Family, dict[str, Any]]:
    """The family of a text model: by its own type, by the type of the whole file, or by its keys.

    Such files leave out values that equal the defaults of the family's class.
    """
    inner, wrapper = text.get("model_type"), outer.get("model_type")
    known = {key: value for key, value in text.items() if value is not None}
    # The class of the whole ties its head, or does not.
    known |= {key: value for key, value in outer.items() if key == "tie_word_embeddings"}
    for candidates in (
        [f for f in naming(str(inner)) if inner in f.model_types],
        [f for f in naming(str(wrapper)) if wrapper in f.wrappers],
    ):
        if candidates:
            family = candidates[0]
            known.pop("architectures", None)
            return family, {**family.class_defaults, **known}
    if not text:
        raise _unsupported(name, f"model_type {wrapper!r}")
    return _family(known, name)


def _family(config: Mapping[str, Any], name: str) -> tuple[Family, dict[str, Any]]:
    """The family of the class that the file lists, otherwise of its model type; and its keys."""
    _check_kind(name, "architectures", config.get("architectures"), (list,))
    _check_kind(name, "model_type", config.get("model_type"), (str,))
    model_type = config.get("model_type", "llama")
    for listed in config.get("architectures") or []:
        candidates = [f for f in naming(str(listed)) if listed in f.class_names]
        if not candidates:
            has_other_head = _OTHER_HEADS.search(str(listed)) is not None
            candidates = [
                f
                for f in naming(str(model_type))
                if model_type in f.wrappers or (has_other_head and model_type in f.model_types)
            ]
        if not candidates:
            return _similar(config, name, f"architecture {listed}")
        return next((f for f in candidates if model_type in f.model_types), candidates[0]), dict(config)
    candidates = [f for f in naming(str(model_type)) if model_type in (*f.model_types, *f.wrappers)]
    if "model_type" not in config and any(key in _SYNONYMS for key in config):
        candidates = []
    if not candidates:
        is_typed = config.get("model_type") is not None
        return _similar(
            config, name, f"model_type {model_type!r}" if is_typed else "a file without model_type"
        )
    return candidates[0], dict(config)


def _similar(config: Mapping[str, Any], name: str, unknown: str) -> tuple[Family, dict[str, Any]]:
    """The family that a file of an unknown class looks like: it has a rule for every key, most of its own.

    Warns of the assumption. Raises ModelError if every family lacks a rule for some key that may change the
    model, or refuses a value.
    """
    if config.get("is_encoder_decoder") or config.get("model_type") in _OTHER_MATHEMATICS:
        raise _unsupported(name, unknown)
    renamed, other_names = _renamed(config, name)
    best = fewest = None
    given: Mapping[str, Any] = config
    for given in (config, renamed) if other_names else (config,):
        best, fewest = _nearest(given, fewest)
        if best is not None:
            break
    if best is None and fewest is not None and len(fewest[1]) <= _FEW:
        family, odd = fewest
        raise ModelError(
            f"{name}: {unknown} is not known. It would be read as {family.name} ({family.title}) but for "
            f"{', '.join(f'{key} = {brief(renamed.get(key, config.get(key)))}' for key in odd)}, which may "
            "change the model; leave out keys that do not, or write the model as a TOML"
        )
    if best is None:
        raise _unsupported(name, unknown)
    as_said = [f"{other} is read as {key}" for other, key in other_names] if given is renamed else []
    warnings.warn(
        f"{name}: {unknown} is not known; all its keys belong to {best.name} ({best.title}), as which "
        "it is read: norms, activation and positions are assumed to be that family's"
        + "".join(f"; {each}" for each in as_said),
        stacklevel=2,
    )
    return best, dict(given)


def _renamed(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The file with its sizes as most families name them, and the names that were changed.

    A file of LLaMA's own format gives the width of the feed-forward by a multiple and a factor. Raises
    ModelError if two names give a size different values.
    """
    renamed = dict(config)
    changed = []
    for other, key in _SYNONYMS.items():
        if other in renamed:
            value = renamed.pop(other)
            changed.append((other, key))
            _set_size(renamed, key, value, f"{name}: {other} = {brief(value)}")
    if changed and renamed.get("max_position_embeddings") is None:
        renamed["max_position_embeddings"] = _ANY_LENGTH
        changed.append((f"no length, so {_ANY_LENGTH},", "max_position_embeddings"))
    width, multiple = renamed.get("hidden_size"), renamed.get("multiple_of")
    if isinstance(multiple, int) and isinstance(width, int) and multiple > 0:
        wanted = int(int(8 * width / 3) * (renamed.pop("ffn_dim_multiplier", None) or 1))
        del renamed["multiple_of"]
        rounded = f"{name}: multiple_of = {multiple}"
        _set_size(renamed, "intermediate_size", -(-wanted // multiple) * multiple, rounded)
        changed.append((f"multiple_of = {multiple}", "intermediate_size"))
    return renamed, changed


def _set_size(config: dict[str, Any], key: str, value: object, given: str) -> None:
    """Set a size of weights. Lengths and padded vocabularies may have a second value: the first stays."""
    if config.get(key) is None:
        config[key] = value
    elif value not in (None, config[key]) and key not in ("max_position_embeddings", "vocab_size"):
        raise ModelError(f"{given} and {key} = {brief(config[key])} contradict each other; leave one out")


_Odd = tuple[Family, list[str]]


def _nearest(config: Mapping[str, Any], fewest: _Odd | None) -> tuple[Family | None, _Odd | None]:
    """The family that reads every key; otherwise the one with the fewest odd keys, and these."""
    known = {key for key in config if key not in EVERY_FILE}
    best: tuple[tuple[bool, bool, int, bool, int, int], Family] | None = None
    for family in families():
        rules = rules_of(family, config)
        missing = [key for key, rule in family.keys.items() if is_missing(config, key, rule)]
        if missing:
            continue
        refused = [key for key in known if refusal(family, key, config[key], rules.get(key))]
        unread = (key for key in known if key not in rules and not is_harmless(key, config[key]))
        odd = sorted({*refused, *unread})
        if odd:
            fewest = fewest if fewest and len(fewest[1]) <= len(odd) else (family, odd)
            continue
        # A family that runs before one that is planned only; then the most keys that any rule reads, the
        # plainest, the most keys of its own, and the fewest properties.
        num_read, num_own = (sum(key in keys for key in known) for keys in (rules, family.keys))
        # Squared ReLU comes with two matrices, other activations with a gate.
        is_gated = family.sets.get("gated", True) is True
        suits = is_gated != (config.get("hidden_act") == "relu2")
        fit = (family.is_written, suits, num_read, family.name in _PLAIN, num_own, -len(family.sets))
        best = max(best or (fit, family), (fit, family), key=lambda each: each[0])
    return (best[1] if best else None), fewest


def is_harmless(key: str, value: object) -> bool:
    """Whether an unknown key is assumed to change nothing: it is off, a factor of 1, or of training."""
    is_factor = key.endswith(("multiplier", "scale", "factor"))
    return (
        value in (None, False, "", 0) or value == [] or value == {} or (is_factor and value == 1)
    ) or _HARMLESS.match(key) is not None


def _unsupported(name: str, what: str) -> ModelError:
    known = ", ".join(each.class_names[0] for each in families())
    return ModelError(f"{name}: {what} is not supported; supported: {known}")


def rules_of(family: Family, given: Iterable[str] = ()) -> dict[str, Rule | Part]:
    """The rule of every key that the family's files may have, and of each key of towers in `given`."""
    rules: dict[str, Rule | Part] = {**EVERY_FILE, **OTHER_MODELS}
    rules |= {key: _TOWER for key in given if _OF_TOWERS.match(key)}
    for table in {key.partition(".")[0] for key in family.keys if "." in key}:
        rules |= {f"{table}.{key}": rule for key, rule in EVERY_FILE.items()}
    for group in family.groups:
        rules |= group.parts
    for rule in family.keys.values():
        rules |= dict.fromkeys(rule.also if isinstance(rule, Key) else (), rule)
    return {**rules, **family.keys}


_TOWER = Ignored("of parts that see, hear or speak")


def is_missing(given: Mapping[str, Any], key: str, rule: Rule) -> bool:
    """Whether the file lacks a key that it needs."""
    return isinstance(rule, Key) and rule.needed and value_of(given, key, rule) is None


def value_of(given: Mapping[str, Any], key: str, rule: Key) -> Any:
    """The value of a key, perhaps by another name, or its default."""
    for name in (key, *rule.also):
        if given.get(name) is not None:
            return given[name]
    return None if rule.null_is_none and key in given else rule.default


def refusal(family: Family, key: str, value: object, rule: Rule | Part | None) -> str | None:
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


def _check_kind(name: str, key: str, value: object, kinds: tuple[type, ...]) -> None:
    if value is not None and not isinstance(value, kinds):
        raise ModelError(f"{name}: {key} = {value!r} must be {_words(kinds)}")
