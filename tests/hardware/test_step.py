"""What a step reaches of a chip's ratings: read, written, and left out for the ideal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost.collectives import seconds_by_bytes
from meshwright.errors import HardwareError
from meshwright.hardware.catalog import chip, dump_toml, load, names, nearest_chip, step_warning, template
from meshwright.hardware.chip import Switch
from meshwright.notation.mesh import Mesh
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import PROGRAMS

STEP = """[step]
attention = 0.5
memory = 0.75
overlap = 0.875
kernel_seconds = 4e-6

[step.matmul]
bf16 = 0.75
fp8 = 0.5

[step.links]
nvlink = 0.75
network = 0.875

[step.sources]
matmul = "measured for this test"
"""


def _h100(tmp_path: Path, step: str) -> str:
    head, rest = dump_toml(load("h100:8").ideal()).split("[step]\n")
    path = tmp_path / "h100.toml"
    path.write_text(f"{head}{step}\n[network]{rest.split('[network]')[1]}")
    return str(path)


def _in_xla(**figures: Any) -> StepEfficiency:
    """The figures, with the ones of programs by XLA: these are the default programs of machines."""
    return PROGRAMS["xla"].applied(StepEfficiency(**figures))


def test_what_a_file_does_not_name_is_ideal(tmp_path: Path) -> None:
    stated = load(_h100(tmp_path, "[step]\n")).chip
    assert stated.step == _in_xla() and step_warning(stated) is None
    assert load(_h100(tmp_path, "[step]\nmemory = 0.5\n")).chip.step == _in_xla(memory=0.5)


def test_a_file_without_a_step_takes_that_of_the_nearest_chip(tmp_path: Path) -> None:
    path = _h100(tmp_path, "")
    Path(path).write_text(Path(path).read_text().replace('name = "h100"', 'name = "ours"'))
    ours, h100 = load(path), load("h100:8")
    assert ours.chip.step.taken_from == "h100"
    assert replace(ours.chip.step, sources={}, taken_from=None) == replace(h100.chip.step, sources={})
    assert ours.chip.step.sources["attention"] == f"from h100: {h100.chip.step.sources['attention']}"
    assert step_warning(ours.chip) == (
        "the file of ours has no [step], so a training step is priced with the shares of the ratings reached "
        "by h100, the gpu of the catalog nearest in memory bandwidth (3.35 TB/s; ours: 3.35 TB/s): 70% of "
        "the bf16 peak in matmuls, 38% in attention, 80% of the memory bandwidth; give a [step], or measure "
        "one with mw calibrate"
    )
    assert step_warning(h100.chip) is None
    # Written out, the figures are the file's own.
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(ours))
    assert load(str(again)).chip.step == replace(ours.chip.step, taken_from=None)


def test_a_file_states_only_what_differs_from_its_shares(tmp_path: Path) -> None:
    path, text = tmp_path / "ours.toml", template("h100")
    assert "attention = " not in text
    path.write_text(text.replace("[step.matmul]", "[step]\nattention = 0.6\n\n[step.matmul]"))
    ours, h100 = load(f"{path}:8").chip, load("h100:8").chip
    assert ours.step == replace(h100.step, attention=0.6) and ours.inference == h100.inference
    path.write_text(text.replace('shares = "gpu"', 'shares = "gpus"'))
    with pytest.raises(HardwareError, match="shares = 'gpus' is unknown; did you mean gpu"):
        load(f"{path}:8")


def test_memory_tells_the_generation_of_a_chip() -> None:
    """Published bandwidths (bytes/s) of chips that the catalog lacks, beside the chip of their generation."""
    h100, v5e = chip("h100"), chip("v5e")
    measured = [known for known in names() if chip(known).step.taken_from is None]
    assert {known: nearest_chip(chip(known)).name for known in measured} == {
        known: "b200" if known == "b300" else "gb200-nvl72" if known == "gb300-nvl72" else known
        for known in measured
    }
    a800 = replace(h100, hbm_bytes_per_second=2.039e12, flops_per_second={"bf16": 312e12})
    h20 = replace(h100, hbm_bytes_per_second=4.0e12, flops_per_second={"bf16": 148e12})
    mi325x = replace(h100, hbm_bytes_per_second=6.0e12, flops_per_second={"bf16": 1307e12})
    assert [nearest_chip(one).name for one in (a800, h20, mi325x)] == ["a100-80gb", "h100", "mi300x"]
    assert nearest_chip(replace(v5e, hbm_bytes_per_second=8e11)).name == "v5e"
    assert nearest_chip(chip("cpu")).name == "cpu"


def test_a_step_is_written_as_it_is_read(tmp_path: Path) -> None:
    read = load(_h100(tmp_path, STEP))
    assert read.chip.step == _in_xla(
        matmul={"bf16": 0.75, "fp8": 0.5},
        attention=0.5,
        memory=0.75,
        links={"nvlink": 0.75, "network": 0.875},
        overlap=0.875,
        kernel_seconds=4e-6,
        sources={"matmul": "measured for this test"},
    )
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(read))
    assert load(str(again)).chip == read.chip


def test_rates_are_the_ratings_times_what_a_step_reaches(tmp_path: Path) -> None:
    chip = load(_h100(tmp_path, STEP)).chip
    assert chip.matmul_flops_per_second("fp8") == chip.flops("fp8") * 0.5
    assert chip.memory_bytes_per_second("bf16") == chip.hbm_bytes_per_second * 0.75
    slower = replace(chip.step, memory_by_dtype={"bf16": 0.5})
    assert replace(chip, step=slower).memory_bytes_per_second("bf16") == chip.hbm_bytes_per_second * 0.375
    assert chip.ideal().matmul_flops_per_second("fp8") == chip.flops("fp8")
    assert load("h100:8").ideal().chip.step == StepEfficiency()


@pytest.mark.parametrize(("dtype", "share"), [("f16", 0.75), ("f32", 0.75), ("fp4", 0.5), ("int8", 0.5)])
def test_a_dtype_not_listed_reaches_what_its_neighbour_does(dtype: str, share: float) -> None:
    step = StepEfficiency(matmul={"bf16": 0.75, "fp8": 0.5})
    assert step.matmul_share(dtype) == share
    assert StepEfficiency().matmul_share(dtype) == 1.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory = 0.75", "memory = 1.5", "step.memory = 1.5 must be at most 1"),
        ("memory = 0.75", "memory = 0", "step.memory = 0 must be above 0"),
        ("overlap = 0.875", "overlap = -1", "step.overlap = -1 must be 0 or more"),
        ("kernel_seconds = 4e-6", "kernel_seconds = -4e-6", "step.kernel_seconds = -4e-06 must be 0 or more"),
        ("fp8 = 0.5", "fp8 = inf", "step.matmul.fp8 = inf must be above 0 and finite"),
        ("fp8 = 0.5", "fp9 = 0.5", "step.matmul.fp9 is unknown; did you mean fp8"),
        ("nvlink = 0.75", "ici = 0.75", "step.links.ici is unknown; known: network, nvlink"),
        ("attention = 0.5", "atention = 0.5", "step.atention is unknown; did you mean attention"),
        ('"measured for this test"', "1", "step.sources.matmul is 1, not a string"),
    ],
)
def test_a_faulty_share_names_its_line_and_key(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = Path(_h100(tmp_path, STEP))
    assert path.read_text().count(old) == 1
    before, after = path.read_text().split(old)
    path.write_text(before + new + after)
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}:{before.count(chr(10)) + 1}: {message}")


def test_a_machine_has_figures_of_its_own() -> None:
    sheet = load("h100:2x8")
    ours = sheet.with_figures(nic_bytes_per_second=25e9, hbm_bytes_per_second=2.4e12, power_watts=500)
    assert isinstance(ours.chip.network, Switch)
    assert ours.chip.network.nic_bytes_per_second == 25e9
    assert (ours.chip.hbm_bytes_per_second, ours.chip.power_limit_watts) == (2.4e12, 500)
    assert ours.chip.power_watts == sheet.chip.power_watts
    assert sheet.with_figures() == sheet


def test_figures_that_no_machine_has_are_refused() -> None:
    with pytest.raises(HardwareError, match=r"^h100:8: hbm_bytes_per_second = 0 must be above 0 and finite$"):
        load("h100:8").with_figures(hbm_bytes_per_second=0)
    with pytest.raises(
        HardwareError, match=r"^v5e:4x4: nic_bytes_per_second is of GPUs; v5e has no network card$"
    ):
        load("v5e:4x4").with_figures(nic_bytes_per_second=25e9)


@pytest.mark.parametrize("spec", ["v5p:4x4x4", "h100:2x8", "cpu:8"])
def test_a_roofline_has_no_latency(spec: str) -> None:
    """Twice the bytes take twice the time, from the first byte on."""
    machine = load(spec)
    place = replace(machine, chip=machine.chip.roofline()).place(Mesh({"X": machine.num_chips}))
    seconds = [seconds_by_bytes("all_gather", ("X",), place)(size) for size in (1024, 2048)]
    if machine.chip.kind != "cpu":  # whose latency is that of threads
        assert seconds[1] == pytest.approx(2 * seconds[0])
    assert machine.chip.roofline().step == StepEfficiency(is_roofline=True)
