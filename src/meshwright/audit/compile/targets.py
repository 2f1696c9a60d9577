"""The choice of the compiler that an audit asks, and its devices."""

from typing import TYPE_CHECKING, Any

from meshwright.audit.compile.platforms import gpu, tpu
from meshwright.audit.compile.target import Target, installed
from meshwright.errors import AuditError, DeviceError, nearest
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.platforms import PLATFORMS

if TYPE_CHECKING:
    import jax

TARGETS = tuple(PLATFORMS)
# Compilers that need none of their chips, by platform.
_WITHOUT_CHIPS = {"tpu": tpu, "gpu": gpu}
# More virtual devices make XLA:CPU's compile slow; larger meshes need the target's compiler.
MAX_CPU_DEVICES = 256


def choose_target(hardware: str, layout: Layout, asked: str | None = None) -> Target:
    """The compiler for a plan's hardware: `asked`, or the chip's own if it is installed, or the CPU's.

    Raises AuditError if the target cannot compile the layout, DeviceError if it is not installed.
    """
    if asked is not None and asked not in TARGETS:
        raise AuditError(f"--target {asked!r} is not supported; {nearest(asked, list(TARGETS))}")
    machine = catalog.load(hardware)
    kind = machine.chip.kind

    def has_own() -> bool:
        return asked is None and kind in _WITHOUT_CHIPS and not _refusal(kind, machine, layout)

    if asked in _WITHOUT_CHIPS or (is_installed(kind) and has_own()):
        name = asked or kind
        if refusal := _refusal(name, machine, layout):
            raise AuditError(refusal)
        _check_installed(name)
        machine.place(layout.mesh)  # raises LayoutError for a mesh of more or fewer devices than chips
        return _WITHOUT_CHIPS[name].target(machine)
    if layout.mesh.num_devices > MAX_CPU_DEVICES:
        raise AuditError(
            f"the layout {layout} has {layout.mesh.num_devices} devices and the cpu target compiles for "
            f"at most {MAX_CPU_DEVICES}; audit a smaller mesh of the same axes"
            + (f", or install {PLATFORMS[kind].compiler.title}: {_install(kind)}" if has_own() else "")
        )
    return Target("cpu")


def own_target(machine: Hardware) -> Target:
    """The compiler of a machine's own chips.

    Raises AuditError if none is known, DeviceError if it is not installed.
    """
    if not machine.chip.compiler:
        names = (f"{PLATFORMS[name].plural} ({', '.join(_known(name))})" for name in _WITHOUT_CHIPS)
        raise AuditError(
            f"no compiler is known for {machine.spec}; ahead of time compile {' and '.join(names)}"
        )
    _check_installed(machine.chip.kind)
    return _WITHOUT_CHIPS[machine.chip.kind].target(machine)


def _check_installed(name: str) -> None:
    if not is_installed(name):
        title = PLATFORMS[name].compiler.title
        raise DeviceError(f"--target {name} needs {title}, which is not installed: {_install(name)}")


def is_installed(name: str) -> bool:
    """Whether the compiler of a platform is installed in a package of its own."""
    return bool(installed(name))


def _install(name: str) -> str:
    return f'pip install "meshwright[{PLATFORMS[name].compiler.extra}]"'


def _known(name: str) -> list[str]:
    """The catalog's chips that the compiler of a platform knows."""
    chips = map(catalog.chip, catalog.names())
    return [chip.name for chip in chips if chip.kind == name and chip.compiler]


def _refusal(name: str, machine: Hardware, layout: Layout) -> str:
    """The reason why programs of compiler `name` for `machine` cannot be audited, or ""."""
    if machine.chip.kind != name or not machine.chip.compiler:
        known = ", ".join(_known(name))
        return f"--target {name} compiles for {known}, not for {machine.spec}; use --target cpu"
    if machine.num_slices > 1 and layout.mesh.num_devices == machine.num_chips:
        return _crossing_refusal(machine, layout)
    return ""


def _crossing_refusal(machine: Hardware, layout: Layout) -> str:
    """A program of slices numbers its own devices: equal to ours only if just the outermost axis crosses."""
    crossing = [
        axis
        for axis, links in machine.place(layout.mesh).links.items()
        if any(link.is_outer for link in links)
    ]
    first = next((axis for axis, size in layout.mesh.sizes.items() if size > 1), "")
    if crossing == [first]:
        return ""
    return (
        f"{layout} on {machine.spec}: {', '.join(crossing)} cross between slices; the audit reads only "
        f"programs where no axis but {first} does: its size must be a multiple of {machine.num_slices}"
    )


def target_mesh(target: Target, layout: Layout) -> "jax.sharding.Mesh | None":
    """The layout's mesh on the target's devices; None for CPUs, whose devices JAX has."""
    if not target.topology:
        return None
    from meshwright.nn.start.device_mesh import device_mesh

    return device_mesh(layout, target_devices(target))


def target_devices(target: Target) -> list[Any]:
    """The devices that a compiler describes. Raises DeviceError if JAX has given it up in this process."""
    return _WITHOUT_CHIPS[target.name].devices(target)
