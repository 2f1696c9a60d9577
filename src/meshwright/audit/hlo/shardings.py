"""How a compiled program says that its inputs are sharded.

`sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}` is in two parts along the first dimension, of each
of which four devices hold the same.
"""

import re
from math import prod

from meshwright.audit.facts.groups import group_axes, parse_groups
from meshwright.audit.hlo.parse import Instruction
from meshwright.errors import AuditError
from meshwright.notation.mesh import Mesh

_TILES = re.compile(r"devices=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)?")


def tiles_of(sharding: str) -> int:
    """Parts into which a sharding cuts a tensor; 1 where it is whole, or cannot be told."""
    tiles = _TILES.search(sharding)
    if not tiles:
        return 1
    sizes = [int(size) for size in tiles[1].split(",")]
    kinds = re.search(r"last_tile_dims=\{([^}]*)\}", sharding)
    num_last = 1 if "last_tile_dim_replicate" in sharding else len(kinds[1].split(",")) if kinds else 0
    return prod(sizes[: len(sizes) - num_last])


def copies_of(parameter: Instruction, num_devices: int) -> int:
    """Devices that hold the same part of an input; 1 where the program does not say."""
    text = parameter.attributes.get("sharding", "")
    if text.startswith("{replicated"):
        return num_devices
    tiles = _TILES.search(text)
    if not tiles:
        return 1
    sizes = [int(size) for size in tiles[1].split(",")]
    if "last_tile_dim_replicate" in text:
        return sizes[-1]
    kinds = re.search(r"last_tile_dims=\{([^}]*)\}", text)
    names = [name.strip() for name in kinds[1].split(",")] if kinds else []
    last = zip(names, sizes[len(sizes) - len(names) :], strict=True)
    return prod(size for name, size in last if name == "replicated")


def copied_over(parameter: Instruction, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes over which an input is the same; none where they cannot be told."""
    text = parameter.attributes.get("sharding", "")
    if text.startswith("{replicated"):
        return tuple(axis for axis, size in mesh.sizes.items() if size > 1)
    tiles = _TILES.search(text)
    if tiles is None or "manual" in text:
        return ()
    copies = copies_of(parameter, mesh.num_devices)
    try:
        groups = parse_groups(f"[{mesh.num_devices // copies},{copies}]{tiles[2] or ''}", mesh.num_devices)
    except AuditError:
        return ()
    return group_axes(groups, mesh).axes or ()
