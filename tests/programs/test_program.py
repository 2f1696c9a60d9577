"""Training programs: records with parents, factors on what a chip reaches, and seconds of its host."""

import tomllib
from importlib import resources

import pytest

from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.errors import HardwareError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.plan.space import different_remats
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import PROGRAMS, at_odds

STEP = StepEfficiency(matmul={"bf16": 0.5, "fp8": 0.4}, attention=0.5, kernel_seconds=4e-6)
WORDS = {"name", "about", "parent", "also", "tables", "fitted_on", "sources"}


def _stated(name: str) -> dict:
    text = (resources.files("meshwright.programs") / f"{name}.toml").read_text()
    return tomllib.loads(text)


@pytest.mark.parametrize("name", PROGRAMS.names)
def test_every_value_has_a_source_and_differs_from_the_parents(name: str) -> None:
    found, stated = PROGRAMS[name], _stated(name)
    assert found.name == name and found.about
    assert set(stated) - WORDS == set(stated.get("sources", {}))
    if found.parent:
        parent = PROGRAMS[found.parent]
        same = [key for key in set(stated) - WORDS if vars(parent)[key] == vars(found)[key]]
        assert not same


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("pytorch-eager", ["eager"]),
        ("nanotron", ["eager"]),
        ("llm-foundry", ["eager"]),
        ("internevo", ["eager"]),
        ("deepspeed", ["eager"]),
        ("deepspeed-2021", ["deepspeed", "eager"]),
        ("megatron", ["megatron-lm", "eager"]),
        ("pytorch-compiled", ["compiled"]),
        ("torchtitan", ["compiled"]),
        ("aleph-alpha", ["megatron-lm", "eager"]),
        ("megatron-te", ["megatron-core", "te"]),
        ("nemo-automodel", ["te"]),
        ("nemo-25.04", ["nemo", "megatron-core", "te"]),
        ("maxtext", ["xla"]),
        ("axlearn", ["xla"]),
    ],
)
def test_parents(name: str, parents: list[str]) -> None:
    found = PROGRAMS[name]
    for parent in parents:
        assert found.parent == parent
        found = PROGRAMS[parent]
    assert found.parent is None


def test_names_of_earlier_releases_keep_their_constants() -> None:
    eager, te = PROGRAMS["pytorch-eager"], PROGRAMS["megatron-te"]
    assert eager.buckets and not eager.wide_sums
    # Rules that a single source suggested are that program's.
    nanotron = PROGRAMS["nanotron"]
    assert (eager.split_loss_arrays, eager.wide_sums, eager.host_flush_seconds) == (0, False, 0.0)
    assert (nanotron.split_loss_arrays, nanotron.wide_sums, nanotron.host_flush_seconds) == (2, True, 1.2)
    assert te.fused == ("norms", "gates", "keys") and te.once_since == 2025
    assert (eager.once_since, PROGRAMS["pytorch-compiled"].once_since) == (2025, 2026)
    assert PROGRAMS["nemo"].folds_experts and not eager.folds_experts
    # The constants of one table's rows of DeepSpeed are that table's.
    assert PROGRAMS["deepspeed"].odds == eager.odds != PROGRAMS["deepspeed-2021"].odds
    assert PROGRAMS["megatron"].host_seconds == 3e-5 and not PROGRAMS["megatron"].buckets
    for name in ("pytorch-eager", "pytorch-compiled", "megatron", "megatron-te", "deepspeed", "xla"):
        assert PROGRAMS[name].fitted_on == name


def test_a_program_without_figures_of_its_own_is_priced_as_its_parent() -> None:
    """The assumptions say so in one line."""
    assert load("h100:8").running("nanotron").software.description == (
        "the step is priced as nanotron runs it (nanotron, PyTorch with operations launched one by one), "
        "with constants fitted on published rows of pytorch-eager"
    )
    unnamed = load("h100:8").running("torchtune")
    assert unnamed.software.description == (
        "the step is priced as torchtune runs it (no record of its own, so as eager: any program on PyTorch "
        "that launches operations one by one), with constants fitted on published rows of pytorch-eager"
    )
    assert unnamed.chip == load("h100:8").running("eager").chip


