"""A contraction of two sharded arrays, and the collectives that it needs, forward and backward.

Every mesh axis has one **role** in a contraction: it splits one of the einsum's letters, or
none (then its devices repeat the same work). The roles determine the rest:

    an operand      is split by the axes whose letter it has, and whole over the others
    the product     is split by the axes whose letter it has, and a partial sum `{U}` over the axes
                    that split a contracted letter
    the collectives reshard each operand to its roles, and the product to the wanted sharding

The four cases of "Sharded Matrices" are four choices of roles. With a Layout, which shards every array, the
roles are those that move the fewest arrays (operation.py). Without one they are searched by seconds
(cost/strategies.py). A gradient's contraction is over the same letters with the same roles, so the backward
collectives are the transposes of the forward ones: a gathered array's cotangent is reduce-scattered, and the
cotangent of a replicated array (a weight over the data axis) is all-reduced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.mesh import Degrees

Roles = Mapping[str, str | None]
Steps = tuple[Collective, ...]
EinsumSide = Literal["lhs", "rhs", "out"]  # an array of a contraction


class ChosenSteps(NamedTuple):
    """The steps of an array and of its cotangent; None for the steps of `reshard`."""

    forward: Steps | None = None
    backward: Steps | None = None


BY_RULES = ChosenSteps()


@dataclass(frozen=True)
class Einsum:
    """The letters of a two-operand einsum.

    >>> e = Einsum.parse("BTD,DNH->BTNH")
    >>> e.contracted, e.letters
    ('D', 'BTDNH')
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def parse(cls, spec: str) -> "Einsum":
        sides, arrow, out = spec.replace(" ", "").partition("->")
        lhs, comma, rhs = sides.partition(",")
        if not (arrow and comma and (lhs + rhs + out).isalpha()):
            raise NotationError(f"{spec!r} is not a two-operand einsum such as 'BTD,DF->BTF'")
        for letter in out:
            if letter not in lhs + rhs:
                raise NotationError(f"{spec!r}: {letter} of the output is in neither operand")
        for letter in lhs + rhs:
            if (letter in lhs) + (letter in rhs) + (letter in out) == 1:
                raise NotationError(f"{spec!r}: {letter} is in only one operand and not in the output")
        return cls(lhs, rhs, out)

    @property
    def letters(self) -> str:
        return "".join(dict.fromkeys(self.lhs + self.rhs))

    @property
    def contracted(self) -> str:
        return "".join(letter for letter in self.letters if letter not in self.out)

    @property
    def batched(self) -> str:
        """The letters of independent products: in both operands and the result.

        >>> Einsum.parse("BTgu,guo->BTgo").batched
        'g'
        """
        return "".join(letter for letter in self.out if letter in self.lhs and letter in self.rhs)

    def flops(self, sizes: Mapping[str, float]) -> float:
        """Two FLOPs (multiply, add) for every point of the index space."""
        return 2 * prod(sizes[letter] for letter in self.letters)

    def __str__(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"


@dataclass(frozen=True)
class Reshard:
    """The reshard of an operand or result, and the transposed reshard of its cotangent.

    given: the array before it. used: the operand as the operation reads it, or the wanted result. yielded:
    the cotangent of `used`. chosen: steps to take in place of `reshard`'s.
    """

    given: ShardedArray
    used: ShardedArray
    yielded: ShardedArray
    chosen: ChosenSteps = BY_RULES

    @cached_property
    def forward(self) -> list[Collective]:
        steps = self.chosen.forward
        return reshard(self.given, self.used) if steps is None else list(steps)

    @cached_property
    def backward(self) -> list[Collective]:
        steps = self.chosen.backward
        return reshard(self.yielded, cotangent(self.given)) if steps is None else list(steps)


@lru_cache(maxsize=4096)
def mirrored(given: ShardedArray, used: ShardedArray) -> Reshard:
    """The reshard of `given` to `used`, with the reverse for the cotangent."""
    return Reshard(given, used, cotangent(used))


@dataclass(frozen=True)
class Contraction:
    """One contraction with its roles: the given operands and the wanted product.

    lhs_chosen, rhs_chosen, out_chosen: steps of each array to take in place of `reshard`'s.
    """

    einsum: Einsum
    lhs: ShardedArray
    rhs: ShardedArray
    out: ShardedArray
    roles: Roles
    lhs_chosen: ChosenSteps = BY_RULES
    rhs_chosen: ChosenSteps = BY_RULES
    out_chosen: ChosenSteps = BY_RULES

    @cached_property
    def lhs_reshard(self) -> Reshard:
        return replace(operand_reshard(self.lhs, self.roles), chosen=self.lhs_chosen)

    @cached_property
    def rhs_reshard(self) -> Reshard:
        return replace(operand_reshard(self.rhs, self.roles), chosen=self.rhs_chosen)

    @cached_property
    def out_reshard(self) -> Reshard:
        return replace(result_reshard(self.out, self.roles), chosen=self.out_chosen)

    @property
    def lhs_computed(self) -> ShardedArray:
        """The left operand as the local product needs it."""
        return self.lhs_reshard.used

    @property
    def rhs_computed(self) -> ShardedArray:
        """The right operand as the local product needs it."""
        return self.rhs_reshard.used

    @property
    def product(self) -> ShardedArray:
        """The result of the local product, partial over the axes that split a contracted letter."""
        return self.out_reshard.given

    @property
    def lhs_steps(self) -> list[Collective]:
        return self.lhs_reshard.forward

    @property
    def rhs_steps(self) -> list[Collective]:
        return self.rhs_reshard.forward

    @property
    def out_steps(self) -> list[Collective]:
        return self.out_reshard.forward

    @property
    def steps(self) -> list[Collective]:
        """All collectives, in order."""
        return [*self.lhs_steps, *self.rhs_steps, *self.out_steps]

    def flops_per_device(self, mesh: Degrees, sizes: Mapping[str, float]) -> float:
        """FLOPs of the local product; axes without a role repeat it."""
        shards = prod(mesh.size(axis) for axis, letter in self.roles.items() if letter)
        return self.einsum.flops(sizes) / shards

    # The cotangent of a partial sum is a whole array, and vice versa, so `d out` has the wanted sharding
    # without partial sums, and a gradient has its operand's sharding at the end.

    @cached_property
    def lhs_gradient(self) -> "Contraction":
        """d lhs = d out . rhs, over the same letters with the same roles."""
        einsum = Einsum(self.einsum.out, self.einsum.rhs, self.einsum.lhs)
        arrays = cotangent(self.out), self.rhs_computed, cotangent(self.lhs)
        moved, home = ChosenSteps(self.out_chosen.backward), ChosenSteps(self.lhs_chosen.backward)
        return Contraction(einsum, *arrays, self.roles, lhs_chosen=moved, out_chosen=home)

    @cached_property
    def rhs_gradient(self) -> "Contraction":
        """d rhs = lhs . d out, over the same letters with the same roles."""
        einsum = Einsum(self.einsum.lhs, self.einsum.out, self.einsum.rhs)
        arrays = self.lhs_computed, cotangent(self.out), cotangent(self.rhs)
        moved, home = ChosenSteps(self.out_chosen.backward), ChosenSteps(self.rhs_chosen.backward)
        return Contraction(einsum, *arrays, self.roles, rhs_chosen=moved, out_chosen=home)


def cotangent(array: ShardedArray) -> ShardedArray:
    """The final cotangent of `array`: with its sharding, and all sums finished."""
    return array.replace(name=f"d{array.name}", unreduced=())


def by_roles(array: ShardedArray, roles: Roles) -> ShardedArray:
    """`array` split by the axes with a role of one of its letters, in the order of the roles."""
    axes = {dim: tuple(axis for axis, letter in roles.items() if letter == dim) for dim in array.dims}
    return array.replace(axes=axes, unreduced=())


def summed_by_roles(array: ShardedArray, roles: Roles) -> ShardedArray:
    """`array` as a local operation yields it: a partial sum over the axes whose letter it lacks.

    Forward that letter is contracted; backward the operand was repeated along it.
    """
    partial = tuple(axis for axis, letter in roles.items() if letter and letter not in array.dims)
    return by_roles(array, roles).replace(unreduced=partial)


def operand_reshard(operand: ShardedArray, roles: Roles) -> Reshard:
    """The reshard of an operand to its roles; its cotangent is partial over axes that repeated it."""
    return Reshard(operand, by_roles(operand, roles), summed_by_roles(cotangent(operand), roles))


def result_reshard(out: ShardedArray, roles: Roles) -> Reshard:
    """The reshard of an operation's result to the sharding of `out`."""
    return Reshard(summed_by_roles(out, roles), out, cotangent(out))


def contraction(
    spec: str, lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray, roles: Roles
) -> Contraction:
    """The contraction with these roles; the arrays' dimensions must be the letters of `spec`."""
    einsum = Einsum.parse(spec)
    for array, letters in ((lhs, einsum.lhs), (rhs, einsum.rhs), (out, einsum.out)):
        if array.dims != tuple(letters):
            raise NotationError(f"{array} does not have the dimensions {letters} of {spec!r}")
    assert set(roles.values()) <= {*einsum.letters, None}, f"{roles} are not roles in {spec!r}"
    return Contraction(einsum, lhs, rhs, out, ordered_roles(roles, rhs, lhs, out))


def ordered_roles(roles: Roles, *arrays: ShardedArray) -> Roles:
    """`roles` with the axes of a letter in the order of the first of `arrays` that they split.

    All arrays of a contraction take this order: D_XY and D_YX are different blocks.
    """
    as_given = [axis for a in arrays for axis in a.sharded_axes if roles.get(axis) == a.dim_of(axis)]
    return {axis: roles[axis] for axis in dict.fromkeys([*as_given, *roles])}
