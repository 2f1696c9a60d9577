"""plan.toml: written, read back, edited wrongly."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.errors import LayoutError, MeshwrightError, ModelError, OutputError, PlanError
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan, load_plan, save_plan, written_shardings


def _plan(model: str = "tiny", hardware: str = "cpu:8") -> Plan:
    layout = Layout.of(data=2, fsdp=2, tensor=2, remat="full", weights_dtype="f32")
    return Plan(load_model(model), hardware, Workload(16, 64), layout, {"step_seconds": 0.25})


# The first layers of MiniMax-M3 lack an indexer.
@pytest.mark.parametrize("model", ["tiny", "llama-3.1-8b", "minimax-m3"])
def test_a_plan_reads_back_as_written(tmp_path: Path, model: str) -> None:
    save_plan(_plan(model), tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == _plan(model)


def test_options_of_the_compiler_and_trials_read_back(tmp_path: Path) -> None:
    trials = ({"change": "as planned", "gain": None}, {"change": "remat=full", "gain": 0.125})
    plan = replace(_plan(), compiler={"xla_a": True, "xla_b": 8, "xla_c": "AUTO"}, tuned=trials)
    save_plan(plan, tmp_path / "plan.toml")
    read = load_plan(tmp_path / "plan.toml")
    assert read.compiler == plan.compiler
    assert read.tuned == ({"change": "as planned"}, trials[1])  # TOML has no word for None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("compiler = 3\n", "compiler = 3 must be a table [compiler]"),
        (
            "[compiler]\nlatency = true\n",
            "[compiler]: latency = True is not an option of XLA; fits: ",
        ),
        ("[compiler]\nxla_a = [1]\n", "[compiler]: xla_a = [1] is not an option of XLA"),
    ],
)
def test_what_is_no_option_of_the_compiler_is_refused(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    save_plan(_plan(), path)
    path.write_text(table + path.read_text() if "[" not in table[:1] else path.read_text() + "\n" + table)
    with pytest.raises(PlanError, match=re.escape(message)):
        load_plan(path)


def test_the_short_form_may_stand_for_the_tables(tmp_path: Path) -> None:
    """As plans were written before rules were tables, and as is quickest to write by hand."""
    path = tmp_path / "plan.toml"
    save_plan(_plan(), path)
    text = path.read_text()
    start, end = text.index("[layout.mesh]"), text.index("[model]")
    short = '[layout]\ndata = 2\nfsdp = 2\ntensor = 2\nremat = "full"\nweights_dtype = "f32"\n\n'
    path.write_text(text[:start] + short + text[end:])
    assert load_plan(path) == _plan()


def test_rules_may_be_edited(tmp_path: Path) -> None:
    """A weight over another of its dimensions: a layout without a short form, which runs by its tables."""
    path = tmp_path / "plan.toml"
    save_plan(_plan(), path)
    for name in ("stored", "gradients", "updated"):
        line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name} = "))
        path.write_text(path.read_text().replace(line, line.replace("}", ', wo = {N = ["tensor", "fsdp"]}}')))
    layout = load_plan(path).layout
    assert layout.form is None and str(layout) == "data=2,fsdp=2,tensor=2,rules=own,remat=full"
    assert str(layout.weight("wo", "NHD")) == "wo[N_{tensor,fsdp}, H, D]"
    assert [str(step) for step in contraction_of(layout, "wo", "BTNH,NHD->BTD").rhs_steps] == [
        "AllGather_{fsdp} wo[N_{tensor,fsdp}, H, D] -> wo[N_tensor, H, D]"
    ]
    save_plan(load_plan(path), path)
    assert load_plan(path).layout == layout


def test_the_notation_stands_in_the_file(tmp_path: Path) -> None:
    save_plan(_plan(), tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert "# wq[L, D_fsdp, N_tensor, H]" in text
    assert "# x[B_{data,fsdp}, T, D]" in text


def test_a_machine_file_is_named_from_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder can be moved with its machine.toml."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    save_plan(_plan(hardware=str(run / "machine.toml")), run / "plan.toml")
    assert 'hardware = "machine.toml"' in (run / "plan.toml").read_text()
    run.rename(moved)
    monkeypatch.chdir(tmp_path)
    assert load_plan(moved / "plan.toml").hardware == "moved/machine.toml"


def test_a_chip_of_ones_own_with_another_topology_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(_plan(hardware="2*mychip.toml:8x8"), tmp_path / "run" / "plan.toml")
    assert 'hardware = "2*../mychip.toml:8x8"' in (tmp_path / "run" / "plan.toml").read_text()
    assert load_plan(tmp_path / "run" / "plan.toml").hardware == "2*mychip.toml:8x8"


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("tensor = 2", "tensor = 16", LayoutError, "do not divide over tensor = 16"),
        ("tensor = 2", "tensr = 2", LayoutError, "mesh axis 'tensor' is not in Mesh.*; did you mean tensr?"),
        ('D = ["fsdp"]', 'D = "fsdp"', LayoutError, r"layout.rules.stored: D = 'fsdp'; write a list"),
        ("updated = {", "updatd = {", LayoutError, "'updatd' is not a table; did you mean updated?"),
        ("fsdp = 2", "fsdp = 2\nextra = 2", LayoutError, "mesh axis extra = 2 splits nothing"),
        ("num_layers = 2", "", ModelError, r"\[model\] lacks num_layers"),
        ("num_layers = 2", "num_layers = 0", ModelError, "num_layers = 0 must be a positive whole number"),
        ("[workload]", "[work]", PlanError, "'work' is unknown; did you mean workload?"),
        ("seq_len = 64", "seq_len = 100000", PlanError, "fits: --seq-len 128"),
        ("num_sequences = 16", "num_sequences = 6", LayoutError, "6 sequences .* do not divide"),
        ("[layout.mesh]", "[layout.mesh", PlanError, "does not parse"),
        ('hardware = "cpu:8"', "", PlanError, "lacks hardware"),
    ],
)
def test_a_wrong_edit_is_said_in_one_line(
    tmp_path: Path, old: str, new: str, error: type[MeshwrightError], message: str
) -> None:
    path = tmp_path / "plan.toml"
    save_plan(_plan(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(error, match=message) as raised:
        load_plan(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_missing_plan_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml: cannot be read: No such file or directory"):
        load_plan(tmp_path / "none.toml")


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        save_plan(_plan(), tmp_path / "file" / "plan.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_shardings_name_every_weight() -> None:
    plan = _plan()
    written = written_shardings(plan.model, plan.layout)
    assert written["weights"]["wo"] == "wo[L, N_tensor, H, D_fsdp]"
    assert written["activations"]["logits"] == "logits[B_{data,fsdp}, T, V_tensor]"
