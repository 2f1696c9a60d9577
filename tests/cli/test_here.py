"""mw calibrate, bench, doctor and demo: what concerns this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.bench import calibration as measuring
from meshwright.cli import bench, demo, doctor
from meshwright.cli.main import main
from meshwright.hardware import catalog
from meshwright.nn.start import devices


def test_bench_plan(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_SEARCHES", [("tiny", "cpu:8", 16, 64)])
    assert main(["bench", "plan", "--repeats", "1", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result.keys() >= {"model", "hardware", "considered", "seconds", "predicted_seconds", "ratio"}
    assert main(["bench", "plan", "--repeats", "1"]) == 0
    assert "tiny" in capsys.readouterr().out


def test_calibrate_writes_hardware_that_plans_are_made_for(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(measuring, "calibrate", lambda spec, progress: catalog.load(spec))
    assert main(["calibrate", "-o", str(tmp_path / "machine.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_chips"] == 8
    assert catalog.load(str(tmp_path / "machine.toml")).num_chips == 8
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]


def test_calibrate_another_machine_than_this_one(tmp_path: Path, capsys):
    assert main(["calibrate", "--hardware", "v5e:2x2", "-o", str(tmp_path / "machine.toml")]) == 2
    assert "JAX sees 8 cpu devices" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_host_devices_replaces_an_earlier_one(monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    )
    devices.split_host(3)
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=3"
    assert os.environ["XLA_FLAGS"] == flags


def test_doctor_finds_nothing_wrong_here(capsys):
    code = main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in document["checks"]}
    wrong = {name for name, check in found.items() if not check["ok"]}
    assert wrong <= {"locks"}  # which another process of this machine may hold
    assert (code, document["ok"]) == (int(bool(wrong)), not wrong)
    assert found["devices"]["found"].startswith("8 cpu")
    assert found["numpy"]["ok"] and found["[run]"]["ok"] and found["[hf]"]["ok"]


def test_doctor_names_what_mends_it(capsys, monkeypatch):
    broken = [doctor.Check("optax", "not installed", ok=False, mend="pip install 'optax>=0.2.6'")]
    monkeypatch.setattr(doctor, "check_all", lambda: broken)
    assert main(["doctor"]) == 1
    assert "pip install 'optax>=0.2.6'" in capsys.readouterr().out


def test_doctor_sees_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["nosuchpackage>=1", "pytest; extra == 'dev'"])
    [check] = doctor.check_packages()
    assert not check.ok and check.mend == "pip install 'nosuchpackage>=1'"


def test_doctor_survives_a_jax_that_does_not_start(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuchplatform")
    check = doctor.check_devices()
    assert not check.ok and "nosuchplatform" in check.state


def test_doctor_says_what_runs_on_cpus(tmp_path: Path, monkeypatch):
    assert doctor.check_native().state.startswith(("native extension", "XLA alone; no native extension: "))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    check = doctor.check_native()
    assert check.ok and check.state.startswith("XLA alone; no native extension: ")


def test_demo_refuses_a_folder_that_is_not_its_own(tmp_path: Path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "checkpoints").mkdir()
    assert main(["demo", "--run", str(tmp_path)]) == 2
    assert "holds thesis.tex, which is not a demo's; name a new or an empty folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "thesis.tex"]


def test_demo_without_the_client(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    assert main(["demo", "--run", str(tmp_path / "run")]) == 2
    assert "pip install 'meshwright[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_demo_replaces_an_earlier_one_but_keeps_its_corpus(tmp_path: Path, capsys, monkeypatch):
    for name in ("checkpoints", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "plan.toml").touch()
    monkeypatch.setattr(demo, "_STAGES", (("Nothing", lambda job: setattr(job, "verdict", "match")),))
    assert main(["demo", "--run", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert f"replacing the demo in {tmp_path}" in printed.err and "[1/1] Nothing" in printed.err
    assert json.loads(printed.out)["verdict"] == "match"


def test_demo_ends_with_the_code_of_a_stage_that_failed(tmp_path: Path, capfd, monkeypatch):
    failing = ("Fail", lambda job: demo.mw("model", "no-such-model"))
    monkeypatch.setattr(demo, "_STAGES", (failing, ("Never", lambda job: pytest.fail("went on"))))
    assert main(["demo", "--run", str(tmp_path)]) == 2
    assert "model 'no-such-model' is neither a preset" in capfd.readouterr().err


def test_demo_trains_for_the_time_that_the_plan_says():
    def steps(step_seconds: float) -> int:
        job = demo.Demo(Path("run"), 100, True, plan={"best": {"step_seconds": step_seconds}})
        return demo.num_steps(job)

    assert [steps(seconds) for seconds in (0.5, 0.33, 10.0, 0.01)] == [200, 300, 30, 600]


@pytest.mark.slow
def test_demo_from_end_to_end(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "demo",
        "--fast",
        "--run",
        str(tmp_path),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "match"
    completion = json.loads((tmp_path / "completion.json").read_text())
    assert completion.keys() == {"prompt", "text", "model", "ttft_seconds", "tpot_seconds"}
    assert "<html" in (tmp_path / "report.html").read_text()
    assert not _answers(done.stderr), "the server still runs"


def _answers(log: str) -> bool:
    address = log.partition("http://")[2].partition("/")[0]
    host, _, port = address.partition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0
