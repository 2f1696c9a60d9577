"""Search for shardings of a step's arguments and constraints with which the step takes less time.

A rule that reads the program knows how an array is moved. Whether another sharding would move less is known
once the step is compiled with it, so the search compiles each alternative. An alternative changes the
sharding of one line's with_sharding_constraint, or of all arguments and constraints that have one shape and
one sharding. It moves the axes of a dimension to another dimension, splits an array that a
constraint makes whole, or leaves the constraint out. The step computes the same numbers with any of them.

    seconds = communication + max(matrix products, reads of the inputs)

An alternative counts only if a device needs no more memory with it. One that changes only arguments may leave
each device a smaller part of a result. The time to gather that result then counts too, since the code that
reads it would gather it. Other steps may read the same arrays and suffer from the change, so the audit
reports it and the user decides.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.audit.facts.buffers import buffer_peak, input_bytes
from meshwright.audit.facts.communication import collectives, narrowest_dtype
from meshwright.audit.facts.emitted import Emitted, on_mesh
from meshwright.audit.facts.matmuls import is_counted_branch, products, smaller_branches
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import MOVES, resolve
from meshwright.audit.remarks import Remark
from meshwright.dtypes import NUMBER_TYPES
from meshwright.errors import MeshwrightError
from meshwright.hardware.topology import Hardware
from meshwright.notation.mesh import Mesh
from meshwright.units import and_more, format_seconds

if TYPE_CHECKING:
    import jax

# The axes that split each dimension; None for a dimension whose split the partitioner chooses.
Spec = tuple[tuple[str, ...] | None, ...]

# An alternative is reported if it saves these shares: of the step's seconds, and of its communication.
_SHARE_OF_STEP, _SHARE_OF_COMMUNICATION = 0.05, 0.1
# Memory may grow by this factor: the order of a schedule changes it a little.
_SAME_MEMORY = 1.05
CHEAPER = "cheaper_sharding"
# Alternatives to compile at most.
_MOST_COMPILED = 24


@dataclass(frozen=True)
class Place:
    """An argument or a constraint: a place at which an array has a sharding.

    name: of the argument, or the file and line of the constraint.
    """

    name: str
    shape: tuple[int, ...]
    spec: Spec
    is_argument: bool


@dataclass(frozen=True)
class Alternative:
    """Another sharding of some places; None leaves the constraints out."""

    places: tuple[Place, ...]
    spec: Spec | None


@dataclass(frozen=True)
class Cost:
    """Seconds of a step's communication and of its other work, and bytes of one device."""

    communication: float
    work: float
    num_bytes: int

    @property
    def seconds(self) -> float:
        return self.communication + self.work


@contextmanager
def constraints(changed: Alternative | None = None) -> Iterator[dict[Place, None]]:
    """Record the constraints of the traces within, in order, and change those of an alternative."""
    import jax
    from jax.extend import source_info_util
    from jax.extend.core import primitives
    from jax.sharding import NamedSharding

    source_info_util.register_exclusion(__file__)  # a constraint has the line of its caller
    primitive, seen = primitives.sharding_constraint_p, dict[Place, None]()
    unchanged = primitive.bind

    def bind(array: Any, **given: Any) -> Any:
        sharding, line = given["sharding"], _line()
        if not (line and isinstance(sharding, NamedSharding)):
            return unchanged(array, **given)
        place = Place(line, tuple(array.shape), spec_of(sharding.spec, array.ndim), is_argument=False)
        seen[place] = None
        if changed is None or place not in changed.places:
            return unchanged(array, **given)
        if changed.spec is None:
            return array
        # JAX takes the sharding of the gradient's constraint from this one, so it changes too.
        given["sharding"] = NamedSharding(sharding.mesh, partition(changed.spec))
        return unchanged(array, **given)

    jax.clear_caches()  # an earlier trace would be taken for this one
    primitive.bind = bind
    try:
        yield seen
    finally:
        del primitive.bind
        jax.clear_caches()


