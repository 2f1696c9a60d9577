"""Processes learn their place and meet before JAX starts; whoever is missing or differs is named."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.errors import DeviceError
from meshwright.nn.start.processes import ProcessPlace, free_port, meet, place

VERSIONS = {"jax": "0.10.2"}


def met(places: list[ProcessPlace], versions: dict[int, dict[str, str]] | None = None) -> list[str]:
    """What each of the processes, played by threads, is told: nothing where all is well."""

    def one(here: ProcessPlace) -> str:
        try:
            meet(here, (versions or {}).get(here.process_id, VERSIONS))
        except DeviceError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, places))


def places(count: int, seconds: float = 20.0) -> list[ProcessPlace]:
    address = f"127.0.0.1:{free_port()}"
    return [ProcessPlace(number, count, address, seconds) for number in range(count)]


def test_processes_that_are_all_there_meet():
    assert met(places(5)) == [""] * 5


def test_missing_processes_are_named_to_all_that_came():
    some = [here for here in places(5, 0.5) if here.process_id not in (2, 3)]
    address = some[0].coordinator
    missing = f"processes 2, 3 of 5 did not come to {address} within 0.5 s"
    assert met(some) == [f"{missing}; see whether they run and reach that port"] * 3


def test_a_missing_coordinator_is_named():
    here = places(2, 0.3)[1]
    (said,) = met([here])
    assert said.startswith(f"process 1 of 2 does not reach process 0 at {here.coordinator} within 0.3 s (")


def test_another_version_is_named():
    host = socket.gethostname()
    said = met(places(3), {2: {"jax": "0.9.0"}})
    assert set(said) <= {"", f"process 2 ({host}, 127.0.0.1) has jax 0.9.0, process 0 0.10.2"} and said[0]


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert met([ProcessPlace(0, 2, f"127.0.0.1:{port}", 1.0)]) == [
            f"process 0 cannot listen on port {port} (Address already in use); choose another with --port"
        ]


def test_noise_on_the_port_is_not_a_process():
    first, second = places(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(meet, first, VERSIONS)
        while True:
            try:
                with socket.create_connection(first.address) as scan:
                    scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
            except ConnectionRefusedError:
                continue
        meet(second, VERSIONS)
        waiting.result()


@pytest.mark.parametrize(
    "environment",
    [
        {"MESHWRIGHT_NUM_PROCESSES": "8", "MESHWRIGHT_PROCESS_ID": "3"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "3"},
        {"MESHWRIGHT_NUM_PROCESSES": "8", "JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_a_process_learns_its_place(environment: dict[str, str]):
    found = place(environment | {"MESHWRIGHT_COORDINATOR": "node1:8476", "MESHWRIGHT_JOIN_SECONDS": "60"})
    assert found == ProcessPlace(3, 8, "node1:8476", 60.0)
    assert found is not None and found.address == ("node1", 8476)
    assert place({}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "MESHWRIGHT_COORDINATOR is set and none of MESHWRIGHT_PROCESS_ID, SLURM_PROCID"),
        ({"SLURM_PROCID": "8", "SLURM_NTASKS": "8"}, "MESHWRIGHT_PROCESS_ID = 8 is not below"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "8"}, "SLURM_PROCID = 'x' is not a number"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "MESHWRIGHT_COORDINATOR": "node1"},
            "MESHWRIGHT_COORDINATOR = 'node1' is not host:port",
        ),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(DeviceError, match=message):
        place({"MESHWRIGHT_COORDINATOR": "node1:8476"} | environment)
