"""mw report of a plan: the page, the figures as files, and refusals of one line."""

import json
from pathlib import Path

import pytest
from tests.report.parsed_page import Page

from meshwright.cli.main import main
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan, save_plan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    save_plan(Plan(load_model("gpt2"), "cpu:8", Workload(16, 128), Layout.of(data=4, fsdp=2)), path)
    return path


def test_a_plan_alone_is_a_page_that_says_why(plan, tmp_path, capsys):
    """No .json lies beside it: what `mw plan train` would have said is worked out."""
    output, plots = tmp_path / "report.html", tmp_path / "figures"
    assert main(["report", str(plan), "-o", str(output), "--plots", str(plots), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["layouts.svg", "step.svg", "memory.svg", "timeline.svg", "strategies.svg", "roofline.svg"]
    assert found == {"path": str(output), "plots": [str(plots / name) for name in names]}
    assert sorted(path.name for path in plots.iterdir()) == sorted(names)
    html = output.read_text()
    page = Page(html)
    assert page.open == []
    assert page.headings == ["The answer", "The plan", "The figures", "The mesh", "The fine print"]
    assert "Where the time goes" in html and "data=4,fsdp=2" in html


def test_paths_are_printed_one_a_line(plan, tmp_path, capsys):
    assert main(["report", str(plan), "-o", str(tmp_path / "r.html"), "--plots", str(tmp_path / "p")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / "r.html") and len(lines) == 7
    assert all(Path(line).is_file() for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["{tmp}/plan.toml", "-o", "{tmp}/plan.toml/report.html"], "cannot be written"),
        (["{tmp}/plan.toml", "-o", "{tmp}/r.html", "--plots", "{tmp}/plan.toml"], "cannot be written"),
        (["{tmp}/bad.toml"], "bad.toml: does not parse"),
        (["{tmp}/metrics", "--plots", "{tmp}/p"], "it holds no plan.toml, so there is nothing for --plots"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(plan, tmp_path, capsys, arguments, message):
    (tmp_path / "bad.toml").write_text("no = plan = at all")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    assert main(["report", *(one.replace("{tmp}", str(tmp_path)) for one in arguments)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("  ")]
    assert len(lines) == 1 and message in lines[0]


def test_a_plan_of_serving_is_refused_with_and_without_its_json(tmp_path: Path, capsys):
    """It has neither steps nor candidates, and ended in a traceback."""
    plan = tmp_path / "serving.toml"
    asked = [
        "--model",
        "tiny",
        "--hardware",
        "v5e:2x2",
        "--phase",
        "generate",
        "--batch",
        "2",
        "--context",
        "64",
    ]
    assert main(["plan", "serve", *asked, "-o", str(plan)]) == 0
    for missing in (None, plan.with_suffix(".json")):
        if missing:
            missing.unlink()
        assert main(["report", str(plan), "-o", str(tmp_path / "serving.html")]) == 2
        assert "a report needs both files of mw plan serve -o" in capsys.readouterr().err


def test_a_serving_plan_is_a_page_with_its_frontier(tmp_path: Path, capsys):
    plan, output, plots = tmp_path / "serve.toml", tmp_path / "serve.html", tmp_path / "figures"
    asked = ["--model", "llama-3-8b", "--hardware", "v5e:2x2,h100:1x1", "--tpot", "0.02"]
    sizes = ["--prompt-tokens", "1k", "--output-tokens", "128"]
    assert main(["plan", "serve", *asked, *sizes, "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["report", str(plan), "-o", str(output), "--plots", str(plots), "--json"]) == 0
    figure = plots / "frontier.svg"
    assert json.loads(capsys.readouterr().out) == {"path": str(output), "plots": [str(figure)]}
    document = json.loads(plan.with_suffix(".json").read_text())
    marks = [one for kind in document["by_chip"].values() for one in kind]
    # A mark for each point of both panels, throughput and price, and two for the chosen one.
    assert figure.read_text().count("<circle") == 2 * (len(marks) + 2)
    html = output.read_text()
    page = Page(html)
    headings = ["The answer", "The frontier", "The points", "The plan in words"]
    assert page.open == [] and page.headings == headings
    assert document["best"]["hardware"] in html and "--tpot" in html and "B_crit" in html
    plan.unlink()
    assert main(["report", str(plan.with_suffix(".json")), "-o", str(output)]) == 0
    assert "plan.toml, environment" not in output.read_text()
