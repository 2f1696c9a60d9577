"""Several JAX processes on this machine, which communicate over gloo as hosts do over a network."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import DeviceError
from meshwright.hardware import catalog
from meshwright.hardware.description import read_chip
from meshwright.hardware.topology import Hardware
from meshwright.nn.start.processes import free_port
from meshwright.notation.mesh import Mesh

_POLL_SECONDS = 0.1
_STARTUP_SECONDS = 60  # for all processes to meet; beyond the budget of the measurement itself
_END_SECONDS = 5
_CALIBRATION_SECONDS = 900


@dataclass(frozen=True)
class CollectiveSweep:
    """Collectives by size (see sweep.py)."""

    mesh: Mapping[str, int]
    sizes: Sequence[int]
    max_seconds: float


@dataclass(frozen=True)
class CalibrateTask:
    """A whole calibration. sizes: a calibration.Sizes, None for its default."""

    sizes: Any


@dataclass(frozen=True)
class ProcessJob:
    """A task on cpu:N for one of several processes."""

    hardware: str
    task: CollectiveSweep | CalibrateTask
    num_processes: int
    port: int
    result: str  # the path that process 0 writes


def sweep_in_processes(
    spec: str, mesh: Mapping[str, int], sizes: Sequence[int], max_seconds: float, num_processes: int
) -> dict[str, Any]:
    """The document of `sweep`, measured over processes that each hold an equal part of cpu:N.

    Raises DeviceError, with the process and its last line of stderr, if one fails or time runs out. All
    processes end with the call, and also if the caller ends.
    """
    task, budget = CollectiveSweep(dict(mesh), list(sizes), max_seconds), 2 * max_seconds
    return json.loads(_in_processes(spec, task, num_processes, budget, "give --max-seconds more"))


def calibrate_in_processes(spec: str, num_processes: int, sizes: object = None) -> Hardware:
    """The hardware of `calibrate` measured in the same way, with collectives over gloo.

    Matmuls, memory and the training step are also timed in all processes at once.
    """
    text = _in_processes(
        spec, CalibrateTask(sizes), num_processes, _CALIBRATION_SECONDS, "ask for fewer devices"
    )
    return replace(catalog.load(spec), chip=read_chip(text, spec).chip)


def _in_processes(
    spec: str, task: CollectiveSweep | CalibrateTask, num_processes: int, seconds: float, cure: str
) -> str:
    """The output of process 0 after all have ended, within `seconds` and the time to connect."""
    num_devices = _num_devices(spec, num_processes)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        job = ProcessJob(spec, task, num_processes, free_port(), str(result))
        workers = [_Worker.start(job, number, num_devices, Path(folder)) for number in range(num_processes)]
        try:
            _wait(workers, time.monotonic() + seconds + _STARTUP_SECONDS, cure)
        finally:
            for worker in workers:
                worker.end()
        return result.read_text(encoding="utf-8")


def _num_devices(spec: str, num_processes: int) -> int:
    """Devices of each process."""
    hardware = catalog.load(spec)
    total = hardware.num_chips
    if not hardware.chip.platform.virtual:
        raise DeviceError(
            f"{spec}: several processes on this machine are a way to measure cpu:{num_processes}"
        )
    if num_processes < 2 or total % num_processes:
        raise DeviceError(
            f"{num_processes} processes cannot share the {total} devices of {spec} evenly; "
            f"write cpu:{max(2, num_processes)}"
        )
    return total // num_processes


@dataclass(frozen=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, job: ProcessJob, number: int, num_devices: int, folder: Path) -> "_Worker":
        """The process, which ends when the pipe to its stdin closes."""
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        }
        log, given = folder / f"{number}.log", folder / "job"
        given.write_bytes(pickle.dumps(job))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.bench.local_processes", str(given), str(number)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
            )
        return cls(number, process, log)

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "said nothing"

    def end(self) -> None:
        """End the process, if it still runs, and wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _wait(workers: Sequence[_Worker], deadline: float, cure: str) -> None:
    """Wait for all. A process that failed is reported before the processes that wait for it."""
    while True:
        codes = [worker.process.poll() for worker in workers]
        for worker, code in zip(workers, codes, strict=True):
            if code:
                raise DeviceError(
                    f"process {worker.number} of {len(workers)} ended with {code}: {worker.last_words()}"
                )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = ", ".join(str(w.number) for w, code in zip(workers, codes, strict=True) if code is None)
            raise DeviceError(f"process {late} of {len(workers)} did not end in time; {cure}")
        time.sleep(_POLL_SECONDS)


def _end_with_parent() -> None:
    """End this process when the process that started it has ended in any way."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock the end of the interpreter waits for
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(job: ProcessJob, process_id: int) -> None:
    _end_with_parent()
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{job.port}",
        num_processes=job.num_processes,
        process_id=process_id,
        initialization_timeout=_STARTUP_SECONDS,
    )
    text = _done(job)
    if process_id == 0:
        Path(job.result).write_text(text, encoding="utf-8")
    jax.distributed.shutdown()


def _done(job: ProcessJob) -> str:
    """The result of the task: a JSON document, or a hardware TOML."""
    if isinstance(job.task, CollectiveSweep):
        from meshwright.bench.sweep import sweep

        task = job.task
        return json.dumps(sweep(job.hardware, Mesh(task.mesh), None, task.sizes, task.max_seconds))
    from meshwright.bench import calibration

    sizes = job.task.sizes or calibration.Sizes()
    return catalog.dump_toml(calibration.measure(job.hardware, sizes).hardware)


if __name__ == "__main__":
    # Not this module under its own name, which pickle does not know as __main__.
    from meshwright.bench import local_processes

    local_processes._work(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))
