"""A Layout: mesh, rules, schedule and precision of a step.

The planner emits it, the runner takes it, the audit checks it.

The rules are tables from letters to mesh axes (rules.py): plain data, which plan.toml shows and a person may
edit. Methods with a name in the field have a short form, `data=2,fsdp=4,tensor=2,remat=full`. It expands to
such tables (axes/, one record for each axis):

    data, fsdp   B of activations; fsdp also D of weights, which are gathered over it before use (ZeRO 3)
    tensor       N, K, F and V of weights and activations; with sequence_parallel also T where none of them is
    context      T of activations; keys and values are gathered for attention or pass round a ring
    expert       E of the experts' weights, over an axis cut out of the data ranks
    pipe         no array: the schedule gives every stage its layers. Under SPMD 1F1B also L of weights, so
                 that each is on its stage, and V

Norms and other vectors are whole on every device: they are too small to be worth a gather.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwright.errors import LayoutError, nearest
from meshwright.layout.axes import CONTEXT, DATA, FSDP, PIPE, TENSOR
from meshwright.layout.precision import Precision
from meshwright.layout.rules import AxisTable, Rules, check_rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.short import (
    DEFAULTS,
    FIELD_OF_WORD,
    WORD_OF_FIELD,
    ShortForm,
    are_words,
    check_company,
    clean_words,
    expand,
    parted,
    read_words,
    short_form_of,
    whole_form,
    written,
    written_mesh,
)
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """A layout: the mesh axes that split each letter of every array, and how a step runs.

    phase: whose table of activations holds: "train", "prefill" or "generate" (`at`).

    >>> layout = Layout.of(data=2, fsdp=2, tensor=2)
    >>> print(layout.weight("wq", "DNH"), layout.activation("x", "BTD"))
    wq[D_fsdp, N_tensor, H] x[B_{data,fsdp}, T, D]
    """

    mesh: Mesh
    rules: Rules = field(default_factory=Rules)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    phase: str = "train"
    _known_form: ShortForm | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._known_form is None:
            check_rules(self.rules, self.mesh)
        if self.schedule.interleave > 1 and self.pipe == 1:
            raise LayoutError(
                f"layout: interleave = {self.schedule.interleave} chunks a stage with pipe = 1; "
                "fits: pipe above 1"
            )

    # The short form

    @classmethod
    def of(cls, **words: object) -> "Layout":
        """The layout of these words of the short form; missing words have their defaults.

        >>> Layout.of(fsdp=64, tensor=8).mesh.num_devices
        512
        """
        form, schedule, precision = parted(words)
        whole = whole_form(form)
        order = Schedule(**schedule)
        return cls(*expand(whole, order), order, Precision(**precision), _known_form=whole)

    @classmethod
    def parse(cls, text: str, /, **defaults: object) -> "Layout":
        """The layout written `data=2,fsdp=64,tensor=8,remat=full`.

        defaults: for words that the text leaves out.

        >>> Layout.parse("fsdp=64,tensor=8").mesh.num_devices
        512
        """
        words = clean_words(read_words(text))
        layout = cls.of(**clean_words(defaults) | words)
        check_company(words)
        return layout

    @cached_property
    def form(self) -> ShortForm | None:
        """Degrees and options that expand to this mesh and these rules; None if there are none."""
        return self._known_form or short_form_of(self.mesh, self.rules, self.schedule)

    @cached_property
    def words(self) -> ShortForm:
        """Degrees and options; the mesh's degrees if the rules have no short form."""
        return self.form or {**DEFAULTS, **self.mesh.sizes}

    def degree(self, axis: str) -> int:
        """The degree of an axis of the short form, or of the mesh if the rules have no short form."""
        return self.words.get(axis, 1)

    def word(self, name: str) -> Any:
        """The value of any word of the short form: a degree, an option, or one of schedule and precision.

        >>> Layout.of(fsdp=4, zero=1).word("zero"), Layout.of().word("remat")
        (1, 'none')
        """
        if name in DEFAULTS:
            return self.words[name]
        part = self.schedule if name in FIELD_OF_WORD else self.precision
        return getattr(part, FIELD_OF_WORD.get(name, name))

    def replace(self, **words: object) -> "Layout":
        """This layout with other words of the short form.

        Raises LayoutError for degrees and options where the rules have no short form.
        """
        form, schedule, precision = parted(words)
        mesh, rules, known = self.mesh, self.rules, self._known_form
        new_schedule = replace(self.schedule, **schedule) if schedule else self.schedule
        alike = self.pipe == 1 or new_schedule.is_spmd == self.schedule.is_spmd
        if not alike:
            form = {**form, PIPE.name: form.get(PIPE.name, self.pipe)}  # the rules follow from both
        if form:
            if self.form is None:
                raise LayoutError(
                    f"layout {self}: rules without a short form have no {', '.join(form)} to set"
                )
            known = whole_form({**self.form, **form})
            mesh, rules = expand(known, new_schedule)
        new_precision = replace(self.precision, **precision) if precision else self.precision
        return Layout(mesh, rules, new_schedule, new_precision, self.phase, known)

    def with_form(self, form: ShortForm) -> "Layout":
        """The layout of a whole form, which is taken as it is, with this schedule and precision."""
        return Layout(*expand(form, self.schedule), self.schedule, self.precision, self.phase, form)

    def at(self, phase: str) -> "Layout":
        """This layout in another phase, whose table of activations then holds."""
        return self if phase == self.phase else replace(self, phase=phase)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """The layout of the four tables of `to_dict`, or of words of the short form.

        Unknown keys are refused with the nearest known.
        """
        if are_words(values):
            return cls.of(**clean_words(values))
        known = ["mesh", "rules", "schedule", "precision"]
        for key in values:
            if key not in known:
                raise LayoutError(f"layout: {key!r} is not supported; {nearest(key, known)}")
        mesh = _table("mesh", values.get("mesh"))
        words = {
            **_table("schedule", values.get("schedule", {})),
            **_table("precision", values.get("precision", {})),
        }
        form, schedule, precision = parted(clean_words(words))
        if form:
            raise LayoutError(f"layout: {next(iter(form))!r} is a degree; it belongs to [layout.mesh]")
        rules = Rules.from_dict(values.get("rules", {}))
        rules = rules.without({axis for axis, size in mesh.items() if size == 1})
        return cls(Mesh(mesh), rules, Schedule(**schedule), Precision(**precision))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Mesh, rules, schedule and precision as tables without None; `from_dict` reads them."""
        schedule = {
            WORD_OF_FIELD.get(name, name): value
            for name, value in asdict(self.schedule).items()
            if value is not None
        }
        precision = {name: value for name, value in asdict(self.precision).items() if value is not None}
        return {
            "mesh": dict(self.mesh.sizes),
            "schedule": schedule,
            "precision": precision,
            "rules": self.rules.to_dict(),
        }

    def __str__(self) -> str:
        """The short form as `--layout` reads it, without dtypes; the mesh if the rules have no short form.

        >>> print(Layout.of(fsdp=4, tensor=2, remat="full"))
        fsdp=4,tensor=2,remat=full
        """
        words = (
            written(self.form, self.schedule, self.precision)
            if self.form
            else written_mesh(self.mesh, self.schedule)
        )
        return ",".join(f"{name}={str(value).lower()}" for name, value in words.items())

    def __repr__(self) -> str:
        p = self.precision
        return f"Layout({self}; weights {p.weights_dtype}, compute {p.compute_dtype})"

    # Degrees that many callers read

    @property
    def data(self) -> int:
        return self.degree(DATA.name)

    @property
    def fsdp(self) -> int:
        return self.degree(FSDP.name)

    @property
    def context(self) -> int:
        return self.degree(CONTEXT.name)

    @property
    def tensor(self) -> int:
        return self.degree(TENSOR.name)

    # Properties derived from the mesh and the rules

    @property
    def table(self) -> AxisTable:
        """The table of activations of this phase."""
        return self.rules.in_phase(self.phase)

    @property
    def pipe(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.sizes.get(PIPE.name, 1)

    @cached_property
    def of_stage(self) -> "Layout":
        """This layout within one stage of a pipeline whose stages run programs of their own: without `pipe`.

        >>> print(Layout.of(pipe=4, data=2, microbatches=8, schedule="zb-h1").of_stage)
        data=2,microbatches=8,remat=none
        """
        sizes = {axis: size for axis, size in self.mesh.sizes.items() if axis != PIPE.name}
        schedule = replace(self.schedule, pipeline=Schedule.pipeline, interleave=1)
        form = self.form and {**self.form, PIPE.name: 1}
        return replace(self, mesh=Mesh(sizes), schedule=schedule, _known_form=form)

    @property
    def spmd_stages(self) -> bool:
        """Whether there are several stages, which run one program."""
        return self.pipe > 1 and self.schedule.is_spmd

    @property
    def stage_programs(self) -> bool:
        """Whether there are several stages, which run programs of their own, dispatched by one process."""
        return self.pipe > 1 and not self.schedule.is_spmd

    @cached_property
    def batch_axes(self) -> Axes:
        """The axes that split the sequences of a batch."""
        return self.table.axes_of("B")

    @cached_property
    def num_batch_shards(self) -> int:
        return self.mesh.size(self.batch_axes)

    @cached_property
    def weight_axes(self) -> Axes:
        """The axes that split some gradient: over them a norm of the gradients is summed."""
        split = self.rules.updated.axes | {PIPE.name}
        return tuple(axis for axis in self.mesh if axis in split and self.mesh.size(axis) > 1)

    def weight(self, name: str, letters: str) -> ShardedArray:
        """The stored sharding of a weight."""
        return self.rules.stored.weight(name, letters)

    def activation(self, name: str, letters: str) -> ShardedArray:
        """The sharding of the activation or cache `name[letters]`."""
        return self.table.split(name, letters)

    @property
    def num_prompt_shards(self) -> int:
        return self.mesh.size(self.rules.prompt_axes)


def _table(name: str, values: object) -> dict:
    if not isinstance(values, Mapping):
        raise LayoutError(f"layout: {name} = {values!r}; it must be a table [layout.{name}]")
    return dict(values)
