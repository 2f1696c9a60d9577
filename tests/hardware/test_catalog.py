"""Hardware by name: the figures of the catalog, the grammar of a spec, and its errors."""

import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from meshwright.errors import HardwareError
from meshwright.hardware.catalog import chip, dump_toml, load, names, step_warning, template, usual
from meshwright.hardware.chip import COLLECTIVES, SharedMemory, Switch, Torus
from meshwright.programs.efficiency import StepEfficiency

# bf16 FLOP/s, int8 OP/s, HBM bytes/s, HBM bytes, one-way ICI bytes/s, pod.
TPUS = {
    "v3": (1.4e14, 1.4e14, 9e11, 32e9, 1e11, (32, 32)),
    "v4p": (2.75e14, 2.75e14, 1.2e12, 32e9, 4.5e10, (16, 16, 16)),
    "v5p": (4.59e14, 9.18e14, 2.8e12, 96e9, 9e10, (16, 20, 28)),
    "v5e": (1.97e14, 3.94e14, 8.1e11, 16e9, 4.5e10, (16, 16)),
    "v6e": (9.2e14, 1.84e15, 1.6e12, 32e9, 9e10, (16, 16)),
}

# bf16 FLOP/s, fp8 FLOP/s, HBM bytes/s, HBM bytes, one-way NVLink and NIC bytes/s, domain; dense.
GPUS = {
    "a100-40gb": (312e12, 312e12, 1.555e12, 40e9, 300e9, 25e9, 8),
    "a100-80gb": (312e12, 312e12, 2.039e12, 80e9, 300e9, 25e9, 8),
    "a800": (312e12, 312e12, 2.039e12, 80e9, 200e9, 25e9, 8),
    "h100": (989e12, 1979e12, 3.35e12, 80e9, 450e9, 50e9, 8),
    "h200": (989e12, 1979e12, 4.8e12, 141e9, 450e9, 50e9, 8),
    "b200": (2.25e15, 4.5e15, 7.7e12, 180e9, 900e9, 50e9, 8),
    "gb200-nvl72": (2.5e15, 5e15, 8e12, 186e9, 900e9, 50e9, 72),
    "h100-pcie": (756e12, 1513e12, 2e12, 80e9, 300e9, 25e9, 2),
    "h800": (989e12, 1979e12, 3.35e12, 80e9, 200e9, 50e9, 8),
    "b300": (2.25e15, 4.5e15, 7.7e12, 270e9, 900e9, 100e9, 8),
    "gb300-nvl72": (2.5e15, 5e15, 8e12, 279e9, 900e9, 100e9, 72),
    "l40s": (362.05e12, 733e12, 0.864e12, 48e9, 31.5e9, 12.5e9, 8),
    "mi300x": (1307.4e12, 2614.9e12, 5.3e12, 192e9, 448e9, 50e9, 8),
    "mi250x-gcd": (191.5e12, 191.5e12, 1.6e12, 64e9, 50e9, 12.5e9, 8),
}

# Chips without published steps: bf16 or f16 FLOP/s, memory bytes/s and bytes, the chip that lends its [step].
WITHOUT_STEPS: dict[str, tuple[float, float, float, str]] = {
    "rtx3090": (71e12, 0.936e12, 24e9, "l40s"),
    "rtx4090": (165.2e12, 1.008e12, 24e9, "l40s"),
    "rtx5090": (209.5e12, 1.792e12, 32e9, "l40s"),
    "rtx6000-ada": (364.2e12, 0.96e12, 48e9, "l40s"),
    "rtx-pro-6000": (503.8e12, 1.792e12, 96e9, "l40s"),
    "l4": (121e12, 0.3e12, 24e9, "l40s"),
    "l40": (181.05e12, 0.864e12, 48e9, "l40s"),
    "a10": (125e12, 0.6e12, 24e9, "l40s"),
    "t4": (65e12, 0.32e12, 16e9, "l40s"),
    "v100": (125e12, 0.9e12, 32e9, "a100-40gb"),
    "gh200": (989e12, 4e12, 96e9, "h100"),
    "dgx-spark": (125e12, 0.273e12, 128e9, "l40s"),
    "mi325x": (1307.4e12, 6e12, 256e9, "mi300x"),
    "mi355x": (2516e12, 8e12, 288e9, "mi300x"),
    "gaudi2": (432e12, 2.46e12, 96e9, "a100-80gb"),
    "gaudi3": (1835e12, 3.67e12, 128e9, "h100"),
    "trainium1": (190e12, 820 * 2**30, 32 * 2**30, "a100-40gb"),
    "trainium2": (667e12, 2.9e12, 96e9, "h100"),
    "inferentia2": (190e12, 820 * 2**30, 32 * 2**30, "a100-40gb"),
    "m2-ultra": (27.2e12, 0.8e12, 192e9, "l40s"),
    "m3-ultra": (28.4e12, 0.819e12, 512e9, "l40s"),
    "m4-pro": (9.2e12, 0.273e12, 64e9, "l40s"),
    "m4-max": (18.4e12, 0.546e12, 128e9, "l40s"),
}


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_chips_without_published_steps_have_those_of_another(name: str) -> None:
    gpu = chip(name)
    *stated, known = WITHOUT_STEPS[name]
    assert (gpu.flops("bf16"), gpu.hbm_bytes_per_second, gpu.hbm_bytes) == pytest.approx(stated, rel=1e-3)
    assert gpu.step.taken_from == known and gpu.step.matmul == chip(known).step.matmul
    warning = step_warning(gpu) or ""
    assert warning.startswith(f"no step of {name} is published") and known in warning


