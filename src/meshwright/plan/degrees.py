"""Check that a layout's degrees multiply to a machine's chips."""

from math import prod

from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout import MULTIPLIED, Layout
from meshwright.layout.axes import DATA, EXPERT
from meshwright.layout.layout_checks import check_fits
from meshwright.models.config import ModelConfig


def check_chips(hardware: Hardware, layout: Layout, config: ModelConfig) -> None:
    """Raise LayoutError if `layout` has another number of devices, with degrees that fit the model too."""
    if layout.mesh.num_devices == hardware.num_chips:
        return
    degrees = {axis: layout.word(axis) for axis in (*MULTIPLIED, EXPERT.name) if layout.word(axis) > 1}
    fits = _fitting(hardware.num_chips, degrees, config)
    if not fits:
        check_fits(layout, config, padded=True)
    raise LayoutError(
        f"layout: {_written(degrees)} has {layout.mesh.num_devices} devices and {hardware.spec} has "
        f"{hardware.num_chips} chips; fits: {' or '.join(fits) or f'data={hardware.num_chips}'}"
    )


def _fitting(num_chips: int, degrees: dict[str, int], config: ModelConfig) -> list[str]:
    """Degrees that fit the chips and the model: one is changed, or `data` is added."""

    def divides(written: str) -> bool:
        try:
            check_fits(Layout.parse(written), config, padded=True)
        except LayoutError:
            return False
        return True

    fits = []
    multiplied = {axis: degree for axis, degree in degrees.items() if axis != EXPERT.name}
    for axis in {DATA.name: 1, **multiplied}:
        others = prod(degree for name, degree in multiplied.items() if name != axis)
        if num_chips % others == 0:
            fits.append(_written({DATA.name: 1, **degrees, axis: num_chips // others}))
    return [written for written in fits if divides(written)]


def _written(degrees: dict[str, int]) -> str:
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1) or "data=1"
