"""The cache of compiled programs, by content, and the lock of libtpu, which runs once at a time."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import meshwright
from meshwright.audit.compile.target import Target
from meshwright.errors import AuditError
from meshwright.files import cache_folder
from meshwright.plan_file import Plan

# Compiler flags that a user may have set; they change the program.
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Compiled programs kept; a program is about a megabyte.
_KEPT = 200
_POLL_SECONDS = 0.2


def content_key(plan: Plan, target: Target, environment: Mapping[str, str] = os.environ) -> str:
    """A hash of everything that decides the compiled program: plan, target, versions, flags and our source.

    The plan's own figures (`planned`, `tuned`) have no influence.
    """
    content = {
        "plan": asdict(replace(plan, planned={}, tuned=())),
        "target": asdict(target),
        "versions": dict(target.versions),
        "flags": {name: environment.get(name, "") for name in _FLAG_VARIABLES},
    }
    return source_key(content)


def source_key(content: Mapping[str, object]) -> str:
    """A hash of some content and of our source."""
    return hashlib.sha256(
        json.dumps({**content, "source": _source_hash()}, sort_keys=True).encode()
    ).hexdigest()


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    root = Path(meshwright.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def fetch(key: str) -> Path | None:
    """The folder with the files stored under `key`; None if there is none."""
    folder = cache_folder() / "programs" / key
    if not folder.is_dir():
        return None
    folder.touch()
    return folder


def store(key: str, files: Mapping[str, str]) -> None:
    """Write `files` (name: text) under `key`, completely or not at all, and drop the least used others.

    Raises AuditError if the cache cannot be written.
    """
    programs = cache_folder() / "programs"
    partial = programs / f".{key}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AuditError(
            f"{partial}: cannot be written: {error.strerror}; set XDG_CACHE_HOME, or pass --no-cache"
        ) from error
    try:
        partial.rename(programs / key)
    except OSError:  # it exists: compiled again without the cache, or by another process
        shutil.rmtree(partial)
    kept = sorted(programs.glob("[!.]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in kept[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def libtpu_lock(waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of libtpu, which one process may use. Calls `waiting` once if it has to wait."""
    path = Path(tempfile.gettempdir()) / f"meshwright-libtpu-{os.getuid()}.lock"
    with path.open("a") as file:
        if not _locked(file.fileno()):
            waiting()
            while not _locked(file.fileno()):
                time.sleep(_POLL_SECONDS)
        yield  # the lock goes with the file


def _locked(descriptor: int) -> bool:
    import fcntl  # systems with libtpu have it, and other targets do not need it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
