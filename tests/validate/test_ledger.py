"""The ledger: errors at the first look at each source, which never change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.validate.test_score import LLAMA

from meshwright.cli.main import main
from meshwright.validate.ledger import covered, first_look_medians, first_looks, ledger
from meshwright.validate.published import MEMORY
from meshwright.validate.score import Prediction


def test_the_first_errors_are_kept() -> None:
    lines = {(line.source, line.figure): line for line in first_looks()}
    assert lines["InternEvo training performance", "time"].first_median == 1.566
    assert lines["torchao training benchmarks", "memory"].first_signed == 0.208
    assert all(line.met for line in lines.values()) and len(lines) > 30


def test_todays_errors_are_of_step_time_and_memory() -> None:
    """A throughput half as high is a step twice as long."""
    slow = Prediction(LLAMA, predicted=LLAMA.value / 2, range=(1.0, 1e9))
    memory = Prediction(replace(LLAMA, metric=MEMORY, value=4e9), predicted=5e9, range=(1.0, 2.0))
    time, bytes_ = (line for line in ledger([slow, memory]) if line.source == "ours")
    assert (time.figure, time.today_median, time.covered) == ("time", pytest.approx(1.0), 1.0)
    assert (bytes_.figure, bytes_.today_median, bytes_.covered) == ("memory", pytest.approx(0.25), 0.0)
    assert time.first_median is None and time.met == "not recorded"
    assert covered([slow, memory]) == 0.5 and covered([]) is None


def test_the_summary_is_over_recorded_times() -> None:
    found = first_look_medians(first_looks())
    assert found["sources"] == 10 and found["rows"] == 170


def test_mw_prints_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["validate", "--ledger", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ledger"][0]["source"].startswith("Megatron-LM SC21") and document["first_median"]
    assert main(["validate", "--ledger"]) == 0
    assert "first looks at step times of 10 sources" in capsys.readouterr().out.replace("\n", " ")
    assert main(["validate"]) == 2
