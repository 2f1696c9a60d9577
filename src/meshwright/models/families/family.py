"""The record of a model family, and its rules.

A family is one file of this folder that assigns FAMILY. `models/hf.py` applies its keys to config.json, and
`nn/files/hf_tensors.py` its tensors to checkpoints. Its published models are in the TOML of the same name:
`models/presets.py` makes the presets of `mw plan --model` from them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from meshwright.models.config import ModelConfig
from meshwright.models.families.releases import Release, read_releases
from meshwright.models.families.tool_formats import ToolFormat

Arrangement = Literal["after", "within", "alternate"]


@dataclass(frozen=True)
class Form:
    """How a value of config.json and a field of ModelConfig correspond.

    read: the field's value, from the file's; raises ValueError with the values that fit. write: the file's
    value, from the field's and the model.
    """

    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any, ModelConfig], Any] = lambda value, model: value


@dataclass(frozen=True)
class Key:
    """A key of config.json that gives fields of ModelConfig; `moe.d_ff` is a field of its `moe`.

    default: the value if the key is absent or null. needed: an absent key is an error. also: other names
    of the key. null_is_none: null switches the feature off and does not mean the default.
    """

    fields: str | tuple[str, ...]
    default: Any = None
    needed: bool = False
    also: tuple[str, ...] = ()
    null_is_none: bool = False
    form: Form = Form()

    @property
    def all_fields(self) -> tuple[str, ...]:
        return (self.fields,) if isinstance(self.fields, str) else self.fields


@dataclass(frozen=True)
class Fixed:
    """A key whose other values would make another model: they are refused. Absent means the first value.

    of_each: the key holds a list, and each of its elements must have such a value.
    """

    values: tuple[Any, ...]
    of_each: bool = False

    def fits(self, value: Any) -> bool:
        listed = value if self.of_each and isinstance(value, list) else [value]
        return all(element in self.values for element in listed)


@dataclass(frozen=True)
class Ignored:
    """A key that changes neither shapes nor mathematics, and why."""

    why: str


Rule = Key | Fixed | Ignored


@dataclass(frozen=True)
class Part:
    """A key of a group: the fields that it helps to decide, and the types that its value may have."""

    fields: tuple[str, ...]
    kinds: tuple[type, ...] = ()


class Group(Protocol):
    """Keys of config.json that are read together, since their meanings depend on each other.

    read: fields of ModelConfig, from the file and the fields that were read before; raises ModelError.
    write: the keys that `read` reads.
    """

    @property
    def parts(self) -> Mapping[str, Part]: ...
    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]: ...
    def write(self, model: ModelConfig) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Tensor:
    """The tensor of a checkpoint that holds a parameter, and the letters of its dimensions as stored.

    name: its first `{}` is the layer, counted from `first`; a second is the expert, if each expert has a
    tensor of its own. dims: the parameter's letters, a string for each dimension of the tensor: ("NH", "D")
    is [N·H, D].
    parts: for a tensor that several parameters share, the letters of each along `axis`; this parameter is
    number `index`. arranged: the parts follow each other, or do so `within` each entry of the first letter
    that all of them have, or `alternate` element by element. groups: the parts follow each other within each
    of this number of equal groups of heads, if not 0. pairs: a letter whose last A elements (all of
    them without latent attention, the first A of an indexer's y) are stored as neighbouring pairs (x0, y0,
    x1, y1) that rotary positions turn; our halves are (x0, x1, y0, y1). pairs_last: the pairs are the
    last A elements in the file, and the first A of the parameter. swapped: a letter whose halves are (y, x),
    since positions turn the other way. factor: the parameter is the tensor times this. centred: a letter,
    half of whose size is subtracted from the tensor's whole numbers. also: another name, in some files.
    """

    name: str
    dims: tuple[str, ...]
    axis: int = 0
    parts: tuple[str, ...] = ()
    index: int = 0
    arranged: Arrangement = "after"
    groups: int = 0
    pairs: str = ""
    swapped: str = ""
    factor: float = 1.0
    first: int = 0
    pairs_last: bool = False
    centred: str = ""
    also: str = ""


@dataclass(frozen=True)
class DraftNames:
    """The names of a draft head's tensors (multi-token prediction), after the name of its `layer`.

    layer: `{}` is its number: that after the model's layers, or 0 if `counted_apart`. of_head: the beginning
    of the names of the norms and the projection, if not the layer's. hidden_first: the projection reads the
    hidden state before the embedding.
    """

    layer: str
    embed_norm: str
    hidden_norm: str
    proj: str
    norm: str
    of_head: str = ""
    counted_apart: bool = False
    hidden_first: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The beginnings of names that no tensor of the model has."""
        prefixes = (self.layer.partition("{")[0],) if self.counted_apart else ()
        return (*prefixes, f"{self.of_head}.") if self.of_head else prefixes


