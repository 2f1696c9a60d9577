"""A chip's TOML with any figure spoilt: the error names file, line and key, and what belongs there."""

from pathlib import Path

import pytest

from meshwright.checked_toml import CheckedToml
from meshwright.errors import HardwareError
from meshwright.hardware.catalog import dump_toml, load

WRONG = ("nan", "inf", "-inf", "-1", "-1e-9", '"80e9"', "true", "[1]", "{}", "1979-05-27")
OPTIONAL = (
    "aliases",
    "devices",
    "hbm_usable_bytes",
    "matrix_unit",
    "power_watts",
    "experts",
    "attention",
    "memory",
    "elementwise",
    "overlap",
)
OPTIONAL += ("waiting", "scatter_passes", "kernel_seconds", "launch_seconds", "slowdown", "efficiency")
OPTIONAL += ("cache", "widened", "collective_seconds", "price_per_chip_hour", "currency")
OPTIONAL += (
    "host_seconds",
    "host_collective_seconds",
    "host_node_seconds",
    "host_stage_seconds",
    "host_flush_seconds",
    "host_request_seconds",
    "padding",
    "host_step_seconds",
    "host_token_seconds",
    "attention_half_keys",
)
OPTIONAL += ("matmul_half_outputs", "network_falloff", "network_latency", "prefetch", "experts_seconds")
OPTIONAL += ("roofline", "packed", "exchanging", "compute_capability", "gke_accelerator", "num_matrix_units")


def _lines(spec: str) -> list[tuple[int, str, str]]:
    """(line, table, key) of every figure of the machine's file."""
    found, table = [], ""
    for number, line in enumerate(dump_toml(load(spec).ideal()).splitlines()):
        if line.startswith("["):
            table = f"{line.strip('[]')}."
        elif line and not table.startswith("sources") and not table.startswith("step.sources"):
            found.append((number, table, line.split(" = ")[0]))
    return found


def _load(path: Path, spec: str, number: int, new: str | None) -> str:
    """The message of loading the machine with one line replaced, or left out."""
    lines = dump_toml(load(spec).ideal()).splitlines()
    lines[number : number + 1] = [] if new is None else [new]
    path.write_text("\n".join(lines))
    with pytest.raises(HardwareError) as caught:
        load(f"{path}:8" if spec.startswith(("h100", "cpu")) else f"{path}:4x4")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("spec", ["h100:8", "v5e:4x4", "cpu:8"])
def test_any_figure_that_is_no_figure(spec: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    for number, table, key in _lines(spec):
        if (key, wrong) in {
            ("name", '"80e9"'),
            ("gke_accelerator", '"80e9"'),
            ("devices", '"80e9"'),
            ("pod", "[1]"),
            ("aliases", '["a"]'),
        }:
            continue
        message = _load(path, spec, number, f"{key} = {wrong}")
        assert message.startswith(f"{path}:{number + 1}: {table}{key} "), message


@pytest.mark.parametrize("spec", ["h100:8", "v5e:4x4", "cpu:8"])
def test_any_figure_that_is_missing(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    text = dump_toml(load(spec).ideal()).splitlines()
    for number, table, key in _lines(spec):
        if key in OPTIONAL or table in ("flops_per_second.", "step.matmul."):
            continue
        message = _load(path, spec, number, None)
        header = text.index(f"[{table[:-1]}]") + 1 if table else 1
        if key.startswith("wraparound"):
            assert message == (
                f"{path}:{header}: network has 0 of wraparound_multiple_of and wraparound_exactly; give one"
            )
        else:
            assert message.startswith(f"{path}:{header}: {table}{key} is missing: "), message
            assert "such as" in message or key in ("kind", "name")


@pytest.mark.parametrize("spec", ["h100:8", "v5e:4x4", "cpu:8"])
def test_any_key_that_is_misspelt(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    for number, table, key in _lines(spec):
        if table in ("flops_per_second.", "step.matmul."):
            continue
        line = dump_toml(load(spec).ideal()).splitlines()[number]
        message = _load(path, spec, number, line.replace(key, f"{key}z", 1))
        assert message.startswith(f"{path}:{number + 1}: {table}{key}z is unknown; did you mean {key}"), (
            message
        )


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1\n[network]\npod = [1]\n", "network.pod", 3),
        ("a = 1\nnetwork.pod = [1]\n", "network.pod", 2),
        ('a = 1\n["network"]\n"pod" = [1]\n', "network.pod", 3),
        ("a = 1\n[ network ] # links\n  pod=[1]\n", "network.pod", 3),
        ("a = 1\nnetwork = { pod = [1] }\n", "network.pod", 2),
        ("a = 1\n[network]\n[step]\n", "network.pod", 2),
        ("a = 1\n", "network.pod", 1),
        ("", "network", 1),
    ],
)
def test_the_line_of_a_key_or_of_where_it_belongs(text: str, key: str, line: int) -> None:
    assert str(CheckedToml("x.toml", text).error(key, "is so")) == f"x.toml:{line}: {key} is so"


def test_what_is_not_toml_or_not_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    path.write_text('name = "x"\nkind == "gpu"\n')
    with pytest.raises(HardwareError, match=r"mychip\.toml:2: not TOML: invalid value$"):
        load(f"{path}:8")
    path.write_bytes(b'name = "\xff\xfe"\n')
    with pytest.raises(HardwareError, match=r"mychip\.toml: not a text file: byte 8 is not UTF-8$"):
        load(f"{path}:8")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(HardwareError, match=r"cannot be read: Is a directory$"):
        load(str(tmp_path / "folder.toml"))


def test_one_rule_of_wraparound(tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    text = dump_toml(load("v5e:4x4"))
    path.write_text(text.replace("[network]\n", "[network]\nwraparound_multiple_of = 4\n"))
    with pytest.raises(
        HardwareError, match="network has 2 of wraparound_multiple_of and wraparound_exactly; give one"
    ):
        load(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "pod = [16, 16]",
            "pod = [true, 16]",
            "network.pod is [True, 16], not a list of sizes such as [16, 16]",
        ),
        ("pod = [16, 16]", "pod = [0, 16]", "network.pod is [0, 16], not a list of sizes such as [16, 16]"),
        (
            'devices = "v5e:4x4"',
            'devices = "v5e:4xx"',
            "mychip.toml: devices: hardware 'v5e:4xx' does not parse;",
        ),
        ('devices = "v5e:4x4"', 'devices = "v5e"', "mychip.toml' has no topology; write "),
        ('devices = "v5e:4x4"', 'devices = "v5e:32x32"', "is larger than a "),
    ],
)
def test_a_topology_that_cannot_be(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mychip.toml"
    text = dump_toml(load("v5e:4x4"))
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
