"""The blocks of an array that each device holds, derived from its sharding."""

from dataclasses import dataclass
from math import prod

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array


@dataclass(frozen=True)
class BlockMap:
    """An array cut into blocks over a mesh.

    >>> from meshwright.notation.parse import parse_array
    >>> cut = BlockMap(parse_array("A[I_XY, J]"), Mesh({"X": 4, "Y": 2, "Z": 2}))
    >>> cut.num_blocks("I"), cut.total_blocks, cut.num_replicas
    (8, 8, 2)
    >>> cut.index({"X": 3, "Y": 1, "Z": 0}, ("I",))
    7
    """

    array: ShardedArray
    mesh: Mesh

    def num_blocks(self, *dims: str) -> int:
        """Blocks along these dimensions: the product of the sizes of the axes that split them."""
        return prod(self.mesh.size(self.array.axes_of(dim)) for dim in dims)

    @property
    def total_blocks(self) -> int:
        return self.num_blocks(*self.array.dims)

    @property
    def num_replicas(self) -> int:
        return self.array.replicas(self.mesh)

    def index(self, coordinates: dict[str, int], dims: tuple[str, ...]) -> int:
        """The block along `dims`, folded row-major, that the device at these mesh coordinates holds.

        Over several axes the first is major: index = c_1 |X_2| + c_2 for `I_{X1,X2}`.
        """
        index = 0
        for axis in (axis for dim in dims for axis in self.array.axes_of(dim)):
            index = index * self.mesh.size(axis) + coordinates[axis]
        return index

    @property
    def drawn_dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Dimensions drawn downwards and across: first the sharded ones, then others but for layers (L)."""
        sharded = [dim for dim in self.array.dims if self.num_blocks(dim) > 1]
        if len(sharded) > 1:
            return (sharded[0],), tuple(sharded[1:])
        plain = [dim for dim in self.array.dims if dim not in sharded and dim != "L"]
        pair = sorted((sharded + plain)[:2], key=self.array.dims.index)
        return (tuple(pair[:1]), tuple(pair[1:])) if len(pair) > 1 else ((), tuple(pair))


def read_block_map(text: str, mesh: Mesh) -> BlockMap | None:
    """The array that `text` writes over this mesh; None if it is none, and is then listed but not drawn."""
    try:
        array = parse_array(text)
        mesh.size(array.sharded_axes + array.unreduced)
    except NotationError:
        return None
    return BlockMap(array, mesh)
