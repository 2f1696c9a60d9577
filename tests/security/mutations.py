"""Generated changes of texts and of JSON values."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]
_LEAVES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 10**30, -(10**30), 0.0, -0.0, 0.5, -1.5,
    1e-300, 1e300,
    float("nan"), float("inf"), float("-inf"), "", " ", "a", "0", "1e9", "nan", "../..", "/dev/zero", "\0",
    "\udc80",
    "é" * 50, "a\nb", "x" * 10_000, [], {}, [[]], [None], [0] * 1000, [-1, "a", None], {"a": 1}, {"": {}},
    [[[[[[1]]]]]],
    "float16", "llama", "silu", "linear", "<|x|>", "{{ x }}",
]  # fmt: skip
LEAVES = st.sampled_from(_LEAVES) | st.integers() | st.text(max_size=20) | st.floats()


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """The places of a JSON value, from its root."""
    yield path
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(part, (*path, key))


@st.composite
def changed_values(draw: st.DrawFn, value: Any) -> Any:
    """The JSON value with one to three parts replaced, removed, renamed, doubled or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        if not (places := [path for path in paths(value) if path]):
            return value
        place: Any = draw(st.sampled_from(places))
        *above, key = place
        holder: Any = value
        for step in above:
            holder = holder[step]
        match draw(
            st.sampled_from(["replace", "replace", "replace", "remove", "double", "rename", "exchange"])
        ):
            case "replace":
                holder[key] = copy.deepcopy(draw(LEAVES))
            case "remove":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=8))] = holder.pop(key)
            case _:
                other: Any = draw(
                    st.sampled_from(range(len(holder)) if isinstance(holder, list) else list(holder))
                )
                holder[key], holder[other] = holder[other], holder[key]
    return value


_SNIPPETS = [
    "", " ", "\n", "\0", "0", "-1", "1", "9" * 30, "1e999", "nan", ",", ";", "=", "==", ":", "(", ")", "[",
    "]", "{", "}", "{}",
    "()", "[]", '"', "'", "\\", "%", "#", "/*", "ENTRY", "ROOT ", "f32[8]{0}",
    "f32[99999999999,99999999999]", "u4[0]", "tuple(",
    "(f32[], ", "while(", "{{0,1},{2}}", "[4,2]<=[8]", "[2,2]<=[9999999]T(1,0)", "all-reduce", "é",
    "\ufeff", "(" * 3000, "[" * 3000,
    "x" * 5000, "true", "1979-05-27", "'''", '"""', "[a]", "[[a]]", "a.b.c = 1",
]  # fmt: skip


@st.composite
def changed_texts(draw: st.DrawFn, text: str) -> str:
    """The text with one to four places cut, overwritten, doubled, or exchanged with another."""
    for _ in range(draw(st.integers(1, 4))):
        if not text:
            return text
        at = draw(st.integers(0, len(text) - 1))
        length = draw(st.sampled_from([0, 1, 1, 2, 5, 20, 200]))
        snippet = draw(st.sampled_from(_SNIPPETS) | st.text(max_size=6))
        match draw(st.sampled_from(["put", "put", "word", "word", "double", "line", "cut"])):
            case "put":
                text = text[:at] + snippet + text[at + length :]
            case "word":  # numbers and names, whole
                begin, end = at, at
                while begin and text[begin - 1].isalnum():
                    begin -= 1
                while end < len(text) and text[end].isalnum():
                    end += 1
                text = text[:begin] + snippet + text[end:]
            case "double":
                text = text[: at + length] + text[at:]
            case "line":
                lines = text.split("\n")
                number, other = at % len(lines), draw(st.integers(0, len(lines) - 1))
                lines[number], lines[other] = lines[other], draw(st.sampled_from([lines[number], ""]))
                text = "\n".join(lines)
            case _:
                text = text[:at] if draw(st.booleans()) else text[at:]
    return text
