"""One operation of a chain, of any number of operands, with the role of every mesh axis.

    out[letters] = f(a[letters], b[letters], ...)

A contraction, an elementwise function (its operands broadcast), a reduction and a split or merge of
a dimension are all an index space with one letter a loop. So all obey the rule of einsum.py: an axis
splits one letter of the space; an array is split by the axes whose letter it has; what an array yields,
forward or backward, is a partial sum over the axes whose letter it lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import (
    ChosenSteps,
    Reshard,
    Roles,
    by_roles,
    operand_reshard,
    ordered_roles,
    result_reshard,
    summed_by_roles,
)


@dataclass(frozen=True)
class Operation:
    """`out = f(operands)` on every device's blocks, once the operands are moved.

    aliases: letters of the space that an operand of a split or merge writes otherwise: the space of
    `q[B, K, G, H] = split(q[B, N, H])` has K, which the operand calls N. chosen: the steps of each
    operand and then of the result; those of `reshard` where none are given.
    """

    operands: tuple[ShardedArray, ...]
    out: ShardedArray
    roles: Roles
    aliases: Mapping[str, str] = field(default_factory=dict)
    chosen: tuple[ChosenSteps, ...] = ()

    @cached_property
    def reshards(self) -> tuple[Reshard, ...]:
        """Every operand to its roles; its cotangent is a partial sum where it was repeated."""
        roles = rename(self.roles, self.aliases)
        reshards = tuple(operand_reshard(operand, roles) for operand in self.operands)
        if not self.chosen:
            return reshards
        return tuple(replace(own, chosen=one) for own, one in zip(reshards, self.chosen[:-1], strict=True))

    @cached_property
    def finish(self) -> Reshard:
        """The result from what the devices yield to where it is wanted."""
        reshard = result_reshard(self.out, self.roles)
        return replace(reshard, chosen=self.chosen[-1]) if self.chosen else reshard


def rename(roles: Roles, aliases: Mapping[str, str]) -> Roles:
    """`roles` with other letters for some."""
    return {axis: aliases.get(letter, letter) if letter else None for axis, letter in roles.items()}


def bias_reshard(y: ShardedArray, b: ShardedArray) -> Reshard:
    """How b, which has some dimensions of y, comes to where it is added to y, a partial sum or not."""
    whole = y.replace(unreduced=())
    there = placed((whole, b), whole, wanted=True).reshards[1]
    yielded = there.yielded
    return replace(there, yielded=yielded.replace(unreduced=(*yielded.unreduced, *y.unreduced)))


@lru_cache(maxsize=4096)
def placed(
    operands: tuple[ShardedArray, ...],
    out: ShardedArray,
    *,
    wanted: bool,
    stored: frozenset[str] = frozenset(),
    whole: str = "",
    renamed: tuple[tuple[str, str], ...] = (),
) -> Operation:
    """The operation that moves the fewest of its arrays; the layout alone decides, no size does.

    out: its sharding where `wanted`; else only its dimensions count, and it stays where it is made
    with its sums finished. stored: names of arrays that rather stay (weights, caches) than another
    array. whole: letters that the function needs undivided, as softmax does its own. renamed: the
    aliases of the operation.
    """
    aliases = dict(renamed)
    space = [_in_space(a, aliases) for a in operands]
    parts = frozenset(aliases if whole else ())
    ballot = _Ballot(space, out if wanted else None, out.dims, stored, parts)
    keepers = [a for a in space if a.name in ballot.stored]
    arrays = [*keepers, *([out] if wanted else []), *space]
    axes = dict.fromkeys(axis for a in arrays for axis in (*a.sharded_axes, *a.unreduced))
    roles = ordered_roles({axis: ballot.elect(axis, whole) for axis in axes}, *arrays)
    if wanted and not set(out.unreduced) <= set(summed_by_roles(out, roles).unreduced):
        raise NotationError(f"{out}: nothing that {', '.join(map(str, operands))} share is summed over there")
    return Operation(operands, out if wanted else by_roles(out, roles), roles, aliases)


@dataclass(frozen=True)
class _Ballot:
    """Which letter each axis had best split: that of most arrays, so that fewest move."""

    operands: list[ShardedArray]
    out: ShardedArray | None
    out_dims: tuple[str, ...]
    stored: frozenset[str]
    parts: frozenset[str]

    def elect(self, axis: str, whole: str) -> str | None:
        """A letter that some array has split over `axis` already, or none."""
        letters = {a.dim_of(axis): None for a in (*self.operands, *([self.out] if self.out else []))}
        if self.out and axis in self.out.unreduced:
            letters |= dict.fromkeys(d for a in self.operands for d in a.dims if d not in self.out_dims)
        candidates = [letter for letter in letters if letter and letter not in whole]
        return min([*candidates, None], key=lambda letter: self._moves(axis, letter))

    def _moves(self, axis: str, letter: str | None) -> tuple[int, int, bool, bool, int]:
        """(arrays moved, stored ones among them, ...); the smallest wins.

        Among equals the parts of a split dimension are left alone, since they may be too few for the
        axis; then work is divided rather than repeated; then the output stays.
        """
        moved = [a for a in self.operands if a.dim_of(axis) not in (None, letter) or axis in a.unreduced]
        out_moved = self._out_moves(axis, letter)
        kept = sum(a.name in self.stored for a in moved)
        return len(moved) + out_moved, kept, letter in self.parts, letter is None, out_moved

    def _out_moves(self, axis: str, letter: str | None) -> int:
        summed = letter is not None and letter not in self.out_dims
        if self.out is None:
            return int(summed)
        if axis in self.out.unreduced:  # nothing but a sum over it can be partial
            return 0 if summed else len(self.operands) + 1
        # A whole result is sliced for nothing; any other difference is a collective.
        return int(summed or (letter is not None and self.out.dim_of(axis) != letter))


def _in_space(array: ShardedArray, aliases: Mapping[str, str]) -> ShardedArray:
    """`array` with the letters of the operation's space for its own."""
    letters = {own: letter for letter, own in aliases.items()}
    dims = tuple(letters.get(dim, dim) for dim in array.dims)
    return ShardedArray(array.name, dims, array.axes, array.unreduced)
