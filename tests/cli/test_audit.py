"""mw audit: what is asked of the audit, and what its verdict exits with."""

import json
from pathlib import Path

import pytest
from tests.report.sample_run import audit_document

from meshwright.cli.main import main
from meshwright.hardware.catalog import dump_toml, load

PLAN = [
    "--model",
    "tiny",
    "--hardware",
    "v5e:2x4",
    "--batch-tokens",
    "1Ki",
    "--seq-len",
    "64",
    "--layout",
    "fsdp=8",
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the last audit was asked; its verdict is that of asked["verdict"]."""
    last: dict = {"verdict": "match"}

    def audit_plan(plan, target, progress, *, use_cache):
        last.update(plan=plan, target=target, use_cache=use_cache)
        return audit_document() | {"verdict": last["verdict"]}

    monkeypatch.setattr("meshwright.audit.audit.audit_plan", audit_plan)
    return last


def test_the_target_and_the_cache_are_passed_on(asked: dict):
    assert main(["audit", *PLAN]) == 0
    assert (asked["target"], asked["use_cache"]) == (None, True)
    assert main(["audit", *PLAN, "--target", "tpu", "--no-cache"]) == 0
    assert (asked["target"], asked["use_cache"]) == ("tpu", False)
    assert (asked["plan"].hardware, str(asked["plan"].layout)) == ("v5e:2x4", "fsdp=8,remat=none")


def test_only_a_host_trains_in_float32_by_default(asked: dict, tmp_path: Path):
    layouts = {}
    for spec in ("v5e:2x4", "cpu:8"):
        file = tmp_path / "machine.toml"
        file.write_text(dump_toml(load(spec)))
        at = PLAN.index("--hardware") + 1
        assert main(["audit", *PLAN[:at], str(file), *PLAN[at + 1 :]]) == 0
        layouts[spec] = asked["plan"].layout
    assert (layouts["v5e:2x4"].compute_dtype, layouts["cpu:8"].compute_dtype) == ("bf16", "f32")


def test_a_difference_exits_1_and_is_written_all_the_same(
    asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture
):
    asked["verdict"] = "differs"
    assert main(["audit", *PLAN, "--json", "-o", str(tmp_path / "audit.json")]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "differs"
    assert json.loads((tmp_path / "audit.json").read_text()) == printed


def test_a_target_that_is_none_is_refused(capsys: pytest.CaptureFixture):
    assert main(["audit", *PLAN, "--target", "gpv"]) == 2
    assert "--target 'gpv' is not supported; known: cpu, tpu" in capsys.readouterr().err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture):
    assert main(["audit", "--model", "tiny"]) == 2
    assert "give --hardware, --batch-tokens, --seq-len, --layout too" in capsys.readouterr().err
