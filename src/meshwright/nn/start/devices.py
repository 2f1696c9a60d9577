"""The devices that JAX sees. They are chosen before it starts, and cannot be changed afterwards."""

import os
import re

from meshwright.errors import DeviceError
from meshwright.hardware.topology import Hardware
from meshwright.nn.start.processes import join, num_processes, wait_for_all

_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def split_host(num_devices: int) -> None:
    """Make JAX start with this number of virtual devices of the host, if it has no others.

    Call it before JAX is imported.
    """
    os.environ["XLA_FLAGS"] = flags_with_devices(num_devices)


def flags_with_devices(num_devices: int) -> str:
    """XLA_FLAGS of this process, with another number of virtual devices: for it, or a process of its own."""
    flags = _COUNT.sub("", os.environ.get("XLA_FLAGS", "")).split()
    return " ".join((*flags, f"--xla_force_host_platform_device_count={num_devices}"))


def num_virtual_devices() -> int:
    """Virtual devices of the host that XLA_FLAGS of this process asks for; 0 if it names no number."""
    match = _COUNT.search(os.environ.get("XLA_FLAGS", ""))
    return int(match[1]) if match else 0


def use_cpu_devices(num_devices: int) -> None:
    """Make JAX start on the host only, with this number of virtual devices."""
    split_host(num_devices)
    os.environ["JAX_PLATFORMS"] = "cpu"


def use_devices_of(hardware: Hardware) -> None:
    """Make JAX see the devices of a plan's hardware, in all processes of the run.

    Virtual devices are divided evenly. Raises DeviceError if this machine has another kind of device, or if
    the processes do not find each other.
    """
    count = num_processes()
    platform = hardware.chip.platform
    if platform.virtual:
        if hardware.num_chips % count:
            raise DeviceError(f"{count} processes cannot share the {hardware.num_chips} devices evenly")
        use_cpu_devices(hardware.num_chips // count)
    join(platform)
    import jax

    kind, spec = platform.name, hardware.spec
    try:
        seen = jax.default_backend()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"{spec}: JAX finds no {kind}: {reason}; mw doctor says more") from error
    if seen != kind:
        raise DeviceError(
            f"{spec} needs {kind} devices and JAX sees {jax.device_count()} {seen} devices; "
            "run it there, or plan for this machine, such as --hardware cpu:8"
        )
    wait_for_all("JAX has its devices")
