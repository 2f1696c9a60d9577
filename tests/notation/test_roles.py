"""The textbook's cases, and the roles that it would consider."""

import pytest

from meshwright.notation.einsum import Einsum
from meshwright.notation.parse import parse_array
from meshwright.notation.roles import axis_orders, case_of, textbook_roles

MATMUL = Einsum("IJ", "JK", "IK")


@pytest.mark.parametrize(
    ("lhs", "rhs", "number", "conflict", "summed"),
    [
        ("A[I_X, J]", "B[J, K]", 1, False, ""),
        ("A[I, J]", "B[J, K_X]", 1, False, ""),
        ("A[I, J]", "B[J, K]", 1, False, ""),
        ("A[I, J_X]", "B[J, K]", 2, False, ""),
        ("A[I, J]", "B[J_X, K]", 2, False, ""),
        ("A[I, J_X]", "B[J, K_X]", 2, True, ""),  # B cannot have X on J as well
        ("A[I_X, J]", "B[J_X, K]", 2, True, ""),
        ("A[I, J_X]", "B[J_X, K]", 3, False, ""),
        ("A[I_X, J]", "B[J, K_X]", 4, True, ""),  # both of the product's dimensions on one axis
        ("A[I, J]{U_X}", "B[J, K]", 1, False, "A"),
        ("A[I, J]{U_X}", "B[J_X, K]", 2, False, "A"),
        ("A[I, J]{U_X}", "B[J, K]{U_X}", 1, False, "AB"),
    ],
)
def test_cases(lhs: str, rhs: str, number: int, conflict: bool, summed: str) -> None:
    case = case_of(MATMUL, parse_array(lhs), parse_array(rhs), "X")
    assert (case.number, case.conflict, "".join(a.name for a in case.summed)) == (number, conflict, summed)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "roles"),
    [
        ("A[I_X, J]", "B[J, K]", "C[I_X, K]", {"I"}),  # in nobody's way
        ("A[I, J]", "B[J, K]", "C[I, K_X]", {"K"}),  # a slice of B is enough
        ("A[I_X, J]", "B[J, K]", None, {"I"}),
        ("A[I, J_X]", "B[J, K]", "C[I, K]", {"J", None}),  # reduce, gather
        ("A[I, J_X]", "B[J_X, K]", "C[I, K_X]", {"J", "K"}),
        ("A[I_X, J]", "B[J, K_X]", "C[I, K]", {"I", "K", None}),  # gather B, A or both
        ("A[I_X, J]", "B[J, K_X]", None, {"I", "K"}),
        ("A[I, J_X]", "B[J, K]", "C[I, K]{U_X}", {"J"}),  # only a contracted letter leaves a partial sum
        ("A[I, J]{U_X}", "B[J, K]", "C[I, K]", {"I", "J", None}),
        ("A[I, J]", "B[J, K]", "C[I, K]", {"I", "K", None}),  # idle: it may spread the work
    ],
)
def test_choices_of_a_matmul(lhs: str, rhs: str, out: str | None, roles: set) -> None:
    wanted = out and parse_array(out)
    found = textbook_roles(MATMUL, parse_array(lhs), parse_array(rhs), wanted or None, "X")
    assert set(found) == roles and len(found) == len(roles)


def test_axes_keep_the_order_of_the_first_array_that_has_them() -> None:
    arrays = parse_array("B[J_YX, K]"), parse_array("A[I, J_XY]")
    assert axis_orders("IJ", arrays, ("X", "Y")) == {"I": ("X", "Y"), "J": ("Y", "X")}
