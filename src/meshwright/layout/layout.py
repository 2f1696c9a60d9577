"""A Layout: mesh, rules, schedule and precision of a step.

The planner emits it, the runner takes it, the audit checks it.

The rules are tables from letters to mesh axes (rules.py): plain data, which plan.toml shows and a person may
edit. What has a name in the field is written short, `data=2,fsdp=4,tensor=2,remat=full`, and expands to such
tables (axes/, one record for each axis):

    data, fsdp   B of activations; fsdp also D of weights, which are gathered over it before use (ZeRO 3)
    tensor       N, K, F and V of weights and activations; with sequence_parallel also T where none of them is
    context      T of activations; keys and values are gathered for attention or pass round a ring
    expert       E of the experts' weights, over an axis cut out of the data ranks
    pipe         no array: the schedule gives every stage its layers. With lanes L of weights, which lie on
                 their stages, and V, of which every stage has a share

Norms and other vectors are whole on every device: they are too small to be worth a gather.
"""

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.errors import LayoutError, nearest
from meshwright.layout.axes.axis import ATTENTION
from meshwright.layout.fit import check_batch, check_cache, check_fields, check_stages, check_weights
from meshwright.layout.grouped import RowRouting, at_experts, routing_of
from meshwright.layout.precision import Precision
from meshwright.layout.rules import (
    Rules,
    Table,
    both_ways,
    check_rules,
    gathered_positions,
    planned_contraction,
    shared_by_heads,
    summed_by_token,
)
from meshwright.layout.schedule import Schedule
from meshwright.layout.short import (
    DEGREES,
    FIELD_OF_WORD,
    OPTIONS,
    WORD_OF_FIELD,
    ShortForm,
    check_company,
    clean_words,
    expand,
    forms_of,
    parted,
    read_words,
    whole_form,
    written,
    written_mesh,
)
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import input_of
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Contraction, Reshard, cotangent
from meshwright.notation.mesh import Mesh


