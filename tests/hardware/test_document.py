"""What docs/reference/hardware.md names exists, and its file loads."""

import re
from pathlib import Path

import pytest

from meshwright.hardware.catalog import load

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "hardware.md").read_text(encoding="utf-8")


def test_the_chip_of_ones_own_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    path = tmp_path / "mychip.toml"
    path.write_text(text)
    machine = load(f"2*{path}:8x8")
    assert (machine.num_chips, machine.wraparound) == (128, (True, True))
    assert machine.chip.flops("f32") == machine.chip.flops("bf16")
    assert machine.chip.step.links == {"ici": 0.85}


@pytest.mark.parametrize("spec", re.findall(r"`([\w*-]+:[\dx]+)`", DOCUMENT))
def test_every_machine_named_exists(spec: str) -> None:
    assert load(spec).num_chips > 0
