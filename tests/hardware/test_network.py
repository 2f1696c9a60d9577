"""Networks are records: chips name theirs, and files that state their own figures keep them."""

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from meshwright.errors import HardwareError
from meshwright.hardware.catalog import chip, dump_toml, load, names, template
from meshwright.hardware.chip import SharedMemory, Switch, Torus
from meshwright.hardware.network import NETWORKS
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import PROGRAMS

WORDS = {"name", "about", "parent", "also", "tables", "sources"}


@pytest.mark.parametrize("name", NETWORKS.names)
def test_every_figure_has_a_source_and_differs_from_the_parents(name: str) -> None:
    stated = tomllib.loads((resources.files("meshwright.hardware.networks") / f"{name}.toml").read_text())
    found = NETWORKS[name]
    assert found.name == name and found.about and found.hop_seconds > 0
    assert set(stated) - WORDS == set(stated.get("sources", {}))
    if found.parent:
        parent = NETWORKS[found.parent]
        assert not [key for key in set(stated) - WORDS if vars(parent)[key] == vars(found)[key]]


def test_names() -> None:
    assert {"infiniband", "efa", "roce", "tcpx", "ethernet", "ici", "dcn"} <= set(NETWORKS.names)


@pytest.mark.parametrize("name", names())
def test_chips_name_their_usual_networks(name: str) -> None:
    network, step = chip(name).network, chip(name).step
    if isinstance(network, Torus):
        assert (network.within, network.between) == ("ici", "dcn")
        assert network.hop_seconds == NETWORKS["ici"].hop_seconds
        assert network.dcn_hop_seconds == NETWORKS["dcn"].hop_seconds
    elif isinstance(network, Switch):
        assert network.between is not None
        usual = NETWORKS[network.between]
        assert network.nic_hop_seconds == usual.hop_seconds
        assert (step.network_falloff, step.network_latency) == (usual.falloff, usual.step_latency)
        assert step.links["network"] == usual.share
    else:
        assert isinstance(network, SharedMemory)


@pytest.mark.parametrize("name", names())
def test_a_template_loads_as_the_chip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(template(name))
    network = chip(name).network
    topology = "x".join("4" for _ in network.pod) if isinstance(network, Torus) else "8"
    mine, ours = load(f"{path}:{topology}").chip, load(f"{name}:{topology}").chip
    assert mine == ours and mine.sources == ours.sources and mine.step.sources == ours.step.sources


def test_a_file_of_an_earlier_release_keeps_its_figures(tmp_path: Path) -> None:
    """mw calibrate wrote, and writes, all figures and no name of a network."""
    path = tmp_path / "machine.toml"
    text = dump_toml(load("h100:2x8"))
    assert "between" not in text.partition("[sources]")[0]
    path.write_text(text.replace("network_falloff = 0.0", "network_falloff = 0.5"))
    again = load(str(path)).chip
    assert (
        again.step.network_falloff == 0.5
        and again.step.network_latency == NETWORKS["infiniband"].step_latency
    )
    assert isinstance(again.network, Switch) and again.network.between is None
    ideal = tmp_path / "ideal.toml"
    ideal.write_text(dump_toml(load("h100:2x8").ideal()))
    assert load(str(ideal)).chip.step == PROGRAMS["xla"].applied(StepEfficiency())


def _mine(tmp_path: Path, old: str, new: str) -> str:
    text = template("h100")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    return f"{path}:2x8"


def test_another_network(tmp_path: Path) -> None:
    """Figures that the file states stay; the network gives the others."""
    mine = load(_mine(tmp_path, 'between = "infiniband"', 'between = "efa"')).chip
    assert isinstance(mine.network, Switch)
    assert (mine.step.network_falloff, mine.network.nic_bytes_per_second) == (NETWORKS["efa"].falloff, 50e9)
    assert mine.step.sources["network_falloff"] == NETWORKS["efa"].sources["falloff"]
    assert mine.step.links == {"nvlink": chip("h100").step.links["nvlink"], "network": NETWORKS["efa"].share}
    stated = load(_mine(tmp_path, "[step.matmul]\n", "[step]\nnetwork_falloff = 0.25\n[step.matmul]\n")).chip
    assert (stated.step.network_falloff, stated.step.network_latency) == (
        0.25,
        NETWORKS["infiniband"].step_latency,
    )


def test_a_machine_on_another_network() -> None:
    usual, other = load("h100:2x8"), load("h100:2x8").over("efa")
    assert other.chip == load("h100:2x8").over("efa").chip != usual.chip
    assert other.chip.step.network_falloff == NETWORKS["efa"].falloff > usual.chip.step.network_falloff == 0
    slow = usual.over("ethernet-100").chip.network
    assert isinstance(slow, Switch) and slow.nic_bytes_per_second == 1.5625e9
    with pytest.raises(HardwareError, match="network dcn joins slices, and h100:2x8 has no such links"):
        usual.over("dcn")
    with pytest.raises(HardwareError, match="network 'infiniban' is unknown; did you mean infiniband"):
        usual.over("infiniban")


def test_tables_name_networks() -> None:
    assert NETWORKS.of_table("MaxText configs README (A3 GPU)") == NETWORKS["tcpx"]
    assert NETWORKS.of_table("an unknown source") is None


def test_a_file_without_a_step_has_the_shares_of_its_own_network(tmp_path: Path) -> None:
    text = template("h100").replace('"infiniband"', '"efa"').replace('name = "h100"', 'name = "ours"')
    head, _, tail = text.replace('shares = "gpu"\n', "").partition("[step.matmul]\n")
    path = tmp_path / "mine.toml"
    path.write_text(head + "[compiler]\n" + tail.partition("[compiler]\n")[2])
    step = load(f"{path}:2x8").chip.step
    assert step.taken_from == "h100" and step.attention == chip("h100").step.attention
    assert step.network_falloff == NETWORKS["efa"].falloff


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('between = "infiniban"', "network.between = 'infiniban' is unknown; did you mean infiniband"),
        ('between = "ici"', "network.between = 'ici' joins chips"),
        ("between = 3", "network.between is 3, not a string"),
        ('within = "ici"', "network.within is unknown"),
    ],
)
def test_a_wrong_network_is_named(new: str, message: str, tmp_path: Path) -> None:
    path = _mine(tmp_path, 'between = "infiniband"', f"{new}\nnic_hop_seconds = 1e-5")
    with pytest.raises(HardwareError) as caught:
        load(path)
    assert message in str(caught.value)


def test_measured_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's curves by size and by nodes are those of the chips that name it."""
    found = NETWORKS.read(
        'name = "efa"\nabout = "a test"\nparent = "cards"\nfalloff = 0.0\n'
        "[by_size]\nall_gather = [[1e3, 0.5], [1e6, 1.0]]\n[by_nodes]\nall_reduce = [[2, 1.0], [4, 0.5]]\n",
        "ours.toml",
    )
    monkeypatch.setitem(NETWORKS._read, "efa", found)
    network = load(_mine(tmp_path, '"infiniband"', '"efa"')).chip.network
    assert isinstance(network, Switch)
    assert network.efficiency == {"network": {"all_gather": ((1e3, 0.5), (1e6, 1.0))}}
    assert network.by_nodes == {"all_reduce": ((2.0, 1.0), (4.0, 0.5))}
