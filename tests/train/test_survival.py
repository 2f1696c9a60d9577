"""`mw train` as a process that is killed, told to stop, and resumed from damaged files."""

import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.processes import Runs, exact_lines

from meshwright.nn.files.checkpoint_files import checkpoint_steps
from meshwright.optimizers.optimizer import PACKED_DTYPES

pytestmark = pytest.mark.sampled(3)

NUM_STEPS = 24
OPTIONS = ("--steps", str(NUM_STEPS), "--checkpoint-every", "4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("survival"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """A run that nothing happens to."""
    runs.mw(*runs.begin(runs.folder / "whole", *OPTIONS))
    return runs.folder / "whole"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Waits until something has happened in the run, or the process has ended."""
    deadline = time.monotonic() + 120
    while not reached() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def our_lines(err: str) -> list[str]:
    assert "Traceback" not in err, err
    return [line for line in err.splitlines() if line.startswith("mw: ")]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(runs, whole, tmp_path):
    run = tmp_path / "run"
    process = runs.start(*runs.begin(run, *OPTIONS))
    until(process, lambda: bool(checkpoint_steps(run / "checkpoints")))
    process.kill()
    process.communicate()
    assert 0 < checkpoint_steps(run / "checkpoints")[-1] < NUM_STEPS
    runs.mw("train", "--run", str(run), "--resume")
    assert exact_lines(run) == exact_lines(whole)


@pytest.mark.slow
def test_a_flipped_bit_is_named_and_the_checkpoint_before_it_used(runs, whole, run):
    *_, before, last = checkpoint_steps(run / "checkpoints")
    assert last == NUM_STEPS
    damaged = max((run / "checkpoints" / str(last) / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    _, err = runs.mw("generate", "def ", "--checkpoint", str(run), "--max-tokens", "2")
    named = f"mw: warning: checkpoint {run}/checkpoints/{last}: is damaged: "
    assert [line for line in our_lines(err) if line.startswith(named)]
    assert f"{damaged.name} does not match its checksum; going on from step {before}" in err
    _, err = runs.mw("train", "--run", str(run), "--resume")
    assert [line for line in our_lines(err) if line.startswith(named)]
    assert exact_lines(run) == exact_lines(whole)
    assert (run / "checkpoints" / f"{last}.damaged").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint_and_it_goes_on(runs, whole, tmp_path, number):
    run = tmp_path / "run"
    process = runs.start(*runs.begin(run, *OPTIONS))
    until(process, lambda: bool(checkpoint_steps(run / "checkpoints")))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    stopped = checkpoint_steps(run / "checkpoints")[-1]
    assert our_lines(err) == [f"mw: stopped at step {stopped}; go on with --resume"]
    runs.mw("train", "--run", str(run), "--resume")
    assert exact_lines(run) == exact_lines(whole)


def test_a_refused_resume_writes_nothing(runs, run):
    (runs.folder / "other.txt").write_text("quite another text\n" * 400)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = contents()
    refused = {
        ("--data", str(runs.folder / "other.txt")): f"began with --data {runs.corpus}, not",
        ("--seed", "3"): "began with --seed 0, not 3; leave the option out, or name another run",
        ("--steps", "3"): f"is at step {NUM_STEPS} already, 3 were asked for; ask for more",
    }
    for options, message in refused.items():
        _, err = runs.mw("train", "--run", str(run), "--resume", *options, code=2)
        assert message in our_lines(err)[-1]
        assert contents() == before


@pytest.mark.slow
def test_a_killed_run_whose_optimizer_waits_on_the_host_goes_on(tmp_path):
    """Also with the optimizer on the devices from then on, and the other way round: the same numbers."""
    layouts = {"host": "fsdp=2,offload_optimizer=true", "device": "fsdp=2"}
    runs = Runs(tmp_path, "cpu:2", layouts["host"])
    plans = {"host": runs.plan, "device": tmp_path / "device.toml"}
    runs.write_plan(plans["device"], "cpu:2", layouts["device"])
    runs.mw(*runs.begin(tmp_path / "whole", *OPTIONS))
    for first, second in (("host", "host"), ("host", "device"), ("device", "host")):
        run = tmp_path / f"{first}-{second}"
        arguments = ("train", str(plans[first]), *runs.begin(run, *OPTIONS)[2:])
        process = runs.start(*arguments)
        until(process, lambda run=run: bool(checkpoint_steps(run / "checkpoints")))
        process.kill()
        process.communicate()
        assert 0 < checkpoint_steps(run / "checkpoints")[-1] < NUM_STEPS
        runs.mw("train", str(plans[second]), "--run", str(run), "--resume")
        assert exact_lines(run) == exact_lines(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_a_killed_run_with_moments_in_eight_bits_goes_on(tmp_path, dtype):
    """With the same numbers; on one device alone, with other blocks, with nearly the same."""
    runs = Runs(tmp_path, "cpu:2", f"fsdp=2,tensor=1,optimizer_dtype={dtype}")
    alone = tmp_path / "alone.toml"
    runs.write_plan(alone, "cpu:1", f"data=1,optimizer_dtype={dtype}")
    runs.mw(*runs.begin(tmp_path / "whole", *OPTIONS))
    whole = exact_lines(tmp_path / "whole")
    process = runs.start(*runs.begin(tmp_path / "run", *OPTIONS))
    until(process, lambda: bool(checkpoint_steps(tmp_path / "run" / "checkpoints")))
    process.kill()
    process.communicate()
    assert 0 < checkpoint_steps(tmp_path / "run" / "checkpoints")[-1] < NUM_STEPS
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    runs.mw("train", "--run", str(tmp_path / "run"), "--resume")
    assert exact_lines(tmp_path / "run") == whole
    runs.mw("train", str(alone), "--run", str(tmp_path / "other"), "--resume")
    last = exact_lines(tmp_path / "other")[-1]
    assert last["step"] == NUM_STEPS
    assert last["loss"] == pytest.approx(whole[-1]["loss"], rel=0.01)


@pytest.mark.slow
def test_garbage_in_the_metrics_is_named_and_the_run_goes_on(runs, run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "\x00garbage", *lines[1:]]) + "\n")
    _, err = runs.mw("train", "--run", str(run), "--resume", "--steps", str(NUM_STEPS + 1))
    assert f"mw: warning: {run}/metrics.jsonl line 2: is not a line of metrics; it is skipped" in our_lines(
        err
    )
    assert [line["step"] for line in exact_lines(run)][-1] == NUM_STEPS + 1


@pytest.mark.slow
def test_packed_data_that_changed_is_refused(runs, run):
    path = run / "data" / "train.npy"
    content = bytearray(path.read_bytes())
    content[-1] = 0xFF  # an id far beyond the vocabulary
    path.write_bytes(content)
    _, err = runs.mw("train", "--run", str(run), "--resume", "--steps", "30", code=2)
    (line,) = our_lines(err)[1:]
    assert line == (
        f"mw: corpus {run}/data: train.npy does not match its checksum;"
        " delete that folder, and it is prepared again from its text"
    )
    shutil.rmtree(run / "data")
    runs.mw("train", "--run", str(run), "--resume", "--steps", "25")


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_last_checkpoint(runs, whole, tmp_path):
    """A limit on the size of a file stands for the disk: TensorStore and Python get EFBIG for ENOSPC."""
    run = tmp_path / "run"
    runs.mw(*runs.begin(run, "--steps", "4"))

    process = runs.start("train", "--run", str(run), "--resume", "--steps", "8")
    # Not by preexec_fn, whose fork JAX warns of if an earlier test of this process has started it.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    _, err = runs.ended(process, code=2)
    assert our_lines(err)[-1] == (
        f"mw: checkpoint {run}/checkpoints/5: cannot be written (File too large);"
        " make room, then go on from step 4 with --resume"
    )
    assert checkpoint_steps(run / "checkpoints")[-1] == 4
    runs.mw("train", "--run", str(run), "--resume")


@pytest.mark.slow
def test_a_repeated_command_begins_or_goes_on(runs, whole, tmp_path):
    command = runs.begin(tmp_path / "run", *OPTIONS, "--resume")
    _, err = runs.mw(*command)
    assert our_lines(err) == [f"mw: {tmp_path}/run/checkpoints holds no checkpoint yet: beginning at step 0"]
    runs.mw(*command)
    assert exact_lines(tmp_path / "run") == exact_lines(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("on_spike", "left_out"), [("skip", 5), ("stop", 0)])
def test_a_run_that_diverges_ends_in_one_line(runs, tmp_path, on_spike, left_out):
    """At such a rate every batch does: those left out are named, then the run is given up."""
    options = ("--steps", "8", "--learning-rate", "1e30", "--on-spike", on_spike)
    _, err = runs.mw(*runs.begin(tmp_path / "run", *options), code=2)
    *warned, last = our_lines(err)
    assert len(warned) == left_out and all(
        "; back to step 1, without the examples " in line for line in warned
    )
    assert last.startswith("mw: training diverged: ")
    assert last.endswith("go on from the last checkpoint, or start again, with a lower learning rate")
    assert ("5 batches after step 1 were left out" in last) == (on_spike == "skip")
