"""Which roles a mesh axis may usefully play in a contraction, and the textbook case it makes.

einsum.contractions() lists every assignment of roles. Most of them carry an axis somewhere only to
carry it back; `role_choices` leaves those out. What is left out is never cheaper: the tests compare
both on random contractions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Einsum

Case = Literal[1, 2, 3, 4]
Choices = tuple[str | None, ...]


def role_choices(
    einsum: Einsum,
    lhs: ShardedArray,
    rhs: ShardedArray,
    out: ShardedArray | None,
    axis: str,
    sizes: Mapping[str, int],
) -> Choices:
    """The roles of `axis` that may be cheapest; `out` is None where any sharding will do.

    If some role needs no collective, only such roles: the axis splits the work and is in nobody's
    way. Otherwise the letters that it splits now, or shall, and others that stand for their like:

    - from a contracted letter an all-to-all takes it to any other of that operand, at one price
    - an axis that splits neither operand may split any letter of the output for nothing
    - where the output is open, so may one whose operand is gathered; where it is whole, the axis may
      repeat the work (no role)

    Of letters that are alike the largest is taken, as the one that divides best.
    """
    if out is not None and axis in out.unreduced:
        return tuple(einsum.contracted)
    free = [letter for letter in einsum.out if _costs_nothing(letter, (lhs, rhs), out, axis)]
    if free:
        return _one_a_side(free, einsum, sizes)
    letters = [a.dim_of(axis) for a in (lhs, rhs, out) if a is not None]
    for operand in (lhs, rhs):
        if axis in operand.unreduced:
            letters += operand.dims
        elif (operand.dim_of(axis) or " ") in einsum.contracted:
            letters += _largest([dim for dim in operand.dims if dim in einsum.out], sizes)
    idle = not any(axis in (*a.sharded_axes, *a.unreduced) for a in (lhs, rhs))
    if idle or out is None:
        letters += _one_a_side(einsum.out, einsum, sizes)
    found: Choices = tuple(dict.fromkeys(letter for letter in letters if letter))
    whole = out is not None and axis not in out.sharded_axes
    return (*found, None) if whole or not found else found


def _largest(letters: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    return [max(letters, key=sizes.__getitem__)] if letters else []


def _one_a_side(letters: Iterable[str], einsum: Einsum, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The largest of `letters` in both operands, in the left alone and in the right alone."""
    left = [letter for letter in letters if letter not in einsum.rhs]
    right = [letter for letter in letters if letter not in einsum.lhs]
    both = [letter for letter in letters if letter in einsum.lhs and letter in einsum.rhs]
    return (*_largest(left, sizes), *_largest(right, sizes), *_largest(both, sizes))


def _costs_nothing(
    letter: str, operands: tuple[ShardedArray, ...], out: ShardedArray | None, axis: str
) -> bool:
    """Whether `axis` can split `letter` with slices alone."""
    for operand in operands:
        if axis in operand.unreduced or operand.dim_of(axis) not in (None, letter):
            return False
    return out is None or out.dim_of(axis) == letter


def axis_orders(letters: str, arrays: Sequence[ShardedArray], axes: Axes) -> dict[str, Axes]:
    """For each letter all of `axes`, in the order in which they may split it.

    That of einsum.contraction(): first as the first of `arrays` has them, and all arrays take it.
    """
    given = {
        letter: [axis for a in arrays if letter in a.dims for axis in a.axes_of(letter)] for letter in letters
    }
    return {letter: tuple(dict.fromkeys([*found, *axes])) for letter, found in given.items()}


def case_of(einsum: Einsum, lhs: ShardedArray, rhs: ShardedArray, axis: str) -> Case:
    """The case of "Sharded Matrices" that `axis` makes of the operands.

    1 it splits no contracted letter, and one letter at most: nothing need move
    2 it splits a contracted letter in one operand alone
    3 it splits the same contracted letter in both: a partial sum
    4 it splits different letters of the two, and a product may use an axis once
    """
    left, right = lhs.dim_of(axis), rhs.dim_of(axis)
    if left and right and left != right:
        return 4
    letter = left or right
    if letter is None or letter not in einsum.contracted:
        return 1
    return 3 if left == right else 2