class InputGroup(NamedTuple):
    """Contractions of one input that move it alike, by the names of their weights.

    It is moved once, and its cotangents are summed before they move back. name: of the moved input; groups
    to which the same is sent have one. is_there: such a group before this one has sent it.
    """

    name: str
    reshard: Reshard
    plans: Mapping[str, Contraction]
    is_there: bool


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
        """The layout of these words of the short form; those left out have their defaults.

        >>> Layout.of(fsdp=64, tensor=8).mesh.num_devices
        512
        """
        form, schedule, precision = parted(words)
        whole = whole_form(form)
        order = Schedule(**schedule)
        return cls(*expand(whole, order), order, Precision(**precision), _known_form=whole)

    @classmethod
    def parse(cls, text: str, **defaults: object) -> "Layout":
        """The layout written `data=2,fsdp=64,tensor=8,remat=full`; defaults: for words that it leaves out.

        >>> Layout.parse("fsdp=64,tensor=8").mesh.num_devices
        512
        """
        words = clean_words(read_words(text))
        layout = cls.of(**clean_words(defaults) | words)
        check_company(words)
        return layout

    @cached_property
    def form(self) -> ShortForm | None:
        """Degrees and options that expand to this mesh and these rules; None where none do."""
        if self._known_form is not None:
            return self._known_form
        for form in forms_of(self.mesh):
            try:
                if expand(whole_form(form), self.schedule) == (self.mesh, self.rules):
                    return form
            except LayoutError:
                continue
        return None

    def degree(self, axis: str) -> int:
        """How many devices an axis of the short form has; of other meshes, the axis of that name."""
        return self.form[axis] if self.form else self.mesh.sizes.get(axis, 1)

    def word(self, name: str) -> Any:
        """The value of any word of the short form: a degree, an option, or one of schedule and precision.

        >>> Layout.of(fsdp=4, zero=1).word("zero"), Layout.of().word("remat")
        (1, 'none')
        """
        if name in DEGREES:
            return self.degree(name)
        if name in OPTIONS:
            return (self.form or {}).get(name, OPTIONS[name].default)
        part = self.schedule if name in FIELD_OF_WORD else self.precision
        return getattr(part, FIELD_OF_WORD.get(name, name))

    def replace(self, **words: object) -> "Layout":
        """This layout with other words of the short form.

        Raises LayoutError for degrees and options where the rules have no short form.
        """
        form, schedule, precision = parted(words)
        mesh, rules, known = self.mesh, self.rules, self._known_form
        new_schedule = replace(self.schedule, **schedule) if schedule else self.schedule
        alike = self.pipe == 1 or new_schedule.is_alike == self.schedule.is_alike
        if not alike:
            form = {**form, "pipe": form.get("pipe", self.pipe)}  # the rules follow from both
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
        if "mesh" not in values and "rules" not in values:
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
        """Mesh, rules, schedule and precision as tables without what is None; `from_dict` reads them back."""
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
        """The short form as `--layout` reads it, without dtypes; or the mesh, where the rules have none.

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

    # Words that are read so often that they have names here

    @property
    def data(self) -> int:
        return self.degree("data")

    @property
    def fsdp(self) -> int:
        return self.degree("fsdp")

    @property
    def context(self) -> int:
        return self.degree("context")

    @property
    def tensor(self) -> int:
        return self.degree("tensor")

    # What follows from the mesh and the rules

    @property
    def table(self) -> Table:
        """The table of activations of this phase."""
        return self.rules.in_phase(self.phase)

    @property
    def pipe(self) -> int:
        """Stages of the pipeline."""
        return self.mesh.sizes.get("pipe", 1)

    @cached_property
    def of_stage(self) -> "Layout":
        """This layout within one stage of a pipeline whose stages run programs of their own: without `pipe`.

        >>> print(Layout.of(pipe=4, data=2, microbatches=8, schedule="zb-h1").of_stage)
        data=2,microbatches=8,remat=none
        """
        sizes = {axis: size for axis, size in self.mesh.sizes.items() if axis != "pipe"}
        schedule = replace(self.schedule, pipeline=Schedule.pipeline, interleave=1)
        form = self.form and {**self.form, "pipe": 1}
        return replace(self, mesh=Mesh(sizes), schedule=schedule, _known_form=form)

    @property
    def stages_alike(self) -> bool:
        """Whether there are several stages, which run one program."""
        return self.pipe > 1 and self.schedule.is_alike

    @property
    def stages_apart(self) -> bool:
        """Whether there are several stages, which run programs of their own, dispatched by one process."""
        return self.pipe > 1 and not self.schedule.is_alike

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
        split = self.rules.updated.axes | {"pipe"}
        return tuple(axis for axis in self.mesh if axis in split and self.mesh.size(axis) > 1)

    def weight(self, name: str, letters: str) -> ShardedArray:
        """The sharding in which a weight is stored."""
        return self.rules.stored.weight(name, letters)

    def activation(self, name: str, letters: str) -> ShardedArray:
        """The sharding of an activation (or a cache) with these letters."""
        return self.table.split(name, letters)

    @cached_property
    def routing(self) -> RowRouting:
        """How rows reach experts that have no capacity."""
        once = self.schedule.dispatch == "once"
        return routing_of(self.table, grouped=self.schedule.grouped, once=once)

    @cached_property
    def _at_experts(self) -> Table:
        """The table of activations for the rows of experts.

        Where rows are as many on all devices, sums over columns are scattered by row.
        """
        if self.fixed_rows:
            return self.table
        return at_experts(self.table, self.routing)

    def rows(self, name: str, letters: str = "ECD") -> ShardedArray:
        """An array of the rows of experts, on the experts' devices."""
        return self._at_experts.split(name, letters)

    def routed(self, name: str) -> ShardedArray:
        """d[E, C, D] as the tokens' own devices sort them by expert, before they travel.

        An expert's tokens have no order: the axes that E takes are innermost, so one AllToAll moves them.
        """
        routing = self.routing
        rows = tuple(
            sorted(
                (axis for axis in routing.tokens if axis not in routing.nodes),
                key=lambda axis: (axis in self.table.axes_of("E"), axis in routing.rows),
            )
        )
        return ShardedArray(name, ("E", "C", "D"), (self._apart, rows, self.activation(name, "BTD").axes[2]))

    @cached_property
    def fixed_rows(self) -> bool:
        """Whether an expert has as many rows of each device: by its capacity, which else masks the gates."""
        return self.schedule.capacity is not None and not self.routing.nodes

    @property
    def _apart(self) -> Axes:
        """The axes of E over which no row travels from where it is sorted."""
        if self.fixed_rows:
            return ()
        return _among(self.table.axes_of("E"), (*self.routing.repeated, *self.routing.nodes))

    def to_experts(self, name: str) -> Reshard:
        """The reshard from rows, as their tokens' devices sorted them, to d[E, C, D] on the experts' own.

        >>> print(*Layout.of(fsdp=4, expert=2).to_experts("d").forward)
        AllToAll_{expert} d[E, C_{fsdp,expert}, D] -> d[E_expert, C_fsdp, D]
        """
        used = self.rows(name)
        if not self.fixed_rows:
            used = used.replace(axes={"E": (*self._apart, *self.routing.exchanged)})
        return both_ways(self.routed(name), used)

    def from_experts(self, name: str) -> Reshard:
        """The way back of `to_experts`."""
        there = self.to_experts(name)
        return both_ways(there.used, there.given)

    def tokens_to_experts(self, name: str) -> Reshard:
        """The reshard from x[B, T, D] to the tokens whose rows a device makes, or sends to nodes.

        Every device that makes rows of a token, or that has columns of its experts, adds to its cotangent.

        >>> print(*Layout.of(fsdp=4, expert=2, grouped=True).tokens_to_experts("x").forward)
        AllGather_{expert} x[B_{fsdp,expert}, T, D] -> x[B_fsdp, T, D]
        """
        tokens, routing = self.activation(name, "BTD"), self.routing.at_home
        own = {*routing.tokens} - {*routing.met}
        used = tokens.replace(axes={letter: _among(tokens.axes_of(letter), own) for letter in "BT"})
        return Reshard(tokens, used, cotangent(used).replace(unreduced=(*routing.met, *routing.repeated)))

    def gates_to_experts(self, name: str) -> Reshard:
        """The reshard from gates[B, T, E] to those of the rows that a device makes, sends or sums up."""
        gates, met = self.activation(name, "BTE"), self.tokens_to_experts(name).used
        routing = self.routing.at_home
        own = gates.axes_of("E") if routing.exchanged or routing.nodes else routing.experts
        used = gates.replace(axes={"B": met.axes_of("B"), "T": met.axes_of("T"), "E": own})
        partial = tuple(axis for axis in (*routing.met, *routing.repeated) if axis not in own)
        return Reshard(gates, used, cotangent(used).replace(unreduced=partial))

    def tokens_from_experts(self, name: str) -> Reshard:
        """The reshard to x[B, T, D] of what each device's experts, or columns of them, add to tokens."""
        there = self.tokens_to_experts(name)
        return both_ways(there.used.replace(unreduced=there.yielded.unreduced), there.given)

    def to_nodes(self, name: str, letters: str = "ECD") -> Reshard:
        """The reshard from rows of tokens, one for each node that a token goes to, to that node.

        Of the gates of these rows, E, each node receives those of its own experts.

        >>> layout = Layout.of(fsdp=8, expert=4, expert_nodes=2, dispatch="once")
        >>> print(*layout.to_nodes("x").forward)
        AllToAll_{expert_nodes} x[E, C_{fsdp,expert,expert_nodes}, D] -> x[E_expert_nodes, C_{fsdp,expert}, D]
        """
        routed, nodes = self.routed(name), self.routing.nodes
        axes = {"C": (*routed.axes_of("C"), *nodes), "D": routed.axes_of("D")}
        home = ShardedArray(name, tuple(letters), tuple(axes.get(letter, ()) for letter in letters))
        return both_ways(home, home.replace(axes={"E": nodes, "C": routed.axes_of("C")}))

    def met_in_node(self, name: str, letters: str = "ECD") -> Reshard:
        """The reshard from what came to a node to the rows of all devices with columns of its experts.

        Each of them adds to their cotangents. None where rows travel there.
        """
        came, met = self.to_nodes(name, letters).used, self.routing.met
        used = came.replace(axes={"C": tuple(axis for axis in came.axes_of("C") if axis not in met)})
        return Reshard(came, used, cotangent(used).replace(unreduced=met))

    def sums_from_node(self, name: str) -> Reshard:
        """The reshard from what each device's columns add to a node's rows of tokens to where these came."""
        there = self.met_in_node(name)
        return both_ways(there.used.replace(unreduced=there.yielded.unreduced), there.given)

    def sums_from_nodes(self, name: str) -> Reshard:
        """The way back of `to_nodes`."""
        there = self.to_nodes(name)
        return both_ways(there.used, there.given)

    def tokens(self, name: str) -> ShardedArray:
        """The sharding of tokens, targets and positions: x[B, T]'s, but whole over axes that split heads."""
        array = self.activation(name, "BT")
        return array.replace(axes={"T": self.activation(name, "BTN").axes_of("T")})

    def keys(self, name: str, letters: str = "BTKH") -> Reshard:
        """Keys (or values) from k[B, T_context, K, H], as projected, to T whole, as attention reads them.

        Every shard of the queries adds to their cotangents.
        """
        return gathered_positions(self.table, name, letters)

    def shared_by_heads(self, name: str) -> Reshard:
        """The reshard from rope[B, T, A], as projected, to where each head's key of the same token lies.

        Every head adds to its cotangent.
        """
        return shared_by_heads(self.table, name)

    @cached_property
    def attending(self) -> "Layout":
        """This layout where queries meet keys: itself, unless heads are exchanged for positions there."""
        own = dict(self.table.arrays).get(ATTENTION)
        if own is None:
            return self
        return replace(self, rules=replace(self.rules, activations=Table(own), own=()))

    def to_heads(self, name: str, letters: str) -> Reshard:
        """The reshard from an array as projected to where queries meet keys: T_context to N_context.

        >>> layout = Layout.of(context=4, context_method="ulysses")
        >>> print(*layout.to_heads("q", "BTNH").forward)
        AllToAll_{context} q[B, T_context, N, H] -> q[B, T, N_context, H]
        """
        return both_ways(self.activation(name, letters), self.attending.activation(name, letters))

    def from_heads(self, name: str, letters: str) -> Reshard:
        """The way back of `to_heads`."""
        return both_ways(self.attending.activation(name, letters), self.activation(name, letters))

    @property
    def num_prompt_shards(self) -> int:
        return self.mesh.size(self.rules.prompt_axes)

    @cached_property
    def whole_positions(self) -> "Layout":
        """This layout where tokens are single ones, such as those whose logits are wanted: T is not split."""
        if not self.table.axes_of("T"):
            return self
        letters = tuple((letter, axes) for letter, axes in self.table.letters if letter not in "TS")
        own = (("generate", self.rules.in_phase("generate")),)
        return replace(self, rules=replace(self.rules, activations=Table(letters), own=own), phase="prefill")

    @property
    def passes_keys_round(self) -> bool:
        """Whether keys and values stay split by position, S, and pass round a ring (else gathered)."""
        return bool(self.table.axes_of("S"))

    def contraction(self, name: str, spec: str) -> Contraction:
        """The contraction of an activation with the weight `name`, as moves the fewest arrays.

        >>> print(*Layout.of(fsdp=4).contraction("wq", "BTD,DNH->BTNH").steps)
        AllGather_{fsdp} wq[D_fsdp, N, H] -> wq[D, N, H]
        """
        if "C" not in spec:
            return planned_contraction(self.rules, self.table, name, spec)
        by_row = self.fixed_rows or self.routing.rows
        plan = planned_contraction if by_row else summed_by_token
        return plan(self.rules, self._at_experts, name, spec)

    def contractions(self, specs: Mapping[str, str]) -> list[InputGroup]:
        """Contractions of one input, grouped by how the input moves to them.

        There is one group, unless some weights are split over axes that others repeat, as those of keys with
        replicated heads.
        """
        groups: dict[Reshard, dict[str, Contraction]] = {}
        for name, spec in specs.items():
            plan = self.contraction(name, spec)
            groups.setdefault(plan.lhs_reshard, {})[name] = plan
        sent = {reshard: [one for one in reshard.forward if one.op != "slice"] for reshard in groups}
        found: list[InputGroup] = []
        for reshard, plans in groups.items():
            alike = [other for other in groups if sent[other] == sent[reshard]]
            name = input_of(*(weight for other in alike for weight in groups[other]))
            is_there = bool(sent[reshard]) and alike[0] != reshard
            found.append(InputGroup(name, reshard, plans, is_there))
        return found

    def check(
        self,
        config: ModelConfig,
        num_sequences: int | None = None,
        seq_len: int | None = None,
        *,
        padded: bool = False,
    ) -> None:
        """Raises LayoutError where the model's dimensions, the batch or the sequence do not divide.

        So it does for a field of what the model has not, such as experts. padded: V and D may be padded to a
        multiple, as a planner may assume and a run may not.
        """
        check_fields(self, config)
        check_stages(self, config)
        check_weights(self, config, padded=padded)
        check_batch(self, num_sequences, seq_len)
        if self.phase == "generate" and num_sequences is not None:
            check_cache(self, config, num_sequences)


def _among(axes: Axes, some: Container[str]) -> Axes:
    return tuple(axis for axis in axes if axis in some)


def _table(name: str, values: object) -> dict:
    if not isinstance(values, Mapping):
        raise LayoutError(f"layout: {name} = {values!r}; it must be a table [layout.{name}]")
    return dict(values)
