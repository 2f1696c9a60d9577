"""mw doctor: checks of this installation, each with the command that fixes it."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import typer

from meshwright import __version__
from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, progress, show
from meshwright.cli.extras import EXTRAS
from meshwright.files import cache_folder

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_PROBLEM = 1
_OLDEST_PYTHON = (3, 11)
_LEAST_FREE_BYTES = 2_000_000_000
_TIMEOUT_SECONDS = 120
# libtpu holds this file for the one process that may use the chips.
_TPU_LOCK = Path("/tmp/libtpu_lockfile")
_ON_CPU = "JAX_PLATFORMS=cpu mw doctor"
_ASK_NATIVE = """
from meshwright.native.kernels import instructions, why_not_built
print(why_not_built() or "", ", ".join(instructions()), sep="|")
"""
_ASK_JAX = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind, sep='|')"


@dataclass(frozen=True)
class Check:
    """One check and its result. mend: the command that fixes a problem; None without one."""

    name: str
    state: str
    ok: bool
    mend: str | None = None

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "found": self.state, "ok": self.ok, "mend": self.mend}


@command(app)
def doctor(as_json: bool = JSON) -> None:
    """Check Python, packages, devices, extras and locks, and say how to fix each problem.

    Exits 1 if there is a problem. A missing extra is not a problem.

    \b
    mw doctor
    """
    with progress() as report:
        report("asking JAX for its devices", None)
        checks = list(check_all())
    if as_json:
        emit({"ok": all(check.ok for check in checks), "checks": [check.to_dict() for check in checks]})
    else:
        show(_table(checks))
    if not all(check.ok for check in checks):
        raise typer.Exit(_PROBLEM)


def check_all() -> Iterator[Check]:
    """All checks, the fast ones first."""
    yield Check("meshwright", __version__, ok=True)
    yield _python()
    yield from check_packages()
    yield check_devices()
    yield check_native()
    yield from _extras()
    yield from _locks()
    yield _disk()


def _python() -> Check:
    ok = sys.version_info >= _OLDEST_PYTHON
    mend = None if ok else "install Python 3.11 or newer, then: make demo PYTHON=python3.11"
    return Check("python", f"{platform.python_version()} at {sys.executable}", ok, mend)


def check_packages() -> Iterator[Check]:
    """Whether each core dependency is installed; the installer has checked versions."""
    for requirement in requires("meshwright") or []:
        if "extra ==" in requirement:
            continue
        name = requirement.partition(">")[0].partition("=")[0].partition("<")[0].strip()
        try:
            yield Check(name, version(name), ok=True)
        except PackageNotFoundError:
            yield Check(name, "not installed", ok=False, mend=f"pip install '{requirement}'")


def check_devices() -> Check:
    """The devices that JAX sees, from another process, which a broken driver may end or block."""
    if find_spec("jax") is None:
        return Check("devices", "not asked: JAX is not installed, and planning needs none", ok=True)
    answer, failure = _asked(_ASK_JAX)
    if failure is not None:
        return Check("devices", failure, ok=False, mend=_ON_CPU)
    count, kind, name = answer.split("|")
    cores = f", {os.cpu_count()} cores" if kind == "cpu" else ""
    return Check("devices", f"{count} {kind} ({name.strip()}){cores}", ok=True)


def check_native() -> Check:
    """Whether CPUs generate with the C++ extension, which is built if needed, or the reason why not."""
    if find_spec("jax") is None:
        return Check("on CPUs", "not asked: JAX is not installed", ok=True)
    answer, failure = _asked(_ASK_NATIVE)
    if failure is not None:
        problem = f"the native extension ends the process: {failure}"
        return Check("on CPUs", problem, ok=False, mend=f"rm -r {cache_folder() / 'native'}")
    reason, _, instructions = answer.strip().rpartition("|")
    state = f"native extension, in C++, with {instructions}"
    if reason:
        state = f"XLA alone; no native extension: {reason}"
    return Check("on CPUs", state, ok=True)


def _asked(code: str) -> tuple[str, str | None]:
    """The output of another process that runs `code`, and its failure or None."""
    command = [sys.executable, "-c", code]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_TIMEOUT_SECONDS} s"
    if asked.returncode:
        return "", (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    return asked.stdout, None


def _extras() -> Iterator[Check]:
    for extra in EXTRAS:
        installed = extra.is_installed
        state = "installed" if installed else f"not installed; only for {extra.purpose}"
        yield Check(f"[{extra.name}]", state, ok=True, mend=None if installed else extra.install)


def _locks() -> Iterator[Check]:
    """The TPU's lock: libtpu locks the file while it runs, and does not remove it if it is killed."""
    if not _TPU_LOCK.exists():
        yield Check("locks", "none", ok=True)
    elif holder := holder_of(_TPU_LOCK):
        yield Check("locks", f"{_TPU_LOCK}: {holder} uses the TPU's driver; wait for it", ok=True)
    else:
        problem = f"{_TPU_LOCK} was left by a process that is gone"
        yield Check("locks", problem, ok=False, mend=f"rm {_TPU_LOCK}")


def holder_of(lock: Path) -> str:
    """The live process that has the file open or locked, such as "process 17"; "" if there is none."""
    import fcntl  # only on Unix, as libtpu

    target = lock.resolve()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if _opens(folder, target):
            return f"process {folder.parent.name}"
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return "a process of another user"
    return ""


def _opens(descriptors: Path, target: Path) -> bool:
    """Whether `target` is an open file of a process; False without permission to see them."""
    try:
        return any(file.resolve() == target for file in descriptors.iterdir())
    except OSError:
        return False


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    ok = free >= _LEAST_FREE_BYTES
    return Check("disk", f"{free / 1e9:.1f} GB free here", ok, None if ok else "mw train --run ELSEWHERE")


def _table(checks: list[Check]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("", "found", "", "mend with", box=SIMPLE_HEAD)
    for check in checks:
        verdict = Text("ok", style="green") if check.ok else Text("wrong", style="red")
        table.add_row(Text(check.name), Text(check.state), verdict, Text(check.mend or ""))
    return table
