"""mw support: what a model runs under, phase by phase, by the check that `mw train` and `mw serve` ask."""

import json

import pytest

from meshwright.cli.main import BAD_INPUT, main
from meshwright.layout import Layout
from meshwright.layout.runnable import why_not
from meshwright.models.presets import load_model


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_it_says_what_the_runners_check_says(model, capsys):
    assert main(["support", model, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for row in document["layouts"]:
        for phase, found in row["phases"].items():
            reason = why_not(load_model(model), Layout.parse(row["layout"]), phase)
            assert found == {"runs": reason is None, "reason": reason}


def test_a_table_for_reading(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["support", "llama-3-8b"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fsdp=2", "runs", "runs", "runs"] in rows
    assert ["pipe=2,microbatches=2", "runs", "no", "no", "pipe=2"] in rows
    assert any(row[:4] == ["fsdp=2,expert=2", "no", "no", "no"] and "experts" in row for row in rows)


def test_an_unknown_model(capsys):
    assert main(["support", "llama-3-8bb"]) == BAD_INPUT
    assert "did you mean llama-3-8b" in capsys.readouterr().err
