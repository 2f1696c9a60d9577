"""The record of one mesh axis: words of the short form, rules, degrees that searches try, prose."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.layout.rules import ATTENTION, AxisTable, Rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.mesh import Mesh

# The short form by name: the degree of every axis, and the options.
ShortForm = Mapping[str, Any]
# Letters that are parallel within a layer: a tensor axis may split them.
WIDE_LETTERS = "NKFMUV"
# Cached arrays with their letters, and the axes that split weights by letters that a cache may lack.
CACHE_ARRAYS = {"k": "BSKH", "v": "BSKH", "latent": "BSR", "rope": "BSA"}
CACHE_AXES = ("tensor", "kv_replicas")
# Every table of the rules.
EVERYWHERE = "stored used gradients updated activations"
# The order of entries in composed tables: of two letters of an array with an axis, the first takes it.
_ORDER = "LE" + WIDE_LETTERS + "GDQRBTSC"


@dataclass(frozen=True)
class FormWord:
    """A word of the short form other than a degree. fits: its possible values, the default first.

    needs: degrees; unless one of them is above 1, other values change nothing.
    """

    fits: tuple[object, ...]
    needs: tuple[str, ...]

    @property
    def default(self) -> object:
        return self.fits[0]


class Composition:
    """The tables that the axes of a short form add up to. present: mesh axes of more than one device.

    cache_letter: letter of a cache that the axes split that its heads leave whole, in generation.
    heads_axis: axis of positions that splits heads instead in attention. None: no such letter or axis.
    """

    def __init__(self, form: ShortForm, present: frozenset[str]) -> None:
        self.form, self.present = form, present
        self.cache_letter: str | None = None
        self.heads_axis: str | None = None
        self._tables: dict[str, dict[str, list[str]]] = {}

    def add(self, tables: str, letters: str, axis: str, *, first: bool = False) -> None:
        """Split each of `letters` over `axis` in each of the tables named, after the axes added before."""
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

    def _activations(self) -> AxisTable:
        """The table of activations, with entries of its own for attention."""
        table, axis = self._table("activations"), self.heads_axis
        if axis not in self.present:
            return table
        rows = {letter: tuple(one for one in axes if one != axis) for letter, axes in table.letters}
        rows |= {letter: (*rows.get(letter, ()), axis) for letter in "NK"}
        rows |= {letter: axes for letter, axes in table.letters if letter not in "NKT"}
        ordered = tuple((letter, rows[letter]) for letter in _ORDER if rows.get(letter))
        return AxisTable(table.letters, ((ATTENTION, ordered),))

    def _generate(self, letter: str) -> AxisTable:
        """The table of activations, with entries of their own for the arrays of a cache."""
        table = self._table("activations").of_generation
        entries = []
        for name, letters in CACHE_ARRAYS.items():
            rows = {one: axes for one, axes in table.letters if one in letters}
            taken = {axis for axes in rows.values() for axis in axes}
            free = [axis for axis in CACHE_AXES if axis in self.present and axis not in taken]
            rows[letter] = (*rows.get(letter, ()), *free)
            entries.append((name, tuple((one, axes) for one, axes in rows.items() if axes)))
        return AxisTable(table.letters, tuple(entries))

    def _table(self, name: str) -> AxisTable:
        rows = self._tables.get(name, {})
        return AxisTable(tuple((letter, tuple(rows[letter])) for letter in _ORDER if letter in rows))


@dataclass(frozen=True)
class Ask:
    """The question of a search to an axis.

    chips: left by the axes chosen before. torus: whether links form one. conditions: words that have
    conditions of the user. node: chips of a slice or an NVLink domain, if tokens cross between them once and
    layouts have to name the nodes; otherwise 0.
    """

    config: ModelConfig
    workload: Workload
    chips: int
    torus: bool = False
    conditions: frozenset[str] = frozenset()
    node: int = 0


@dataclass(frozen=True)
class Axis:
    """One mesh axis. A new axis is a file with its record, its test and a row in the table of axes.

    turn: rank in a search, which chooses degrees by rising turn, each given the degrees chosen before.
    options: its words in the short form other than its degree.
    always: whether every mesh has it.
    is_ranks: whether its devices are data ranks, each with separate sequences.
    needs: the axes that it is cut out of; at the same degree as these it is valid. Degrees of axes without
    needs multiply to the number of chips.
    takes_from: axes whose degrees its choices change.
    also: its names in other programs.
    """

    name: str
    turn: int
    options: Mapping[str, FormWord] = field(default_factory=dict)
    always: bool = False
    is_ranks: bool = False
    needs: tuple[str, ...] = ()
    takes_from: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def check(self, form: ShortForm) -> None:
        """Raise LayoutError if words of the axis contradict each other."""

    def place(self, form: ShortForm, sizes: MutableMapping[str, int]) -> None:
        """Write the sizes of its mesh axes, outer axes first."""
        sizes[self.name] = form[self.name]

    def compose(self, tables: Composition) -> None:
        """Add the rules of the axis."""

    def read(self, rules: Rules, form: ShortForm, mesh: Mesh) -> dict[str, object]:
        """Words of the axis that compose these rules; form: the mesh's degrees and words read before."""
        return {}

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Words to try in training, of the form or `grouped`; form: words chosen before."""
        yield {}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Words to try in inference, in the phase of `ask.workload`."""
        yield {}

    def free_words(self, form: ShortForm, config: ModelConfig, schedule: Schedule) -> dict[str, Any]:
        """Words that change no price of this form: nothing moves and nothing is split over one device."""
        return {}

    def fit(self, config: ModelConfig, mesh: Mesh, table: AxisTable, schedule: Schedule) -> None:
        """Raise LayoutError if the model lacks dimensions that the axis splits."""

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        """A clause for readers who are new to the axis, to follow `axis=degree: `."""
        raise NotImplementedError

    def serving_words(self, config: ModelConfig, form: ShortForm) -> str | None:
        """A sentence on the axis in inference; None if it does not serve."""
        return None
