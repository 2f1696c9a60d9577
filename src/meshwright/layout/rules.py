"""The rules of a Layout: tables from the letters of an array to mesh axes.

    stored       weights between two steps
    used         weights as operands of products, after an all-gather over the other axes of `stored`
    gradients    a weight's gradient while microbatches add to it
    updated      the summed gradient, and the optimizer's state
    activations  activations and caches; prefill and generate may have separate tables

FSDP, ZeRO stages, tensor and expert parallelism are entries in the tables (layout/axes/). So are layouts
without a name: a weight split over another dimension, replicated heads, a cache split by sequence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

from meshwright.errors import LayoutError, nearest
from meshwright.models.mixers import LIKE_LETTERS
from meshwright.models.parameters import OF_STACKS, of_a_layer
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Mesh

LetterRules = tuple[tuple[str, Axes], ...]
# Letters of models/transformer.py that a rule may name.
LETTERS = "BTSCDFMUNKGHVWEJAORQLZ"
# The name of the entries of a table for queries, keys and values in attention.
ATTENTION = "attention"
# The axis of pipeline stages, which splits no array unless stages run one program: no rule has to name it.
STAGES = "pipe"
# Phases of inference; each may have its own table of activations.
OWN_PHASES = ("prefill", "generate")


@dataclass(frozen=True)
class AxisTable:
    """Mesh axes by letter. Where two letters of an array ask for an axis, the earlier entry has it.

    arrays: entries for single arrays, by name, that replace the table's for them.

    >>> table = AxisTable((("F", ("tensor",)), ("D", ("fsdp",))))
    >>> print(table.split("w_in", "DF"))
    w_in[D_fsdp, F_tensor]
    """

    letters: LetterRules
    arrays: tuple[tuple[str, LetterRules], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.letters, self.arrays))

    def __hash__(self) -> int:
        return self._hash  # tables are keys of caches that a search asks a million times

    def axes_of(self, letter: str) -> Axes:
        """The axes of the entry for `letter`; empty without an entry."""
        return dict(self.letters).get(letter, ())

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every mesh axis that some entry names."""
        tables = (self.letters, *(letters for _, letters in self.arrays))
        return frozenset(axis for table in tables for _, axes in table for axis in axes)

    def split(self, name: str, letters: str) -> ShardedArray:
        """The array `name[letters]` as the table splits it."""
        return _split(self, name, letters)

    def weight(self, name: str, letters: str) -> ShardedArray:
        """The weight `name[letters]` as the table splits it: a vector of every layer only by layer."""
        return (self if is_matrix(letters) else self.of_layers).split(name, letters)

    @cached_property
    def of_layers(self) -> "AxisTable":
        """Only the entry for L: vectors of every layer are split by layer, and whole otherwise."""
        return AxisTable(tuple(row for row in self.letters if row[0] == "L"))

    def without(self, axes: set[str]) -> "AxisTable":
        """This table without the mesh axes named, and without the entries that had no others."""
        return AxisTable(
            _without(self.letters, axes), tuple((name, _without(rows, axes)) for name, rows in self.arrays)
        )

    def with_one_axis(self, axes: Axes, instead: str) -> "AxisTable":
        """This table with the axis `instead` in place of each of `axes`."""

        def rows_of(letters: LetterRules) -> LetterRules:
            renamed = (
                (letter, [instead if axis in axes else axis for axis in old]) for letter, old in letters
            )
            return tuple((letter, tuple(dict.fromkeys(new))) for letter, new in renamed)

        return AxisTable(rows_of(self.letters), tuple((name, rows_of(rows)) for name, rows in self.arrays))

    @cached_property
    def position_axes(self) -> Axes:
        """The axes that split positions (T) and no dimension of a token; `context` is one."""
        apart = {axis for letter, axes in self.letters if letter not in "BTSC" for axis in axes}
        return tuple(axis for axis in self.axes_of("T") if axis not in apart)

    @cached_property
    def attending(self) -> "AxisTable | None":
        """The table of queries, keys and values in attention; None if it is this one."""
        attention = dict(self.arrays).get(ATTENTION)
        return None if attention is None else AxisTable(attention)

    @cached_property
    def of_generation(self) -> "AxisTable":
        """The table for steps with a token of each sequence: axes that split positions split sequences."""
        if not (over := self.position_axes):
            return self
        rows = {letter: tuple(one for one in axes if one not in over) for letter, axes in self.letters}
        rows = {"B": (), **rows, "C": self.axes_of("C")}
        rows["B"] += over
        return AxisTable(tuple((letter, axes) for letter, axes in rows.items() if axes), self.arrays)

    def to_dict(self) -> dict[str, object]:
        """Letters with lists of axes, and arrays with such tables of their own, as TOML has them."""
        rows: dict[str, object] = {letter: list(axes) for letter, axes in self.letters}
        return rows | {
            name: {letter: list(axes) for letter, axes in letters} for name, letters in self.arrays
        }

    @classmethod
    def from_dict(cls, where: str, values: object) -> "AxisTable":
        """The table that `to_dict` wrote. Raises LayoutError naming the entry that is none."""
        if not isinstance(values, Mapping):
            raise LayoutError(f'{where} = {values!r}; write a table: D = ["fsdp"], F = ["tensor"]')
        rows, arrays = [], []
        for key, value in values.items():
            if isinstance(value, Mapping):
                arrays.append((key, tuple(_entry(f"{where}.{key}", *row) for row in value.items())))
            else:
                rows.append(_entry(where, key, value))
        return cls(tuple(rows), tuple(arrays))


