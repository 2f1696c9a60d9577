"""Platforms: one record each for everything that depends on the kind of device that a program runs on.

Other rooms ask the record of a chip (`chip.platform`), of a mesh (`platform_of`) or of this process
(`nn.start.device_mesh.default_platform`) for the property that they depend on, not for its name. A new
platform is a file here, a file in `audit/compile/platforms/`, and the chips of its kind in `hardware/chips/`.
"""

from typing import Any

from meshwright.platforms.cpu import CPU
from meshwright.platforms.gpu import GPU
from meshwright.platforms.platform import Attention, Compiler, ExpertBlocks, Kernel, Platform
from meshwright.platforms.tpu import TPU

# By JAX's name of the backend, in the order that lists of chips have.
PLATFORMS = {platform.name: platform for platform in (TPU, GPU, CPU)}

__all__ = [
    "CPU",
    "GPU",
    "PLATFORMS",
    "TPU",
    "Attention",
    "Compiler",
    "ExpertBlocks",
    "Kernel",
    "Platform",
    "platform_of",
]


def platform_of(mesh: Any) -> Platform:
    """The platform of the devices of a `jax.sharding.Mesh`."""
    return PLATFORMS[mesh.devices.flat[0].platform]
