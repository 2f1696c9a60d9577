"""docs/hardware.md shows what mw hardware prints, and a file that loads."""

import re
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.hardware.catalog import load

DOCUMENT = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")


def test_the_chip_of_ones_own_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    path = tmp_path / "mychip.toml"
    path.write_text(text)
    machine = load(f"2*{path}:8x8")
    assert (machine.num_chips, machine.wraparound) == (128, (True, True))
    assert machine.chip.flops("f32") == machine.chip.flops("bf16")
    assert machine.chip.step.links == {"ici": 0.85}


def test_the_command_prints_what_is_shown(capsys: pytest.CaptureFixture) -> None:
    (shown,) = re.findall(r"```\n\$ mw (hardware.*?)```", DOCUMENT, re.DOTALL)
    command, *lines = shown.splitlines()
    assert main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if "─" not in line] == [
        line for line in printed[: len(lines)] if "─" not in line
    ]


@pytest.mark.parametrize("spec", re.findall(r"`([\w*-]+:[\dx]+)`", DOCUMENT))
def test_every_machine_named_exists(spec: str) -> None:
    assert load(spec).num_chips > 0
