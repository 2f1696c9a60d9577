"""Processes that measure together: they meet over gloo, they end, and a failure has a name."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.bench.test_calibration import QUICK

from meshwright.bench import local_processes
from meshwright.bench.local_processes import _Worker, calibrate_in_processes, sweep_in_processes
from meshwright.cost.collectives import collective_seconds
from meshwright.errors import DeviceError
from meshwright.hardware.chip import COLLECTIVES, SharedMemory
from meshwright.notation.mesh import Mesh


@pytest.mark.slow  # starts JAX twice
def test_two_processes_measure_over_gloo() -> None:
    document = sweep_in_processes("cpu:2", {"X": 2}, [4096], 20.0, 2)
    assert document["processes"] == 2
    assert {result["op"] for result in document["results"]} == set(COLLECTIVES)


@pytest.mark.slow  # starts JAX twice, and compiles a training step
def test_two_processes_calibrate_over_gloo() -> None:
    """The hardware is cpu:2 with a price for every collective, and says how it was measured."""
    hardware = calibrate_in_processes("cpu:2", 2, QUICK)
    assert (hardware.spec, hardware.num_chips) == ("cpu:2", 2)
    assert isinstance(hardware.chip.network, SharedMemory)
    assert set(hardware.chip.network.costs) == set(COLLECTIVES)
    assert "2 virtual devices at work in 2 processes over gloo" in hardware.chip.sources["network"]
    placement = hardware.place(Mesh({"X": 2}))
    assert collective_seconds("all_gather", 1e6, "X", placement).seconds > 0


def test_processes_that_cannot_share_the_devices_are_refused() -> None:
    with pytest.raises(
        DeviceError, match=r"^3 processes cannot share the 4 devices of cpu:4 evenly; write cpu:3$"
    ):
        calibrate_in_processes("cpu:4", 3)


def _worker(tmp_path: Path, number: int, code: str) -> _Worker:
    log = tmp_path / f"{number}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    return _Worker(number, process, log)


def test_the_process_that_failed_is_named_with_its_last_words(tmp_path: Path) -> None:
    waits = _worker(tmp_path, 0, "import time; time.sleep(60)")
    fails = _worker(tmp_path, 1, "raise SystemExit('no such port')")
    with pytest.raises(DeviceError, match=r"^process 1 of 2 ended with 1: no such port$"):
        local_processes._wait([waits, fails], time.monotonic() + 30, "wait")
    waits.process.kill()
    for worker in (waits, fails):
        worker.end()
        assert worker.process.poll() is not None


def test_a_process_that_takes_too_long_is_named(tmp_path: Path) -> None:
    waits = _worker(tmp_path, 0, "import time; time.sleep(60)")
    with pytest.raises(DeviceError, match=r"^process 0 of 1 did not end in time; give --max-seconds more$"):
        local_processes._wait([waits], time.monotonic(), "give --max-seconds more")
    waits.process.kill()
    waits.end()


def test_a_process_ends_when_the_pipe_to_it_closes(tmp_path: Path) -> None:
    code = (
        "from meshwright.bench import local_processes as p; p._end_with_parent(); import time; time.sleep(60)"
    )
    worker = _worker(tmp_path, 0, code)
    started = time.monotonic()
    worker.end()
    assert worker.process.returncode == 1
    assert time.monotonic() - started < 5
