"""The notation as text: reading inverts writing, and an error points at its character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError, NotationError
from meshwright.notation.array import ShardedArray, subscript
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_mesh, parse_sizes

_LETTER = st.sampled_from("ABCXYZabxyz")
_WORD = st.text("AbXyZ19", max_size=4)
WORDS = st.builds(str.__add__, _LETTER, _WORD)


@st.composite
def arrays(draw: st.DrawFn) -> ShardedArray:
    """Any array that can be written: one-letter axes and words, small and capital, mixed."""
    dims = draw(st.lists(WORDS, min_size=1, max_size=4, unique=True))
    axes = draw(st.lists(WORDS, max_size=5, unique=True))
    places = [draw(st.integers(0, len(dims))) for _ in axes]
    by_dim = [tuple(a for a, place in zip(axes, places, strict=True) if place == i) for i in range(len(dims))]
    partial = tuple(a for a, place in zip(axes, places, strict=True) if place == len(dims))
    return ShardedArray(
        draw(st.sampled_from(["", "A", "w_gate", "dx1"])), tuple(dims), tuple(by_dim), partial
    )


@given(arrays())
def test_reading_inverts_writing(array: ShardedArray) -> None:
    assert parse_array(str(array)) == array


@given(st.text("AIJ_X[]{},U xy1", max_size=14))
def test_any_other_text_is_read_or_refused(text: str) -> None:
    """Nothing but NotationError comes out, and what is read can be written and read again."""
    try:
        array = parse_array(text)
    except NotationError:
        return
    assert parse_array(str(array)) == array


@pytest.mark.parametrize(
    ("text", "axes", "unreduced"),
    [
        ("A[I_X, J_YZ]{U_W}", (("X",), ("Y", "Z")), ("W",)),
        ("A[I_X1Y2,J]", (("X1", "Y2"), ()), ()),
        ("[I_X, J]", (("X",), ()), ()),
        (" A[ I_ {data , fsdp} , J_tensor ] { U_context } ",
         (("data", "fsdp"), ("tensor",)), ("context",)),
        ("A[I_Data, J_{XY}]", (("Data",), ("XY",)), ()),
    ],
)  # fmt: skip
def test_forms_of_a_subscript(
    text: str, axes: tuple[tuple[str, ...], ...], unreduced: tuple[str, ...]
) -> None:
    """Capitals run together are an axis each; a word is one axis; braces hold any names."""
    array = parse_array(text)
    assert (array.axes, array.unreduced) == (axes, unreduced)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ((), ""),
        (("X", "Y"), "_XY"),
        (("fsdp",), "_fsdp"),
        (("data", "fsdp"), "_{data,fsdp}"),
        (("Data",), "_Data"),
        (("XY",), "_{XY}"),  # bare it would read as X and Y
        (("x", "y"), "_{x,y}"),  # bare it would read as one axis
    ],
)
def test_a_subscript_reads_as_the_axes_that_it_writes(axes: tuple[str, ...], text: str) -> None:
    assert subscript(axes) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I_X", "expected ',' at character 6 of 'A[I_X'"),
        ("A[I_X, ]", "expected a dimension at character 8 of 'A[I_X, ]'"),
        ("A[I_, J]", "expected a mesh axis at character 5 of 'A[I_, J]'"),
        ("A[I_X, J]{X}", "expected 'U_' at character 11 of 'A[I_X, J]{X}'"),
        ("A[I_X, J]{U_X", "expected '}' at character 14 of 'A[I_X, J]{U_X'"),
        ("A[I_{X, J]", "expected '}' at character 10 of 'A[I_{X, J]'"),
        ("A[I] B", "unexpected 'B' at character 6 of 'A[I] B'"),
        ("", "expected '[' at character 1 of ''"),
        ("A", "expected '[' at character 1 of 'A'"),
        ("A[]", "expected a dimension at character 3 of 'A[]'"),
    ],
)
def test_an_error_points_at_its_character(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_array(text)
    assert str(caught.value) == message


def test_sizes_and_meshes() -> None:
    assert parse_sizes("I=1024, J=4k,") == {"I": 1024, "J": 4000}
    assert parse_mesh("X=4,Y=2") == Mesh({"X": 4, "Y": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X4", "'X4' is not NAME=SIZE at character 1 of 'X4'; write X=4,Y=2"),
        ("X=4,=2", "'=2' is not NAME=SIZE at character 5 of 'X=4,=2'; write X=4,Y=2"),
        ("X=4,Y=2,X=8", "X is given twice at character 9 of 'X=4,Y=2,X=8'"),
        (
            "X=four",
            "'four' is not a count; write 4194304, 4M (4e6), 32k (32e3) or 32Ki (32768) "
            "at character 3 of 'X=four'",
        ),
        ("X=0", "'0' is not a positive whole number below 1e18 at character 3 of 'X=0'"),
        ("X=4, Y=1e30", "'1e30' is not a positive whole number below 1e18 at character 8 of 'X=4, Y=1e30'"),
        (
            "X=",
            "'' is not a count; write 4194304, 4M (4e6), 32k (32e3) or 32Ki (32768) at character 3 of 'X='",
        ),
        ("X=4,,Y=2", "'' is not NAME=SIZE at character 5 of 'X=4,,Y=2'; write X=4,Y=2"),
    ],
)
def test_sizes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        parse_mesh(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("A[I₍X₎, J₍YZ₎]", (("X",), ("Y", "Z"))),
        ("A[Iₓ, Jₙ₁]", (("x",), ("n1",))),
        ("A[I₍XY,₎, J₍data,fsdp₎]", (("XY",), ("data", "fsdp"))),
        ("A[I₍ X ₎, J_tensor]", (("X",), ("tensor",))),
    ],
)
def test_unicode_subscripts(text: str, axes: tuple[tuple[str, ...], ...]) -> None:
    assert parse_array(text).axes == axes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I₍X, J]", "expected '₎' at character 9 of 'A[I₍X, J]'"),
        ("A[I₍₎]", "expected a mesh axis at character 5 of 'A[I₍₎]'"),
        ("A[I₁]", "expected a mesh axis at character 4 of 'A[I₁]'"),
        ("A[I]{U}", "expected 'U_' at character 6 of 'A[I]{U}'"),
        ("A[I]{Uₓ", "expected '}' at character 8 of 'A[I]{Uₓ'"),
    ],
)
def test_unicode_that_does_not_read(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_array(text)
    assert str(caught.value) == message


LONG = 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I_X" + " " * LONG, f"expected ',' at character {LONG + 6} of "),
        ("A" * LONG, "expected '[' at character 1 of 'AAA"),
        ("A[I] " + "x" * LONG, "unexpected 'xxxxxxxxxxxxxxxxxxxx...' at character 6 of 'A[I] xxx"),
        ("A[" + "I," * LONG, "dimension I is named twice at character 5 of 'A[I,I,"),
        ("A[I_" + "X" * LONG, "mesh axis X is used twice at character "),
        ("A[I_{" + ",".join(f"a{n}" for n in range(10**6)) + "}", "expected ',' at character "),
    ],
)
def test_a_long_text_is_refused_at_once_in_one_short_line(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_array(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["X=" + "9" * LONG, "X=1e" + "9" * 30, "X" * LONG, "X=4" * LONG])
def test_long_sizes_are_refused(text: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_mesh(text)
    assert "at character" in str(caught.value) and len(str(caught.value)) < 300


def test_a_mesh_of_a_million_axes_is_refused() -> None:
    with pytest.raises(NotationError, match=r"^more than 1000 sizes at character 6891 of '\.\.\."):
        parse_mesh(",".join(f"a{n}=2" for n in range(10**6)))
    with pytest.raises(NotationError, match=r"^a mesh of 65 axes; fits: up to 64$"):
        parse_mesh(",".join(f"a{n}=2" for n in range(65)))


def test_an_array_with_a_million_axes_is_one() -> None:
    array = parse_array("A[I_{" + ",".join(f"a{n}" for n in range(10**6)) + "}]")
    assert len(array.sharded_axes) == 10**6
    with pytest.raises(NotationError, match=r"^mesh axis a0 is unknown; this mesh has X$"):
        array.local_shape(Mesh({"X": 2}), {"I": 4})
