"""The spec of this machine from the names that its tools print."""

from pathlib import Path

import pytest

from meshwright.hardware.here import chip_of_device, this_machine

DEVICES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA GH200 480GB": "gh200",
    "card0,AMD Instinct MI300X OAM,0x74a1": "mi300x",
    "Apple M3 Ultra": "m3-ultra",
    "Quadro P400": None,
    "": None,
}


@pytest.mark.parametrize("device", DEVICES)
def test_devices_by_name(device: str) -> None:
    assert chip_of_device(device) == DEVICES[device]


def test_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor i in 1 2 3 4; do echo NVIDIA H100 80GB HBM3; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine() == "h100:4"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert this_machine() == "cpu:1"
