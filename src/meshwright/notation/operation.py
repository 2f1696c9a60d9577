"""One operation of a chain, with any number of operands and the role of every mesh axis.

    out[letters] = f(a[letters], b[letters], ...)

A contraction, an elementwise function (its operands broadcast), a reduction and a split or merge of
a dimension are all loops over an index space, with a letter for each loop. So all obey the rule of einsum.py:
an axis splits one letter of the space; an array is split by the axes whose letter it has; a result or
cotangent is a partial sum over the axes whose letter its array lacks.
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
    """`out = f(operands)` on each device's blocks, after the operands are moved.

    aliases: letters of the space that an operand of a split or merge writes differently: the space of
    `q[B, K, G, H] = split(q[B, N, H])` has K, which the operand calls N. chosen: the steps of each operand
    and then of the result; if empty they are the steps of `reshard`.
    """

    operands: tuple[ShardedArray, ...]
    out: ShardedArray
    roles: Roles
    aliases: Mapping[str, str] = field(default_factory=dict)
    chosen: tuple[ChosenSteps, ...] = ()

    @cached_property
    def reshards(self) -> tuple[Reshard, ...]:
        """The reshards of the operands to their roles.

        The cotangent of an operand is a partial sum over the axes along which the operand was repeated.
        """
        roles = rename(self.roles, self.aliases)
        reshards = tuple(operand_reshard(operand, roles) for operand in self.operands)
        if not self.chosen:
            return reshards
        return tuple(replace(r, chosen=steps) for r, steps in zip(reshards, self.chosen[:-1], strict=True))

    @cached_property
    def finish(self) -> Reshard:
        """The reshard of the result, from the devices' blocks to the wanted sharding."""
        reshard = result_reshard(self.out, self.roles)
        return replace(reshard, chosen=self.chosen[-1]) if self.chosen else reshard


def rename(roles: Roles, aliases: Mapping[str, str]) -> Roles:
    """`roles` with letters replaced by their aliases."""
    return {axis: aliases.get(letter, letter) if letter else None for axis, letter in roles.items()}


def bias_reshard(y: ShardedArray, b: ShardedArray) -> Reshard:
    """The reshard of a bias b[F] before its addition to y[.., F], perhaps a partial sum."""
    whole = y.replace(unreduced=())
    to_y = placed_operation((whole, b), whole, wanted=True).reshards[1]
    yielded = to_y.yielded
    return replace(to_y, yielded=yielded.replace(unreduced=(*yielded.unreduced, *y.unreduced)))


@lru_cache(maxsize=4096)
def placed_operation(
    operands: tuple[ShardedArray, ...],
    out: ShardedArray,
    *,
    wanted: bool,
    stored: frozenset[str] = frozenset(),
    whole: str = "",
    renamed: tuple[tuple[str, str], ...] = (),
) -> Operation:
    """The operation with the roles that move the fewest arrays; sizes do not matter.

    out: the wanted sharding if `wanted`; otherwise only its dimensions are used, and it keeps the sharding
    that the operation yields, with sums finished. stored: names of arrays (weights, caches) that move only
    if no other choice moves as few. whole: letters that the function needs undivided, such as softmax's.
    renamed: the aliases of the operation.
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
    """The choice of a letter for each axis: the one that most arrays have there, so that fewest move."""

    operands: list[ShardedArray]
    out: ShardedArray | None
    out_dims: tuple[str, ...]
    stored: frozenset[str]
    parts: frozenset[str]

    def elect(self, axis: str, whole: str) -> str | None:
        """A letter that some array already has split over `axis`, or None."""
        letters = {a.dim_of(axis): None for a in (*self.operands, *([self.out] if self.out else []))}
        if self.out and axis in self.out.unreduced:
            letters |= dict.fromkeys(d for a in self.operands for d in a.dims if d not in self.out_dims)
        candidates = [letter for letter in letters if letter and letter not in whole]
        return min([*candidates, None], key=lambda letter: self._moves(axis, letter))

    def _moves(self, axis: str, letter: str | None) -> tuple[int, int, bool, bool, int]:
        """(moved arrays, stored arrays among them, ...); the smallest is chosen.

        Further criteria: do not split the parts of a split dimension, which may be too few for the axis;
        divide the work instead of repeating it; do not move the output.
        """
        moved = [a for a in self.operands if a.dim_of(axis) not in (None, letter) or axis in a.unreduced]
        out_moved = self._out_moves(axis, letter)
        kept = sum(a.name in self.stored for a in moved)
        return len(moved) + out_moved, kept, letter in self.parts, letter is None, out_moved

    def _out_moves(self, axis: str, letter: str | None) -> int:
        summed = letter is not None and letter not in self.out_dims
        if self.out is None:
            return int(summed)
        if axis in self.out.unreduced:  # only a sum over the axis can be partial
            return 0 if summed else len(self.operands) + 1
        # Slicing a whole result is free; any other difference is a collective.
        return int(summed or (letter is not None and self.out.dim_of(axis) != letter))


def _in_space(array: ShardedArray, aliases: Mapping[str, str]) -> ShardedArray:
    """`array` with the letters of the operation's space."""
    letters = {alias: letter for letter, alias in aliases.items()}
    dims = tuple(letters.get(dim, dim) for dim in array.dims)
    return ShardedArray(array.name, dims, array.axes, array.unreduced)
