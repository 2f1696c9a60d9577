"""Algorithms carried out step by step on numpy devices, and random chains and layouts.

The functions are written here anew, forward and transposed. The unsharded gradients are compared
with dual numbers (`directional`), which know nothing of transposition.
"""

from collections.abc import Callable, Mapping

import numpy as np
from hypothesis import strategies as st
from tests.notation.devices import Blocks, Devices, shardings

from meshwright.notation.algorithm import GIVEN, Algorithm, Local, Step
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import VIEWS, Chain
from meshwright.notation.mesh import Mesh

Arrays = dict[str, np.ndarray]
Sizes = Mapping[str, int]
Key = tuple[str, tuple, frozenset[str]]

# Each function of elements, and its derivatives by every operand.
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "square": lambda a: a * a,
    "exp": lambda a, shift: np.exp(a - shift),
    "divide": lambda a, b: a / b,
    "double": lambda a: 2 * a,
}
DERIVATIVES: dict[str, list[Callable[..., np.ndarray]]] = {
    "mul": [lambda a, b: b + 0 * a, lambda a, b: a + 0 * b],
    "square": [lambda a: 2 * a],
    "exp": [lambda a, shift: np.exp(a - shift)],
    "divide": [lambda a, b: 1 / b + 0 * a, lambda a, b: -a / b**2],
    "double": [lambda a: 2 + 0 * a],
}


def key(array: ShardedArray) -> Key:
    return array.name, array.axes, frozenset(array.unreduced)


def simulate(
    algorithm: Algorithm, devices: Devices, sizes: Sizes, given: dict[Key, Blocks]
) -> dict[Key, Blocks]:
    """What every array's blocks are in the end, from those of the stored arrays and the cotangents."""
    values = dict(given)
    for step in (*algorithm.forward, *algorithm.backward):
        action = step.action
        if isinstance(action, Local) and action.function == GIVEN:
            continue
        if isinstance(action, Local):
            operands = [values[key(a)] for a in action.operands]
            new = {d: _local(action, devices.mesh, sizes, [o[d] for o in operands]) for d in devices.all()}
        else:
            new = _collective(step, devices, values[key(action.operand)])
        old = values.get(key(step.result)) if step.accumulates else None
        values[key(step.result)] = {d: new[d] + old[d] for d in new} if old else new
    return values


def _collective(step: Step, devices: Devices, blocks: Blocks) -> Blocks:
    assert not isinstance(step.action, Local)
    if not step.maximum:
        return devices.run([step.action], blocks)
    assert step.action.op == "all_reduce"
    groups = devices.groups(step.action.axes)
    return {d: np.max([blocks[other] for other in group], axis=0) for group in groups for d in group}


