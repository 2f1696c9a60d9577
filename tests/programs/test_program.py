"""Software is a description of its own: factors on what a chip reaches, and what its host takes to launch."""

import pytest

from meshwright.errors import HardwareError
from meshwright.hardware.catalog import load
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import at_odds, read_software, software, software_names

STEP = StepEfficiency(matmul={"bf16": 0.5, "fp8": 0.4}, attention=0.5, kernel_seconds=4e-6)


@pytest.mark.parametrize("name", software_names())
def test_every_figure_has_a_source(name: str) -> None:
    found = software(name)
    assert found.name == name and found.about
    told = {key for key in ("odds", "seconds") if getattr(found, key)}
    told |= {key for key in vars(found) if key.startswith("host_") and getattr(found, key)}
    assert told <= set(found.sources)


def test_the_chips_files_are_of_xla() -> None:
    machine = load("h100:8")
    assert machine.software.name == "xla"
    assert machine.running("xla").chip.step == machine.chip.step


def test_factors_are_on_odds_and_seconds() -> None:
    found = read_software(
        'name = "ours"\nabout = "a test"\nhost_seconds = 1e-5\nwhole_sums = true\n'
        "[odds]\nmatmul = 3.0\nattention = 3.0\n[seconds]\nkernel_seconds = 0.5\n[sources]\n",
        "ours.toml",
    ).applied(STEP)
    assert found.matmul == {"bf16": 0.75, "fp8": pytest.approx(2 / 3)}
    assert (found.attention, found.kernel_seconds, found.host_seconds) == (0.75, 2e-6, 1e-5)
    assert found.whole_sums


def test_shares_stay_between_nothing_and_all() -> None:
    assert at_odds(0.9, 100.0) < 1 and at_odds(0.1, 0.01) > 0 and at_odds(1.0, 7.0) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nabout = "y"\nspeed = 1\n[sources]\n', "ours.toml:3: speed is unknown"),
        ('name = "x"\nabout = "y"\neager = 1\n[sources]\n', "eager is 1, not true or false"),
        ('name = "x"\nabout = "y"\n[odds]\nmatmul = -1\n[sources]\n', "odds.matmul"),
    ],
)
def test_a_fault_is_named(text: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        read_software(text, "ours.toml")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(HardwareError, match=r"software 'megatorn' is unknown; .*megatron"):
        load("h100:8").running("megatorn")
