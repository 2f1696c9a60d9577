"""`mw launch local`: processes that end together, start again, and train as one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.train.processes import Runs, exact_lines

from meshwright.cli.main import main
from meshwright.errors import DeviceError
from meshwright.launch import local
from meshwright.launch.local import launch_local
from meshwright.nn.files.checkpoint_files import checkpoint_steps


def python(program: str) -> list[str]:
    start = "import os, sys, time; from pathlib import Path; me = int(os.environ['MESHWRIGHT_PROCESS_ID']);"
    return [sys.executable, "-c", start + program]


def launched(program: str, count: int = 3, restarts: int = 0) -> tuple[int, list[str]]:
    said: list[str] = []
    return launch_local(python(program), count, restarts=restarts, say=said.append), said


def test_all_end_well(tmp_path: Path):
    assert launched(f"Path({str(tmp_path)!r}, str(me)).touch()") == (0, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("sys.exit('mw: out of luck')", "ended with 1: out of luck"),
    ],
)
def test_one_that_dies_is_named_and_ends_the_others(act: str, how: str):
    began = time.monotonic()
    with pytest.raises(DeviceError) as error:
        launched(f"(time.sleep(0.3), {act}) if me == 2 else time.sleep(60)")
    assert str(error.value) == f"process 2 of 3 {how}; the others were ended"
    assert time.monotonic() - began < 20


def test_one_that_is_stopped_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "_STOPPED_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(DeviceError) as error:
        launched("(time.sleep(0.3), os.kill(os.getpid(), 19)) if me == 1 else time.sleep(60)")
    message = "process 1 of 3 was stopped, by SIGSTOP or the like, for over 0.5 s; the others were ended"
    assert str(error.value) == message and time.monotonic() - began < 20


def test_one_that_is_stopped_is_named_and_not_those_that_miss_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(local, "_MISSED_SECONDS", 0.2)
    # The peer fails 0.8 s after the stop, however late either of them starts on a busy machine.
    program = f"""
state = Path({str(tmp_path)!r}, "state")
if me == 1:
    Path({str(tmp_path)!r}, "number").write_text(str(os.getpid()))
    Path({str(tmp_path)!r}, "number").rename(state)
    os.kill(os.getpid(), 19)
while not state.exists() or ") T " not in Path("/proc", state.read_text(), "stat").read_text():
    time.sleep(0.01)
