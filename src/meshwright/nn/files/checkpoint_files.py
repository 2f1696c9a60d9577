"""Checkpoints as folders of files: listing, completeness and damage. No JAX.

    checkpoints/<step>/state/         the arrays, as Orbax writes them
    checkpoints/<step>/position.json  the position in the data, and other facts that a run resumes from
    checkpoints/<step>/SHA256SUMS     every file above, as sha256sum writes it; the last line is its own
    checkpoints/.saving/<step>/       the same while it is being written

A checkpoint is complete once its folder is renamed into place. So a process killed at any moment leaves whole
checkpoints and, at most, a folder in .saving.
"""

import hashlib
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.files import file_sha256, parse_json, read_text

CHECKPOINTS = "checkpoints"
SAVING = ".saving"
POSITION = "position.json"
STATE = "state"
SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
# The list of files in a checkpoint of 0.1.0, which has no SHA256SUMS.
_LIST_OF_0_1_0 = "files.json"
# Hashing releases the interpreter's lock, so files are read in parallel.
_HASHING_THREADS = 8


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in `directory`, in order, sound or not."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def seal(path: Path) -> None:
    """Writes the checksums of all files below `path`; everything is on the disk afterwards."""
    names = _files(path)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        sums = dict(zip(names, pool.map(lambda name: _synced_sha256(path / name), names), strict=True))
    with (path / SUMS).open("wb") as file:
        file.write(_rendered(sums))
        file.flush()
        os.fsync(file.fileno())


def put_in_place(path: Path, directory: Path) -> None:
    """Makes the sealed folder `path` a checkpoint of `directory`, instead of one with its name."""
    final = directory / path.name
    if final.exists():
        shutil.rmtree(final)
    path.rename(final)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path) -> str | None:
    """The damage to the checkpoint in folder `path`; None if every file matches its checksum.

    Raises CheckpointError if the checkpoint has the format of 0.1.0.
    """
    try:
        content = (path / SUMS).read_bytes()
    except OSError:
        if (path / _LIST_OF_0_1_0).is_file():
            raise CheckpointError(
                f"checkpoint {path}: has the format of meshwright 0.1.0, which this version does not read; "
                "continue this run with meshwright 0.1.0, or train again into another folder"
            ) from None
        return f"lacks {SUMS}"
    sums = _parsed(content)
    if sums is None:
        return f"{SUMS} differs from the written bytes"
    if missing := [name for name in sums if not (path / name).is_file()]:
        return f"lacks {missing[0]}"
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = pool.map(lambda name: file_sha256(path / name), sums)
        wrong = [name for name, digest in zip(sums, digests, strict=True) if digest != sums[name]]
    return f"{wrong[0]} does not match its checksum" if wrong else None


def newest_sound(directory: Path) -> tuple[int, list[str]]:
    """(step, damaged): the last sound checkpoint, and a sentence on each later one that is not.

    Raises CheckpointError if there is no checkpoint, or none is sound.
    """
    damaged: list[str] = []
    for step in reversed(checkpoint_steps(directory)):
        problem = damage(directory / str(step))
        if problem is None:
            return step, damaged
        damaged.append(f"checkpoint {directory / str(step)}: is damaged: {problem}")
    if damaged:
        raise CheckpointError(f"{'; '.join(damaged)}; there is no sound one, so train again")
    raise CheckpointError(f"checkpoint: {directory} holds none; train first, or without --resume")


def check_sound(directory: Path, step: int) -> None:
    """Raises CheckpointError if `directory` has no checkpoint `step` or it is damaged."""
    saved = checkpoint_steps(directory)
    if step not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"checkpoint: {directory} holds no step {step}; there: {known}")
    if problem := damage(directory / str(step)):
        raise CheckpointError(f"checkpoint {directory / str(step)}: is damaged: {problem}")


def read_position(directory: Path, step: int) -> dict[str, Any]:
    """A checkpoint's facts other than arrays. CheckpointError if they cannot be read."""
    path = directory / str(step) / POSITION
    try:
        return parse_json(read_text(path, CheckpointError))
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {path.parent}: is damaged: {POSITION} ({error})") from None


def set_aside(directory: Path, step: int) -> None:
    """Renames the checkpoints after `step`, which are damaged, to <step>.damaged."""
    for later in [other for other in checkpoint_steps(directory) if other > step]:
        aside = directory / f"{later}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (directory / str(later)).rename(aside)


def prune(directory: Path, keep: int) -> None:
    """Removes all checkpoints but the last `keep` and the one with the lowest validation loss."""
    saved = checkpoint_steps(directory)
    losses = validation_losses(directory)
    kept = {*saved[-keep:], *([min(losses, key=lambda step: losses[step])] if losses else [])}
    for step in saved:
        if step not in kept:
            # Renamed first: a folder that is half removed must not look like a damaged checkpoint.
            doomed = directory / SAVING / f"{step}.removed"
            doomed.parent.mkdir(exist_ok=True)
            (directory / str(step)).rename(doomed)
            shutil.rmtree(doomed)


def validation_losses(directory: Path) -> dict[int, float]:
    """The validation losses of the checkpoints that were validated and can be read, by step."""
    losses: dict[int, float] = {}
    for step in checkpoint_steps(directory):
        with suppress(CheckpointError):
            loss = read_position(directory, step).get("validation_loss")
            if loss is not None:
                losses[step] = loss
    return losses


def _files(path: Path) -> list[str]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != SUMS)
    return sorted(file.relative_to(path).as_posix() for file in files)


def _synced_sha256(path: Path) -> str:
    """The checksum of a file, after it was flushed from caches to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_sha256(path)


def _rendered(sums: dict[str, str]) -> bytes:
    """The checksums as `sha256sum -c` reads them; it takes the last line for a comment."""
    text = "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()
    return text + f"# {hashlib.sha256(text).hexdigest()}\n".encode()


def _parsed(content: bytes) -> dict[str, str] | None:
    """The checksums by name, None for anything but the very bytes that were written."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        return None
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in matches if match is not None}
    return sums if sums and _rendered(sums) == content else None
