"""The instructions of a program that communicate, also between slices of TPUs.

Between slices a collective is a send and a recv through each host, which name it. A program of several slices
is compiled for one of them: its devices are numbered from 0, and communication across slices is `send(...),
is_host_transfer=true` with XLA's attributes `_xla_megascale_*`.
"""

import re

from meshwright.audit.facts.groups import DeviceGroups
from meshwright.audit.hlo.read import Computation, Instruction
from meshwright.cost.collectives import Op
from meshwright.errors import AuditError
from meshwright.models.scopes import rows_by_even_load

_OPS: dict[str, Op] = {
    "ALL_REDUCE": "all_reduce",
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
}


def crossing_op(instruction: Instruction) -> Op | None:
    """The collective of a send or recv between slices; None for other instructions."""
    if instruction.opcode not in ("send", "recv"):
        return None
    return _OPS.get(_attribute(instruction, "megascale_transfer_type"))


def received(computation: Computation, send: Instruction) -> Instruction:
    """The recv of the same collective."""
    return _other_end(computation, send, "recv")


def sent(computation: Computation, recv: Instruction) -> Instruction:
    """The send of the same collective."""
    return _other_end(computation, recv, "send")


def _other_end(computation: Computation, instruction: Instruction, opcode: str) -> Instruction:
    rendezvous = _attribute(instruction, "host_transfer_rendezvous")
    for other in computation.instructions.values():
        if other.opcode == opcode and _attribute(other, "host_transfer_rendezvous") == rendezvous:
            return other
    raise AuditError(f"{instruction.name}: no {opcode} of its collective {rendezvous!r} between slices")


def crossing_groups(instruction: Instruction, num_partitions: int) -> DeviceGroups:
    """The groups of a collective between slices: the devices with the same number in each slice.

    Device ids count through one slice after another. The target is written `{1,2}x{0:15}`: slices and their
    devices.
    """
    target = _attribute(instruction, "megascale_target")
    slices = re.match(r"\{([\d,:]+)\}x", target)
    if not slices:
        raise AuditError(f"_xla_megascale_target={target!r}: this form is unknown")
    count = sum(_count(part) for part in slices[1].split(","))
    return DeviceGroups(
        tuple(
            tuple(number + num_partitions * each for each in range(count)) for number in range(num_partitions)
        )
    )


def _count(part: str) -> int:
    first, _, last = part.partition(":")
    return int(last or first) - int(first) + 1


def _attribute(instruction: Instruction, name: str) -> str:
    value = re.search(f'_xla_{name}="([^"]*)"', instruction.attributes.get("frontend_attributes", ""))
    return value[1] if value else ""


_OF_OPCODES: dict[str, Op] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
_ROWS = re.compile(rows_by_even_load("/(all_to_all|all_gather|reduce_scatter)", 0).replace("0", r"(\d+)"))


def op_of(instruction: Instruction) -> Op | None:
    """Our name of a collective or its start; None for a done and other instructions."""
    if instruction.opcode == "send":
        return crossing_op(instruction)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "ragged-all-to-all":
        return "all_to_all" if rows_said(instruction.op_name) else None
    return _OF_OPCODES.get(opcode)


def rows_said(op_name: str) -> tuple[Op, int] | None:
    """The collective that an exchange of experts' rows amounts to, and its rows; otherwise None.

    The sent rows depend on data; the scope states their number by an even load.

    >>> rows_said("jit(step)/jvp()/dispatch/all_to_all_by_even_load_512_rows/all_to_all")
    ('all_to_all', 512)
    """
    exchanges = _ROWS.findall(op_name)
    return (exchanges[-1][0], int(exchanges[-1][1])) if exchanges else None
