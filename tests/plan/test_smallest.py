"""The smallest slice: which sizes there are, and that the answer is the first that works."""

import pytest

from meshwright.errors import HardwareError, PlanError
from meshwright.hardware.prices import ChipPrices
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.smallest import Smallest, sizes, smallest_machines


def specs(spec: str) -> list[str]:
    return [machine.spec for machine in sizes(spec)]


def find(model: str, spec: str, workload: Workload, max_seconds: float | None = None) -> Smallest:
    return smallest_machines(
        load_model(model),
        spec,
        workload,
        weights_dtype="bf16",
        compute_dtypes=("bf16",),
        max_seconds=max_seconds,
    )


class TestSizes:
    def test_a_two_dimensional_torus_doubles(self):
        assert specs("v5e")[:9] == [
            *("v5e:1x1", "v5e:1x2", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16"),
            "v5e:16x16",
        ]
        assert specs("v5e")[9] == "2*v5e:16x16"

    def test_a_three_dimensional_torus_grows_by_cubes_of_four(self):
        found = specs("v5p")
        assert found[:7] == [
            *("v5p:1x1x1", "v5p:1x1x2", "v5p:1x2x2", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4"),
        ]
        assert {"v5p:4x4x8", "v5p:4x4x12", "v5p:16x16x16", "v5p:16x20x28", "2*v5p:16x20x28"} <= set(found)
        assert not any(text.startswith("v5p:2x") and "20" in text for text in found)

    def test_gpus_fill_a_domain_and_then_take_domains(self):
        assert specs("h100")[:6] == ["h100:1x1", "h100:1x2", "h100:1x4", "h100:1x8", "h100:2x8", "h100:3x8"]
        assert "gb200-nvl72:1x72" in specs("gb200-nvl72")

    def test_a_topology_bounds_them_and_is_the_last(self):
        assert specs("v5p:4x4x8")[-2:] == ["v5p:4x4x4", "v5p:4x4x8"]
        assert specs("h100:3x8")[-2:] == ["h100:2x8", "h100:3x8"]

    def test_they_ascend(self):
        for chip in ("v5e", "v5p", "h100", "gb200-nvl72"):
            counts = [machine.num_chips for machine in sizes(chip)]
            assert counts == sorted(set(counts))

    def test_a_host_has_no_slices(self):
        with pytest.raises(PlanError, match="cpu:8 does not come in slices"):
            sizes("cpu:8")

    def test_an_unknown_chip_is_named(self):
        with pytest.raises(HardwareError, match="did you mean v5p or v5e"):
            sizes("v5q")


def test_the_answer_fits_and_what_is_smaller_does_not():
    result = find("llama-3-8b", "v5e", Workload(128, 4096))
    assert result.search.best.fits and result.hardware.spec == result.search.best.hardware.spec
    for tried in result.tried:
        assert (tried.why_not is None) == (tried.hardware == result.hardware.spec) or (
            tried.why_not is None and tried.num_chips > result.hardware.num_chips
        )
    first = result.tried[0]
    assert first.hardware == "v5e:1x1" and first.why_not is not None
    assert "weights and moments need 80.3 GB per chip" in first.why_not


def test_a_limit_on_the_step_takes_more_chips():
    workload = Workload(128, 4096)
    least = find("llama-3-8b", "v5e", workload)
    half = least.search.best.step_seconds / 2
    faster = find("llama-3-8b", "v5e", workload, half)
    assert faster.hardware.num_chips > least.hardware.num_chips
    assert faster.search.best.step_seconds <= half
    nearest = [tried for tried in faster.tried if tried.why_not and tried.step_seconds]
    assert all("more than" in str(tried.why_not) for tried in nearest)


def test_no_size_says_why():
    with pytest.raises(PlanError, match=r"llama-3-70b on up to v5e:2x2: weights and moments need 176 GB"):
        find("llama-3-70b", "v5e:2x2", Workload(64, 4096))


def test_the_document():
    document = find("llama-3-8b", "v5e:4x4", Workload(128, 4096)).to_dict()
    assert document.keys() == {"hardware", "num_chips", "tried"}


def test_the_machines_have_the_users_price():
    found = smallest_machines(
        load_model("llama-3-8b"),
        "h100:1x8",
        Workload(64, 8192),
        weights_dtype="bf16",
        compute_dtypes=("bf16",),
        prices=ChipPrices("2.5"),
    )
    assert found.search.best.hardware.chip.price_per_chip_hour == 2.5
