"""Delay of /health and memory of a server under each hostile request of `tests/security/hostile.py`.

    python benchmarks/hostile_requests.py --generated 10000 --apart -o FILE

A server with two workers runs a model worked by hand. Two processes ask /health without pause, at the
server's port and at its port for probes. Hostile requests with names are sent first, then generated requests:
valid ones with a few changes, as `make fuzz` makes them.

With --apart, a process on each core wakes every 5 ms and notes how late it wakes. It has the server's
priority and does nothing else, so it is late only if other processes hold the core. Answers of /health over
100 ms are counted with such pauses and without them.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.security.hostile import COUNTS, GRAMMARS, VALUES  # noqa: E402
from tests.security.server import Served, served  # noqa: E402

PROBE_SECONDS = 0.01
WAKE_SECONDS = 0.005
LATE_SECONDS = 0.02  # of a core that runs other processes in between
MOST_SECONDS = 0.1  # the bound of /health
IDLE_SECONDS = 2.0


@dataclass
class Probe:
    """Times at which a separate process asked /health and had its answer.

    In the process that sends requests, the probe would wait for the interpreter and not for the server.
    """

    answers: list[tuple[float, float]] = field(default_factory=list)

    def within(self, began: float, ended: float) -> list[float]:
        """Seconds of each answer that was pending between two times."""
        seconds = [last - first for first, last in self.answers if last >= began and first <= ended]
        assert seconds, "/health was not asked meanwhile"
        return seconds

    def figures(self, began: float, ended: float, pauses: list[tuple[float, float]]) -> dict[str, object]:
        """pauses: of the machine, whose time counts separately."""
        seconds = self.within(began, ended)
        own = [
            last - first - sum(max(0.0, min(last, end) - max(first, start)) for start, end in pauses)
            for first, last in self.answers
            if last >= began and first <= ended
        ]
        return {
            "answers": len(seconds),
            "p99_seconds": round(quantiles(seconds, n=100)[98], 4),
            "most_seconds": round(max(seconds), 4),
            "over_100_ms": sum(each > MOST_SECONDS for each in seconds),
            "most_seconds_without_pauses": round(max(own), 4),
            "over_100_ms_without_pauses": sum(each > MOST_SECONDS for each in own),
        }


@contextmanager
def probed(url: str) -> Iterator[Probe]:
    """A probe of a server while the block runs; its answers are known at the end."""
    processes, probe = multiprocessing.get_context("spawn"), Probe()
    near, far = processes.Pipe()
    process = processes.Process(target=_ask, args=(url + "/health", far), daemon=True)
    process.start()
    near.recv()
    try:
        yield probe
    finally:
        near.send(None)
        probe.answers = near.recv()
        process.join()


def _ask(url: str, connection: Connection) -> None:
    answers = list[tuple[float, float]]()
    gc.disable()
    with httpx.Client(timeout=60) as http:
        http.get(url).raise_for_status()
        connection.send(None)
        while not connection.poll(PROBE_SECONDS):
            began = time.perf_counter()
            http.get(url).raise_for_status()
            answers.append((began, time.perf_counter()))
    connection.send(answers)


@contextmanager
def watched(cores: list[int]) -> Iterator[list[tuple[float, float]]]:
    """Pauses of any of these cores, as (began, ended); the list is filled when the block ends."""
    processes, pauses = multiprocessing.get_context("spawn"), list[tuple[float, float]]()
    pipes = [processes.Pipe() for _ in cores]
    for core, (near, far) in zip(cores, pipes, strict=True):
        processes.Process(target=_watch, args=(core, far), daemon=True).start()
        near.recv()
    try:
        yield pauses
    finally:
        of_cores = []
        for near, _ in pipes:
            near.send(None)
            of_cores += near.recv()
        pauses += merged(of_cores)


def _watch(core: int, connection: Connection) -> None:
    os.sched_setaffinity(0, [core])
    gc.disable()
    connection.send(None)
    pauses, due = list[tuple[float, float]](), time.perf_counter()
    while not connection.poll():
        due = time.perf_counter() + WAKE_SECONDS
        time.sleep(WAKE_SECONDS)
        woken = time.perf_counter()
        if woken - due > LATE_SECONDS:
            pauses.append((due, woken))
    connection.send(pauses)


def merged(pauses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pauses without overlaps, in order."""
    separate = list[tuple[float, float]]()
    for began, ended in sorted(pauses):
        if separate and began <= separate[-1][1]:
            separate[-1] = separate[-1][0], max(ended, separate[-1][1])
        else:
            separate.append((began, ended))
    return separate


@dataclass
class Sent:
    """A request, its status, the times at which it was sent and answered, and the server's memory then."""

    text: str
    num_bytes: int
    status: int
    began: float
    ended: float
    resident_bytes: int


