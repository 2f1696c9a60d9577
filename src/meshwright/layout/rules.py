"""The rules of a Layout: which mesh axes split each letter of an array."""

from dataclasses import dataclass
from functools import lru_cache

from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Contraction, Reshard, contraction, cotangent
from meshwright.notation.operation import placed

LetterRules = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class Rules:
    """What splits each letter, first rule first. Layouts that differ in degrees alone share them."""

    stored: LetterRules
    updated: LetterRules
    activations: LetterRules


@lru_cache(maxsize=4096)
def make_rules(
    batch: Axes, zero_axes: Axes, zero: int, experts: Axes, tensor: Axes, tensor2: Axes, positions: Axes
) -> Rules:
    wide = (("E", experts), *((letter, tensor) for letter in "NKFMUV"))
    sharded = (*wide, ("D", tensor2 + zero_axes))
    stored = sharded if zero == 3 else (*wide, ("D", tensor2))
    activations = (*wide, ("D", tensor2), ("B", batch), ("T", positions), ("C", batch + positions))
    return Rules(stored, sharded, activations)


def is_matrix(letters: str) -> bool:
    """Whether a weight is more than one vector a layer."""
    return len(letters.translate(_WITHOUT_LAYERS)) > 1


_WITHOUT_LAYERS = str.maketrans("", "", "LP")


@lru_cache(maxsize=4096)
def split(name: str, letters: str, rules: LetterRules) -> ShardedArray:
    taken: dict[str, Axes] = {}
    used: set[str] = set()
    for letter, axes in rules:
        # A router's scores have an entry for every expert: only what is an expert's own is split.
        if letter in letters and (letter != "E" or "M" in letters or "C" in letters):
            taken[letter] = tuple(axis for axis in axes if axis not in used)
            used |= set(axes)
    return ShardedArray(name, tuple(letters), tuple(taken.get(letter, ()) for letter in letters))


@lru_cache(maxsize=4096)
def planned_contraction(rules: Rules, name: str, spec: str) -> Contraction:
    operands, _, out = spec.partition("->")
    x, w = operands.split(",")
    given, weight = split("x", x, rules.activations), split(name, w, rules.stored)
    product = split(f"{name}_out", out, rules.activations)
    operation = placed((given, weight), product, wanted=True, stored=frozenset({name}))
    return contraction(spec, given, weight, product, operation.roles)


@lru_cache(maxsize=4096)
def gathered_positions(rules: Rules, name: str, letters: str) -> Reshard:
    """From an activation's shards of T to T whole, to whose cotangent every shard of the queries adds."""
    projected = split(name, letters, rules.activations)
    whole = projected.replace(axes={"T": ()})
    return Reshard(projected, whole, cotangent(whole).replace(unreduced=projected.axes_of("T")))