def _line() -> str:
    """The file and line that constrains an array, outside of JAX, other packages and this project.

    A constraint in a short function, such as a user's own helper, has the line that calls the function. ""
    for the constraint of a gradient, which JAX adds.
    """
    import jax

    skipped = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))
    frame, first = sys._getframe(), ""
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith(_OF_GRADIENTS) and not first:
            return ""
        if not (code.co_filename.startswith(skipped) or _INSTALLED.search(code.co_filename)):
            lines = [line for _, _, line in code.co_lines() if line]
            place = f"{code.co_filename}:{frame.f_lineno}"
            if max(lines) - min(lines) >= _HELPER_LINES and code.co_name != "<module>":
                return place
            first = first or place
        frame = frame.f_back
    return first


# Functions of fewer lines are helpers.
_HELPER_LINES = 3
# Start of the names of JAX's functions that transpose a program (interpreters/ad.py; jax 0.10.2).
_OF_GRADIENTS = "backward_pass"
# Files of installed packages, and of Python itself.
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen |contextlib\.py$")


def spec_of(spec: "jax.sharding.PartitionSpec", num_dims: int) -> Spec:
    """The axes of each of an array's dimensions."""
    import jax

    def axes(entry: Any) -> tuple[str, ...] | None:
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            return None
        return entry if isinstance(entry, tuple) else (entry,) if entry else ()

    entries = tuple(map(axes, spec))
    return entries + ((),) * (num_dims - len(entries))


def partition(spec: Spec) -> "jax.sharding.PartitionSpec":
    """The PartitionSpec of `spec`."""
    import jax

    kind = jax.sharding.PartitionSpec

    def entry(axes: tuple[str, ...] | None) -> Any:
        if axes is None:
            return kind.UNCONSTRAINED
        return axes[0] if len(axes) == 1 else axes or None

    return kind(*map(entry, spec))


def arguments(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Place]:
    """The arrays among a step's arguments with named shardings, by the names of its parameters."""
    import jax

    return [
        Place(name, tuple(leaf.shape), spec_of(leaf.sharding.spec, len(leaf.shape)), is_argument=True)
        for name, leaf in _named(jitted, (args, dict(kwargs)))
        if isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding)
    ]


def _named(jitted: Any, given: Any) -> list[tuple[str, Any]]:
    """The leaves of (args, kwargs), by name."""
    import jax

    try:
        parameters = list(inspect.signature(jitted).parameters)
    except (TypeError, ValueError):
        parameters = []
    leaves, _ = jax.tree_util.tree_flatten_with_path(given)
    return [(_name(path, parameters), leaf) for path, leaf in leaves]


def _name(path: tuple[Any, ...], parameters: Sequence[str]) -> str:
    import jax

    of_args, first, *others = path
    number = getattr(first, "idx", len(parameters))
    is_known = of_args.idx == 0 and number < len(parameters)
    name = parameters[number] if is_known else str(getattr(first, "key", number))
    return name + jax.tree_util.keystr(tuple(others))


def alternatives(
    places: Sequence[Place], mesh: Mesh, cost: Callable[[Place], float] = lambda _: 0.0
) -> list[Alternative]:
    """The alternatives to each sharding of the places, costly places first, then of larger arrays.

    cost: seconds of the collectives that a place may cause (`costs_of_places`). All alternatives of the same
    places follow each other.
    """
    lines: dict[tuple[str, Spec], list[Place]] = {}
    alike: dict[tuple[tuple[int, ...], Spec], list[Place]] = {}
    for place in places:
        alike.setdefault((place.shape, place.spec), []).append(place)
        if not place.is_argument:
            lines.setdefault((place.name, place.spec), []).append(place)
    groups = [several for several in alike.values() if len(several) > 1 or several[0].is_argument]
    groups += [[one] for several in lines.values() for one in several]
    # A constraint may be needed in one shape, and be a mistake for all of a line's shapes.
    left_out = [Alternative(tuple(several), None) for several in lines.values()]
    moved = [
        Alternative(tuple(several), spec)
        for several in {frozenset(one): one for one in groups}.values()
        for spec in _other_specs(several[0], mesh, add=not any(one.is_argument for one in several))
    ]

    def rank(changed: Alternative) -> tuple[float, float]:
        return -max(map(cost, changed.places)), -_elements_per_device(changed, mesh)

    return sorted([*left_out, *moved], key=rank)


def _elements_per_device(changed: Alternative, mesh: Mesh) -> float:
    """Elements of the largest of the places' arrays on one device."""
    sizes = (prod(one.shape) / prod(mesh.size(axes) for axes in one.spec if axes) for one in changed.places)
    return max(sizes)


