"""Conditions that every layout of a search must meet: `pipe<=4,schedule!=zb-v,tensor=8`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne

from meshwright.errors import PlanError, nearest
from meshwright.layout import COMPANY, Layout
from meshwright.layout.short import WORDS, clean_words, read_words, word_here
from meshwright.units import parse_bytes

# Fields of a layout that a search does not choose, but takes from conditions.
NOT_SEARCHED = (
    "context_method",
    "offload_optimizer",
    "capacity",
    "dispatch",
    "matmul_dtype",
    "matmul_scales",
    "saved_dtype",
    "gradients_dtype",
    "optimizer",
    "optimizer_dtype",
    "master_weights",
)
# Fields with an option of their own.
_OPTIONS = {"weights_dtype": "--weights-dtype", "compute_dtype": "--compute-dtype"}
# Words of machines and of results, which are no conditions, with what to type instead.
_NO_CONDITIONS = {
    **dict.fromkeys(
        ("chips", "gpus", "devices", "nodes", "hosts", "chip", "gpu"),
        "the machine is --hardware h100:4; --smallest finds the fewest chips",
    ),
    **dict.fromkeys(
        ("step_time", "step_seconds", "seconds", "time", "mfu", "hfu", "throughput", "tokens_per_second"),
        "it is a result, by which layouts are ranked; leave it out",
    ),
    **dict.fromkeys(
        ("price", "cost", "usd", "days"), "with --smallest and --tokens 15T type --days 30 or --price 2.5"
    ),
    **dict.fromkeys(("batch", "batch_size", "global_batch", "batch_tokens"), "write --batch-tokens 1Mi"),
    **dict.fromkeys(("seq", "seq_len", "sequence_length"), "write --seq-len 8k"),
}
_COMPARISONS = {"=": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}
_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|=|<|>)\s*([^\s<>=!]+)\s*")


@dataclass(frozen=True)
class Condition:
    """One field of a layout, compared with a value."""

    field: str
    comparison: str
    value: object

    def holds(self, value: object) -> bool:
        """Whether a layout whose field has `value` meets it."""
        return _COMPARISONS[self.comparison](value, self.value)

    def __str__(self) -> str:
        value = str(self.value)
        return f"{self.field}{self.comparison}{value.lower() if isinstance(self.value, bool) else value}"


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """The conditions in a text.

    Raises PlanError for text that is not a condition, LayoutError naming the nearest known field or value.

    >>> [str(condition) for condition in parse_conditions("pipe<=4, schedule!=zb-v,tensor=8")]
    ['pipe<=4', 'schedule!=zb-v', 'tensor=8']
    """
    return tuple(_condition(part) for part in text.split(",") if part.strip())


def memory_limit(text: str) -> tuple[str, int | None]:
    """The other conditions of a text, and the bytes of a chip that `memory<=70GB` allows; None without it.

    >>> memory_limit("tensor=8,memory<=70GB")
    ('tensor=8', 70000000000)
    """
    parts = [part for part in text.split(",") if part.strip()]
    limits = [part for part in parts if re.match(r"\s*memory\b", part)]
    sizes = []
    for part in limits:
        match = re.fullmatch(r"\s*memory\s*<=?\s*(.+)", part)
        if not match:
            raise PlanError(
                f"--given {part.strip()}: memory of a chip has an upper limit; write memory<=70GB"
            )
        sizes.append(parse_bytes(match[1]))
    return ",".join(part for part in parts if part not in limits), min(sizes, default=None)


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if not match and len(several := text.split()) > 1 and all(map(_CONDITION.fullmatch, several)):
        raise PlanError(f"--given {text.strip()}: conditions are joined by commas; write {','.join(several)}")
    bare = re.sub(r"[\[\]{}()'\"]", "", text)
    if not match and bare != text and _CONDITION.fullmatch(bare):
        raise PlanError(
            f"--given {text.strip()}: conditions have no brackets or quotes; write {bare.strip()}"
        )
    if not match:
        raise PlanError(
            f"--given {text.strip()}: not a condition; write FIELD, one of {' '.join(_COMPARISONS)}, and a "
            "value: tensor=8,pipe<=4"
        )
    field, comparison, written = match.groups()
    if (word := word_here(field)) != field:
        fits = word if "=" in word else f"{word}{comparison}{written}"
        raise PlanError(f"--given {text.strip()}: {field} is {word.partition('=')[0]} here; write {fits}")
    if answer := _NO_CONDITIONS.get(field.lower()):
        raise PlanError(f"--given {text.strip()}: {answer}")
    if field not in (*WORDS, "memory"):
        raise PlanError(
            f"--given {text.strip()}: write a word of a layout or memory: tensor=8, memory<=70GB; "
            f"{nearest(field, [*WORDS, 'memory'])}"
        )
    if field == "memory":
        raise PlanError(f"--given {text.strip()}: the memory of one machine; name the topology")
    if field in _OPTIONS:
        raise PlanError(
            f"--given {text.strip()}: a search does not choose it; write {_OPTIONS[field]} {written}"
        )
    [value] = clean_words(read_words(f"{field}={written}")).values()
    Layout.of(**dict.fromkeys((field, *COMPANY.get(field, ())), value))  # refuses values that no layout has
    if comparison not in ("=", "!=") and (isinstance(value, bool) or not isinstance(value, int)):
        raise PlanError(f"--given {text.strip()}: values of {field} have no order; write = or !=")
    if field in NOT_SEARCHED and comparison != "=":
        raise PlanError(f"--given {text.strip()}: a search does not choose {field}; write {field}=VALUE")
    return Condition(field, comparison, value)


def equal(fields: Mapping[str, object]) -> tuple[Condition, ...]:
    """The conditions that fields have these values."""
    return tuple(Condition(field, "=", value) for field, value in fields.items())
