"""A changed layout that still uses all chips: if one word changes, other axes change with it."""

from collections.abc import Callable, Iterator, Mapping
from math import prod

from meshwright.errors import LayoutError
from meshwright.layout.short import read_words

# Axes whose degrees multiply to the number of chips. The first is the first to change for another.
SPLITTING = ("fsdp", "data", "tensor", "context", "pipe")
# Words that need a degree above 1 of the axis.
_DEPENDENT = {
    "tensor": ("sequence_parallel", "kv_replicas"),
    "context": ("context_method",),
    "pipe": ("schedule", "interleave"),
    "data": ("zero",),
}
# Microbatches for each stage of a pipeline, tried in this order.
_MICROBATCHES = (1, 2, 4)
# Whether a layout, as text, divides the model and the batch.
Allows = Callable[[str], bool]


def absorbed(text: str, moved: str, num_chips: int, allows: Allows) -> str | None:
    """The layout nearest to `text` that uses all chips and keeps the word `moved`; None if there is none.

    moved: an axis, another word of the layout, or empty.

    >>> absorbed("fsdp=64,tensor=8", "tensor", 64, lambda layout: True)
    'fsdp=8,tensor=8'
    """
    try:
        words = read_words(text)
    except LayoutError:
        return None
    for degrees in _degrees(words, moved, num_chips):
        for layout in _variants({**words, **degrees}, moved):
            if allows(layout):
                return layout
    return None


def reachable(
    text: str, choices: Mapping[str, tuple[str, ...]], num_chips: int, allows: Allows
) -> dict[str, list[str]]:
    """The values of each word in `choices` that `text` can take if other axes change with it."""
    return {
        name: [
            value
            for value in values
            if absorbed(_with(text, name, value), name, num_chips, allows) is not None
        ]
        for name, values in choices.items()
    }


def _with(text: str, name: str, value: str) -> str:
    """The layout's text with a word set; an empty value leaves it out."""
    words = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
    words.pop(name, None)
    if value:
        words[name] = value
    return _written(words)


def _degrees(words: Mapping[str, object], moved: str, num_chips: int) -> Iterator[dict[str, int]]:
    """Degrees of the splitting axes that multiply to the number of chips, the fewest changes first."""
    now = {axis: degree if isinstance(degree := words.get(axis, 1), int) else 1 for axis in SPLITTING}
    if prod(now.values()) == num_chips:
        yield now
    free = [axis for axis in SPLITTING if axis != moved]
    for axis in free:
        rest = prod(now.values()) // max(now[axis], 1)
        if rest and num_chips % rest == 0:
            yield {**now, axis: num_chips // rest}
    for number in range(2, len(free) + 1):  # put all chips of the first axes on a single axis
        kept = {axis: 1 if axis in free[:number] else degree for axis, degree in now.items()}
        rest = prod(kept.values())
        if rest and num_chips % rest == 0:
            for axis in free[:number]:
                yield {**kept, axis: num_chips // rest}


def _variants(words: dict[str, object], moved: str) -> Iterator[str]:
    """The layout without words that its degrees rule out, then variants of it to try.

    Variants divide experts over data instead of fsdp, or have another number of microbatches.
    """
    kept = dict(words)
    for axis, names in _DEPENDENT.items():
        if words.get(axis, 1) == 1:
            for name in names:
                if name != moved:
                    kept.pop(name, None)
    if moved in words and moved in _DEPENDENT["tensor"] and words.get("tensor", 1) == 1:
        return
    yield _written(kept)
    experts = words.get("expert", 1)
    if isinstance(experts, int) and experts > 1 and moved == "expert" and words.get("fsdp", 1) != 1:
        yield _written({**kept, "data": words["fsdp"], "fsdp": 1})
    stages = words.get("pipe", 1)
    if isinstance(stages, int) and stages > 1:
        plain = {name: value for name, value in kept.items() if name not in ("schedule", "interleave")}
        chosen = {"schedule": kept["schedule"]} if moved == "schedule" and "schedule" in kept else {}
        for times in _MICROBATCHES:
            batch = {} if moved == "microbatches" else {"microbatches": times * stages}
            yield _written({**plain, **chosen, **batch})
            if chosen:
                yield _written({**plain, **chosen, **batch, "interleave": 2})
    if moved not in ("microbatches", "schedule", "pipe"):
        yield _written({**kept, "microbatches": 1})


def _written(words: Mapping[str, object]) -> str:
    """The words as text, without degrees of 1 and a single microbatch."""
    texts = {name: str(value).lower() for name, value in words.items()}  # true, as layouts are written
    left_out = (*SPLITTING, "expert", "microbatches")
    kept = (f"{name}={text}" for name, text in texts.items() if not (name in left_out and text == "1"))
    return ",".join(kept) or "data=1"