def _local(action: Local, mesh: Mesh, sizes: Sizes, blocks: list[np.ndarray]) -> np.ndarray:
    function, operands, result = action.function.partition("_")[0], action.operands, action.result
    shape = tuple(sizes[d] // mesh.size(axes) for d, axes in zip(result.dims, result.axes, strict=True))
    if function == ".":
        return np.einsum(_spec([a.dims for a in operands], result.dims), *blocks)
    if function in VIEWS:
        return blocks[0].reshape(shape)
    if function == "sum" and action.wrt is not None:
        return np.broadcast_to(_spread(blocks[0], operands[0].dims, result.dims), shape).copy()
    if function in ("sum", "max"):
        gone = tuple(i for i, d in enumerate(operands[0].dims) if d not in result.dims)
        return blocks[0].sum(axis=gone) if function == "sum" else blocks[0].max(axis=gone)
    if action.wrt is None:
        spread = [_spread(b, a.dims, result.dims) for a, b in zip(operands, blocks, strict=True)]
        return np.broadcast_to(FUNCTIONS[function](*spread), shape).copy()
    dims = operands[0].dims
    d_out, *spread = [_spread(b, a.dims, dims) for a, b in zip(operands, blocks, strict=True)]
    slope = DERIVATIVES[function][action.wrt](*spread) if spread else 1
    return np.einsum(_spec([dims], result.dims), d_out * slope)


def _spec(operands: list[tuple[str, ...]], out: tuple[str, ...]) -> str:
    return ",".join("".join(dims) for dims in operands) + "->" + "".join(out)


def _spread(block: np.ndarray, dims: tuple[str, ...], out: tuple[str, ...]) -> np.ndarray:
    """`block` with a dimension of one for every letter of `out` that it lacks."""
    kept = [d for d in out if d in dims]
    block = np.einsum(_spec([dims], tuple(kept)), block)
    return block.reshape([block.shape[kept.index(d)] if d in kept else 1 for d in out])


def evaluate(chain: Chain, sizes: Sizes, arrays: Arrays) -> Arrays:
    """Every array of the unsharded chain, line by line."""
    values = dict(arrays)
    for line in chain.lines:
        action = Local(line.call, line.operands, line.out)
        values[line.out.name] = _local(action, Mesh({}), sizes, [values[a.name] for a in line.operands])
    return values


def directional(chain: Chain, sizes: Sizes, values: Arrays, tangents: Arrays) -> Arrays:
    """The derivative of every array along `tangents`, by the rules of dual numbers."""
    moving = dict(tangents)
    for line in chain.lines:
        total = np.zeros([sizes[d] for d in line.out.dims], dtype=np.int64)
        for wrt, operand in enumerate(line.operands):
            blocks = [values[a.name] for a in line.operands]
            if line.function in DERIVATIVES:
                spread = [
                    _spread(b, a.dims, line.out.dims) for a, b in zip(line.operands, blocks, strict=True)
                ]
                slope = DERIVATIVES[line.function][wrt](*spread)
                total = total + slope * _spread(moving[operand.name], operand.dims, line.out.dims)
            elif line.function == "add":
                total = total + _spread(moving[operand.name], operand.dims, line.out.dims)
            else:  # linear in each operand
                blocks[wrt] = moving[operand.name]
                total = total + _local(Local(line.call, line.operands, line.out), Mesh({}), sizes, blocks)
        moving[line.out.name] = total
    return moving


def random_arrays(shapes: Mapping[str, ShardedArray], sizes: Sizes, seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    return {n: draw.integers(-3, 4, [sizes[d] for d in a.dims]) for n, a in shapes.items()}


Shapes = dict[str, str]


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Up to four lines over the letters A, B, C and N = K G, each of what came before or a new weight."""
    shapes: Shapes = {"X0": _dims(draw, 2, 3)}
    lines: list[str] = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        name = draw(st.sampled_from(sorted(shapes)))
        kind = draw(st.sampled_from([_contraction, _contraction, _of_two, _of_one, _sum, _split]))
        call, dims = kind(draw, shapes, name)
        if not dims or len(dims) > 4 or {"N", "K"} <= set(dims):
            call, dims = f"square({_written(shapes, name)})", shapes[name]
        shapes[f"X{number}"] = dims
        lines.append(f"{_written(shapes, f'X{number}')} = {call}")
    return Chain.parse("\n".join(lines))


def _contraction(draw: st.DrawFn, shapes: Shapes, name: str) -> tuple[str, str]:
    other = _other(draw, shapes, "".join(_dims(draw, 1, 2)))
    both = dict.fromkeys(shapes[name] + shapes[other])
    shared = [d for d in both if d in shapes[name] and d in shapes[other]]
    summed = draw(st.sets(st.sampled_from(shared))) if shared else set()
    out = "".join(draw(st.permutations([d for d in both if d not in summed])))
    return f"{_written(shapes, name)} . {_written(shapes, other)}", out


def _of_two(draw: st.DrawFn, shapes: Shapes, name: str) -> tuple[str, str]:
    """A function of two arrays; what one lacks it is repeated along."""
    other = _other(draw, shapes, "".join(draw(st.permutations(shapes[name])))[:2])
    function = draw(st.sampled_from(["add", "mul"]))
    out = "".join(dict.fromkeys(shapes[name] + shapes[other]))
    return f"{function}({_written(shapes, name)}, {_written(shapes, other)})", out


def _of_one(draw: st.DrawFn, shapes: Shapes, name: str) -> tuple[str, str]:
    function = draw(st.sampled_from(["square", "double"]))
    return f"{function}({_written(shapes, name)})", shapes[name]


def _sum(draw: st.DrawFn, shapes: Shapes, name: str) -> tuple[str, str]:
    gone = draw(st.sampled_from(shapes[name]))
    return f"sum_{gone}({_written(shapes, name)})", shapes[name].replace(gone, "")


def _split(draw: st.DrawFn, shapes: Shapes, name: str) -> tuple[str, str]:
    dims = shapes[name]
    out = dims.replace("N", "KG") if "N" in dims else dims.replace("KG", "N")
    return f"{'split' if 'N' in dims else 'merge'}({_written(shapes, name)})", out if out != dims else ""


def _other(draw: st.DrawFn, shapes: Shapes, new: str) -> str:
    """An array that there is, or a weight `new`."""
    weight = f"W{len(shapes)}"
    name = draw(st.sampled_from([*sorted(shapes), weight]))
    shapes.setdefault(name, new)
    return name


def _dims(draw: st.DrawFn, least: int, most: int) -> str:
    return "".join(draw(st.lists(st.sampled_from("ABCN"), min_size=least, max_size=most, unique=True)))


def _written(shapes: Shapes, name: str) -> str:
    return f"{name}[{', '.join(shapes[name])}]"


@st.composite
def layouts(draw: st.DrawFn, chain: Chain, mesh: Mesh) -> dict[str, ShardedArray]:
    """Any sharding for any of the chain's arrays."""
    return {
        name: draw(shardings(mesh, "".join(array.dims), name))
        for name, array in chain.arrays.items()
        if draw(st.booleans())
    }


def letter_sizes(mesh: Mesh) -> dict[str, int]:
    """Every letter divides over all devices, and none is trivial; N = K G."""
    n = max(2, mesh.num_devices)
    return {"A": n, "B": n, "C": n, "K": n, "G": n, "N": n * n}
