"""One colour a block: two devices of one colour hold the same numbers."""

from math import cos, radians, sin

MAX_SHOWN = 8  # along one axis: more squares cannot be told apart


def block_colour(row: int, num_rows: int, column: int, num_columns: int) -> str:
    """A CSS colour, one a block: hue runs over rows, lightness over columns (hue, if there is one row)."""
    lightness, chroma, hue = block_oklch(row, num_rows, column, num_columns)
    return f"oklch({lightness:.3f} {chroma:.3f} {hue:.1f})"


def block_hex(row: int, num_rows: int, column: int, num_columns: int) -> str:
    """The colour of a block as `#rrggbb`, which every viewer of a lone SVG knows.

    Source of the matrices: Björn Ottosson, "A perceptual color space for image processing" (2020).
    """
    lightness, chroma, hue = block_oklch(row, num_rows, column, num_columns)
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    return "#" + "".join(f"{_srgb(min(max(channel, 0.0), 1.0)):02x}" for channel in linear)


def _srgb(linear: float) -> int:
    """One channel with sRGB's gamma, in 256 steps."""
    return round(255 * (12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055))


def block_oklch(row: int, num_rows: int, column: int, num_columns: int) -> tuple[float, float, float]:
    """Lightness, chroma and hue in degrees of a block."""
    if num_rows == 1:
        row, num_rows, column, num_columns = column, num_columns, 0, 1
    # The golden angle keeps neighbours apart where there are more rows than even steps can tell apart.
    hue = 262 + (360 * row / num_rows if num_rows <= MAX_SHOWN else 137.5 * row) + 9 * (column // MAX_SHOWN)
    shade = (column % MAX_SHOWN) / (min(num_columns, MAX_SHOWN) - 1) if num_columns > 1 else 0.28
    return 0.87 - 0.25 * shade, 0.085 + 0.05 * shade, hue % 360