def send(server: Served, http: httpx.Client, name: str, path: str, body: bytes) -> Sent:
    began = time.perf_counter()
    status = http.post(path, content=body).status_code
    ended = time.perf_counter()
    return Sent(name, len(body), status, began, ended, server.resident_bytes)


def rows(sent: list[Sent], before: int, main: Probe, apart: Probe) -> list[dict[str, object]]:
    """The figures of each request. before: the server's memory at the start."""
    return [
        {
            "request": each.text,
            "body_bytes": each.num_bytes,
            "status": each.status,
            "answer_seconds": round(each.ended - each.began, 3),
            "health_seconds": round(max(main.within(each.began, each.ended + 4 * PROBE_SECONDS)), 4),
            "health_port_seconds": round(max(apart.within(each.began, each.ended + 4 * PROBE_SECONDS)), 4),
            "more_memory_bytes": each.resident_bytes - previous,
        }
        for each, previous in zip(sent, [before, *(each.resident_bytes for each in sent)], strict=False)
    ]


def send_generated(server: Served, http: httpx.Client, number: int, seed: int) -> list[Sent]:
    """Send generated requests, one after another."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from tests.security.test_http_fuzz import REQUESTS

    sent = list[Sent]()

    @seeded(seed)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(request=REQUESTS)
    def send_one(request: tuple[str, str]) -> None:
        path, body = request
        sent.append(send(server, http, f"{path} {body[:500]}", path, body.encode("utf-8", "surrogatepass")))

    send_one()
    return sent


def generated_figures(
    sent: list[Sent], before: int, main: Probe, apart: Probe, pauses: list[tuple[float, float]]
) -> dict[str, object]:
    began, ended = sent[0].began, sent[-1].ended
    statuses = Counter(each.status for each in sent)
    slowest = sorted((last - first, first) for first, last in main.answers if began <= first <= ended)[-3:]
    return {
        "requests": len(sent),
        "answers": {str(status): count for status, count in sorted(statuses.items())},
        "health": main.figures(began, ended, pauses),
        "health_port": apart.figures(began, ended, pauses),
        "slowest_during": [
            {
                "health_seconds": round(seconds, 4),
                "pauses": [
                    [round(first - at, 4), round(last - at, 4)]
                    for first, last in pauses
                    if first <= at + seconds and at <= last
                ],
                "requests": [each.text for each in sent if each.began <= at + seconds and at <= each.ended],
            }
            for seconds, at in reversed(slowest)
        ],
        "most_more_memory_bytes": max(each.resident_bytes for each in sent) - before,
        "kept_memory_bytes": sent[-1].resident_bytes - before,
    }


@contextmanager
def server_apart() -> Iterator[Served]:
    """A server on the last core and its clients on the others, with priority over other processes."""
    cores = sorted(os.sched_getaffinity(0))
    with suppress(PermissionError):  # only root may raise the priority
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    # Linux compares priorities only within a session, and sessions with one another by this file.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15", encoding="ascii")
    os.sched_setaffinity(0, cores[-1:])  # processes inherit it
    with served() as server:
        os.sched_setaffinity(0, cores[:-1] or cores)
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--generated", type=int, default=0, help="number of generated requests")
    parser.add_argument("--seed", type=int, default=0, help="of the generated requests")
    parser.add_argument("--apart", action="store_true", help="the server has a core of its own")
    arguments = parser.parse_args()
    output = arguments.output
    hostile, cores = GRAMMARS | VALUES | COUNTS, sorted(os.sched_getaffinity(0))
    with (server_apart if arguments.apart else served)() as server:
        server.complete()
        before = server.resident_bytes
        with (
            watched(cores if arguments.apart else []) as pauses,
            probed(server.url) as main_port,
            probed(server.probes_url) as health_port,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            began = time.perf_counter()
            time.sleep(IDLE_SECONDS)
            idle_ended = time.perf_counter()
            named = []
            for name, request in hostile.items():
                named.append(send(server, http, name, *request))
                time.sleep(5 * PROBE_SECONDS)  # so that /health is asked during quick requests too
            kept = server.resident_bytes
            generated = (
                send_generated(server, http, arguments.generated, arguments.seed)
                if arguments.generated
                else []
            )
        is_same = server.process.poll() is None
    ports = main_port, health_port
    document = {
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "server_has_its_own_core": arguments.apart,
        "same_process": is_same,
        "idle_health": main_port.figures(began, idle_ended, pauses),
        "pauses": {
            "number": len(pauses),
            "most_seconds": round(max((last - first for first, last in pauses), default=0), 4),
        },
        "kept_memory_bytes": kept - before,
        "requests": rows(named, before, *ports),
        "generated": generated_figures(generated, kept, *ports, pauses) if generated else None,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