def test_the_chips_files_are_of_xla() -> None:
    machine = load("h100:8")
    assert machine.software.name == "xla"
    assert machine.running("xla").chip.step == machine.chip.step


def test_factors_are_on_odds_and_seconds() -> None:
    found = PROGRAMS.read(
        'name = "ours"\nabout = "a test"\nhost_seconds = 1e-5\nwhole_sums = true\n'
        "[odds]\nmatmul = 3.0\nattention = 3.0\n[seconds]\nkernel_seconds = 0.5\n[sources]\n",
        "ours.toml",
    ).applied(STEP)
    assert found.matmul == {"bf16": 0.75, "fp8": pytest.approx(2 / 3)}
    assert (found.attention, found.kernel_seconds, found.host_seconds) == (0.75, 2e-6, 1e-5)
    assert found.whole_sums


def test_a_child_states_single_factors() -> None:
    found = PROGRAMS.read(
        'name = "ours"\nabout = "a test"\nparent = "deepspeed"\n[odds]\nmatmul = 2.0\n', "x.toml"
    )
    assert found.odds == {**PROGRAMS["deepspeed"].odds, "matmul": 2.0}
    assert found.gathers_first and found.sources == PROGRAMS["deepspeed"].sources


def test_shares_stay_between_nothing_and_all() -> None:
    assert at_odds(0.9, 100.0) < 1 and at_odds(0.1, 0.01) > 0 and at_odds(1.0, 7.0) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nabout = "y"\nspeed = 1\n[sources]\n', "ours.toml:3: speed is unknown"),
        ('name = "x"\nabout = "y"\neager = 1\n[sources]\n', "eager is 1, not true or false"),
        ('name = "x"\nabout = "y"\n[odds]\nmatmul = -1\n[sources]\n', "odds.matmul"),
        ('name = "x"\nabout = "y"\n[odds]\nnorms = 1\n', "ours.toml:4: odds.norms is unknown"),
        ('name = "x"\nabout = "y"\nfused = ["sums"]\n', "fits: norms, gates, keys"),
        ('name = "x"\nabout = "y"\nparent = "egaer"\n', "software 'egaer' is unknown; did you mean eager"),
        ('name = "x"\n', "ours.toml:1: about is missing"),
    ],
)
def test_a_fault_is_named(text: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        PROGRAMS.read(text, "ours.toml")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(HardwareError, match=r"software 'megatorn' is unknown; .*megatron"):
        load("h100:8").running("megatorn")


@pytest.mark.parametrize(("chip", "is_vendors"), [("h100", False), ("b200", True), ("mi300x", False)])
def test_pytorch_calls_the_vendors_attention_on_blackwell(chip: str, is_vendors: bool) -> None:
    machine = load(f"{chip}:8")
    for name in ("pytorch-compiled", "torchtitan", "pytorch-eager", "llm-foundry"):
        found = machine.running(name).chip.step
        assert (found.attention == machine.chip.step.attention) == is_vendors, name


def test_wide_heads_had_no_flash_kernel_on_blackwell() -> None:
    """DeepSeek-V3's heads of 192 need cuDNN 9.11 there; those of an H100 do not."""
    before, after = PROGRAMS["nemo-25.04"], PROGRAMS["nemo"]
    assert PROGRAMS.of_table("NVIDIA dgxc-benchmarking (NeMo pretraining) v25.05.04") == before
    assert not before.has_flash(192, 10.0) and before.has_flash(128, 10.0) and before.has_flash(192, 9.0)
    assert after.has_flash(192, 10.0) and before.has_flash(192, None)
    model = load_model("deepseek-v3")
    for program, kept in ((before, True), (after, False)):
        machine = load("gb200-nvl72:128").running(program.name)
        assert ("attention" in different_remats(model, machine)) == kept
        graph = record_training(model, machine, Layout.of(data=128), PassShape(128, 4096, 4096))
        assert any(node.kind == "softmax" for _, node in graph.nodes()) == kept
