"""What a plan rests on: each constant of the step that matters, and what a file without [step] takes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.assumptions import LEAST_SHARE, assumptions, constants, shares
from meshwright.plan.candidate import Candidate
from meshwright.plan.train import price

# NVIDIA H20 datasheet: 148 TFLOP/s bf16 and 296 fp8, dense; 96 GB at 4.0 TB/s; NVLink 900 GB/s both ways;
# 400 W. A server of 8 with a 400 Gb/s port a GPU; latencies as of the catalog's H100.
H20 = """name = "h20"
kind = "gpu"
chips_per_host = 8
hbm_bytes = 96e9
hbm_bytes_per_second = 4.0e12
host_bytes = 2e12
host_link_bytes_per_second = 64e9
power_watts = 400

[flops_per_second]
bf16 = 148e12
fp8 = 296e12

[network]
domain_size = 8
nvlink_bytes_per_second = 450e9
nvlink_hop_seconds = 1.9e-6
nic_bytes_per_second = 50e9
nic_hop_seconds = 4e-6
collective_launch_seconds = 1e-5
"""
CONFIG, WORKLOAD = load_model("llama-3-8b"), Workload(256, 4096)
TENSOR = "fsdp=16,tensor=2,remat=attention"


def priced(machine: Hardware, layout: str) -> Candidate:
    return price(CONFIG, machine, WORKLOAD, Layout.parse(layout))


def share_of(machine: Hardware, layout: str) -> dict[str, float]:
    """The share of the step by the first words of each constant."""
    found = shares(priced(machine, layout))
    return {constant.text: share for share, constant in found}


def test_an_h20_from_its_data_sheet_plans_like_its_kind(tmp_path: Path) -> None:
    """As a real command: priced at its ratings the sheet alone planned at 97.7% MFU."""
    (tmp_path / "h20.toml").write_text(H20)
    asked = ["--model", "llama-3-8b", "--batch-tokens", "1Mi", "--seq-len", "4096", "--json"]
    command = [sys.executable, "-c", "from meshwright.cli.main import run; run()", "plan", "train", *asked]
    done = subprocess.run(
        [*command, "--hardware", "h20.toml:4x8"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    warning = found["assumptions"][0]
    assert warning.startswith("the file of h20 has no [step]") and "h100" in warning
    assert done.stderr == f"mw: warning: {warning}\n"
    assert 0.3 < found["best"]["mfu"] < 0.6
    assert any("attention runs at 38% of the bf16 peak" in line for line in found["assumptions"])


def test_matmuls_at_half_their_peak_rest_half_their_time_on_it() -> None:
    """One constant that is not ideal: its share of the step is what the arithmetic says."""
    machine = load("h100:4x8").ideal()
    plain = priced(machine, "fsdp=32,remat=full")
    half = replace(machine.chip, step=replace(machine.chip.step, matmul={"bf16": 0.5}))
    slower = priced(replace(machine, chip=half), "fsdp=32,remat=full")
    ((share, constant), *others) = shares(slower)
    assert constant.text == "large matmuls in bf16 run at 50% of the bf16 peak"
    assert share == pytest.approx(1 - plain.step_seconds / slower.step_seconds)
    assert share > 0.4 and all(other < 0.01 for other, _ in others)


@pytest.mark.parametrize("spec", ["h100:4x8", "v5p:2x4x4", "2*v5e:4x4", "cpu:32"])
def test_each_share_is_a_saving_in_the_step_as_planned(spec: str) -> None:
    machine = load(spec)
    best = priced(machine, TENSOR)
    found = shares(best)
    assert found == sorted(found, key=lambda one: -one[0])
    assert {constant for _, constant in found} == set(constants(machine.chip, best.layout))
    # Faster links can never take longer; nor can anything else.
    assert all(-1e-9 <= share < 1 for share, _ in found)
    assert found[0][0] > LEAST_SHARE


def test_what_matters_is_printed_with_value_and_source_and_nothing_else() -> None:
    machine = load("h100:4x8")
    best = priced(machine, TENSOR)
    lines = list(assumptions(CONFIG, WORKLOAD, best))
    printed = {line.split(": ")[0]: line for line in lines if "of this step depends on it" in line}
    assert set(printed) == {text for text, share in share_of(machine, TENSOR).items() if share > LEAST_SHARE}
    attention = printed["attention runs at 38% of the bf16 peak"]
    assert re.search(r": \d+% of this step depends on it \(benchmarks/fit_published.py on \d+ ", attention)
    assert "no other fitted or measured constant affects more than 5% of this step" in lines


@pytest.mark.parametrize(("spec", "is_said"), [("cpu:32", True), ("cpu:1", False), ("h100:4x8", False)])
def test_virtual_devices_of_one_cpu_are_said_to_wait_for_each_step(spec: str, is_said: bool) -> None:
    machine = load(spec)
    layout = TENSOR if machine.num_chips > 1 else "data=1"
    lines = assumptions(CONFIG, WORKLOAD, priced(machine, layout))
    said = [line for line in lines if "the host waits for each step before it dispatches the next" in line]
    assert [line.startswith("the 32 virtual devices share one CPU") for line in said] == [True] * is_said


def test_an_ideal_chip_rests_on_no_constant() -> None:
    machine = load("h100:4x8").ideal()
    best = priced(machine, "fsdp=32,remat=full")
    lines = list(assumptions(CONFIG, WORKLOAD, best))
    assert "no fitted or measured constant affects more than 5% of this step" in lines


def test_shares_hold_for_axes_on_other_links_than_the_first() -> None:
    """A candidate may have been placed otherwise; its own placement is priced, at other bandwidths."""
    machine = load("v5p:16x16x16")
    layout = Layout.parse("fsdp=1024,tensor=4,remat=attention")
    first, second = machine.placements(layout.mesh)[:2]
    faster = replace(machine.chip.network, one_way_bytes_per_second=1e12)
    assert all(
        (link.size, link.dim, link.stride, link.ring) == (same.size, same.dim, same.stride, same.ring)
        and link.one_way_bytes_per_second == 1e12
        for axis in layout.mesh.sizes
        for link, same in zip(second.over(faster).links[axis], second.links[axis], strict=True)
    )
    assert first.links != second.links


@pytest.mark.parametrize(
    ("spec", "layout", "names"),
    [
        ("h100:4x8", "data=4,tensor=8,remat=attention", {"nvlink", "network"}),
        ("2*v5e:4x4", "data=2,fsdp=4,tensor=4,remat=attention", {"ici", "dcn"}),
        ("cpu:32", TENSOR, {"host"}),
    ],
)
def test_links_have_the_names_of_their_machine(spec: str, layout: str, names: set[str]) -> None:
    found = priced(load(spec), layout).to_dict()
    links = {item["bound_name"] for item in found["breakdown"] if item["bound"] in ("ici", "dcn")}
    assert links == names
    others = [item for item in found["breakdown"] if item["bound"] not in ("ici", "dcn")]
    assert all(item["bound_name"] == item["bound"] for item in others)
    assert found["bound"] in ("compute", "hbm", "ici", "dcn", "bubble", "launch")


@pytest.mark.parametrize(
    ("layout", "is_said"),
    [
        ("fsdp=64,expert=8", True),
        ("fsdp=64", False),
        ("fsdp=64,expert=8,capacity=1.25", False),
        ("pipe=4,fsdp=16,expert=8,microbatches=4,schedule=interleaved,interleave=2", False),
    ],
)
def test_experts_over_several_devices_are_said_to_take_rounds(layout: str, is_said: bool) -> None:
    """Of those that run here, without a capacity; without an axis of experts there is room for all rows."""
    config, hardware, workload = load_model("mixtral-8x7b"), load("h100:64"), Workload(64, 4096)
    found = price(config, hardware, workload, Layout.parse(layout))
    said = " ".join(assumptions(config, workload, found))
    assert ("their buffers hold twice that number of rows" in said) == is_said


@pytest.mark.parametrize(
    ("hardware", "layout", "reason"),
    [
        ("h100:1x8", "fsdp=2,context=4,remat=full", "positions are split over context"),
        ("v5e:2x4", "fsdp=2,context=4,context_method=ring,remat=full", "keys pass round a ring over context"),
        ("h100:1x8", "fsdp=2,context=4,context_method=ulysses,remat=full", None),
        ("h100:1x8", "fsdp=8,compute_dtype=f32,remat=full", "cuDNN has none for f32"),
        ("v5e:2x4", "fsdp=2,context=4,remat=full", None),
        ("v5e:2x4", "fsdp=8,remat=full", None),
    ],
)
def test_a_kernel_that_the_run_lacks_is_said(hardware: str, layout: str, reason: str | None) -> None:
    machine, workload = load(hardware), Workload(16, 4096)
    best = price(CONFIG, machine, workload, Layout.parse(layout))
    [said] = [one for one in assumptions(CONFIG, workload, best) if "flash kernel" in one]
    assert ("go through memory" in said) == (reason is not None)
    assert (reason or "") in said
