"""A command run as several processes of this machine, which end together."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshwright.errors import DeviceError
from meshwright.nn.start.processes import COORDINATOR, JOIN_SECONDS, NUM_PROCESSES, PROCESS_ID, free_port

_POLL_SECONDS = 0.05
# Time for processes to save and end after SIGTERM, and to end after the failure of a peer.
_GRACE_SECONDS, _LAST_SECONDS = 30.0, 2.0
# A process that is stopped (SIGSTOP) counts as failed after the first time. If another process has failed,
# the second, shorter time holds: that process may have missed the heartbeats of the stopped one.
_STOPPED_SECONDS, _MISSED_SECONDS = 30.0, 5.0
_DONE, _BAD_INPUT, _INTERRUPTED = 0, 2, 130
# Signals from outside: the last output of the process does not explain them.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


def launch_local(
    command: Sequence[str],
    num_processes: int,
    *,
    restarts: int = 0,
    port: int | None = None,
    join_seconds: float = 300.0,
    say: Callable[[str], None],
) -> int:
    """The exit code of `command`, run as processes that find each other through the environment.

    Process 0 has the stdout and stderr of this process; the last line of stderr of another process is part of
    the error if it fails. If a process fails all are ended. restarts: the number of times that they are then
    started again with --resume, except after bad input (exit code 2). SIGINT and SIGTERM are passed to all.
    say: receives messages for the user. Raises DeviceError with the process for a failure without a restart.
    """
    for attempt in range(restarts + 1):
        again = attempt > 0 and "--resume" not in command
        started = [*command, *(["--resume"] if again else [])]
        address = f"127.0.0.1:{port or free_port()}"
        with (
            tempfile.TemporaryDirectory() as folder,
            _Group(started, num_processes, address, join_seconds, Path(folder)) as group,
        ):
            failure = group.wait()
        if failure is None or failure.code in (_DONE, _INTERRUPTED):
            return _DONE if failure is None else failure.code
        if failure.code == _BAD_INPUT and failure.number == 0:
            return _BAD_INPUT  # its message is on stderr
        if attempt == restarts or failure.code == _BAD_INPUT:
            raise DeviceError(f"{failure}; the others were ended")
        say(f"{failure}; the others were ended; starting again, {attempt + 1} of {restarts}")
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True)
class Failure:
    """A process that failed.

    last_words: its last line of stderr if it ended by itself. stopped_seconds: the longest time it may be
    stopped, if it was stopped longer.
    """

    number: int
    num_processes: int
    code: int
    last_words: str
    stopped_seconds: float = 0.0

    def __str__(self) -> str:
        how = f"ended with {self.code}"
        if self.code == -signal.SIGSTOP:
            how = f"was stopped, by SIGSTOP or the like, for over {self.stopped_seconds:g} s"
        elif self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        words = f": {self.last_words}" if self.last_words else ""
        return f"process {self.number} of {self.num_processes} {how}{words}"


class _Group:
    """The processes of one attempt; none outlives the block."""

    def __init__(
        self, command: Sequence[str], count: int, address: str, join_seconds: float, folder: Path
    ) -> None:
        self._logs = [folder / f"{number}.log" for number in range(count)]
        self._stopped = threading.Event()
        self._stopped_since: dict[int, float] = {}
        self._processes = [
            self._start(command, number, count, address, join_seconds) for number in range(count)
        ]

    def _start(
        self, command: Sequence[str], number: int, count: int, address: str, join_seconds: float
    ) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            COORDINATOR: address,
            NUM_PROCESSES: str(count),
            PROCESS_ID: str(number),
            JOIN_SECONDS: str(join_seconds),
            "MESHWRIGHT_LOCAL_ID": str(number),
        }
        mine = [sys.executable, "-m", "meshwright.cli.main"] if command[0] == "mw" else [command[0]]
        with self._logs[number].open("wb") as log:
            # In new sessions, so that a Ctrl-C at the terminal reaches them once, through this process.
            return subprocess.Popen(
                [*mine, *command[1:]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if number == 0 else log,
                stderr=None if number == 0 else log,
                start_new_session=True,
            )

    def __enter__(self) -> "_Group":
        return self

    def __exit__(self, *_: object) -> None:
        self._end(0.0)

    def wait(self) -> Failure | None:
        """Wait for all processes, or end them after the first failure, which is returned."""
        with _at_signals(self._signal):
            while True:
                codes = [process.poll() for process in self._processes]
                failed = [number for number, code in enumerate(codes) if code not in (None, _DONE)]
                most = _MISSED_SECONDS if failed else _STOPPED_SECONDS
                if (number := self._stopped_for(most)) is not None:
                    self._end(0.0)
                    return Failure(number, len(codes), -signal.SIGSTOP, "", most)
                if failed:
                    first = min(failed, key=lambda number: (_rank(codes[number]), number))
                    self._end(_GRACE_SECONDS if self._stopped.is_set() else _LAST_SECONDS)
                    if codes[first] == _BAD_INPUT == self._processes[0].returncode:
                        first = 0  # all have the same fault, and the message of process 0 is on stderr
                    code = self._processes[first].returncode
                    words = "" if code in _FROM_OUTSIDE else self._last_words(first)
                    return Failure(first, len(codes), code, words)
                if all(code == _DONE for code in codes):
                    return None
                time.sleep(_POLL_SECONDS)

    def _stopped_for(self, seconds: float) -> int | None:
        """The number of a process that has been stopped for longer than `seconds`; None without one."""
        if not hasattr(os, "waitid"):  # Python for macOS before 3.13
            return None
        now = time.monotonic()
        for number, process in enumerate(self._processes):
            is_stopped = False
            if process.poll() is None:
                # WNOWAIT leaves the state as it is, so that `poll` still sees it.
                state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
                is_stopped = state is not None and state.si_code == os.CLD_STOPPED
            if not is_stopped:
                self._stopped_since.pop(number, None)
            elif now - self._stopped_since.setdefault(number, now) > seconds:
                return number
        return None

    def _signal(self) -> None:
        self._stopped.set()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _end(self, seconds: float) -> None:
        """Wait for `seconds`, then kill the processes that still run."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _last_words(self, number: int) -> str:
        if number == 0:
            return ""
        lines = self._logs[number].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        ours = [line for line in lines if line.startswith("mw: ")]
        return (ours or lines or [""])[-1].removeprefix("mw: ")


def _rank(code: int | None) -> int:
    """The order of likely causes: killed from outside, crashed, ended (perhaps after the loss of a peer)."""
    assert code is not None
    return 0 if code in _FROM_OUTSIDE else 1 if code < 0 else 2


@contextmanager
def _at_signals(action: Callable[[], None]) -> Iterator[None]:
    """At SIGINT and SIGTERM, run `action` instead of ending this process."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        action()

    previous = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
