"""Several JAX processes on this machine, which reach each other over gloo as hosts do over a network."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import DeviceError

_POLL_SECONDS = 0.1
_STARTUP_SECONDS = 60  # for all processes to meet; beyond the budget of the measurement itself
_END_SECONDS = 5


@dataclass(frozen=True)
class Job:
    """A sweep (see sweep.py) as one process of several gets it."""

    hardware: str
    mesh: Mapping[str, int]
    sizes: Sequence[int]
    max_seconds: float
    num_processes: int
    port: int
    result: str  # the path that process 0 writes
    process_id: int = 0


def sweep_in_processes(
    spec: str, mesh: Mapping[str, int], sizes: Sequence[int], max_seconds: float, num_processes: int
) -> dict[str, Any]:
    """The document of `sweep`, measured over processes that each hold an equal part of cpu:N.

    Raises DeviceError, naming the process and its last words, if one fails or time runs out. No
    process outlives the call, nor the caller, whatever ends it.
    """
    num_devices = _num_devices(spec, num_processes)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        job = Job(spec, dict(mesh), list(sizes), max_seconds, num_processes, _free_port(), str(result))
        workers = [_Worker.start(job, number, num_devices, Path(folder)) for number in range(num_processes)]
        try:
            _wait(workers, time.monotonic() + 2 * max_seconds + _STARTUP_SECONDS)
        finally:
            for worker in workers:
                worker.end()
        return json.loads(result.read_text(encoding="utf-8"))


def _num_devices(spec: str, num_processes: int) -> int:
    """Devices of each process."""
    from meshwright.hardware import catalog

    hardware = catalog.load(spec)
    total = hardware.num_chips
    if hardware.chip.kind != "cpu":
        raise DeviceError(
            f"{spec}: several processes on this machine are a way to measure cpu:{num_processes}"
        )
    if num_processes < 2 or total % num_processes:
        raise DeviceError(
            f"{num_processes} processes cannot share the {total} devices of {spec} evenly; "
            f"write cpu:{max(2, num_processes)}"
        )
    return total // num_processes


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass(frozen=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, job: Job, number: int, num_devices: int, folder: Path) -> "_Worker":
        """The process, which ends when the pipe to its stdin closes."""
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        }
        document = json.dumps(asdict(job) | {"process_id": number})
        log = folder / f"{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.bench.processes", document],
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
        """Ends the process, if it still runs, and waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _wait(workers: Sequence[_Worker], deadline: float) -> None:
    """Returns when all are done. One that failed is named before those that only wait for it."""
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
            raise DeviceError(
                f"process {late} of {len(workers)} did not end in time; give --max-seconds more"
            )
        time.sleep(_POLL_SECONDS)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that ended."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock the end of the interpreter waits for
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(job: Job) -> None:
    _end_with_parent()
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{job.port}",
        num_processes=job.num_processes,
        process_id=job.process_id,
        initialization_timeout=_STARTUP_SECONDS,
    )
    from meshwright.bench.sweep import sweep
    from meshwright.notation.mesh import Mesh

    document = sweep(job.hardware, Mesh(job.mesh), None, job.sizes, job.max_seconds)
    if job.process_id == 0:
        Path(job.result).write_text(json.dumps(document), encoding="utf-8")
    jax.distributed.shutdown()


if __name__ == "__main__":
    _work(Job(**json.loads(sys.argv[1])))
