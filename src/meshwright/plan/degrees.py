"""Whether a layout's degrees multiply to a machine's chips, and which nearby ones do."""

from math import prod

from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout import MULTIPLIED, Layout


def check_chips(hardware: Hardware, layout: Layout) -> None:
    """Raises LayoutError where `layout` is of another number of devices, with the nearest that is not."""
    if layout.num_chips == hardware.num_chips:
        return
    degrees = {axis: layout.word(axis) for axis in MULTIPLIED if layout.word(axis) > 1}
    written = ",".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "data=1"
    raise LayoutError(
        f"layout: {written} has {layout.num_chips} devices and {hardware.spec} has {hardware.num_chips} "
        f"chips; fits: {' or '.join(_fitting(hardware.num_chips, degrees))}"
    )


def _fitting(num_chips: int, degrees: dict[str, int]) -> list[str]:
    """The degrees with one of them changed, or with `data` for what is missing; else data alone."""
    fits = []
    for axis in {"data": 1, **degrees}:
        others = prod(degree for name, degree in degrees.items() if name != axis)
        if num_chips % others == 0:
            changed = {"data": 1, **degrees, axis: num_chips // others}
            kept = [f"{name}={degree}" for name, degree in changed.items() if degree > 1]
            fits.append(",".join(kept) or "data=1")
    return fits or [f"data={num_chips}"]
