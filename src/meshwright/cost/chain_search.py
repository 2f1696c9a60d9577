"""A search of the shardings of a chain's arrays: the fastest that fit a memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshwright.cost.derivation import PricedSteps, priced_steps
from meshwright.errors import NotationError, nearest
from meshwright.hardware.topology import Hardware
from meshwright.notation.algorithm import Algorithm, Local, Step
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import Chain
from meshwright.notation.derive import derive
from meshwright.notation.mesh import Mesh

# Maximum number of combinations of shardings.
MAX_COMBINATIONS = 1 << 15


@dataclass(frozen=True)
class ChainChoice:
    """Shardings of the searched arrays with the priced passes.

    bytes_per_device: the most that a device holds in a forward step, inputs included.
    """

    arrays: tuple[ShardedArray, ...]
    passes: Mapping[str, PricedSteps]
    bytes_per_device: int

    @property
    def seconds(self) -> float:
        """Seconds of all passes, with all but their critical path overlapped."""
        return sum(priced.seconds_overlapped for priced in self.passes.values())


def peak_bytes(
    steps: Sequence[Step], inputs: Sequence[ShardedArray], mesh: Mesh, sizes: Mapping[str, int], dtype: str
) -> int:
    """The most bytes that a device holds in a pass: inputs, and each result until its last use.

    The results that no step reads are held to the end.
    """
    held = sum(array.bytes_per_device(mesh, sizes, dtype) for array in inputs)
    last: dict[ShardedArray, int] = {}
    for number, step in enumerate(steps):
        action = step.action
        last |= dict.fromkeys(action.operands if isinstance(action, Local) else (action.operand,), number)
    live: dict[ShardedArray, int] = {}
    most = held
    for number, step in enumerate(steps):
        if step.result not in inputs:
            live[step.result] = step.result.bytes_per_device(mesh, sizes, dtype)
        most = max(most, held + sum(live.values()))
        live = {array: size for array, size in live.items() if last.get(array, len(steps)) > number}
    return most


def search_chain(
    chain: Chain,
    layout: Mapping[str, ShardedArray],
    names: Sequence[str],
    mesh: Mesh,
    sizes: Mapping[str, int],
    dtype: str,
    hardware: Hardware,
    memory_limit_bytes: float,
    *,
    backward: bool = False,
) -> list[ChainChoice]:
    """The choices for the arrays `names`: first the ones that fit, by seconds, then the others, by bytes.

    A choice gives each axis of the mesh to one dimension of an array, or to none. Raises NotationError for an
    unknown array, or if there are too many choices.
    """
    for name in names:
        if name not in chain.arrays:
            raise NotationError(f"--search {name!r} is in no statement; {nearest(name, list(chain.arrays))}")
    options = [list(candidate_shardings(chain.arrays[name], mesh, sizes)) for name in names]
    if (count := prod(map(len, options))) > MAX_COMBINATIONS:
        raise NotationError(
            f"--search {','.join(names)} has {count:,} combinations of shardings; fits: "
            f"{MAX_COMBINATIONS:,} or fewer, so name fewer arrays"
        )
    candidates = []
    for arrays in product(*options):
        chosen = {**layout, **{array.name: array for array in arrays}}
        inputs = [chosen.get(name, chain.arrays[name]) for name in (*chain.stored, chain.source)]
        num_bytes = sum(array.bytes_per_device(mesh, sizes, dtype) for array in inputs)
        candidates.append((num_bytes, arrays, chosen, inputs))
    # If no inputs fit, the inputs with the fewest bytes are priced.
    most = max(memory_limit_bytes, min((num_bytes for num_bytes, *_ in candidates), default=0))
    choices = []
    for num_bytes, arrays, chosen, inputs in candidates:
        if num_bytes > most:
            continue
        try:
            algorithm = derive(chain, chosen)
            passes = _priced(algorithm, mesh, sizes, dtype, hardware, backward=backward)
        except NotationError:  # no operation yields this combination
            continue
        held = peak_bytes(algorithm.forward, inputs, mesh, sizes, dtype)
        choices.append(ChainChoice(arrays, passes, held))
    if not choices:
        raise NotationError(f"no sharding of {', '.join(names)} divides over the mesh")
    return sorted(
        choices,
        key=lambda choice: (
            max(0, choice.bytes_per_device - memory_limit_bytes),
            choice.seconds,
            choice.bytes_per_device,
        ),
    )


def candidate_shardings(array: ShardedArray, mesh: Mesh, sizes: Mapping[str, int]) -> Iterator[ShardedArray]:
    """The array with each axis of the mesh along one of its dimensions or along none, if it divides.

    >>> from meshwright.notation.parse import parse_array
    >>> print(*candidate_shardings(parse_array("A[I, J]"), Mesh({"X": 2}), {"I": 4, "J": 3}))
    A[I, J] A[I_X, J]
    """
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    for dims in product((None, *array.dims), repeat=len(axes)):
        placed = {dim: tuple(a for a, d in zip(axes, dims, strict=True) if d == dim) for dim in array.dims}
        if all(sizes.get(dim, 0) % mesh.size(over) == 0 for dim, over in placed.items()):
            yield array.replace(axes=placed)


def _priced(
    algorithm: Algorithm,
    mesh: Mesh,
    sizes: Mapping[str, int],
    dtype: str,
    hardware: Hardware,
    *,
    backward: bool,
) -> dict[str, PricedSteps]:
    passes = {"forward": priced_steps(algorithm.forward, mesh, sizes, dtype, hardware)}
    if backward:
        passes["backward"] = priced_steps(algorithm.backward, mesh, sizes, dtype, hardware)
    return passes