time.sleep(0.8)
os.abort()
"""
    with pytest.raises(
        DeviceError, match=r"^process 1 of 2 was stopped, by SIGSTOP or the like, for over 0.2 s"
    ):
        launched(program, count=2)


def test_one_that_goes_on_after_a_stop_has_not_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "_STOPPED_SECONDS", 1.0)
    resume = "until grep -q '^State:.T' /proc/$0/status; do sleep 0.01; done; sleep 0.3; kill -CONT $0"
    program = (
        f"import subprocess; subprocess.Popen(['sh', '-c', {resume!r}, str(os.getpid())]);"
        "os.kill(os.getpid(), 19); time.sleep(1)"
    )
    assert launched(program, count=1) == (0, [])


def test_the_one_that_was_killed_is_named_not_those_that_lost_it(tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "pipe")  # the others read to its end, which is the death of who writes
    end = f"(open({str(pipe)!r}, 'w'), os.kill(os.getpid(), 9))"
    with pytest.raises(DeviceError, match="process 2 of 3 was killed by SIGKILL"):
        launched(f"{end} if me == 2 else (open({str(pipe)!r}).read(), sys.exit(1))")


def test_it_starts_again_with_resume_as_often_as_asked(tmp_path: Path):
    count = f"path = Path({str(tmp_path)!r}, 'lives'); n = path.stat().st_size if path.exists() else 0;"
    program = count + "me or path.write_text('x' * (n + 1));"
    program += "assert me or (n > 0) == ('--resume' in sys.argv);"
    code, said = launched(program + "me or n > 1 or os.kill(os.getpid(), 9); me and time.sleep(0.2)", 2, 3)
    assert code == 0 and len(said) == 2
    first = "process 0 of 2 was killed by SIGKILL; the others were ended; starting again, 1 of 3"
    assert said[0] == first


def test_bad_input_is_not_tried_again(capfd):
    assert launched("me == 0 and (print('mw: no such plan', file=sys.stderr), sys.exit(2))", 2, 5) == (2, [])
    assert capfd.readouterr().err == "mw: no such plan\n"


def test_bad_input_that_all_processes_refuse_is_printed_once(tmp_path: Path, capfd):
    plan = ["plan", "train", "--model", "tiny", "--hardware", "cpu:8", "--batch-tokens", "1024"]
    assert main([*plan, "--seq-len", "64", "-o", str(tmp_path / "plan.toml")]) == 0
    capfd.readouterr()
    train = ["mw", "train", str(tmp_path / "plan.toml"), "--data", "stdlib", "--run", str(tmp_path / "run")]
    assert main(["launch", "local", "-n", "3", "--", *train]) == 2
    assert capfd.readouterr().err.count("3 processes cannot share the 8 devices evenly") == 1


def test_bad_input_is_said_by_process_0_though_another_found_it_first(capfd):
    program = "time.sleep(0.3 * (me == 0)); print('mw: no such plan', file=sys.stderr); sys.exit(2)"
    assert launched(program) == (2, [])
    assert capfd.readouterr().err == "mw: no such plan\n"


def test_a_signal_is_handed_to_all(tmp_path: Path):
    program = (
        "import signal; stop = lambda *_: (Path(folder, f'stopped{me}').touch(), sys.exit(130));"
        "signal.signal(signal.SIGTERM, stop); Path(folder, f'up{me}').touch(); time.sleep(60)"
    )
    command = python(f"folder = {str(tmp_path)!r};" + program)
    source = "from meshwright.launch.local import launch_local;"
    source += f"raise SystemExit(launch_local({command!r}, 2, say=print))"
    launcher = subprocess.Popen([sys.executable, "-c", source])
    while len(list(tmp_path.iterdir())) < 2:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 130
    assert {path.name for path in tmp_path.iterdir()} == {"up0", "up1", "stopped0", "stopped1"}


# Real training


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("launch"), "cpu:4", "data=2,fsdp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["data=2,fsdp=2", "fsdp=2,tensor=2", "pipe=2,tensor=2,microbatches=2,schedule=lanes"]
)
def test_four_processes_train_as_one_with_four_devices(runs: Runs, tmp_path: Path, layout: str):
    """Also where several processes hold the same rows of a batch."""
    runs.write_plan(runs.plan, "cpu:4", layout)
    options = ("--steps", "12", "--checkpoint-every", "4")
    runs.mw(*runs.begin(tmp_path / "one", *options))
    out, _ = runs.mw("launch", "local", "-n", "4", "--", "mw", *runs.begin(tmp_path / "four", *options))
    assert out.startswith("step 12: training loss ")
    one, four = exact_lines(tmp_path / "one"), exact_lines(tmp_path / "four")
    for expected, found in zip(one, four, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_processes_wait_for_one_that_compiles_slowly(runs: Runs, tmp_path: Path):
    """Over gloo, processes that went on would give up after 30 s of waiting to connect."""
    runs.write_plan(runs.plan, "cpu:4", "data=2,fsdp=2")  # sums over data are of devices of both
    run, program = tmp_path / "run", tmp_path / "slowly.py"
    program.write_text(f"""
import os, sys, time
from pathlib import Path

import jax
from meshwright.cli.main import main


def slowly(event, seconds, fun_name="", **_):
    is_step = event.endswith("backend_compile_duration") and fun_name == "jit(_step)"
    if is_step and os.environ["MESHWRIGHT_PROCESS_ID"] == "1":
        Path({str(run)!r}, "slow").touch()
        time.sleep(35)


jax.monitoring.register_event_duration_secs_listener(slowly)
sys.exit(main({runs.begin(run, "--steps", "2")!r}))
""")
    out, _ = runs.mw("launch", "local", "-n", "2", "--", sys.executable, str(program))
    assert out.startswith("step 2: training loss ")
    assert (run / "slow").exists()


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_the_run_goes_on(runs: Runs, tmp_path: Path):
    """Two processes, one killed, both started again; then one process goes on with the run."""
    runs.write_plan(runs.plan, "cpu:4", "data=2,fsdp=2")
    run, options = tmp_path / "run", ("--steps", "40", "--checkpoint-every", "4")
    command = ["mw", *runs.begin(run, *options)]
    launcher = runs.start("launch", "local", "-n", "2", "--restarts", "1", "--", *command)
    while not checkpoint_steps(run / "checkpoints"):
        assert launcher.poll() is None
        time.sleep(0.01)
    os.kill(child_numbered(launcher.pid, 1), signal.SIGKILL)
    _, err = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, err
    named = "mw: process 1 of 2 was killed by SIGKILL; the others were ended; starting again, 1 of 1"
    assert named in err.splitlines()
    runs.mw("train", "--run", str(run), "--resume", "--steps", "44")
    runs.mw(*runs.begin(tmp_path / "whole", *options))
    whole = exact_lines(tmp_path / "whole")
    for expected, found in zip(whole, exact_lines(run), strict=False):
        assert found == pytest.approx(expected, rel=1e-5)


def child_numbered(parent: int, number: int) -> int:
    """The child of the process whose environment has this process id."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if int(stat[1]) == parent and f"MESHWRIGHT_PROCESS_ID={number}".encode() in environment:
                return int(entry.name)
    raise AssertionError("no such child")
