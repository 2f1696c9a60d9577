"""The page of a plan for a load: its answer, every candidate, the launch line."""

import json
from pathlib import Path

import pytest
from markupsafe import escape

from meshwright.cli.main import main
from meshwright.report.pages.servers import read_servers_plan, servers_plan_html, servers_table

# One H100 is cheaper than the servers of L40S that meet the target, and misses it by 0.5 ms.
_ASKED = (
    "plan serve --model llama-3.1-8b --hardware l40s:1x2,h100:1x1 --rate 20 --ttft-p95 1s --tpot-p95 30ms "
    "--prompt-tokens 1k --output-tokens 200"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "plan.toml"
    assert main([*_ASKED.split(), "-o", str(path)]) == 0
    return path


def test_a_plan_for_a_load_has_a_page(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = plan.with_suffix(".html")
    assert main(["report", str(plan), "-o", str(page)]) == 0
    text = page.read_text()
    document = read_servers_plan(plan.with_suffix(".json"))
    assert document is not None and document == read_servers_plan(plan)
    best, missed = document["best"], document["cheaper"][0]
    for part in (
        *("Asked", "Recommended", "Price", "How sure", "Runner-up"),
        f"<strong>{best['replicas']} servers</strong>",
        f"{missed['price_per_hour']:,.2f}",
        document["launch"]["command"],
        f"cheaper, but {missed['missed']}.",
        escape('hardware = "l40s:1x2"'),  # of plan.toml
    ):
        assert part in text, part
    assert text.index("Recommended") < text.index(missed["missed"])
    capsys.readouterr()
    assert main(["report", str(plan), "-o", str(page), "--plots", str(plan.parent)]) == 2
    assert "which has no figures; leave out --plots" in capsys.readouterr().err


def test_another_chip_is_named_unless_it_was_simulated(plan: Path) -> None:
    document = json.loads(plan.with_suffix(".json").read_text())
    best, missed = document["best"], document["cheaper"]
    other = {**document["other"], "chips": 512}
    named = servers_table({**document, "other": other}).rows
    assert (named[-1].cells[4].text, len(named)) == ("512", 2 + len(missed))
    repeated = servers_table({**document, "other": {**other, "chips": missed[0]["chips"]}}).rows
    assert (repeated[0].tone, len(repeated)) == ("chosen", 1 + len(missed))
    # Without prices, and without a record of the engine's start.
    plain = {**best, "price_per_hour": None}
    page = servers_plan_html({**document, "best": plain, "boot": None, "cheaper": [], "other": None})
    assert "Price of an hour" not in page and "Memory per chip" not in page


def test_a_plan_of_an_earlier_version_is_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = plan.with_name("old.json")
    document = json.loads(plan.with_suffix(".json").read_text())
    old.write_text(json.dumps({key: value for key, value in document.items() if key != "verdict"}))
    assert main(["report", str(old)]) == 2
    assert "write it again with `mw plan serve -o`" in capsys.readouterr().err
