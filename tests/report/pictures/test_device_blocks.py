"""The drawing of a derivation: what each device holds, counted in the picture."""

from xml.etree import ElementTree

from meshwright.cost.strategies import strategies
from meshwright.cost.strategy import ContractionQuestion, PricedStep
from meshwright.hardware import catalog
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.report.pictures.block_maps import block_colour
from meshwright.report.pictures.device_blocks import contraction_svg, reshard_svg

SVG = "{http://www.w3.org/2000/svg}"


def coloured(svg: str) -> list[str]:
    """The fills of all parts drawn, in order."""
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [
        rect.attrib["fill"]
        for rect in rects
        if rect.attrib.get("fill", "").startswith("#") and "class" not in rect.attrib
    ]


def drawn(before: str, after: str, op, mesh: Mesh) -> list[str]:
    arrays = parse_array(before), parse_array(after)
    step = PricedStep(Collective(op, tuple(mesh.axes), *arrays), 64, 1e-6, windowed=False)
    hatch = 1  # the white of the pattern
    return coloured(reshard_svg(*arrays, [step], mesh))[hatch:]


def test_a_gather_fills_every_device():
    fills = drawn("A[I_X, J]", "A[I, J]", "all_gather", Mesh({"X": 4}))
    blocks = [block_colour(row, 4, 0, 1) for row in range(4)]
    assert fills[:4] == blocks  # the array itself
    assert fills[4:8] == blocks  # a block a device
    assert fills[8:] == 4 * blocks  # all on each


def test_an_exchange_turns_rows_into_columns():
    fills = drawn("A[I_X, J]", "A[I, J_X]", "all_to_all", Mesh({"X": 2}))
    grid = [[block_colour(row, 2, column, 2) for column in range(2)] for row in range(2)]
    assert fills[4:8] == [*grid[0], *grid[1]]
    assert fills[8:] == [grid[0][0], grid[1][0], grid[0][1], grid[1][1]]


def test_a_partial_sum_is_hatched():
    arrays = parse_array("A[I]{U_X}"), parse_array("A[I]")
    step = PricedStep(Collective("all_reduce", ("X",), *arrays), 64, 1e-6, windowed=False)
    assert reshard_svg(*arrays, [step], Mesh({"X": 4})).count('fill="url(#partial)"') == 4


def test_a_contraction_has_a_row_a_step_and_one_for_the_product():
    arrays = parse_array("A[I_X, J]"), parse_array("B[J_X, K]"), parse_array("C[I_X, K]")
    sizes = {"I": 1024, "J": 4096, "K": 4096}
    place = Mesh({"X": 4, "Y": 2}), sizes, catalog.load("v5e:4x2"), "bf16"
    best = strategies(ContractionQuestion(Einsum("IJ", "JK", "IK"), *arrays, *place))[0]
    svg = contraction_svg(best)
    rules = [
        path for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.attrib["class"] == "s-line"
    ]
    assert len(rules) == len(best.steps) + 1


def test_many_parts_are_drawn_coarsely():
    """Five hundred and twelve blocks on a mesh of which a part is drawn."""
    fills = drawn("A[I_X]", "A[I]", "all_gather", Mesh({"X": 512}))
    assert len(fills) == 16 + 8 + 8 * 16


def test_names_are_escaped():
    arrays = parse_array("A[I]"), parse_array("A[I]")
    assert "<script>" not in reshard_svg(*arrays, [], Mesh({"<script>": 2}))