def test_a_card_without_links_is_one_card(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    head, _, rest = template("rtx4090").partition("[network]")
    path.write_text(head + "[sources]" + rest.partition("[sources]")[2])
    assert load(str(path)).num_chips == load(f"{path}:1").num_chips == 1
    with pytest.raises(HardwareError, match=r"joins 8 chips, and .*mine.toml has no \[network\]; fits: .*:1"):
        load(f"{path}:8")


def test_a_step_next_to_a_step_from_another_chip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(template("rtx4090") + "\n[step]\nmatmul = {bf16 = 0.5}\n")
    with pytest.raises(HardwareError, match=r"step_from = 'l40s' next to a \[step\]; leave one of them out"):
        load(f"{path}:1")


@pytest.mark.parametrize("name", TPUS)
def test_tpu_figures(name: str) -> None:
    tpu = chip(name)
    assert isinstance(tpu.network, Torus)
    assert (
        tpu.flops("bf16"),
        tpu.flops("int8"),
        tpu.hbm_bytes_per_second,
        tpu.hbm_bytes,
        tpu.network.one_way_bytes_per_second,
        tpu.network.pod,
    ) == TPUS[name]
    assert tpu.network.dcn_bytes_per_second == 2.5e10 / tpu.chips_per_host
    assert tpu.host_link_bytes_per_second == 1.5e10
    assert tpu.network.hop_seconds == 1e-6


@pytest.mark.parametrize("name", GPUS)
def test_gpu_figures(name: str) -> None:
    gpu = chip(name)
    assert isinstance(gpu.network, Switch)
    assert (
        gpu.flops("bf16"),
        gpu.flops("fp8"),
        gpu.hbm_bytes_per_second,
        gpu.hbm_bytes,
        gpu.network.nvlink_bytes_per_second,
        gpu.network.nic_bytes_per_second,
        gpu.network.domain_size,
    ) == GPUS[name]


def test_ironwood_follows_its_sheet() -> None:
    tpu = chip("tpu7x")
    assert (tpu.flops("bf16"), tpu.flops("fp8"), tpu.hbm_bytes) == (2.307e15, 4.614e15, 192 * 2**30)
    assert tpu.flops("int8") == tpu.flops("bf16")
    assert isinstance(tpu.network, Torus)
    assert tpu.network.pod[0] * tpu.network.pod[1] * tpu.network.pod[2] == 9216


@pytest.mark.parametrize("name", names())
def test_every_figure_has_a_source(name: str) -> None:
    described = chip(name)
    unsourced = {"name", "kind", "aliases", "network", "sources", "chips_per_host", "price_per_chip_hour"}
    unsourced |= {"matmul_rates", "memory_rates", "power_limit_watts"}  # of one machine's file alone
    figures = (
        {field.name for field in fields(described)}
        - unsourced
        - {"step", "inference", "currency", "no_price", "spared_bytes"}
    )
    not_all_have = (
        "power_watts", "matrix_unit", "hbm_usable_bytes", "compute_capability",
        "num_matrix_units", "compiler", "gke_accelerator", "cores_in_cloud_names",
    )  # fmt: skip
    figures -= {key for key in not_all_have if vars(described)[key] is None}
    figures -= {"machines"} if not described.machines else set()
    if isinstance(described.network, SharedMemory):
        figures = (figures - {"hbm_bytes", "host_bytes"}) | {"network"}
    else:
        of_steps = "falloff", "direct_seconds", "exchange_bytes_per_second"
        figures |= {
            key
            for key in vars(described.network)
            if key not in ("efficiency", "by_nodes", "scatter_passes", *of_steps)
            and not key.startswith("wraparound")
        }
    assert figures <= set(described.sources)
    assert all(len(source) > 10 for source in described.sources.values())
    fitted = {key for key, value in vars(described.step).items() if value != vars(StepEfficiency())[key]}
    assert fitted <= {"sources", "taken_from"} | set(described.step.sources)


def test_a_machine_of_a_cloud_names_its_chips() -> None:
    assert chip("h100").machines["p5.48xlarge"] == 8
    with pytest.raises(HardwareError, match=r"write h100:8"):
        load("p5.48xlarge:8")


def test_names_are_grouped_by_kind() -> None:
    assert names()[0] == "v3"
    assert names()[-1] == "cpu"
    assert set(TPUS) | set(GPUS) | set(WITHOUT_STEPS) | {"tpu7x", "cpu"} == set(names())


@pytest.mark.parametrize(
    ("spec", "dims", "num_slices", "num_chips"),
    [
        ("v5p-256", (4, 4, 8), 1, 128),
        ("v4-64", (2, 4, 4), 1, 32),
        ("v5litepod-16", (4, 4), 1, 16),
        ("v6e-64", (8, 8), 1, 64),
        ("64xh100", (8, 8), 1, 64),
        ("8 h100", (1, 8), 1, 8),
        ("H100x16", (2, 8), 1, 16),
        ("v5p:16x20x28", (16, 20, 28), 1, 8960),
        ("v5p:28x16x20", (28, 16, 20), 1, 8960),
        ("2*v5p:16x16x16", (16, 16, 16), 2, 8192),
        ("v5e:4x4", (4, 4), 1, 16),
        ("v4:4x4x4", (4, 4, 4), 1, 64),
        ("H100:64", (8, 8), 1, 64),
        ("h100:4", (1, 4), 1, 4),
        ("a100:16x8", (16, 8), 1, 128),
        ("h100:8x4", (8, 4), 1, 32),
        ("gb200-nvl72:64", (1, 64), 1, 64),
        ("gb200-nvl72:144", (2, 72), 1, 144),
        ("gb200-nvl72:256", (4, 64), 1, 256),
        ("gb300-nvl72:8", (1, 8), 1, 8),
        ("a100-80gb:315x8", (315, 8), 1, 2520),
        ("v6e:4", (2, 2), 1, 4),
        ("tpu7x:4", (1, 2, 2), 1, 4),
        ("v5p:256", (4, 8, 8), 1, 256),
        ("32*v5e:16x16", (16, 16), 32, 8192),
        ("v4p:4x4x12", (4, 4, 12), 1, 192),
        ("cpu:8", (8,), 1, 8),
    ],
)
def test_specs(spec: str, dims: tuple[int, ...], num_slices: int, num_chips: int) -> None:
    hardware = load(spec)
    assert (hardware.dims, hardware.num_slices, hardware.num_chips) == (dims, num_slices, num_chips)
    assert hardware.spec == usual(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("v5q:4x4x4", "hardware 'v5q' is unknown; did you mean v5p or v5e?"),
        ("h10:8", "hardware 'h10' is unknown; did you mean h100"),
        ("v5p:8x8", "hardware 'v5p:8x8': v5p is a 3D torus, not 2D; write v5p:4x4x4"),
        ("v5e:4x4x4", "hardware 'v5e:4x4x4': v5e is a 2D torus, not 3D; write v5e:8x8"),
        ("v5e:257", "hardware 'v5e:257': v5e is a 2D torus, not 1D; up to v5e:16x16"),
        ("v5e:32x4", "hardware 'v5e:32x4' is larger than a v5e pod, 16x16; join slices: 2*v5e:16x16"),
        ("v5e:0x4", "hardware 'v5e:0x4': every size is at least 1"),
        ("0*v5e:4x4", "hardware '0*v5e:4x4': every size is at least 1"),
        ("v5e", "hardware 'v5e' has no topology; write v5e:4x4"),
        ("cpu", "hardware 'cpu' has no topology; write cpu:8"),
        (
            "gb200-nvl72:100",
            "100 GPUs do not fill NVLink domains of 72; write gb200-nvl72:72 or gb200-nvl72:144",
        ),
        ("h100:12", "12 GPUs do not fill NVLink domains of 8; write h100:8 or h100:16, or domains x GPUs"),
        ("h100:2x16", "hardware 'h100:2x16': an NVLink domain of h100 holds 8, not 16"),
        ("h100:2x2x2", "hardware 'h100:2x2x2': write domains x GPUs, such as h100:8x8"),
        ("2*h100:8", "hardware '2*h100:8': only TPUs come in slices; write h100:8"),
        ("cpu:2x4", "hardware 'cpu:2x4': a host has one number of devices: cpu:8"),
        ("v5p:", "hardware 'v5p:' does not parse; write v5p:16x20x28"),
        ("", "hardware '' does not parse"),
        ("missing.toml", "missing.toml: cannot be read: No such file or directory"),
    ],
)
def test_wrong_specs_say_what_fits(spec: str, message: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_type_without_units_computes_in_a_wider_one() -> None:
    assert chip("a100").flops("fp8") == chip("a100").flops("bf16")
    assert chip("h100").flops("int4") == chip("h100").flops("int8")
    assert chip("b300").flops("int4") == chip("b300").flops("int8") < chip("b300").flops("fp8")
    assert chip("h100").flops("fp4") == chip("h100").flops("bf16") < chip("h100").flops("fp8")
    assert chip("v5e").flops("fp4") == chip("v5e").flops("fp8") == chip("v5e").flops("bf16")
    assert chip("tpu7x").flops("int8") == chip("tpu7x").flops("bf16")
    assert chip("cpu").flops("bf16") == chip("cpu").flops("f32")
    assert replace(chip("h100"), flops_per_second={"bf16": 1e15}).flops("f16") == 1e15
    only_int8 = replace(chip("h100"), flops_per_second={"int8": 1e15})
    for dtype in ("bf16", "fp4"):
        with pytest.raises(HardwareError, match=f"h100 lists no FLOPs for {dtype} or wider; it has int8"):
            only_int8.flops(dtype)


# dense fp4 FLOP/s and watts, where the sheet gives them.
FP4 = {"b200": 9e15, "b300": 13.5e15, "gb200-nvl72": 10e15, "gb300-nvl72": 15e15}
WATTS = {
    "a100-40gb": 400, "a100-80gb": 400, "a800": 400, "h100": 700, "h100-pcie": 350, "h800": 700, "h200": 700,
    "b200": 1000, "b300": 1100, "gb200-nvl72": 1200, "gb300-nvl72": 1400, "l40s": 350,
    "mi300x": 750, "mi250x-gcd": 280,
}  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_narrow_floats_and_power(name: str) -> None:
    assert chip(name).flops_per_second.get("fp4") == FP4.get(name)
    assert chip(name).power_watts == WATTS[name]


def test_virtual_devices_share_the_host() -> None:
    core, one, eight = chip("cpu"), load("cpu:1").chip, load("cpu:8").chip
    assert one.flops("f32") == pytest.approx(core.flops("f32") * (os.cpu_count() or 1))
    assert eight.flops("f32") == pytest.approx(one.flops("f32") / 8)
    assert eight.hbm_bytes_per_second == pytest.approx(one.hbm_bytes_per_second / 8)
    assert eight.hbm_bytes == one.hbm_bytes // 8
    assert one.hbm_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert core.overlap == 0


@pytest.mark.parametrize("spec", ["cpu:8", "h100:16", "v5e:4x4", "2*v5p:4x4x8", "tpu7x:4x4x4"])
def test_a_dumped_machine_loads_as_the_same(spec: str, tmp_path: Path) -> None:
    path, hardware = tmp_path / "machine.toml", load(spec)
    path.write_text(dump_toml(hardware))
    again = load(str(path))
    assert again.chip == hardware.chip
    assert (again.dims, again.num_slices) == (hardware.dims, hardware.num_slices)
    assert dump_toml(again) == path.read_text()


def test_a_dumped_machine_keeps_a_figure_of_zero(tmp_path: Path) -> None:
    """A file without it is refused, since a network has no default for it."""
    path, hardware = tmp_path / "machine.toml", load("h100:8")
    network = replace(hardware.chip.network, collective_launch_seconds=0.0)
    path.write_text(dump_toml(replace(hardware, chip=replace(hardware.chip, network=network))))
    assert load(str(path)).chip.network == network


def test_a_file_without_names_of_compilers_and_clusters_has_those_of_its_chip(tmp_path: Path) -> None:
    path, hardware = tmp_path / "machine.toml", load("h100:8")
    bare = replace(hardware.chip, compiler=None, gke_accelerator=None)
    path.write_text(dump_toml(replace(hardware, chip=bare)))
    assert load(str(path)).chip == hardware.chip
    path.write_text(dump_toml(replace(hardware, chip=replace(bare, name="mine"))))
    assert load(str(path)).chip.compiler is None


def test_a_machine_file_takes_another_topology(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(dump_toml(load("v5e:4x4")))
    assert load(f"{path}:8x8").num_chips == 64


def test_a_rewritten_machine_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    text = dump_toml(load("h100:8").ideal())
    path.write_text(text)
    assert load(str(path)).chip.overlap == 1.0
    path.write_text(text.replace("overlap = 1.0", "overlap = 0.5"))
    assert load(str(path)).chip.overlap == 0.5


def _machine(tmp_path: Path, spec: str, old: str, new: str) -> str:
    text = dump_toml(load(spec).ideal())
    assert text.count(old) == 1
    path = tmp_path / "machine.toml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    ("spec", "old", "new", "message"),
    [
        ("h100:8", "hbm_bytes = 80000000000\n", "", "toml:1: hbm_bytes is missing: bytes of one chip's"),
        (
            "h100:8",
            "hbm_bytes = 80000000000",
            "hbm_bytes = -1",
            "machine.toml:4: hbm_bytes = -1 must be above 0",
        ),
        ("h100:8", "hbm_bytes = 80000000000", "hbm_bytes = nan", "= nan must be above 0 and finite"),
        ("h100:8", "hbm_bytes = 80000000000", "hbm_bytes = 1.5", "hbm_bytes = 1.5 must be a whole number"),
        ("h100:8", "hbm_bytes = 80000000000", 'hbm_bytes = "80 GB"', "hbm_bytes is '80 GB', not a number"),
        ("h100:8", "hbm_bytes = 80000000000", "hbm_byte = 8", "hbm_byte is unknown; did you mean hbm_bytes"),
        ("h100:8", "overlap = 1.0", "overlap = 1.5", "overlap = 1.5 must be at most 1"),
        ("h100:8", "overlap = 1.0", "overlap = -0.5", "overlap = -0.5 must be 0 or more"),
        ("h100:8", "overlap = 1.0", "overlap = ", "machine.toml:34: not TOML: invalid value"),
        ("h100:8", "bf16 = ", "bf17 = ", "flops_per_second.bf17 is unknown; did you mean bf16"),
        ("h100:8", 'kind = "gpu"', 'kind = "fpga"', "machine.toml:2: kind is 'fpga'; it is tpu, gpu"),
        ("h100:8", "domain_size = 8\n", "", "network.domain_size is missing"),
        ("h100:8", "cores = 132\n", "", "compiler.cores is missing"),
        ("h100:8", "cores = 132", "cores = 1.5", "compiler.cores"),
        ("v5e:4x4", 'name = "v5e"\n\n[sources]', "name = 5\n\n[sources]", "compiler.name"),
        ("v5e:4x4", "num_matrix_units = 4", "num_matrix_units = 0", "num_matrix_units = 0 must be above 0"),
        ("v5e:4x4", "pod = [16, 16]", "pod = 16", "network.pod is 16, not a list of sizes such as [16, 16]"),
        ("v5e:4x4", "wraparound_exactly = 16\n", "", "network has 0 of wraparound_multiple_of and"),
        (
            "cpu:8",
            "[network.permute]",
            "[network.permutes]",
            "network.permutes is unknown; did you mean permute",
        ),
        (
            "cpu:8",
            "[flops_per_second]",
            "[flops_per_s]",
            "flops_per_s is unknown; did you mean flops_per_second",
        ),
    ],
)
def test_a_faulty_file_names_its_line_and_key(
    spec: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = _machine(tmp_path, spec, old, new)
    with pytest.raises(HardwareError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(path)


def test_every_collective_of_a_host_is_described() -> None:
    network = load("cpu:8").chip.network
    assert isinstance(network, SharedMemory)
    assert set(network.costs) == set(COLLECTIVES)


_CURVE = "[[65536, 0.5], [1048576, 1.0]]"


@pytest.mark.parametrize(
    ("spec", "old", "new", "message"),
    [
        (
            "cpu:8",
            "[network.all_gather]",
            "[network.all_gather]\nefficiency = [[1e3, 0.5], [2e3, 1.5]]",
            "network.all_gather.efficiency has [2000.0, 1.5]: bytes are above 0, a share in (0, 1]",
        ),
        (
            "cpu:8",
            "[network.all_gather]",
            "[network.all_gather]\nefficiency = [[2e3, 0.5], [1e3, 0.5]]",
            "network.all_gather.efficiency has 1000.0 bytes after 2000.0: sizes ascend",
        ),
        (
            "cpu:8",
            "[network.all_gather]",
            "[network.all_gather]\nefficiency = [[1e3, 0.1], [2e3, 0.5]]",
            "efficiency makes 2000.0 bytes faster than 1000.0: no larger message takes less time",
        ),
        (
            "cpu:8",
            "[network.all_gather]",
            "[network.all_gather]\nefficiency = [0.5]",
            "network.all_gather.efficiency is [0.5], not points such as [[65536, 0.5], [1048576, 1.0]]",
        ),
        (
            "h100:8",
            "[sources]",
            f"[network.efficiency.ici]\nall_gather = {_CURVE}\n[sources]",
            "network.efficiency.ici is unknown",
        ),
    ],
)
def test_faulty_efficiency_names_its_points(
    spec: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = _machine(tmp_path, spec, old, new)
    with pytest.raises(HardwareError) as caught:
        load(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "old", "new"),
    [
        ("cpu:8", "[network.all_gather]", f"[network.all_gather]\nefficiency = {_CURVE}"),
        ("h100:8", "[sources]", f"[network.efficiency.nvlink]\nall_gather = {_CURVE}\n[sources]"),
        ("v5e:4x4", "[sources]", f"[network.efficiency.ici]\nall_to_all = {_CURVE}\n[sources]"),
    ],
)
def test_measured_efficiency_is_written_as_it_is_read(spec: str, old: str, new: str, tmp_path: Path) -> None:
    read = load(_machine(tmp_path, spec, old, new))
    assert read.chip != load(spec).chip
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(read))
    assert load(str(again)).chip == read.chip


def test_measured_rates_are_written_as_they_are_read(tmp_path: Path) -> None:
    rates = "[matmul_rates]\nf32 = [[1e6, 1e9], [1e9, 1e10]]\n[memory_rates]\nbf16 = [[1e6, 2e9]]\n"
    read = load(_machine(tmp_path, "cpu:8", "[flops_per_second]", f"{rates}[flops_per_second]"))
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(read))
    assert load(str(again)).chip == read.chip
    assert read.chip.matmul_rates == {"f32": ((1e6, 1e9), (1e9, 1e10))}
    assert read.chip.memory_rates == {"bf16": ((1e6, 2e9),)}


def test_a_faulty_rate_names_its_points(tmp_path: Path) -> None:
    rates = "[matmul_rates]\nf32 = [[1e6, -1.0]]\n[flops_per_second]"
    path = _machine(tmp_path, "cpu:8", "[flops_per_second]", rates)
    with pytest.raises(
        HardwareError, match=r"matmul_rates\.f32 has \[1000000\.0, -1\.0\]: both are above 0$"
    ):
        load(path)


@pytest.mark.parametrize("name", names())
def test_a_price_has_its_seller_and_its_year(name: str) -> None:
    priced = chip(name)
    source = priced.sources.get("price_per_chip_hour", "")
    assert (priced.price_per_chip_hour is None) == (not source)
    assert not source or re.search(r": \S.* 20\d\d$", source)


def test_prices_are_those_of_whole_machines_divided() -> None:
    """SkyPilot's catalog: price of a machine over its chips."""
    machines = {"v3": (8, 4), "v4p": (12.88, 4), "inferentia2": (12.98127, 12)}
    machines |= {"mi355x": (68.8, 8), "gb300-nvl72": (72, 4)}
    for name, (price, count) in machines.items():
        assert chip(name).price_per_chip_hour == pytest.approx(price / count, rel=1e-3)
