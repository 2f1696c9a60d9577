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
    way. Otherwise the letters that it splits now, or shall; none, which gathers all; and one letter
    that stands for its like: where it splits a contracted letter, an all-to-all takes it to any
    other of that operand at one price, and where it splits no operand it may split any of the
    output. The largest is taken, as the one that divides best.
    """
    if out is not None and axis in out.unreduced:
        return tuple(einsum.contracted)
    free = [letter for letter in einsum.out if _costs_nothing(letter, (lhs, rhs), out, axis)]
    if free:
        return _one_a_side(free, einsum, sizes)
    letters = [a.dim_of(axis) for a in (lhs, rhs, out) if a is not None]
    for operand in (lhs, rhs):
        if (operand.dim_of(axis) or " ") in einsum.contracted:
            kept = [dim for dim in operand.dims if dim in einsum.out]
            letters += [max(kept, key=sizes.__getitem__)] if kept else []
        elif axis in operand.unreduced:
            letters += operand.dims
    if not any(axis in (*a.sharded_axes, *a.unreduced) for a in (lhs, rhs)):
        letters += _one_a_side(einsum.out, einsum, sizes)
    return (*dict.fromkeys(letter for letter in letters if letter), None)


def _one_a_side(letters: Iterable[str], einsum: Einsum, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The largest of `letters` in both operands, in the left alone and in the right alone."""
    found: dict[tuple[bool, bool], str] = {}
    for letter in letters:
        side = (letter in einsum.lhs, letter in einsum.rhs)
        if side not in found or sizes[letter] > sizes[found[side]]:
            found[side] = letter
    return tuple(found.values())


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