def _without(letters: LetterRules, axes: set[str]) -> LetterRules:
    left = ((letter, tuple(axis for axis in old if axis not in axes)) for letter, old in letters)
    return tuple((letter, kept) for letter, kept in left if kept)


def _entry(where: str, letter: str, axes: object) -> tuple[str, Axes]:
    if len(letter) != 1 or letter not in LETTERS:
        raise LayoutError(
            f"{where}: {letter!r} is not a letter of an array; fits: one of {', '.join(LETTERS)}, or an "
            "array's name with a table of its own"
        )
    if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
        raise LayoutError(f'{where}: {letter} = {axes!r}; write a list of mesh axes: {letter} = ["fsdp"]')
    return letter, tuple(axes)


# Letters next to E in arrays that are split over experts: their matrices, rows and biases.
_SPLIT_WITH = ("M", "C", "ED", "Em")


@lru_cache(maxsize=8192)
def _split(table: AxisTable, name: str, letters: str) -> ShardedArray:
    dims = dict(table.arrays).get(name.rpartition("/")[2], table.letters)
    taken: dict[str, Axes] = {}
    used: set[str] = set()
    for letter, axes in dims:
        # An entry for L holds for every stack of layers.
        letter = next((one for one in OF_STACKS if one in letters), letter) if letter == "L" else letter
        # Heads of a state are split as query heads are, and channels of a convolution as the feed-forward.
        if letter in LIKE_LETTERS and letter not in letters:
            letter = next((one for one in LIKE_LETTERS[letter] if one in letters), letter)
        # A device has a router's scores of all experts; only weights and rows of experts are split over E.
        if letter in letters and (letter != "E" or any(one in letters for one in _SPLIT_WITH)):
            taken[letter] = tuple(axis for axis in axes if axis not in used)
            used |= set(axes)
    return ShardedArray(name, tuple(letters), tuple(taken.get(letter, ()) for letter in letters))


