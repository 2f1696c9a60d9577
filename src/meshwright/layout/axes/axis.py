"""What one axis of parallelism is: words of the short form, rules, degrees that a search tries, prose."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.layout.rules import ATTENTION, Rules, Table
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.mesh import Mesh

# The short form by name: the degree of every axis, and the options beside them.
ShortForm = Mapping[str, Any]
# Letters that are parallel within a layer: what a tensor axis may split.
WIDE_LETTERS = "NKFMUV"
# What a cache holds, by array, and the axes that split weights by letters of which it may have none.
CACHE_ARRAYS = {"k": "BSKH", "v": "BSKH", "latent": "BSR", "rope": "BSA"}
_CACHE_AXES = ("tensor", "kv_replicas")
# Every table of the rules.
EVERYWHERE = "stored used gradients updated activations"
# The order of entries in composed tables: where two letters of an array ask for an axis, the first has it.
_ORDER = "LE" + WIDE_LETTERS + "GDQRBTSC"


@dataclass(frozen=True)
class Option:
    """A word of the short form beside the degrees. fits: the values it may have, the default first.

    needs: the degrees of which one must be above 1 for any other value to change something.
    """

    fits: tuple[object, ...]
    needs: tuple[str, ...]

    @property
    def default(self) -> object:
        return self.fits[0]


class Composition:
    """The tables that the axes of a short form add up to. present: the mesh axes of more than one device.

    cache_letter: what of a cache the axes split that its heads leave whole, in generation; None: nothing.
    heads_axis: the axis of positions that heads have instead where queries meet keys; None: none.
    """

    def __init__(self, form: ShortForm, present: frozenset[str]) -> None:
        self.form, self.present = form, present
        self.cache_letter: str | None = None
        self.heads_axis: str | None = None
        self._tables: dict[str, dict[str, list[str]]] = {}

    def add(self, tables: str, letters: str, axis: str, *, first: bool = False) -> None:
        """Splits each of `letters` over `axis` in each of the tables named, after what splits it already."""
        if axis not in self.present:
            return
        for table in tables.split():
            for letter in letters:
                axes = self._tables.setdefault(table, {}).setdefault(letter, [])
                axes.insert(0 if first else len(axes), axis)

    def rules(self) -> Rules:
        table = self._table
        return Rules(
            table("stored"),
            table("used"),
            table("gradients"),
            table("updated"),
            self._activations(),
            (("generate", self._generate(self.cache_letter)),) if self.cache_letter else (),
        )

    def _activations(self) -> Table:
        """The table of activations, with entries of its own for where queries meet keys."""
        table, axis = self._table("activations"), self.heads_axis
        if axis not in self.present:
            return table
        rows = {letter: tuple(one for one in axes if one != axis) for letter, axes in table.letters}
        rows |= {letter: (*rows.get(letter, ()), axis) for letter in "NK"}
        rows |= {letter: axes for letter, axes in table.letters if letter not in "NKT"}
        ordered = tuple((letter, rows[letter]) for letter in _ORDER if rows.get(letter))
        return Table(table.letters, ((ATTENTION, ordered),))

    def _generate(self, letter: str) -> Table:
        """The table of activations, with entries of their own for the arrays of a cache."""
        table = self._table("activations").of_generation
        entries = []
        for name, letters in CACHE_ARRAYS.items():
            rows = {one: axes for one, axes in table.letters if one in letters}
            taken = {axis for axes in rows.values() for axis in axes}
            free = [axis for axis in _CACHE_AXES if axis in self.present and axis not in taken]
            rows[letter] = (*rows.get(letter, ()), *free)
            entries.append((name, tuple((one, axes) for one, axes in rows.items() if axes)))
        return Table(table.letters, tuple(entries))

    def _table(self, name: str) -> Table:
        rows = self._tables.get(name, {})
        return Table(tuple((letter, tuple(rows[letter])) for letter in _ORDER if letter in rows))


@dataclass(frozen=True)
class Ask:
    """What a search asks an axis.

    chips: those that the axes before leave. torus: whether links form one. conditions: the words that the
    user has set conditions for. node: the chips of a slice or an NVLink domain, if tokens are to cross from
    one to another once, and layouts have to say where; else 0.
    """

    config: ModelConfig
    workload: Workload
    chips: int
    torus: bool = False
    conditions: frozenset[str] = frozenset()
    node: int = 0


@dataclass(frozen=True)
class Axis:
    """One axis of parallelism. A new one is a file with its record, and its test.

    options: its words in the short form beside its degree. always: whether every mesh has it.
    """

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    always: bool = False

    def check(self, form: ShortForm) -> None:
        """Raises LayoutError where the axis' words contradict each other."""

    def place(self, form: ShortForm, sizes: MutableMapping[str, int]) -> None:
        """Writes the sizes of the mesh axes that it takes, outer axes first."""
        sizes[self.name] = form[self.name]

    def compose(self, tables: Composition) -> None:
        """Adds the rules of the axis."""

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        """The words that a search tries, of the form or `grouped`; form: those of the axes before."""
        yield {}

    def fit(self, config: ModelConfig, mesh: Mesh, table: Table, schedule: Schedule) -> None:
        """Raises LayoutError if the model lacks the dimensions that the axis splits."""

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        """A clause for readers who are new to the axis, to follow `axis=degree: `."""
        raise NotImplementedError


def divisors(number: int) -> list[int]:
    """The divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
