"""Honest clients alone and beside hostile ones, in turns, against `mw serve` with a small checkpoint.

    python benchmarks/hostile_soak.py --minutes 60 -o benchmarks/results/hostile_soak.json

Two honest clients stream short answers, and a third asks /health. For half of each minute two hostile
clients send the requests of `tests/security/hostile.py`, changed valid requests, and half-sent ones. The
turns give both halves the same other load of the machine. Reports the 99th percentiles of honest first
tokens, of gaps between tokens and of /health, the server's memory, and whether its process is the same at
the end.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.security.hostile import COUNTS, GRAMMARS  # noqa: E402
from tests.serve.replicas.processes import save_checkpoint  # noqa: E402

NAME, WARM_UP_SECONDS = "tiny", 10.0
TURN_SECONDS = 15.0  # an even number of turns a minute
PR_SET_PDEATHSIG = 1  # of Linux
HOSTILE = "127.0.0.2"  # the address of the hostile clients
SECONDS = ("first_token", "gap", "health")


class Soak:
    """The measured seconds by phase and kind, from clients in threads."""

    def __init__(self, url: str) -> None:
        self.url, self.phase, self.ends = url, "alone", False
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.num_failed = 0

    def honest(self) -> None:
        """Stream one answer after another."""
        body = {"model": NAME, "prompt": "hello", "max_tokens": 32, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as http:
            while not self.ends:
                phase, last, kind = self.phase, time.perf_counter(), "first_token"
                try:
                    with http.stream("POST", self.url + "/v1/completions", json=body) as response:
                        response.raise_for_status()
                        for line in response.iter_lines():
                            if line.startswith("data: {"):
                                now = time.perf_counter()
                                self.seconds[phase, kind].append(now - last)
                                last, kind = now, "gap"
                except httpx.HTTPError:
                    self.num_failed += 1
                time.sleep(0.05)

    def health(self) -> None:
        with httpx.Client(timeout=60) as http:
            while not self.ends:
                phase, began = self.phase, time.perf_counter()
                http.get(self.url + "/health").raise_for_status()
                self.seconds[phase, "health"].append(time.perf_counter() - began)
                time.sleep(0.02)


def end_with_parent() -> None:
    """End this process when its parent ends in any way, killed as well."""
    assert ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0


def hostile(url: str, seed: int, is_alone: Any, ends: Any, statuses: Any) -> None:
    """A hostile client, as a process: as a thread of this one it would delay the honest clients itself."""
    end_with_parent()
    # Its own work is no part of the server's load, and takes what others leave of this machine.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    draw, requests = random.Random(seed), list((GRAMMARS | COUNTS).values())
    host, port = url.removeprefix("http://").split(":")
    # From an address of their own: limits of workers and connections are of an address.
    with httpx.Client(timeout=60, transport=httpx.HTTPTransport(local_address=HOSTILE)) as http:
        while not ends.is_set():
            if is_alone.is_set():
                time.sleep(0.1)
                continue
            path, body = draw.choice(requests)
            if draw.random() < 0.7:  # a request with a few bytes changed
                path, body = "/v1/completions", _changed(draw)
            with suppress(httpx.HTTPError, OSError):
                if draw.random() < 0.1:
                    with socket.create_connection((host, int(port)), 5, (HOSTILE, 0)) as half:
                        half.sendall(
                            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n{"
                        )
                        time.sleep(0.05)
                    statuses.put("half-sent")
                else:
                    statuses.put(str(http.post(url + path, content=body).status_code))


def _changed(draw: random.Random) -> bytes:
    body = {"model": NAME, "prompt": "x" * draw.randrange(1, 500), "max_tokens": draw.randrange(1, 64)}
    body |= {"n": draw.randrange(1, 9), "logprobs": draw.randrange(0, 21), "echo": draw.random() < 0.5}
    text = bytearray(json.dumps(body).encode())
    for _ in range(draw.randrange(3)):
        text[draw.randrange(len(text))] = draw.randrange(256)
    return bytes(text)


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def run(minutes: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / NAME, 4096)
        command = [sys.executable, "-m", "meshwright", "serve", "--checkpoint", f"{folder}/{NAME}"]
        command += ["--port", "0", "--slots", "8", "--context", "2048", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, preexec_fn=end_with_parent, **pipes) as process:
            assert process.stdout is not None
            try:
                soak = Soak(json.loads(process.stdout.readline())["address"])
                threading.Thread(target=lambda: process.stderr and process.stderr.read(), daemon=True).start()
                return _measured(soak, process.pid, minutes, lambda: process.poll() is None)
            finally:
                process.kill()


def _measured(soak: Soak, pid: int, minutes: float, runs: Callable[[], bool]) -> dict[str, object]:
    processes = multiprocessing.get_context("spawn")
    is_alone, ends, answers = processes.Event(), processes.Event(), processes.Queue()
    attackers = [
        processes.Process(target=hostile, args=(soak.url, seed, is_alone, ends, answers), daemon=True)
        for seed in (1, 2)
    ]
    is_alone.set()
    for attacker in attackers:
        attacker.start()
    threads = [threading.Thread(target=client) for client in (soak.honest, soak.honest, soak.health)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_SECONDS)
    soak.seconds.clear()
    memory, statuses, began = list[int](), Counter[str](), time.monotonic()
    while time.monotonic() - began < 60 * minutes and runs():
        (is_alone.clear if is_alone.is_set() else is_alone.set)()
        soak.phase = "alone" if is_alone.is_set() else "beside"
        time.sleep(TURN_SECONDS)
        memory.append(resident_bytes(pid))
        while not answers.empty():
            statuses[answers.get()] += 1
    ends.set()
    soak.ends, is_same = True, runs()
    for thread in threads:
        thread.join()
    for attacker in attackers:
        attacker.join(60)
    p99 = {
        f"{kind}_p99_seconds": {
            phase: round(quantiles(soak.seconds[phase, kind], n=100)[98], 4) for phase in ("alone", "beside")
        }
        for kind in SECONDS
    }
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "same_process": is_same,
        "honest_failures": soak.num_failed,
        "honest_answers": len(soak.seconds["alone", "first_token"] + soak.seconds["beside", "first_token"]),
        "hostile_answers": dict(sorted(statuses.items())),
        **p99,
        "health_most_seconds": round(max(soak.seconds["beside", "health"]), 4),
        "resident_bytes": {
            "after_first_turns": memory[min(3, len(memory) - 1)],
            "most": max(memory),
            "last": memory[-1],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    figures = run(given.minutes)
    document = {
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    } | figures
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if given.output is not None:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
