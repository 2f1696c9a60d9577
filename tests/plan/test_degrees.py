"""Degrees that do not multiply to the chips: the message holds layouts that do."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.plan.degrees import check_chips

WIDE = load_model("megatron-gpt-76b")  # 80 heads
DEGREE = st.sampled_from([1, 2, 3, 4, 8])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=32", "fsdp=32 has 32 devices and v5p:4x4x4 has 64 chips; fits: data=2,fsdp=32 or fsdp=64"),
        ("fsdp=48", "fsdp=48 has 48 devices and v5p:4x4x4 has 64 chips; fits: fsdp=64"),
        (
            "pipe=4,tensor=8",
            "pipe=4,tensor=8 has 32 devices and v5p:4x4x4 has 64 chips; "
            "fits: data=2,pipe=4,tensor=8 or pipe=8,tensor=8 or pipe=4,tensor=16",
        ),
        ("fsdp=5", "fsdp=5 has 5 devices and v5p:4x4x4 has 64 chips; fits: fsdp=64"),
        ("remat=full", "data=1 has 1 devices and v5p:4x4x4 has 64 chips; fits: data=64"),
    ],
)
def test_the_nearest_that_fit(text: str, message: str):
    with pytest.raises(LayoutError) as error:
        check_chips(load("v5p:4x4x4"), Layout.parse(text), WIDE)
    assert str(error.value) == f"layout: {message}"


def test_degrees_that_the_model_lacks_are_not_named():
    """8 KV heads do not divide over tensor=16."""
    with pytest.raises(LayoutError, match=r"fits: data=2,tensor=8$"):
        check_chips(load("h100:2x8"), Layout.parse("tensor=8"), load_model("llama-3-8b"))


def test_degrees_that_never_fit_the_model_come_first():
    with pytest.raises(LayoutError, match=r"^wq.*: 80 query heads \(N\) do not divide over tensor = 3; "):
        check_chips(load("v5p:4x4x4"), Layout.parse("tensor=3,fsdp=5"), WIDE)


def test_experts_stay_in_what_fits():
    fits = r"^layout: tensor=8,expert=8 has 8 devices and v5e:8x16 has .*; fits: data=16,tensor=8,expert=8$"
    with pytest.raises(LayoutError, match=fits):
        check_chips(load("v5e:8x16"), Layout.parse("tensor=8,expert=8"), load_model("mixtral-8x7b"))


@given(
    st.builds(
        Layout.of, data=DEGREE, fsdp=DEGREE, context=DEGREE, tensor=st.sampled_from([1, 2, 4, 8]), pipe=DEGREE
    )
)
def test_what_is_said_to_fit_has_as_many_devices(layout: Layout):
    hardware = load("v5p:4x4x4")
    if layout.mesh.num_devices == hardware.num_chips:
        check_chips(hardware, layout, WIDE)
        return
    with pytest.raises(LayoutError) as error:
        check_chips(hardware, layout, WIDE)
    for written in str(error.value).partition("fits: ")[2].split(" or "):
        assert prod(map(int, re.findall(r"=(\d+)", written))) == hardware.num_chips
        assert Layout.parse(written).mesh.num_devices == hardware.num_chips
