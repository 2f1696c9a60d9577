"""The spec of this machine, found without JAX: its NVIDIA or AMD GPUs, an Apple chip, or its CPU."""

import platform
import re
import shutil
import subprocess

from meshwright.hardware import catalog

_TIMEOUT_SECONDS = 5
# Commands that print the name of each device on a line.
_ASK = (
    ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
    ("sysctl", "-n", "machdep.cpu.brand_string"),
)


def this_machine() -> str:
    """The spec of this machine: `h100:8`, `rtx4090:1`, `m4-max:1`, or `cpu:1` if no chip is recognised."""
    for command in _ASK:
        if command[0] == "sysctl" and platform.system() != "Darwin":
            continue
        known = [name for line in _lines(command) if (name := chip_of_device(line))]
        if known:
            return f"{known[0]}:{known.count(known[0])}"
    return "cpu:1"


def chip_of_device(device: str) -> str | None:
    """The catalog's chip of a device's name, by the longest name that the device's contains.

    >>> chip_of_device("NVIDIA A100-SXM4-80GB"), chip_of_device("NVIDIA GeForce RTX 4090")
    ('a100-80gb', 'rtx4090')
    >>> chip_of_device("Apple M4 Max")
    'm4-max'
    """
    names = {alias: name for name in catalog.names() for alias in (name, *catalog.chip(name).aliases)}
    matching = [alias for alias in names if all(_in(part, device.lower()) for part in alias.split("-"))]
    return names[max(matching, key=len)] if matching else None


def _in(part: str, device: str) -> bool:
    """Whether a part of a chip's name is in a device's, with or without a space before digits."""
    words = r"[\s-]*".join(re.findall(r"[a-z]+|\d+", part))
    return re.search(rf"(?<![a-z0-9]){words}(?![a-z0-9])", device) is not None


def _lines(command: tuple[str, ...]) -> list[str]:
    """The lines that a command prints; none if it is missing, fails or takes too long."""
    if not shutil.which(command[0]):
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
