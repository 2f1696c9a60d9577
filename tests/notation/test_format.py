"""The three styles: what they print, and that ASCII and Unicode are read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.notation.test_parse import arrays

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import contraction
from meshwright.notation.format import Style, format_array, format_collective, format_contraction
from meshwright.notation.parse import parse_array, parse_product


@given(arrays(), st.sampled_from(["ascii", "unicode"]))
def test_reading_inverts_printing(array: ShardedArray, style: Style) -> None:
    assert parse_array(format_array(array, style)) == array


@given(arrays())
def test_latex_braces_balance(array: ShardedArray) -> None:
    text = format_array(array, "latex").replace(r"\{", "").replace(r"\}", "")
    assert text.isascii() and text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("array", "unicode", "latex"),
    [
        ("A[I_X, J_YZ]{U_W}", "A[I₍X₎, J₍YZ₎]{U₍W₎}", r"A[I_{X}, J_{YZ}]\{U_{W}\}"),
        ("A[I, J]", "A[I, J]", "A[I, J]"),
        ("x[B_{data,fsdp}, T]", "x[B₍data,fsdp₎, T]", r"x[B_{\mathrm{data},\mathrm{fsdp}}, T]"),
        ("w_gate[D, F_tensor]", "w_gate[D, Fₜₑₙₛₒᵣ]", r"\mathrm{w\_gate}[D, F_{\mathrm{tensor}}]"),
        ("[I_{XY}]{U_x1}", "[I₍XY,₎]{Uₓ₁}", r"[I_{\mathrm{XY}}]\{U_{\mathrm{x1}}\}"),
        ("A[I_{x,y}]", "A[I₍x,y₎]", "A[I_{xy}]"),
    ],
)
def test_an_array_in_every_style(array: str, unicode: str, latex: str) -> None:
    parsed = parse_array(array)
    assert format_array(parsed) == format_array(parsed, "ascii") == str(parsed)
    assert format_array(parsed, "unicode") == unicode
    assert format_array(parsed, "latex") == latex


def _step(before: str, after: str) -> Collective:
    return reshard(parse_array(before), parse_array(after))[0]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("ascii", "ReduceScatter_{X} A[I, J]{U_X} -> A[I, J_X]"),
        ("unicode", "ReduceScatter₍X₎ A[I, J]{U₍X₎} → A[I, J₍X₎]"),
        ("latex", r"\mathrm{ReduceScatter}_{X} \, A[I, J]\{U_{X}\} \to A[I, J_{X}]"),
    ],
)
def test_a_collective_in_every_style(style: Style, text: str) -> None:
    assert format_collective(_step("A[I, J]{U_X}", "A[I, J_X]"), style) == text


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("ascii", "A[I, J_X] ._J B[J_X, K] -> C[I, K]{U_X}"),
        ("unicode", "A[I, J₍X₎] ·₍J₎ B[J₍X₎, K] → C[I, K]{U₍X₎}"),
        ("latex", r"A[I, J_{X}] \cdot_{J} B[J_{X}, K] \to C[I, K]\{U_{X}\}"),
    ],
)
def test_a_contraction_in_every_style(style: Style, text: str) -> None:
    """The local product: A was whole and is sliced to its role first."""
    arrays = parse_array("A[I, J]"), parse_array("B[J_X, K]"), parse_array("C[I, K]")
    plan = contraction("IJ,JK->IK", *arrays, {"X": "J"})
    assert format_contraction(plan, style) == text
    if style != "latex":
        operands, out = parse_product(text)
        assert [*operands, out] == [plan.lhs_computed, plan.rhs_computed, plan.product]


def test_an_outer_product_sums_nothing() -> None:
    arrays = parse_array("A[I_X]"), parse_array("B[J]"), parse_array("C[I_X, J]")
    text = format_contraction(contraction("I,J->IJ", *arrays, {"X": "I"}), "unicode")
    assert text == "A[I₍X₎] · B[J] → C[I₍X₎, J]"


def test_an_unknown_style() -> None:
    with pytest.raises(NotationError) as caught:
        format_array(parse_array("A[I]"), "unicod")  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == "style 'unicod' is unknown; did you mean unicode?"