def costs_of_places(program: Program, sent: Sequence[Emitted], prices: Prices) -> Callable[[Place], float]:
    """The seconds of the collectives that the sharding of a place may cause.

    These send the place's argument, or the result of a matmul of it, are on the line of its constraint, or
    send an array of its size.
    """
    by_name: dict[str, float] = {}
    by_size: dict[int, float] = {}
    for emitted in sent:
        seconds = prices.seconds(emitted) or 0.0
        value = resolve(program, emitted.operand(), MOVES)
        near = [value, *(resolve(program, each, MOVES) for each in value.operands())]
        inputs = {each.instruction.label for each in near if each.is_input}
        for name in {*inputs, emitted.tensor, emitted.source}:
            by_name[name] = by_name.get(name, 0.0) + seconds
        size = emitted.elements_of_all
        by_size[size] = by_size.get(size, 0.0) + seconds
    return lambda place: max(by_name.get(place.name, 0.0), by_size.get(prod(place.shape), 0.0))


def _other_specs(place: Place, mesh: Mesh, *, add: bool) -> Iterator[Spec]:
    """Specs with the axes of one dimension moved to another one that they divide.

    add: give a whole array the specs that split one of its dimensions by one axis.
    """
    spec = place.spec
    pairs = [(at, axes) for at, axes in enumerate(spec) if axes]
    if add and not pairs:
        pairs = [(-1, (axis,)) for axis, size in mesh.sizes.items() if size > 1]
    for at, axes in pairs:
        for to, present in enumerate(spec):
            if to == at or present is None or set(axes) & set(present):
                continue
            size = mesh.size(axes) * mesh.size(present)
            if place.shape[to] % size:
                continue
            yield tuple(
                () if dim == at else (*present, *axes) if dim == to else old for dim, old in enumerate(spec)
            )


def cost_of(program: Program, mesh: Mesh, machine: Hardware) -> Cost | None:
    """Seconds and memory of a compiled step on `machine`; None if a collective has no price."""
    return cost_of_sent(program, _sent(program, mesh), _prices(mesh, machine))


def _sent(program: Program, mesh: Mesh) -> list[Emitted]:
    """The collectives of a program with the axes of `mesh`."""
    widened = program.platform.compiler.widens
    return [on_mesh(one, mesh, widened=widened) for one in collectives(program)]


def _prices(mesh: Mesh, machine: Hardware) -> Prices:
    return Prices(mesh, machine.place(mesh), machine.chip, mesh)


def cost_of_sent(program: Program, sent: Iterable[Emitted], prices: Prices) -> Cost | None:
    """`cost_of` a program whose collectives are `sent`; None also without hardware."""
    smaller = smaller_branches(program)
    communication = 0.0
    for emitted in sent:
        if not is_counted_branch(emitted.value.place, smaller):
            continue
        # XLA for CPU has no reduce-scatter, which sends half as much as an all-reduce.
        scattered = replace(emitted, collective=replace(emitted.collective, op="reduce_scatter"))
        priced = scattered if emitted.collective.scattered else emitted
        seconds = prices.seconds(priced)
        if seconds is None:
            return None
        communication += seconds
    by_type: dict[str, float] = {}
    for product in products(program):
        operands = product.value.operands()
        dtype = narrowest_dtype(program, operands[0]) if operands else "f32"
        dtype = dtype if dtype in NUMBER_TYPES else "f32"  # 64 bits, which chips have no rate for
        by_type[dtype] = by_type.get(dtype, 0.0) + product.flops
    times = [prices.product_seconds(flops, dtype) for dtype, flops in by_type.items()]
    peak = buffer_peak(program)
    inputs = input_bytes(program)
    # A step of generation takes the time to read all weights and the cache: it multiplies little.
    work = max(sum(one or 0.0 for one in times), prices.read_seconds(inputs) or 0.0)
    return Cost(communication, work, inputs + (peak.num_bytes if peak else 0))


