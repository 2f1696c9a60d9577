"""Roles of a mesh axis in a contraction: the textbook's cases, and the roles that it tries."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Einsum


class AxisCase(NamedTuple):
    """The case of an axis and two operands, as in "Sharded Matrices".

    number:
        1  the axis splits no contracted letter, and at most one letter: no operand needs to move
        2  it splits a contracted letter in only one operand
        3  it splits the same contracted letter in both: the product is a partial sum
        4  it splits a letter of each that is not contracted, but the product may use an axis only once
    conflict: whether it splits different letters of the operands, so that one operand must move; this can
    also happen in case 2. summed: operands that are partial sums over the axis, which the book does not
    treat; they are summed before the product.
    """

    number: Literal[1, 2, 3, 4]
    conflict: bool
    summed: tuple[ShardedArray, ...]


def case_of(einsum: Einsum, lhs: ShardedArray, rhs: ShardedArray, axis: str) -> AxisCase:
    """The case of `axis` and the operands."""
    left, right = lhs.dim_of(axis), rhs.dim_of(axis)
    conflict = bool(left and right and left != right)
    contracted = [letter for letter in (left, right) if letter and letter in einsum.contracted]
    summed = tuple(array for array in (lhs, rhs) if axis in array.unreduced)
    if not contracted:
        return AxisCase(4 if conflict else 1, conflict, summed)
    return AxisCase(3 if left == right else 2, conflict, summed)


def textbook_roles(
    einsum: Einsum, lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray | None, axis: str
) -> tuple[str | None, ...]:
    """The roles of `axis` that a textbook tries. out: None if it may have any sharding.

    If some roles divide the work without a collective, only these are tried. Otherwise these are:
    the letters that the axis splits in an operand or in the wanted output; the letters of an operand that is
    a partial sum over it; all letters of the output, if the axis splits no operand or `out` is None; and no
    letter, which repeats the work, if the output is whole over the axis.
    """
    if out is not None and axis in out.unreduced:
        return tuple(einsum.contracted)
    free = [letter for letter in einsum.out if _costs_nothing(letter, (lhs, rhs), out, axis)]
    if free:
        return tuple(free)
    letters = [array.dim_of(axis) for array in (lhs, rhs, out) if array is not None]
    letters += [dim for array in (lhs, rhs) if axis in array.unreduced for dim in array.dims]
    if out is None or not any(axis in (*array.sharded_axes, *array.unreduced) for array in (lhs, rhs)):
        letters += einsum.out
    tried = tuple(dict.fromkeys(letter for letter in letters if letter))
    is_whole = out is not None and axis not in out.sharded_axes
    return (*tried, None) if is_whole or not tried else tried


def _costs_nothing(
    letter: str, operands: tuple[ShardedArray, ...], out: ShardedArray | None, axis: str
) -> bool:
    """Whether `axis` can split `letter` with no collective but slices."""
    for operand in operands:
        if axis in operand.unreduced or operand.dim_of(axis) not in (None, letter):
            return False
    return out is None or out.dim_of(axis) == letter


def axis_orders(letters: str, arrays: Sequence[ShardedArray], axes: Axes) -> dict[str, Axes]:
    """All of `axes` for each letter, in the order of all arrays that they split.

    The order is as in einsum.contraction(): axes as in the first of `arrays` with the letter, then others.
    """
    given = {
        letter: [axis for a in arrays if letter in a.dims for axis in a.axes_of(letter)] for letter in letters
    }
    return {letter: tuple(dict.fromkeys([*ordered, *axes])) for letter, ordered in given.items()}
