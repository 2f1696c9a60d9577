"""Slices of TPUs, as libtpu describes them."""

from typing import Any

from meshwright.audit.compile.target import Target
from meshwright.hardware.topology import Hardware


def target(machine: Hardware) -> Target:
    """The compiler for the slices of a machine."""
    assert machine.chip.compiler, machine.chip.name
    # libtpu wants whole hosts, of 2 x 2 chips by default, which an odd dimension does not divide into.
    hosts = tuple(2 if size % 2 == 0 else 1 for size in machine.dims[:2])
    topology = f"{machine.chip.compiler.name}:{'x'.join(map(str, machine.dims))}"
    slices = f"{machine.num_slices}*" if machine.num_slices > 1 else ""
    title = f"XLA for {slices}{topology} (libtpu)"
    return Target("tpu", topology, (*hosts, 1), machine.num_slices, title=title)


def devices(target: Target) -> list[Any]:
    """The chips, by one of their cores each: a layout counts chips."""
    from jax.experimental import topologies

    slices = {"num_slices": target.slices} if target.slices > 1 else {}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology,
        chips_per_host_bounds=list(target.chips_per_host), **slices,
    )  # fmt: skip
    return [device for device in described.devices if device.core_on_chip == 0]
