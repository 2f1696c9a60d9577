"""What a mesh axis does in a contraction: the textbook's case, and the roles that a textbook would try."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Einsum


class AxisCase(NamedTuple):
    """The case of "Sharded Matrices" that an axis makes of two operands.

    number:
        1  it splits no contracted letter, and one letter at most: nothing need move
        2  it splits a contracted letter in one operand alone
        3  it splits the same contracted letter in both: the product is a partial sum
        4  it splits a letter of each that is not contracted, and the product may use an axis once
    conflict: whether it splits different letters of the two, so that one operand gives way; of case 2
    where the other operand has it on another letter. summed: the operands that hold partial sums
    over it, which the book leaves out; they are summed before the product.
    """

    number: Literal[1, 2, 3, 4]
    conflict: bool
    summed: tuple[ShardedArray, ...]


def case_of(einsum: Einsum, lhs: ShardedArray, rhs: ShardedArray, axis: str) -> AxisCase:
    """The case that `axis` makes of the operands."""
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
    """The roles of `axis` that a textbook tries; `out` is None where any sharding will do.

    If some role needs no collective, such roles alone: the axis splits the work and is in nobody's
    way. Otherwise the letters that it splits in an array as given or wanted, those of an operand that holds
    partial sums over it, any of the output where it splits no operand or the output is open; and none, which
    repeats the work, where the output is whole over it.
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
    found = tuple(dict.fromkeys(letter for letter in letters if letter))
    is_whole = out is not None and axis not in out.sharded_axes
    return (*found, None) if is_whole or not found else found


def _costs_nothing(
    letter: str, operands: tuple[ShardedArray, ...], out: ShardedArray | None, axis: str
) -> bool:
    """Whether `axis` can split `letter` with slices alone."""
    for operand in operands:
        if axis in operand.unreduced or operand.dim_of(axis) not in (None, letter):
            return False
    return out is None or out.dim_of(axis) == letter


def axis_orders(letters: str, arrays: Sequence[ShardedArray], axes: Axes) -> dict[str, Axes]:
    """All of `axes` for each letter, in the order in which they may split it.

    That of einsum.contraction(): first as the first of `arrays` has them, and all arrays take it.
    """
    given = {
        letter: [axis for a in arrays if letter in a.dims for axis in a.axes_of(letter)] for letter in letters
    }
    return {letter: tuple(dict.fromkeys([*found, *axes])) for letter, found in given.items()}
