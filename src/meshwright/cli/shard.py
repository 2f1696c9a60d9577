"""mw shard: prices of all ways to multiply sharded arrays, and of reshards."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import ceil, prod
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, note, waiting
from meshwright.cli.extras import require
from meshwright.cost.chain_search import search_chain
from meshwright.cost.derivation import PricedSteps, algorithm_of, priced_steps
from meshwright.cost.reshard_seconds import step_price
from meshwright.cost.strategies import strategies
from meshwright.cost.strategy import ContractionQuestion, PricedStep, Strategy, priced_step
from meshwright.dtypes import dtype_bytes
from meshwright.errors import HardwareError, NotationError
from meshwright.files import check_writable, write_whole
from meshwright.hardware import catalog
from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware
from meshwright.notation.algorithm import Algorithm
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_mesh, parse_sizes
from meshwright.notation.resharding import cheapest_reshard
from meshwright.notation.roles import case_of
from meshwright.notation.written import is_chain, parse_written, written_dims
from meshwright.options import REQUIRED, option, parse_dtype
from meshwright.report.pictures.device_blocks import contraction_svg, reshard_svg
from meshwright.report.terminal.board import (
    chain_lines,
    choices_lines,
    contraction_lines,
    pass_lines,
    reshard_lines,
    run_lines,
)
from meshwright.units import format_bytes, format_number_of, format_seconds, parse_count

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_FORMS = (
    '"A[I_X, J] . B[J_X, K] -> C[I_X, K]" or, of one array, "A[I_X, J] -> A[I, J_X]"; '
    "several statements are separated by ;"
)
_PRODUCT = re.compile(r"(?<=[\]}])\s*[.·@](?:_(?:\{[^}]*\}|\w+))?\s*")
DEFAULT_CHIP = "v5p"
# Devices whose blocks are listed at most.
_MOST_BLOCKS = 8


_Objective = Literal["latency", "throughput"]


@command(app)
def shard(
    written: Annotated[
        str, typer.Argument(metavar="EXPRESSION", help="A[I_X, J] . B[J_X, K] -> C[I_X, K], quoted.")
    ],
    mesh: str = option(REQUIRED, help="Mesh axes and their sizes: X=4,Y=2."),
    dims: str | None = option(
        None, help="Sizes of the dimensions: I=1024,J=4k,K=4k.", unset="for one array, letters"
    ),
    hardware: str | None = option(
        None, help="v5e:4x2, h100:8, machine.toml.", unset="v5p with a torus of the mesh's shape"
    ),
    dtype: str = option("bf16", parser=parse_dtype, help="Dtype of the arrays."),
    memory_limit: int | None = option(
        None, parser=parse_count, help="Memory of one device in bytes: 300M, 16G.", unset="the chip's HBM"
    ),
    search: str | None = option(
        None, help="Arrays whose shardings are searched: A,B. The fastest that fits the memory."
    ),
    objective: _Objective = option(
        "latency", help="Minimise the time of one run, or of each of many runs that overlap."
    ),
    svg: Path | None = option(None, help="Draw the blocks that each device holds."),
    run: bool = option(False, help="Run the cheapest strategy on virtual CPU devices and check its result."),
    backward: bool = option(False, help="Also derive the gradients."),
    as_json: bool = JSON,
) -> None:
    """Derive and price every way to multiply sharded arrays.

    Without `-> C[...]`, letters in both operands are summed and the output may have any sharding. `{U_X}` in
    the output leaves its partial sums over X unreduced. One array is counted, or with `->` resharded;
    without --dims its blocks are counted in letters. Several
    statements form a chain: the command prints the steps that its shardings imply, with --backward the
    gradients' steps too. --search tries every sharding of the named arrays.

    \b
    mw shard "A[I_X, J] . B[J_X, K] -> C[I_X, K]" --mesh X=4,Y=2 --dims I=1024,J=4096,K=4096
    mw shard "x[B_X, D] . w[D, F_Y]" --mesh X=4,Y=4 --dims B=8k,D=4k,F=16k --hardware v5e:4x4
    mw shard "A[I_XY, J]" --mesh X=4,Y=2
    mw shard "A[I_XY, J]" --mesh X=4,Y=2 --dims I=1024,J=4096
    mw shard "A[I_X, J] -> A[I, J_X]" --mesh X=8 --dims I=1024,J=4096 --hardware h100:8
    mw shard "x[B_X, D] . w[D_X, F] -> h[B_X, F]; h . v[F, D_X] -> y[B_X, D]" --backward \\
      --mesh X=4 --dims B=8k,D=4k,F=16k
    mw shard "x[B, D] . w[D, F] -> h; h . v[F, D] -> y[B, D]" --search w,v --memory-limit 300M \\
      --mesh X=4 --dims B=128,D=8k,F=32k --hardware v5e:2x2
    """
    if svg:
        check_writable(svg)
    if run:
        require("run")
    parsed_mesh = parse_mesh(mesh)
    if dims is None:
        given = {"--svg": svg, "--run": run, "--backward": backward, "--search": search}
        given |= {"--hardware": hardware, "--memory-limit": memory_limit, "--dtype": dtype != "bf16"}
        _in_letters(written, parsed_mesh, given, as_json=as_json)
        return
    sizes = parse_sizes(dims)
    machine = _rated(catalog.load(hardware)) if hardware else default_hardware(parsed_mesh)
    if is_chain(written) or search:
        _refuse({"--svg": svg, "--run": run}, "takes one product or reshard, not a chain")
        limit = memory_limit or machine.chip.hbm_bytes
        names = [name.strip() for name in search.split(",")] if search else []
        _chain(written, names, parsed_mesh, sizes, machine, dtype, limit, backward, as_json)
        return
    operands, out = parse_shard(written)
    if len(operands) == 1 and out is None:
        given = {"--svg": svg, "--run": run, "--backward": backward}
        _refuse(given, "takes a product or a reshard, not one array")
        _array(operands[0], parsed_mesh, sizes, dtype, machine, as_json=as_json)
        return
    if len(operands) == 1 and out is not None:
        if backward:
            raise typer.BadParameter("takes a product or a chain, not a reshard", param_hint="--backward")
        _reshard(operands[0], out, parsed_mesh, sizes, machine, dtype, svg, run, as_json)
        return
    lhs, rhs = operands
    question = ContractionQuestion(_einsum(lhs, rhs, out), lhs, rhs, out, parsed_mesh, sizes, machine, dtype)
    limit = memory_limit or machine.chip.hbm_bytes
    _contraction(question, limit, objective, svg, run=run, backward=backward, as_json=as_json)


def _refuse(given: Mapping[str, object], words: str) -> None:
    """Raise BadParameter for the first option that has a value."""
    for option_name, value in given.items():
        if value:
            raise typer.BadParameter(words, param_hint=option_name)


def _array(
    array: ShardedArray,
    mesh: Mesh,
    sizes: Mapping[str, int],
    dtype: str,
    machine: Hardware,
    *,
    as_json: bool,
) -> None:
    """Print the block of an array that each device holds, its bytes, and the time to read it."""
    block = array.local_shape(mesh, sizes)
    each, copies = array.bytes_per_device(mesh, sizes, dtype), array.replicas(mesh)
    document = {
        "array": str(array),
        "mesh": dict(mesh.sizes),
        "dtype": dtype,
        "bytes": ceil(prod(sizes[dim] for dim in array.dims) * dtype_bytes(dtype)),
        "block": list(block),
        "bytes_per_device": each,
        "copies": copies,
        "bytes_of_all_devices": each * mesh.num_devices,
        "hardware": machine.spec,
        "seconds_read": each / machine.chip.memory_bytes_per_second(dtype),
    }
    if as_json:
        emit(document)
        return
    blocks = _block_indices(array, mesh, sizes) if 1 < mesh.num_devices <= _MOST_BLOCKS else {}
    print(
        f"{array} in {dtype}: {format_bytes(document['bytes'])}",
        f"each of {format_number_of(mesh.num_devices, 'device')} holds a block {list(block)}, "
        f"{format_bytes(each)}; {_holders(copies)} each block",
        f"all devices together hold {format_bytes(document['bytes_of_all_devices'])}",
        f"a device of {machine.spec} reads its block in {format_seconds(document['seconds_read'])}",
        *(f"  {device}: {indices}" for device, indices in blocks.items()),
        sep="\n",
    )


def _in_letters(written: str, mesh: Mesh, given: Mapping[str, object], *, as_json: bool) -> None:
    """Print the block of an array without sizes.

    Raises NotationError if the answer needs sizes, BadParameter for a given option that needs them.
    """
    size = 128 * mesh.num_devices
    example = f"--dims {','.join(f'{dim}={size}' for dim in written_dims(written))}"
    if is_chain(written) or len(operands := parse_shard(written)[0]) > 1 or "->" in written:
        raise NotationError(f"{written!r}: the price needs the sizes of the dimensions; give {example}")
    _refuse(given, f"needs the sizes of the dimensions; give {example}")
    array = operands[0]
    shards = {dim: mesh.size(axes) for dim, axes in zip(array.dims, array.axes, strict=True)}
    block = [dim if number == 1 else f"{dim}/{number}" for dim, number in shards.items()]
    copies = array.replicas(mesh)
    arrays = mesh.num_devices // prod(shards.values())
    if as_json:
        document = {"array": str(array), "mesh": dict(mesh.sizes), "block": block, "copies": copies}
        emit(document | {"arrays_of_all_devices": arrays})
        return
    part = f"1/{prod(shards.values())} of the" if mesh.size(array.sharded_axes) > 1 else "all"
    print(
        f"{array} on {', '.join(f'{axis}={size}' for axis, size in mesh.sizes.items())}",
        f"each of {format_number_of(mesh.num_devices, 'device')} holds a block [{', '.join(block)}], "
        f"{part} elements; {_holders(copies)} each block",
        f"all devices together hold {array.name} {'once' if arrays == 1 else f'{arrays} times'}",
        f"for bytes and the time to read a block, give {example}",
        sep="\n",
    )


def _holders(copies: int) -> str:
    return f"{format_number_of(copies, 'device')} {'holds' if copies == 1 else 'hold'}"


def _block_indices(array: ShardedArray, mesh: Mesh, sizes: Mapping[str, int]) -> dict[str, str]:
    """The indices of each device's block, by the device's place on the mesh.

    >>> from meshwright.notation.parse import parse_array
    >>> _block_indices(parse_array("A[I_X, J]"), Mesh({"X": 2}), {"I": 4, "J": 3})
    {'X=0': 'A[0:2, 0:3]', 'X=1': 'A[2:4, 0:3]'}
    """
    blocks = {}
    for places in product(*(range(size) for size in mesh.sizes.values())):
        place = dict(zip(mesh.sizes, places, strict=True))
        parts = []
        for dim, axes in zip(array.dims, array.axes, strict=True):
            number = 0
            for axis in axes:  # the first axis is the major one
                number = number * mesh.size(axis) + place[axis]
            length = sizes[dim] // mesh.size(axes)
            parts.append(f"{number * length}:{(number + 1) * length}")
        device = ", ".join(f"{axis}={at}" for axis, at in place.items())
        blocks[device] = f"{array.name or ''}[{', '.join(parts)}]"
    return blocks


def _reshard(
    array: ShardedArray,
    target: ShardedArray,
    mesh: Mesh,
    sizes: Mapping[str, int],
    machine: Hardware,
    dtype: str,
    svg: Path | None,
    run: bool,
    as_json: bool,
) -> None:
    placement = machine.place(mesh)
    collectives = cheapest_reshard(array, target, mesh, sizes, step_price(placement), dtype)
    steps = [priced_step(step, mesh, sizes, dtype, placement) for step in collectives]
    if svg:
        write_whole(svg, reshard_svg(array, target, steps, mesh))
        note(f"wrote {svg}")
    ran: dict = {}
    if run:
        from meshwright.audit.shard.on_devices import run_reshard

        with waiting("running on virtual devices"):
            ran = run_reshard(collectives, mesh, sizes, dtype)
    if as_json:
        emit(_reshard_document(array, steps, mesh, sizes, dtype) | ran)
    else:
        print(*reshard_lines(array, target, steps, machine.spec), *run_lines(ran), sep="\n")


def _contraction(
    question: ContractionQuestion,
    limit: float,
    objective: _Objective,
    svg: Path | None,
    *,
    run: bool,
    backward: bool,
    as_json: bool,
) -> None:
    """Print the strategies of a product of two arrays, ranked. Exits 1 if none fits `limit` bytes."""
    with waiting("searching strategies"):
        ranked = strategies(question, memory_limit_bytes=limit, objective=objective)
    best = ranked[0]
    if svg:
        write_whole(svg, contraction_svg(best))
        note(f"wrote {svg}")
    ran = _ran(best, gradients=backward) if run else {}
    passes = {}
    if backward:
        given = question.mesh, question.sizes, question.dtype, question.hardware
        passes = _passes(algorithm_of(best), *given)
    if as_json:
        steps = {title: priced.to_dict() for title, priced in passes.items()}
        emit(_document(ranked, objective, limit) | steps | ran)
    else:
        lines = contraction_lines(question, ranked, objective, limit)
        more = ["", *pass_lines("backward", passes["backward"])] if backward else []
        print(*lines, *more, *run_lines(ran), sep="\n")
    if not best.fits(limit):
        raise typer.Exit(1)


def _ran(strategy: Strategy, *, gradients: bool) -> dict:
    from meshwright.audit.shard.on_devices import run_strategy  # the audit reads HLO, which planning need not

    with waiting("running on virtual devices"):
        return run_strategy(strategy, gradients=gradients)


def _chain(
    written: str,
    names: Sequence[str],
    mesh: Mesh,
    sizes: Mapping[str, int],
    machine: Hardware,
    dtype: str,
    memory_limit: float,
    backward: bool,
    as_json: bool,
) -> None:
    """Print the algorithm of a chain with its shardings, and the price of each step.

    names: the arrays whose shardings are searched; without any, the chain is priced as written.
    """
    chain, layout = parse_written(written)
    with waiting("searching shardings"):
        choices = search_chain(
            chain, layout, names, mesh, sizes, dtype, machine, memory_limit, backward=backward
        )
    best, fits = choices[0], choices[0].bytes_per_device <= memory_limit
    if as_json:
        document = {"hardware": machine.spec, "bytes_per_device": best.bytes_per_device, "fits": fits}
        document |= {"arrays": [str(array) for array in best.arrays]} if names else {}
        emit(document | {title: priced.to_dict() for title, priced in best.passes.items()})
    else:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
        given = ", ".join(f"{dim}={size:,}" for dim, size in sizes.items())
        print(*chain_lines(best.passes, f"{axes} on {machine.spec}; {given}; {dtype}"), sep="\n")
        if names or not fits:
            print("", *choices_lines(choices, memory_limit), sep="\n")
    if not fits:
        raise typer.Exit(1)


def _passes(
    algorithm: Algorithm, mesh: Mesh, sizes: Mapping[str, int], dtype: str, machine: Hardware
) -> dict[str, PricedSteps]:
    return {
        "forward": priced_steps(algorithm.forward, mesh, sizes, dtype, machine),
        "backward": priced_steps(algorithm.backward, mesh, sizes, dtype, machine),
    }


def parse_shard(text: str) -> tuple[list[ShardedArray], ShardedArray | None]:
    """(the one or two operands, the wanted output or None) of an expression.

    >>> operands, out = parse_shard("A[I, J_X] . B[J_X, K] -> C[I, K]{U_X}")
    >>> print(*operands, out)
    A[I, J_X] B[J_X, K] C[I, K]{U_X}
    """
    left, arrow, right = text.partition("->")
    parts = _PRODUCT.split(left.strip())
    if len(parts) > 2:
        raise NotationError(f"{text!r} is neither a product of two arrays nor a reshard; write {_FORMS}")
    operands = [_named(parse_array(part), name) for part, name in zip(parts, "AB", strict=False)]
    return operands, _named(_wanted(right), "C") if arrow else None


def _named(array: ShardedArray, name: str) -> ShardedArray:
    """The array, with `name` if it has none, since steps show names."""
    return array if array.name else array.replace(name=name)


def _wanted(text: str) -> ShardedArray:
    """The output. Raises NotationError with the reason if it cannot exist."""
    try:
        return parse_array(text.strip())
    except NotationError as error:
        if "used twice" not in str(error):
            raise
        raise NotationError(
            f"the wanted output is impossible: {error} (each device would hold only a block of the diagonal)"
        ) from error


def _einsum(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray | None) -> Einsum:
    """The einsum of the product; without an output, letters in both operands are summed."""
    for array in (lhs, rhs, out):
        for dim in array.dims if array else ():
            if len(dim) > 1:
                raise NotationError(f"{array}: dimension {dim} of a product must be one letter")
    left, right = "".join(lhs.dims), "".join(rhs.dims)
    kept = "".join(dim for dim in left + right if (dim in left) != (dim in right))
    return Einsum.parse(f"{left},{right}->{''.join(out.dims) if out else kept}")


def default_hardware(mesh: Mesh) -> Hardware:
    """v5p chips, each axis of the mesh along a dimension of their torus (three at most)."""
    sizes = [size for size in mesh.sizes.values() if size > 1]
    network = catalog.chip(DEFAULT_CHIP).network
    assert isinstance(network, Torus)
    rank = len(network.pod)
    if len(sizes) > rank:
        raise HardwareError(
            f"{mesh} has {len(sizes)} axes and {DEFAULT_CHIP} a {rank}D torus; give --hardware"
        )
    shape = [*sizes, *(1 for _ in range(rank - len(sizes)))]
    return _rated(catalog.load(f"{DEFAULT_CHIP}:{'x'.join(map(str, shape))}"))


def _document(ranked: list[Strategy], objective: str, limit: float) -> dict:
    """The keys of `mw shard` in docs/reference/json.md; best is null if no strategy fits the memory."""
    question = ranked[0].question
    return {
        "best": 0 if ranked[0].fits(limit) else None,
        "objective": objective,
        "memory_limit_bytes": limit,
        "hardware": question.hardware.spec,
        "cases": {
            axis: case_of(question.einsum, question.lhs, question.rhs, axis).number for axis in question.mesh
        },
        "strategies": [strategy.to_dict() for strategy in ranked],
    }


def _reshard_document(
    array: ShardedArray, steps: list[PricedStep], mesh: Mesh, sizes: Mapping[str, int], dtype: str
) -> dict:
    """The same keys for one array: its cheapest reshard is the only strategy, without FLOPs."""
    held = [array, *(step.collective.result for step in steps)]
    block_bytes = [block.bytes_per_device(mesh, sizes, dtype) for block in held]
    seconds = sum(step.seconds for step in steps)
    strategy = {
        "name": ", then ".join(step.collective.title for step in steps) or "nothing moves",
        "out": str(held[-1]),
        "steps": [step.to_dict() for step in steps],
        "flops_per_device": 0,
        "seconds_compute": 0.0,
        "seconds_comms": seconds,
        "seconds": seconds,
        "bytes_per_device": max(map(sum, pairwise(block_bytes)), default=block_bytes[0]),
    }
    return {"best": 0, "strategies": [strategy]}


def _rated(machine: Hardware) -> Hardware:
    """The machine at its ratings, as in textbooks, unless it is calibrated."""
    return machine if machine.chip.matmul_rates else machine.ideal()