@dataclass(frozen=True)
class Rules:
    """The tables of a Layout. Layouts that differ only in degrees share them.

    by_phase: tables of activations of single phases. Other phases use `activations`; in generation, axes that
    split positions there split sequences.
    """

    stored: AxisTable = AxisTable(())
    used: AxisTable = AxisTable(())
    gradients: AxisTable = AxisTable(())
    updated: AxisTable = AxisTable(())
    activations: AxisTable = AxisTable(())
    by_phase: tuple[tuple[str, AxisTable], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.stored, self.used, self.gradients, self.updated, self.activations, self.by_phase))

    def __hash__(self) -> int:
        return self._hash

    def in_phase(self, phase: str) -> AxisTable:
        """The table of activations in "train", "prefill" or "generate"."""
        if phase in dict(self.by_phase):
            return dict(self.by_phase)[phase]
        return self.activations.of_generation if phase == "generate" else self.activations

    @cached_property
    def zero_stage(self) -> int:
        """The ZeRO stage: data ranks shard 1 optimizer state, 2 gradients too, 3 weights too; 0 nothing."""
        if self.stored != self.used:
            return 3
        return 0 if self.updated == self.stored else 2 if self.gradients == self.updated else 1

    @cached_property
    def prompt_axes(self) -> Axes:
        """The axes that split the positions of prompts, in prefill; generation splits sequences over them."""
        return self.in_phase("prefill").position_axes

    def tables(self) -> Iterable[tuple[str, AxisTable]]:
        """Every table with its name."""
        named = [
            (field.name, getattr(self, field.name)) for field in fields(self) if field.name != "by_phase"
        ]
        return (*named, *self.by_phase)

    def without(self, axes: set[str]) -> "Rules":
        """These rules without some mesh axes; without all axes, they are the rules of one device."""
        left = {name: table.without(axes) for name, table in self.tables()}
        phases = tuple((phase, left.pop(phase)) for phase, _ in self.by_phase)
        return Rules(**left, by_phase=phases)

    def to_dict(self) -> dict[str, Any]:
        """The tables by name; `from_dict` reads them back."""
        return {name: table.to_dict() for name, table in self.tables()}

    @classmethod
    def from_dict(cls, values: object) -> "Rules":
        """The rules that `to_dict` wrote. A table of weights that is not given is as `stored`."""
        if not isinstance(values, Mapping):
            raise LayoutError(f"layout: rules = {values!r}; it must hold the tables stored, used, ...")
        names = [field.name for field in fields(cls) if field.name != "by_phase"]
        for key in values:
            if key not in (*names, *OWN_PHASES):
                raise LayoutError(
                    f"layout.rules: {key!r} is not a table; {nearest(key, [*names, *OWN_PHASES])}"
                )
        read = {key: AxisTable.from_dict(f"layout.rules.{key}", value) for key, value in values.items()}
        stored = read.get("stored", AxisTable(()))
        return cls(
            stored,
            read.get("used", stored),
            read.get("gradients", stored),
            read.get("updated", stored),
            read.get("activations", AxisTable(())),
            tuple((phase, read[phase]) for phase in OWN_PHASES if phase in read),
        )


def check_rules(rules: Rules, mesh: Mesh) -> None:
    """Raises LayoutError for an axis that the mesh lacks or that splits nothing, and for K split unlike N.

    Attention reads keys with the queries of their group, so K takes the first of the axes that N takes.
    """
    for name, table in rules.tables():
        for axis in sorted(table.axes):
            if axis not in mesh.sizes:
                raise LayoutError(
                    f"layout.rules.{name}: mesh axis {axis!r} is not in {mesh}; {nearest(axis, list(mesh))}"
                )
    named = {STAGES}.union(*(table.axes for _, table in rules.tables()))
    for axis, size in mesh.sizes.items():
        if size > 1 and axis not in named:
            raise LayoutError(
                f"layout: mesh axis {axis} = {size} splits nothing, since no rule names it; fits: {axis} = "
                f'1, or B = ["{axis}"] in layout.rules.activations'
            )
    for phase in ("train", *dict(rules.by_phase)):
        _check_heads(rules.in_phase(phase))


def _check_heads(table: AxisTable) -> None:
    q, k = table.split("q", "BTNH"), table.split("k", "BTKH")
    if q.axes_of("N")[: len(k.axes_of("K"))] != k.axes_of("K"):
        raise LayoutError(f"{q} and {k}: attention needs K split over the first of the axes that split N")
    for array in (q, k):
        if array.axes_of("H"):
            raise LayoutError(f"{array}: attention needs H whole; fits: {array.replace(axes={'H': ()})}")


def is_matrix(letters: str) -> bool:
    """Whether a weight is more than one vector a layer. Norms and small biases are whole on every device."""
    return len(of_a_layer(letters)) > 1
