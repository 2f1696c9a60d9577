"""A chain and its shardings from one line of text."""

import pytest

from meshwright.errors import NotationError
from meshwright.notation.derive import derive
from meshwright.notation.written import is_chain, parse_written

FSDP = "x[B_X, D] . w[D_X, F] -> h[B_X, F]; h . v[F, D_X] -> y[B_X, D]"


def test_products_with_arrows_are_lines_of_a_chain() -> None:
    chain, layout = parse_written(FSDP)
    assert [str(line) for line in chain.lines] == ["h[B, F] = x . w", "y[B, D] = h . v"]
    assert {name: str(array) for name, array in layout.items()} == {
        "x": "x[B_X, D]", "w": "w[D_X, F]", "h": "h[B_X, F]", "v": "v[F, D_X]", "y": "y[B_X, D]",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "h[B_X, F] = x[B_X, D] . w[D_X, F]; y[B_X, D] = h . v[F, D_X]",
        "x[B_X, D] . w[D_X, F] -> h[B_X, F]\nh · v[F, D_X] -> y[B_X, D]",
        "x[B_X, D] ._D w[D_X, F] -> h[B_X, F]; h[B_X, F] @ v[F, D_X] -> y[B_X, D];",
    ],
)
def test_other_forms_of_the_same(text: str) -> None:
    assert parse_written(text) == parse_written(FSDP)


def test_a_result_that_is_a_name_alone_keeps_what_one_operand_has() -> None:
    chain, layout = parse_written("x[B_X, D] . w[D, F_Y] -> h; a[B, F] = gelu(h); a . v[F_Y, D] -> y")
    assert [str(line) for line in chain.lines] == ["h[B, F] = x . w", "a[B, F] = gelu(h)", "y[B, D] = a . v"]
    assert set(layout) == {"x", "w", "v", "y"}  # h and a stay as they are made


def test_an_inner_array_stays_as_it_is_made_and_a_result_is_as_written() -> None:
    """Megatron's column and row: the sum is finished only because y is a result."""
    found = derive(*parse_written("x[B, D] . w[D, F_Y] -> h; h . v[F_Y, D] -> y[B, D]"))
    assert [str(step).partition("  (")[0] for step in found.forward] == [
        "h[B, F_Y] = x[B, D] ·_D w[D, F_Y]",
        "y[B, D]{U_Y} = h[B, F_Y] ·_F v[F_Y, D]",
        "y[B, D] = AllReduce_Y(y[B, D]{U_Y})",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A[I, J] . B[J, K]", False),
        ("A[I] -> A[I_X]", False),
        ("a[I]; b[I]", True),
        ("C[I, K] = A[I, J] . B[J, K]", True),
    ],
)
def test_what_is_a_chain(text: str, expected: bool) -> None:
    assert is_chain(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x[B, D] . w[D, F] -> h; h[B_X, F] . v[F, D] -> y",
            "h[B, F] and h[B_X, F] are two shardings of one array; write only h",
        ),
        (
            "x[B, D] . w[D, F] -> h; h . v -> y",
            "'v' is not an array; write NAME[I, J], or a name used",
        ),
        ("x[B, D]; y[B] = sum_D(x)", "'x[B, D]' is not a line of a chain"),
        (
            "x[B_X, D_X] . w[D, F] -> h; h . v[F] -> y",
            "mesh axis X is used twice at character 10 of 'x[B_X, D_X]'",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_written(text)
    assert str(caught.value).startswith(message)
