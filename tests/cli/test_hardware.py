"""mw hardware: the list, the shape and roofs of a machine, and figures beside their sources."""

import json
from pathlib import Path

import pytest

from meshwright.cli.hardware_tables import _figure, _torus_words, num_hosts, shape
from meshwright.cli.main import main
from meshwright.hardware import catalog
from meshwright.hardware.catalog import dump_toml, load
from meshwright.hardware.chip import LinearCost, Torus


def document(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    assert main(["hardware", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def words(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(["hardware", *arguments]) == 0
    return capsys.readouterr().out


def test_the_catalog_is_listed(capsys: pytest.CaptureFixture) -> None:
    assert [chip["name"] for chip in document(capsys)["hardware"]] == catalog.names()
    text = words(capsys)
    assert all(name in text for name in catalog.names())
    (v5p,) = (" ".join(line.split()) for line in text.splitlines() if " v5p " in line)
    # The table of How to Scale Your Model, and what follows: C / W_hbm and C / W_ici.
    assert v5p == "v5p tpu 459T 918T 96 GB 2.8 TB 164 90 GB 2,550 16x20x28"


def test_a_machine_has_its_topology_roofs_and_sources(capsys: pytest.CaptureFixture) -> None:
    found = document(capsys, "v5p:16x20x28")
    assert (found["num_chips"], found["dims"], found["kind"]) == (8960, [16, 20, 28], "tpu")
    assert (found["num_hosts"], found["wraparound"]) == (2240, [True, True, True])
    assert found["sources"].keys() >= {"flops_per_second", "hbm_bytes", "one_way_bytes_per_second"}
    assert [(roof["kind"], roof["size"]) for roof in found["roofs"]] == [
        ("hbm", 1), ("ici", 16), ("ici", 20), ("ici", 28), ("ici", 8960), ("dcn", 1), ("host_link", 1),
    ]  # fmt: skip
    alphas = [round(roof["flops_per_byte"]) for roof in found["roofs"]]
    assert alphas == [164, 2550, 2550, 2550, 850, 73440, 30600]


def test_a_machine_in_words(capsys: pytest.CaptureFixture) -> None:
    text = words(capsys, "2*v5e:8x16")
    assert text.startswith(
        "2*v5e:8x16: 256 chips on 64 hosts, 2 slices of 8 x 16; "
        "16 is a ring (rings close along a dimension of 16)\n"
        "together 50.4P FLOP/s in bf16, 4.1 TB of device memory, 12.3 TB on hosts\n"
    )
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "device memory 810 GB/s 810 GB/s 243" in rows
    assert "ICI 8, line 45 GB/s 45 GB/s 4,378" in rows
    assert "ICI 16, ring 45 GB/s 90 GB/s 2,189" in rows
    assert "ICI, 2 dimensions at once 128 90 GB/s 135 GB/s 1,459" in rows
    assert "DCN, between slices 2 6.25 GB/s 6.25 GB/s 31,520" in rows


def test_gpus_in_words(capsys: pytest.CaptureFixture) -> None:
    text = words(capsys, "h100:16x8")
    assert text.startswith("h100:16x8: 128 chips on 16 hosts, 16 NVLink domains of 8\n")
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "NVLink domain 8 450 GB/s 450 GB/s 2,198" in rows
    assert "network, between domains 16 50 GB/s 50 GB/s 19,780" in rows
    assert words(capsys, "h100").startswith("h100:8: 8 chips on 1 host, 1 NVLink domain of 8\n")


def test_a_host_in_words(capsys: pytest.CaptureFixture) -> None:
    text = words(capsys, "cpu:8")
    assert "cpu:8: 8 chips on 1 host, devices that share one memory" in text
    assert "us + bytes /" in text
    assert "device threads and collectives take turns on the same cores" in text


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (
            "v5p:4x4x8",
            "4 x 4 x 8; every dimension is a ring (rings close where every dimension is a multiple of 4)",
        ),
        (
            "v5p:2x4x4",
            "2 x 4 x 4; no dimension is a ring (rings close where every dimension is a multiple of 4)",
        ),
        ("v6e:16x16", "16 x 16; every dimension is a ring (rings close along a dimension of 16)"),
        ("v3:8x32", "8 x 32; 32 is a ring (rings close along a dimension of 32)"),
    ],
)
def test_rings_are_told_with_their_rule(spec: str, shown: str) -> None:
    machine = load(spec)
    assert isinstance(machine.chip.network, Torus)
    assert _torus_words(machine, machine.chip.network) == shown


@pytest.mark.parametrize(
    ("spec", "hosts"),
    [
        ("h100:8x4", 8),
        ("h100:4", 1),
        ("gb200-nvl72:144", 36),
        ("3*v5e:2x4", 6),
        ("v5p:1x1x2", 1),
        ("cpu:8", 1),
    ],
)
def test_hosts_are_counted_by_slice_and_domain(spec: str, hosts: int) -> None:
    assert num_hosts(load(spec)) == hosts


def test_a_chip_of_ones_own(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    text = dump_toml(load("v5e:4x4")).replace('name = "v5e"', 'name = "mychip"')
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith("devices")))
    found = document(capsys, f"{path}:16x16")
    assert (found["name"], found["num_chips"], found["wraparound"]) == ("mychip", 256, [True, True])
    assert shape(load(f"2*{path}:4x4")).startswith(
        f"2*{path}:4x4: 32 chips on 8 hosts, 2 slices of 4 x 4; no "
    )
    assert main(["hardware", str(path)]) == 2
    assert capsys.readouterr().err == f"mw: hardware '{path}' has no topology; write {path}:4x4\n"


def test_a_file_without_a_step_warns_and_shows_whose_it_takes(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "ours.toml"
    head, rest = dump_toml(load("h100:8")).split("[step]\n")
    path.write_text(f"{head}[network]{rest.split('[network]')[1]}")
    assert main(["hardware", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["step"]["taken_from"] == "h100"
    assert output.err.startswith("mw: warning: the file of h100 has no [step], so a training step is priced ")
    assert "from h100: benchmarks/fit_published.py" in words(capsys, str(path))
    path.write_text(f"{head}[step]\n[network]{rest.split('[network]')[1]}")
    assert main(["hardware", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_unknown_hardware_names_the_nearest(capsys: pytest.CaptureFixture) -> None:
    assert main(["hardware", "h10"]) == 2
    assert capsys.readouterr().err == "mw: hardware 'h10' is unknown; did you mean h100 or h100-pcie?\n"


def test_measured_efficiency_is_shown_by_its_ends() -> None:
    cost = LinearCost(1e-4, 1e9, ((65536.0, 0.5), (1e6, 1.0)))
    shown = "100 us + bytes / 1 GB/s, 50% of it at 65.5 kB to 100% of it at 1 MB"
    assert _figure("all_gather", cost) == shown
    links = {"nvlink": {"all_gather": [(65536.0, 0.5), (1e6, 1.0)]}}
    shown = "all_gather over nvlink, 50% of it at 65.5 kB to 100% of it at 1 MB"
    assert _figure("efficiency", links) == shown