@dataclass(frozen=True)
class Family:
    """A model family: the meaning of its config.json and the names of its tensors.

    name: the name of its file, and ModelConfig.family. title: its models, for people. class_names: the
    classes that config.json may list; the first is written. model_types: the same for `model_type`; the
    name if empty. wrappers: model types of larger models whose `text_config` describes one of this family.
    sets: fields of ModelConfig that all its models have. groups: keys that are read together, in order.
    tensors: by parameter (`wq`), or by stack and parameter if stacks differ (`dense_layers/w_in`). variants:
    the tensors that some models name differently. constants: numbers that files hold for each layer, and that
    are not read.
    optional: tables that only some of its models have. class_defaults: values of keys that files of larger
    models leave out of their `text_config`.
    prefix: the beginning of tensor names that some files leave out. unread: beginnings of the names of
    tensors that are not read. more_layers: whether files hold layers after the last, which predict further
    tokens and are read as draft heads only. drafts: their names. tool_calls: the format that its chat models
    were trained on. is_written: whether `to_hf` writes its models. Chats are formatted by the
    template in the tokenizer's files.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    keys: Mapping[str, Rule]
    tensors: Mapping[str, Tensor]
    groups: tuple[Group, ...]
    sets: Mapping[str, Any] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    unread: tuple[str, ...] = ()
    more_layers: bool = False
    drafts: DraftNames | None = None
    is_written: bool = True
    tool_calls: ToolFormat | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    variants: Callable[[ModelConfig], Mapping[str, Tensor]] = lambda model: {}

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_types", self.model_types or (self.name,))

    @cached_property
    def releases(self) -> tuple[Release, ...]:
        """Its published models, from the TOML next to its file."""
        return read_releases(self.name)

    @property
    def fields(self) -> set[str]:
        """The fields of ModelConfig that its keys, their groups or the family itself set."""
        of_keys = (rule.all_fields for rule in self.keys.values() if isinstance(rule, Key))
        of_groups = (part.fields for group in self.groups for part in group.parts.values())
        return {*self.sets}.union(*of_keys, *of_groups)

    def has(self, table: str) -> bool:
        """Whether its models have this table of fields, such as `moe` or `mla`."""
        return any(name.startswith(f"{table}.") for name in self.fields)

    def groups_name(self, table: str) -> bool:
        """Whether keys that are read together decide this table, or fields of it."""
        parts = [part for group in self.groups for part in group.parts.values()]
        return any(name.partition(".")[0] == table for part in parts for name in part.fields)


def needed(fields: str | tuple[str, ...], *also: str) -> Key:
    """A key that every file of the family has."""
    return Key(fields, needed=True, also=also)


def without(rules: Mapping[str, Rule], *keys: str) -> dict[str, Rule]:
    """The rules of all keys but these."""
    return {key: rule for key, rule in rules.items() if key not in keys}


def ignored(why: str, *keys: str) -> dict[str, Rule]:
    """Keys that are ignored for one reason."""
    return {key: Ignored(why) for key in keys}


def fixed(**keys: Any) -> dict[str, Rule]:
    """Keys that must have this value, which is also the meaning of an absent key."""
    return {key: Fixed((value,)) for key, value in keys.items()}
