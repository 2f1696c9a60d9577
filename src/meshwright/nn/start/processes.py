"""One of several processes of a run: its number, the connection to the others, and the start of JAX.

MESHWRIGHT_COORDINATOR    host:port of process 0, for the check below and then for JAX
MESHWRIGHT_NUM_PROCESSES  otherwise SLURM_NTASKS
MESHWRIGHT_PROCESS_ID     otherwise SLURM_PROCID, or JOB_COMPLETION_INDEX of a Kubernetes job
MESHWRIGHT_JOIN_SECONDS   seconds to wait for the others

`mw launch` sets them. Without them JAX detects the processes, if a TPU pod, SLURM or Open MPI has started
several. Nothing here imports JAX before all processes have connected: if one is missing, JAX aborts the
others without naming it.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import meshwright
from meshwright.errors import DeviceError
from meshwright.platforms.platform import Platform

COORDINATOR, NUM_PROCESSES = "MESHWRIGHT_COORDINATOR", "MESHWRIGHT_NUM_PROCESSES"
PROCESS_ID, JOIN_SECONDS = "MESHWRIGHT_PROCESS_ID", "MESHWRIGHT_JOIN_SECONDS"
_DEFAULT_JOIN_SECONDS = 300.0
# A lost process is noticed within this time, unless a launcher ends the others first.
_HEARTBEAT_SECONDS = 30
_RETRY_SECONDS = 0.2
_SPEAK_SECONDS = 5.0


@dataclass(frozen=True)
class ProcessPlace:
    """This process among all: its number, how many there are, and the address of process 0."""

    process_id: int
    num_processes: int
    coordinator: str
    join_seconds: float = _DEFAULT_JOIN_SECONDS

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port)


def place(environment: Mapping[str, str] = os.environ) -> ProcessPlace | None:
    """This process's place by the environment; None if no coordinator is named.

    Raises DeviceError for missing or invalid values.
    """
    coordinator = environment.get(COORDINATOR)
    if coordinator is None:
        return None
    number = _integer(environment, PROCESS_ID, "SLURM_PROCID", "JOB_COMPLETION_INDEX")
    count = _integer(environment, NUM_PROCESSES, "SLURM_NTASKS")
    if not 0 <= number < count:
        raise DeviceError(f"{PROCESS_ID} = {number} is not below {NUM_PROCESSES} = {count}")
    if not coordinator.rpartition(":")[2].isdecimal() or ":" not in coordinator:
        raise DeviceError(f"{COORDINATOR} = {coordinator!r} is not host:port")
    return ProcessPlace(
        number, count, coordinator, float(environment.get(JOIN_SECONDS, _DEFAULT_JOIN_SECONDS))
    )


def num_processes(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes of this run; 1 if only JAX can detect it."""
    here = place(environment)
    return here.num_processes if here else 1


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of its run; False if only JAX can say."""
    here = place(environment)
    return here.process_id == 0 if here else not _detected_by_jax(environment)


def join(platform: Platform) -> None:
    """Joins this process with the others of its run, if any. platform: of the devices.

    Call it before any other function of JAX. Raises DeviceError naming the processes that did not connect in
    time, or that run other versions.
    """
    here = place()
    if here is None:
        if not _detected_by_jax(os.environ):
            return
    elif here.num_processes == 1:
        return
    else:
        libraries = {name: metadata.version(name) for name in ("jax", "jaxlib")}
        meet(here, {"meshwright": meshwright.__version__, **libraries})
    import jax

    for name, value in platform.jax_settings.items():
        jax.config.update(name, value)
    if here is None:
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
        return
    # On SLURM and under `mw launch local` a process has one GPU of its node; on Kubernetes all of them.
    local = os.environ.get("MESHWRIGHT_LOCAL_ID", os.environ.get("SLURM_LOCALID"))
    jax.distributed.initialize(
        coordinator_address=here.coordinator,
        num_processes=here.num_processes,
        process_id=here.process_id,
        local_device_ids=[int(local)] if platform.device_per_process and local is not None else None,
        cluster_detection_method="deactivate",
        initialization_timeout=int(here.join_seconds),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )


def meet(here: ProcessPlace, versions: Mapping[str, str]) -> None:
    """Return once all processes have reached process 0 with equal versions. Raises DeviceError otherwise."""
    deadline = time.monotonic() + here.join_seconds
    verdict = _receive(here, versions, deadline) if here.process_id == 0 else _reach(here, versions, deadline)
    if verdict:
        raise DeviceError(verdict)


def wait_for_all(where: str) -> None:
    """Return once all processes are at this point of the program. where: its name, equal in all processes.

    Over gloo a collective waits 30 minutes for the slowest process, but connecting, which the first
    collective of a group does, and reduce-scatters wait only 30 seconds, without an option (jaxlib 0.10).
    So processes wait for each other here after work of different duration.
    """
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _receive(here: ProcessPlace, versions: Mapping[str, str], deadline: float) -> str:
    """Process 0: accept a call from every other process, then send the verdict to all of them."""
    calls: dict[int, socket.socket] = {}
    verdict = ""
    try:
        with _listener(here) as listener:
            while len(calls) < here.num_processes - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    call, address = listener.accept()
                except TimeoutError:
                    verdict = verdict or _missing(here, calls)
                    break
                caller = _caller(call)
                if caller is None:  # a port scan, or a process that died during the call
                    call.close()
                    continue
                calls[caller["process"]] = call
                if not verdict and (verdict := _disagreement(caller, versions, address[0])):
                    # Processes that are about to call receive the verdict, too.
                    deadline = min(deadline, time.monotonic() + _SPEAK_SECONDS)
    finally:
        for call in calls.values():
            with call:
                call.sendall((json.dumps({"verdict": verdict}) + "\n").encode())
    return verdict


def _caller(call: socket.socket) -> dict[str, Any] | None:
    """A calling process's description of itself; None if it is not one of this run."""
    call.settimeout(_SPEAK_SECONDS)
    try:
        with call.makefile("r") as lines:
            caller = json.loads(lines.readline())
        is_ours = isinstance(caller, dict) and {"process", "host", "versions"} <= caller.keys()
        return caller if is_ours else None
    except (OSError, ValueError):
        return None


