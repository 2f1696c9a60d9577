"""mw collective: the price of one collective, written in the notation."""

import re
from typing import Annotated, Literal

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import HARDWARE, JSON, emit, show
from meshwright.cost.collectives import CollectivePrice, collective_seconds
from meshwright.errors import NotationError, nearest
from meshwright.hardware import catalog
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_mesh, parse_sizes
from meshwright.options import REQUIRED, option, parse_dtype
from meshwright.units import format_bytes, format_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
_OPS: dict[str, _Op] = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "AllToAll": "all_to_all",
}
_CALL = re.compile(r"\s*(?P<op>[A-Za-z]+)_(?P<subscript>\{[^}]*\}|\w+)\s*\((?P<operand>.*)\)\s*")
_FORMS = "AllGather_X([B_X, D]), ReduceScatter_{X,D}([B, D]{U_X}), AllReduce_X([B, D]{U_X})"
_FORMS += " or AllToAll_X([B_X, D] -> [B, D_X])"


@command(app)
def collective(
    written: Annotated[
        str, typer.Argument(metavar="EXPRESSION", help="A collective, quoted: AllGather_X([B_X, D_Y]).")
    ],
    hardware: str = HARDWARE,
    mesh: str = option(REQUIRED, help="Mesh axes and their sizes: X=4,Y=4,Z=4."),
    dims: str = option(REQUIRED, help="Sizes of the dimensions: B=1024,D=4k."),
    dtype: str = option("bf16", parser=parse_dtype, help="Dtype of the array."),
    one_way: bool = option(False, help="Use rings in one direction only."),
    as_json: bool = JSON,
) -> None:
    """Price one collective and say whether bandwidth or latency limits it.

    V in the output is the size of the gathered array, divided by the axes that keep it sharded.

    \b
    mw collective "AllGather_X([B_X, D_Y])" --mesh X=4,Y=4,Z=4 --dims B=1024,D=4096 --hardware v4p:4x4x4
    mw collective "ReduceScatter_{X,D}([B, D]{U_X})" --mesh X=8 --dims B=1024,D=4096 --hardware h100:8
    mw collective "AllToAll_X([B_X, D] -> [B, D_X])" --mesh X=8 --dims B=1024,D=4096 --hardware h100:8
    """
    parsed_mesh, sizes = parse_mesh(mesh), parse_sizes(dims)
    move = parse_collective(written, parsed_mesh)
    for array in (move.operand, move.result):
        array.local_shape(parsed_mesh, sizes)  # raises if a size is missing or does not divide
    moved_bytes = move.gathered_bytes(parsed_mesh, sizes, dtype)
    placement = catalog.load(hardware).place(parsed_mesh)
    if one_way:
        placement = placement.one_way()
    price = collective_seconds(_OPS[_title(written)], moved_bytes, move.axes, placement)
    if as_json:
        emit(_document(move, moved_bytes, price))
    else:
        show(_sentence(move, moved_bytes, price))


def parse_collective(text: str, mesh: Mesh) -> Collective:
    """The collective of an expression. Raises NotationError with the character or part at fault.

    >>> print(parse_collective("ReduceScatter_{X,J}([I, J]{U_X})", Mesh({"X": 4})))
    ReduceScatter_{X} [I, J]{U_X} -> [I, J_X]
    """
    match = _CALL.fullmatch(text)
    if not match:
        raise NotationError(f"{text!r} is not a collective at character {_stuck(text)}; write {_FORMS}")
    if match["op"] not in _OPS:
        at = match.start("op") + 1
        raise NotationError(
            f"{match['op']!r} at character {at} of {text!r} is unknown; {nearest(match['op'], list(_OPS))}"
        )
    operand, arrow, target = match["operand"].partition("->")
    array = parse_array(operand)
    names = _subscript(match["subscript"])
    axes = tuple(name for name in names if name not in array.dims)
    mesh.size(axes)  # raises for an axis that the mesh does not have
    if arrow:
        result = parse_array(target)
    else:
        result = _result(_OPS[match["op"]], array, axes, tuple(n for n in names if n in array.dims), text)
    return _checked(Collective(_OPS[match["op"]], axes, array, result), text)


def _stuck(text: str) -> int:
    """The number of the first character that does not read as a part of a collective."""
    readable = re.match(r"\s*(?:[A-Za-z]+(?:_(?:\{[^}]*\}?|[A-Za-z0-9]+)(?:\s*(?:\(.*\)?)?)?)?)?", text)
    return (readable.end() if readable else 0) + 1


def _title(text: str) -> str:
    return text.strip().partition("_")[0]


def _subscript(text: str) -> tuple[str, ...]:
    """`{X,J}` is X and J, `XY` is X and Y, `fsdp` is one axis."""
    if text.startswith("{"):
        return tuple(name.strip() for name in text[1:-1].split(","))
    return tuple(re.findall(r"[A-Z][0-9]*", text)) if text[0].isupper() else (text,)


def _result(
    op: _Op, array: ShardedArray, axes: tuple[str, ...], dims: tuple[str, ...], text: str
) -> ShardedArray:
    """The result of the collective, if the text does not give it."""
    if op == "all_to_all":
        raise NotationError(f"{text!r} does not name its result; write AllToAll_X([B_X, D] -> [B, D_X])")
    if op == "all_gather":
        kept = {dim: tuple(a for a in array.axes_of(dim) if a not in axes) for dim in array.dims}
        return array.replace(axes=kept)
    rest = tuple(axis for axis in array.unreduced if axis not in axes)
    if op == "all_reduce":
        return array.replace(unreduced=rest)
    if len(dims) != 1:
        raise NotationError(
            f"{text!r} names no dimension to scatter over; write ReduceScatter_{{X,D}}([B, D]{{U_X}})"
        )
    scattered = {dims[0]: array.axes_of(dims[0]) + axes}
    return array.replace(axes=scattered, unreduced=rest)


def _checked(move: Collective, text: str) -> Collective:
    """`move`, checked to be the only step from its operand to its result.

    One all-gather may gather several dimensions at once: AllGather_XY([B_X, D_Y]).
    """
    if move.operand.dims != move.result.dims:
        raise NotationError(f"{text!r}: {move.operand} and {move.result} have different dimensions")
    steps = reshard(move.operand, move.result)
    axes = [axis for step in steps for axis in step.axes]
    if {step.op for step in steps} != {move.op} or sorted(axes) != sorted(move.axes):
        does = ", then ".join(map(str, steps)) or "no step at all"
        raise NotationError(f"{text!r}: from {move.operand} to {move.result} it takes {does}")
    return move


def _document(move: Collective, moved_bytes: int, price: CollectivePrice) -> dict:
    """The keys of `mw collective` in docs/reference/json.md."""
    return {
        "op": move.op,
        "axes": list(move.axes),
        "operand": str(move.operand),
        "result": str(move.result),
        "seconds": price.seconds,
        "bound": price.bound,
        "bytes": moved_bytes,
        "hops": price.hops,
        "link": price.link,
    }


def _sentence(move: Collective, moved_bytes: int, price: CollectivePrice) -> str:
    link = f" on {price.link}" if price.link else ""
    return (
        f"{move}: {format_seconds(price.seconds)}, bound by {price.bound}{link}; "
        f"V = {format_bytes(moved_bytes)}, {price.hops} hops"
    )
