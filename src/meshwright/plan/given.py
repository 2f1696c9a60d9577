"""Conditions that every layout of a search must meet: `pipe<=4,schedule!=zb-v,tensor=8`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import eq, ge, gt, le, lt, ne

from meshwright.errors import PlanError
from meshwright.layout import COMPANY, DEGREES, Layout
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
        (
            "step_time",
            "step_seconds",
            "seconds",
            "time",
            "mfu",
            "hfu",
            "fits",
            "throughput",
            "tokens_per_second",
        ),
        "it is a result, and layouts are ranked by it; leave it out",
    ),
    **dict.fromkeys(
        ("price", "cost", "usd", "days"), "with --smallest and --tokens 15T type --days 30 or --price 2.5"
    ),
    **dict.fromkeys(("batch", "batch_size", "global_batch", "batch_tokens"), "write --batch-tokens 1Mi"),
    **dict.fromkeys(("seq", "seq_len", "sequence_length"), "write --seq-len 8k"),
}
_COMPARISONS = {"=": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}
_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|=|<|>)\s*([^\s<>=!]+)\s*")
_REVERSED = re.compile(r"\s*(\d+)\s*(<=|>=|!=|=|<|>)\s*([a-z_]+)\s*")
_VALUE = r"[^\W_][\w.]*"
_SEVERAL = re.compile(rf"\s*(\w+)\s*=\s*({_VALUE}(?:\s*[|/]\s*{_VALUE}|\s+or\s+{_VALUE})+)\s*")
_RANGE = re.compile(r"\s*(\w+)\s*(?:=|between|from)\s*(\d+)\s*(?:\.\.+|-|to|and)\s*(\d+)\s*")


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
    if listed := re.search(r"\b(\w+)\s+in\s+[\[({]?([\w., ]+)[\])}]?", text):
        raise PlanError(f"--given {text.strip()}: {_bounds(listed[1], re.findall(_VALUE, listed[2]))}")
    if several := re.search(r"\b(\w+)\s*(!?=)\s*([\w.-]+(?:,\s*[\w.-]+)+)\s*(?:,|$)", text):
        values = [value.strip() for value in several[3].split(",")]
        if several[2] == "!=":
            fits = "write " + ",".join(f"{several[1]}!={value}" for value in values)
        else:
            fits = _bounds(several[1], values)
        raise PlanError(f"--given {text.strip()}: {fits}")
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


def _bounds(field: str, values: Sequence[str]) -> str:
    """What to write in place of several values of a field: bounds for numbers, otherwise the first value."""
    numbers = sorted(int(value) for value in values if value.isdigit())
    if len(numbers) == len(values) > 1:
        return f"a condition has one value; write {field}>={numbers[0]},{field}<={numbers[-1]}"
    return f"a condition has one value; write {field}={values[0]}, and run it again for each other value"


def _refuse(text: str) -> None:
    """Raise PlanError for text that is not one condition, with the conditions that it may mean."""
    other_forms = (_RANGE, _SEVERAL, _REVERSED)  # whose values could be words of a condition
    if _CONDITION.fullmatch(text) and not any(form.fullmatch(text) for form in other_forms):
        return
    given, several = f"--given {text.strip()}", text.split()
    if match := _RANGE.fullmatch(text):
        raise PlanError(f"{given}: {_bounds(match[1], match.groups()[1:])}")
    if (match := re.fullmatch(r"\s*(?:no|without)[ -](\w+?)(?:line|s)?\s*", text)) and match[1] in DEGREES:
        raise PlanError(f"{given}: a condition is a comparison; write {match[1]}=1")
    bare = re.sub(r"[\[\]{}()'\"]", "", text)
    if match := _REVERSED.fullmatch(text):
        turned = match[2].translate(str.maketrans("<>", "><"))
        raise PlanError(f"{given}: the field comes first; write {match[3]}{turned}{match[1]}")
    if match := _SEVERAL.fullmatch(text):
        raise PlanError(f"{given}: {_bounds(match[1], re.findall(_VALUE, match[2]))}")
    plain = re.sub(r"\s+and\s+|\s*(&&?|;)\s*", ",", text.strip()).replace("==", "=")
    plain = re.sub(r"\s+is\s+", "=", plain).replace(" ", "")
    if plain != text.strip() and all(map(_CONDITION.fullmatch, plain.split(","))):
        raise PlanError(f"{given}: conditions are joined by commas, with one sign each; write {plain}")
    if len(several) > 1 and all(map(_CONDITION.fullmatch, several)):
        raise PlanError(f"{given}: conditions are joined by commas; write {','.join(several)}")
    if bare != text and _CONDITION.fullmatch(bare):
        raise PlanError(f"{given}: conditions have no brackets or quotes; write {bare.strip()}")
    raise PlanError(
        f"{given}: not a condition; write FIELD, one of {' '.join(_COMPARISONS)}, and a value: "
        "tensor=8,pipe<=4"
    )


def _condition(text: str) -> Condition:
    _refuse(text)
    match = _CONDITION.fullmatch(text)
    assert match, "other text is refused"
    field, comparison, written = match.groups()
    if (word := word_here(field)) != field:
        fits = word if "=" in word else f"{word}{comparison}{written}"
        raise PlanError(f"--given {text.strip()}: {field} is {word.partition('=')[0]} here; write {fits}")
    answers = map(_NO_CONDITIONS.get, (field.lower(), *field.lower().split("_")))
    if field not in WORDS and (answer := next(filter(None, answers), "")):
        raise PlanError(f"--given {text.strip()}: {answer}")
    if field not in (*WORDS, "memory"):
        close = get_close_matches(field, [*WORDS, "memory"], n=2, cutoff=0.7)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise PlanError(
            f"--given {text.strip()}: write a word of a layout or memory: tensor=8, memory<=70GB{hint}"
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
