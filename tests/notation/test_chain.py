"""Chains as text: what they say of their arrays, and what is refused, with which words."""

import re

import pytest

from meshwright.errors import NotationError
from meshwright.notation.chain import Chain

CHAIN = Chain.parse(
    """S[B, T, V] = X[B, T, D] . W[D, V]
    M[B, T] = max_V(S)
    E[B, T, V] = exp(S, M)
    H[B, T] = E . target[B, T, V]
    Y[B, T, K, G] = split(P[B, T, N])""",
    constants=("target",),
)


def test_what_no_line_makes_is_stored_but_for_the_source() -> None:
    assert CHAIN.source == "X"
    assert CHAIN.stored == {"W", "target", "P"}
    assert CHAIN.results == ("H", "Y")


def test_constants_and_maxima_have_no_cotangent() -> None:
    assert CHAIN.differentiated == {"X", "W", "S", "E", "H", "P", "Y"}


def test_a_line_prints_as_it_was_written() -> None:
    assert [str(line) for line in CHAIN.lines] == [
        "S[B, T, V] = X . W",
        "M[B, T] = max_V(S)",
        "E[B, T, V] = exp(S, M)",
        "H[B, T] = E . target",
        "Y[B, T, K, G] = split(P)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a chain needs a line such as 'C[I, K] = A[I, J] . B[J, K]'"),
        ("C[I]", "'C[I]' is not a line of a chain; write C[I, K] = A[I, J] . B[J, K]"),
        ("C[I] = A[I]", "'A[I]' is neither A[I, J] . B[J, K] nor function(A[I, J], ...)"),
        ("C[I] = gelu(A)", "'A' is not an array; write NAME[I, J], or a name used before"),
        ("C[I_X] = A[I, J] . B[J]", "C[I_X]: a chain has no shardings; give them as its layout"),
        ("C[I] = gelu(A[I_X])", "A[I_X]: a chain has no shardings; give them as its layout"),
        ("C[I] = A[I, J] . B[K, J]", "C[I] = A . B: K is in only one of the three arrays"),
        ("C[I] = gelu(A[I, J])", "C[I] = gelu(A): J is not in the result; sum or contract it"),
        (
            "C[I] = sum_K(A[I, J])",
            "C[I] = sum_K(A): a reduction removes the letters it names",
        ),
        ("C[I] = sum(A[I])", "C[I] = sum(A): a reduction removes the letters it names"),
        ("C[I] = norm_J(A[I])", "C[I] = norm_J(A): no array has the dimension that norm_J is along"),
        ("C[K, G] = split(A[I, N, J])", "C[K, G] = split(A): split writes 1 as 2 in place"),
        ("C[G, I, K] = split(A[N, I])", "C[G, I, K] = split(A): split writes 1 as 2 in place"),
        ("C[N] = merge(A[N])", "C[N] = merge(A): merge writes 2 as 1 in place"),
        ("C[I] = add(A[I], A[J])", "A[J] and A[I] are one array with two shapes"),
        ("C[I] = gelu(A[I])\nC[I] = gelu(A)", "C[I] is made when C[I] already exists; give it a new name"),
        ("dA[I] = gelu(A[I])", "dA is the name of the cotangent of A; rename it"),
        ("C[I, I] = gelu(A[I])", "dimension I is named twice at character 6 of 'C[I, I]'"),
    ],
)
def test_a_line_that_says_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=f"^{re.escape(message)}$"):
        Chain.parse(text)


def test_a_constant_that_is_nowhere_is_refused() -> None:
    message = "constant 'wrong' is in no line of the chain; known: A, C"
    with pytest.raises(NotationError, match=f"^{re.escape(message)}$"):
        Chain.parse("C[I] = gelu(A[I])", constants=("wrong",))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("X[B_X, T, D] Q[B]", "Q[B] is in no line of the chain; known: E, H, M, P, S, W, X, Y, target"),
        ("X[B_X, D]", "X[B_X, D]: the chain writes X[B, T, D]"),
        ("X[B, T, D] what", "'what' in a layout is not an array; write In[B_X, D] Win[D, F_Y]"),
        (
            "W[D_X, V_X]",
            "mesh axis X is used twice at character 10 of 'W[D_X, V_X]'; an array may use each axis once",
        ),
        ("W[D, V] W[D_X, V]", "W[D_X, V] and W[D, V] are two shardings of one array"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: str, message: str) -> None:
    with pytest.raises(NotationError, match=f"^{re.escape(message)}$"):
        CHAIN.layout(layout)


def test_a_layout_reads_axes_of_any_name() -> None:
    layout = CHAIN.layout("X[B_{data,fsdp}, T, D]; W[D_fsdp, V_tensor]")
    assert layout["X"].axes_of("B") == ("data", "fsdp")
    assert layout["W"].axes == (("fsdp",), ("tensor",))
