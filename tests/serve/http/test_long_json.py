"""JSON texts with lazy lists."""

import asyncio
import json

import pytest

from meshwright.serve.http.long_json import LazyList, json_pieces, lazy_list


@pytest.mark.parametrize(
    ("content", "plain"),
    [
        ({"a": [1, 'é"\n', None]}, {"a": [1, 'é"\n', None]}),
        (LazyList(list), []),
        ({"a": [LazyList(lambda: [1, {"b": LazyList(lambda: ["x"])}]), {}]}, {"a": [[1, {"b": ["x"]}], {}]}),
        ({"a": lazy_list(2, lambda: iter("xy"))}, {"a": ["x", "y"]}),
    ],
)
def test_a_lazy_list_is_written_as_a_list(content: object, plain: object) -> None:
    assert json.loads(b"".join(asyncio.run(json_pieces(content)))) == plain


def test_a_long_text_is_written_in_pieces() -> None:
    pieces = asyncio.run(json_pieces({"a": lazy_list(40_000, lambda: range(40_000))}))
    assert len(pieces) > 2 and json.loads(b"".join(pieces)) == {"a": list(range(40_000))}
