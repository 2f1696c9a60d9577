"""Inputs that a step is given whole, although each device reads only its own part of them."""

from collections.abc import Collection

from meshwright.audit.facts.groups import changes_along, copies_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.facts.shards import Offsets, slice_offsets
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import CallPath, TracedValue, readers
from meshwright.audit.remarks import Remark
from meshwright.units import format_bytes

# Inputs are reported if their unread parts are more than this share of a chip's memory; without a chip, of
# all inputs.
_SHARE = 0.02
GIVEN_WHOLE = "given_whole"


def given_whole(program: Program, prices: Prices, state: Collection[str]) -> list[Remark]:
    """A warning for each large input that is whole on devices that read only slices of it.

    An example is a mask or a bias of each sequence, which the partitioner cuts as the batch is split. state:
    names of moments and caches, which have a warning of their own.
    """
    arrays = [one for one in program.main.parameters if isinstance(one.shape, ArrayShape)]
    memory = prices.chip.hbm_bytes if prices.chip else sum(one.shapes[0].num_bytes for one in arrays)
    remarks = list[Remark]()
    for parameter in arrays:
        num_bytes = parameter.shapes[0].num_bytes
        if (
            parameter.name in state
            or num_bytes <= _SHARE * memory
            or copies_of(parameter, program.num_devices) == 1
        ):
            continue
        pieces = _own_pieces(program, parameter)
        if not pieces:
            continue
        read, offsets = pieces
        if num_bytes - read > _SHARE * memory:
            remarks.append(_of_input(parameter, num_bytes - read, _spec(offsets, prices)))
    return remarks


def _own_pieces(program: Program, parameter: Instruction) -> tuple[int, Offsets] | None:
    """Bytes that a device reads of an input, and the offsets of the largest slice on each device.

    None if something reads the whole input, or if all devices read the same slices.
    """
    uses = list(readers(program, TracedValue(parameter, CallPath(program.main))))
    if not uses or any(at != 0 or user.instruction.opcode != "dynamic-slice" for user, at in uses):
        return None
    pieces = sorted((user for user, _ in uses), key=lambda one: -one.instruction.shapes[0].num_bytes)
    offsets = [slice_offsets(program, piece, first=1) for piece in pieces]
    if any(each is None or len(set(each)) == 1 for each in offsets):
        return None
    read = {each: piece.instruction.shapes[0].num_bytes for piece, each in zip(pieces, offsets, strict=True)}
    assert offsets[0] is not None
    return sum(read.values()), offsets[0]


def _spec(offsets: Offsets, prices: Prices) -> str:
    """The PartitionSpec that gives each device its slice; "" if the mesh's axes have no names."""
    if not prices.named:
        return ""
    entries = list[str]()
    for values in zip(*offsets, strict=True):
        axes = [repr(axis) for axis in prices.mesh.sizes if changes_along(axis, values, prices.mesh)]
        entries.append(axes[0] if len(axes) == 1 else f"({', '.join(axes)})" if axes else "None")
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _of_input(parameter: Instruction, excess: int, spec: str) -> Remark:
    name = parameter.label
    how = f" as {spec}" if spec else ""
    return Remark(
        GIVEN_WHOLE,
        name,
        f"`{name}` ({format_bytes(parameter.shapes[0].num_bytes)}) is whole on each device, which reads only "
        "its own part of it",
        "step_args",
        f"give it split{how}, in place of whole (jax.device_put, or the sharding of its ShapeDtypeStruct): "
        f"{format_bytes(excess)} less on each device",
        excess,
        None,
        instruction=parameter.name,
    )