def cheaper_shardings(
    compile_with: Callable[[Alternative], tuple[Program, Mesh | None]],
    places: Sequence[Place],
    step: Program,
    mesh: Mesh,
    machine: Hardware,
    seconds: float,
    is_wrong: Callable[[Program], bool],
) -> list[Remark]:
    """A warning of the alternative with the fastest step, if it saves enough.

    The search ends once an alternative of the tried places saves enough. compile_with:
    compiles the step with an alternative. places: of the step's shardings. step: the program
    without an alternative. seconds: after these, no further alternative is compiled. is_wrong: whether a
    program has a mistake that another warning would report; such an alternative is not proposed.
    """
    sent, prices = _sent(step, mesh), _prices(mesh, machine)
    before = cost_of_sent(step, sent, prices)
    if before is None or before.communication < _SHARE_OF_STEP * before.seconds:
        return []
    started, cheaper = time.monotonic(), list[tuple[Alternative, Cost, Program]]()
    costs = costs_of_places(step, sent, prices)
    for tried in alternatives(places, mesh, costs)[:_MOST_COMPILED]:
        is_enough = bool(cheaper) and not set(tried.places) & set(cheaper[-1][0].places)
        if is_enough or time.monotonic() - started > seconds:
            break
        try:
            with constraints(tried):
                program, _ = compile_with(tried)
        except MeshwrightError:  # a shard_map or a result may need the sharding
            continue
        cost = cost_of(program, mesh, machine)
        if cost is None or cost.num_bytes > _SAME_MEMORY * before.num_bytes:
            continue
        if all(one.is_argument for one in tried.places):
            gathers = _result_gather_seconds(program, step, tried.places[0].spec, prices)
            cost = replace(cost, communication=cost.communication + gathers)
        saved = before.seconds - cost.seconds
        if saved > _SHARE_OF_STEP * before.seconds and saved > _SHARE_OF_COMMUNICATION * before.communication:
            cheaper.append((tried, cost, program))
    cheaper.sort(key=lambda one: one[1].seconds)
    best = next((one for one in cheaper if not is_wrong(one[2])), None)
    return [_remark(best[0], best[1], before)] if best else []


def _result_gather_seconds(program: Program, step: Program, spec: Spec, prices: Prices) -> float:
    """Seconds to gather, over the axes of `spec`, each result that a device has less of than in `step`."""
    axes = tuple(axis for several in spec for axis in several or ())
    pairs = zip(step.main.result.shapes, program.main.result.shapes, strict=True)
    smaller = (old for old, new in pairs if new.num_elements < old.num_elements)
    return sum(prices.gather_seconds(old.num_bytes, axes) for old in smaller)


def _remark(chosen: Alternative, after: Cost, before: Cost) -> Remark:
    first = chosen.places[0]
    lines = list(dict.fromkeys(one.name for one in chosen.places if not one.is_argument))
    names = [one.name for one in chosen.places if one.is_argument]
    old, new = _text(first.spec), _text(chosen.spec) if chosen.spec else ""
    subjects = []
    if names:
        more = and_more(len(names) - 1)
        subjects.append(f"argument `{names[0]}`{more}")
    if lines:
        subjects.append(f"the constraint at {', '.join(lines[:3])}")
    subject = " and ".join(subjects)
    how = f"split {subject} as {new} in place of {old}" if new else f"leave out {subject}, {old}"
    times = [
        f"{format_seconds(cost.communication)} of communication and {format_seconds(cost.work)} of work"
        for cost in (after, before)
    ]
    return Remark(
        CHEAPER,
        names[0] if names else Path(lines[0]).name,
        f"{subject}: with {new or 'no constraint'} in place of {old} the step compiles to {times[0]}, in "
        f"place of {times[1]}, with no more memory",
        lines[0] if lines else "step_args",
        how,
        None,
        before.seconds - after.seconds,
    )


def _text(spec: Spec) -> str:
    return str(partition(spec)).replace("PartitionSpec", "P")


def with_arguments(
    jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Alternative
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step's arguments; arguments that an alternative changes become types with its sharding."""
    import jax
    from jax.sharding import NamedSharding

    names = {one.name for one in changed.places if one.is_argument}
    given = args, dict(kwargs)

    def placed(name: str, leaf: Any) -> Any:
        if name not in names or changed.spec is None:
            return leaf
        sharding = NamedSharding(leaf.sharding.mesh, partition(changed.spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.unflatten(jax.tree.structure(given), [placed(*one) for one in _named(jitted, given)])
