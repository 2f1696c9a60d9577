"""A compiler and its devices, which need not be attached."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from meshwright.hardware.chip import Chip
from meshwright.platforms import PLATFORMS, Compiler


@dataclass(frozen=True)
class Target:
    """A compiler, by the name of its platform, and its devices.

    topology: as the compiler writes it, `v5p:4x4x4`, or partitions x nodes x GPUs, `1x8x8`; empty for CPUs,
    which have only a number of virtual devices. chips_per_host: chips of a TPU host along each dimension.
    slices: of TPUs, joined by the data-centre network. gpu, capability, config: the chip by our name, its
    compute capability, and XLA's description of it. title: the compiler's name in sentences.
    """

    name: str
    topology: str = ""
    chips_per_host: tuple[int, ...] = ()
    slices: int = 1
    gpu: str = ""
    capability: float | None = None
    config: str = ""
    title: str = "XLA for CPU"

    @property
    def compiler(self) -> Compiler:
        """The record of the compiler."""
        return PLATFORMS[self.name].compiler

    def is_of(self, chip: Chip) -> bool:
        """Whether this is the compiler of a chip's platform."""
        return self.name == chip.kind

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages that decide the program."""
        packages = "jax", "jaxlib", *installed(self.name)
        return {name: importlib.metadata.version(name) for name in packages}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that let the compiler run without chips."""
        return {"JAX_PLATFORMS": "cpu", **self.compiler.environment}

    def kernels(self) -> AbstractContextManager[None]:
        """A context: JAX chooses kernels for the target's chip, and not for this machine's."""
        if self.capability is None:
            return nullcontext()
        from meshwright.nn.attention.flash import kernels_of

        return kernels_of(self.capability)


def installed(name: str) -> list[str]:
    """The installed packages that contain a platform's compiler; none for CPUs: theirs is in jaxlib."""
    packages = PLATFORMS[name].compiler.packages
    return [package for package in packages if importlib.util.find_spec(package.replace("-", "_"))]