def _listener(here: ProcessPlace) -> socket.socket:
    port = here.address[1]
    try:
        return socket.create_server(("", port), backlog=here.num_processes)
    except OSError as error:
        raise DeviceError(
            f"process 0 cannot listen on port {port} ({os.strerror(error.errno or 0)});"
            " choose another with --port"
        ) from None


def _reach(here: ProcessPlace, versions: Mapping[str, str], deadline: float) -> str:
    """Another process: call process 0 until it answers."""
    caller = {"process": here.process_id, "host": socket.gethostname(), "versions": dict(versions)}
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(
                here.address, timeout=max(deadline - time.monotonic(), 0.1)
            ) as call:
                call.sendall((json.dumps(caller) + "\n").encode())
                # A little longer than process 0 itself waits, so that its verdict arrives.
                call.settimeout(max(deadline - time.monotonic(), 0) + 5)
                with call.makefile("r") as lines:
                    answer = lines.readline()
                if answer:
                    return json.loads(answer)["verdict"]
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_RETRY_SECONDS)
    return (
        f"process {here.process_id} of {here.num_processes} does not reach process 0 at {here.coordinator}"
        f" within {here.join_seconds:g} s ({reason})"
    )


def _missing(here: ProcessPlace, calls: Mapping[int, socket.socket]) -> str:
    missing = [str(number) for number in range(1, here.num_processes) if number not in calls]
    word = "process" if len(missing) == 1 else "processes"
    return (
        f"{word} {', '.join(missing)} of {here.num_processes} did not come to {here.coordinator} within"
        f" {here.join_seconds:g} s; see whether they run and reach that port"
    )


def _disagreement(caller: Mapping[str, Any], versions: Mapping[str, str], host: str) -> str:
    for name, version in versions.items():
        other = caller["versions"].get(name)
        if other != version:
            who = f"process {caller['process']} ({caller['host']}, {host})"
            return f"{who} has {name} {other}, process 0 {version}"
    return ""


def _integer(environment: Mapping[str, str], *names: str) -> int:
    for name in names:
        if name in environment:
            if not environment[name].isdecimal():
                raise DeviceError(f"{name} = {environment[name]!r} is not a number")
            return int(environment[name])
    raise DeviceError(f"{COORDINATOR} is set and none of {', '.join(names)}; mw launch sets both")


def _detected_by_jax(environment: Mapping[str, str]) -> bool:
    """Whether a TPU pod, SLURM or Open MPI has started several processes."""
    counts = (environment.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return "," in environment.get("TPU_WORKER_HOSTNAMES", "") or any(
        count.isdecimal() and int(count) > 1 for count in counts
    )
