"""The batch of a program: which inputs it is, and the mesh axes that it shares with weights."""

import re
from typing import NamedTuple

from meshwright.audit.hlo.parse import ArrayShape, Instruction, Program
from meshwright.audit.hlo.shardings import copied_over, tiles_of
from meshwright.notation.mesh import Mesh

_INTEGERS = re.compile(r"[su](8|16|32|64)$")


class ProgramBatch(NamedTuple):
    """fsdp_axes: mesh axes over which both the batch and weights are sharded.

    elements: numbers of the batch on one device.
    """

    fsdp_axes: frozenset[str]
    elements: int


def batch_of(program: Program, mesh: Mesh) -> ProgramBatch:
    """The batch is the integers that enter a program, tokens or labels; none where no array of them does."""
    arrays = [
        one for one in program.main.parameters if isinstance(one.shape, ArrayShape) and one.shapes[0].dims
    ]
    tokens = [one for one in arrays if _INTEGERS.match(one.shapes[0].dtype)]
    weights = [one for one in arrays if one not in tokens and len(one.shapes[0].dims) > 1]
    axes = [frozenset().union(*(_split_over(one, mesh) for one in some)) for some in (tokens, weights)]
    elements = max((one.shapes[0].num_elements for one in tokens), default=0)
    return ProgramBatch(axes[0] & axes[1], elements)


def _split_over(one: Instruction, mesh: Mesh) -> frozenset[str]:
    if tiles_of(one.attributes.get("sharding", "")) == 1:
        return frozenset()
    return frozenset(axis for axis, size in mesh.sizes.items() if size > 1) - set(copied_over(one, mesh))
