"""Check that a layout's degrees multiply to a machine's chips."""

from math import prod

from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout import MULTIPLIED, Layout
from meshwright.layout.axes import DATA
from meshwright.layout.fit import check_fits
from meshwright.models.config import ModelConfig


def check_chips(hardware: Hardware, layout: Layout, config: ModelConfig) -> None:
    """Raise LayoutError if `layout` has another number of devices, with degrees that fit the model too."""
    if layout.mesh.num_devices == hardware.num_chips:
        return
    degrees = {axis: layout.word(axis) for axis in MULTIPLIED if layout.word(axis) > 1}
    written = ",".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "data=1"
    raise LayoutError(
        f"layout: {written} has {layout.mesh.num_devices} devices and {hardware.spec} has "
        f"{hardware.num_chips} chips; fits: {' or '.join(_fitting(hardware.num_chips, degrees, config))}"
    )


def _fitting(num_chips: int, degrees: dict[str, int], config: ModelConfig) -> list[str]:
    """The degrees with one changed to fit, or with `data` added; `data` only if none fits."""

    def divides(written: str) -> bool:
        try:
            check_fits(Layout.parse(written), config, padded=True)
        except LayoutError:
            return False
        return True

    fits = []
    for axis in {DATA.name: 1, **degrees}:
        others = prod(degree for name, degree in degrees.items() if name != axis)
        if num_chips % others == 0:
            changed = {DATA.name: 1, **degrees, axis: num_chips // others}
            kept = [f"{name}={degree}" for name, degree in changed.items() if degree > 1]
            fits.append(",".join(kept) or "data=1")
    return [written for written in fits if divides(written)] or [f"data={num_chips}"]
