"""`mw train` killed at random moments, and its checkpoints damaged bit by bit: prints JSON.

    python benchmarks/survival.py [--kills 50] [--flips 200] [--steps 1000] [--seed 0] \\
        > benchmarks/results/survival.json

A run is killed (SIGKILL) and resumed, again and again; every other kill falls into the moments of a save.
Its metrics must be those of a run that nothing happened to, bit for bit, and nothing may be lost but the
steps after the last checkpoint. Then single bits of a checkpoint are flipped, anywhere in any file; each
must be named and the checkpoint before it used.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.train.processes import Runs, exact_lines  # noqa: E402

from meshwright.nn.files import checkpoint_files as files  # noqa: E402

CHECKPOINT_EVERY = 10
# A run is killed at any moment up to this many times the time that a new one takes to its first checkpoint.
LONGEST_LIFE = 1.2


def kill(
    runs: Runs, run: Path, command: list[str], longest: float, in_a_save: bool, chance: random.Random
) -> dict[str, Any]:
    """One life of the run: what it had before, when it was killed, and what it has after."""
    checkpoints = run / files.CHECKPOINTS
    before, left_over = files.checkpoint_steps(checkpoints), being_saved(checkpoints)
    process = runs.start(*command)
    began, life = time.monotonic(), chance.uniform(0, longest)
    while process.poll() is None and time.monotonic() - began < life:
        time.sleep(0.002)
    while in_a_save and process.poll() is None and not being_saved(checkpoints) - left_over:
        time.sleep(0.0005)
    if in_a_save:
        time.sleep(chance.uniform(0, 0.1))
    seconds = time.monotonic() - began
    process.kill()
    process.communicate()
    saving = sorted(path.name for path in (checkpoints / files.SAVING).glob("*"))
    sound = files.newest_sound(checkpoints)[0] if files.checkpoint_steps(checkpoints) else 0
    assert sound >= (before[-1] if before else 0), "a checkpoint was lost"
    return {"seconds": round(seconds, 3), "sound_step": sound, "save_cut_off": bool(saving)}


def being_saved(checkpoints: Path) -> set[tuple[str, int]]:
    """The checkpoints under way, or cut off, by name and inode."""
    found = set()
    for path in (checkpoints / files.SAVING).glob("*"):
        with suppress(OSError):
            found.add((path.name, path.stat().st_ino))
    return found


def kills(runs: Runs, num_kills: int, num_steps: int, seed: int) -> dict[str, Any]:
    """A run that is done before all kills are spent is compared, and another begun."""
    chance = random.Random(seed)
    options = ("--steps", str(num_steps), "--checkpoint-every", str(CHECKPOINT_EVERY), "--resume")
    whole = runs.folder / "whole"
    runs.mw(*runs.begin(runs.folder / "compiled_once", "--steps", "2"))
    process, began = runs.start(*runs.begin(whole, *options)), time.monotonic()
    while not files.checkpoint_steps(whole / files.CHECKPOINTS):
        time.sleep(0.01)
    longest = LONGEST_LIFE * (time.monotonic() - began)
    process.communicate()
    expected, lives, compared = exact_lines(whole), [], []
    while len(lives) < num_kills:
        run = runs.folder / f"killed{len(compared)}"
        while len(lives) < num_kills and files.checkpoint_steps(run / files.CHECKPOINTS)[-1:] != [num_steps]:
            lives.append(kill(runs, run, runs.begin(run, *options), longest, len(lives) % 2 == 1, chance))
            print(len(lives), lives[-1], file=sys.stderr, flush=True)
        runs.mw(*runs.begin(run, *options))
        compared.append(sum(one == two for one, two in zip(expected, exact_lines(run), strict=True)))
    return {
        "kills": num_kills,
        "killed_in_a_save": sum(life["save_cut_off"] for life in lives),
        "seed": seed,
        "runs": len(compared),
        "steps": num_steps,
        "lines_of_a_run": len(expected),
        "lines_identical": compared,
    }


def flips(runs: Runs, num_flips: int, seed: int) -> dict[str, Any]:
    """Every flip is judged as a resumed run judges it; a few by a whole `mw generate`."""
    chance, checkpoints = random.Random(seed), runs.folder / "whole" / files.CHECKPOINTS
    *_, before, last = files.checkpoint_steps(checkpoints)
    paths = sorted(path for path in (checkpoints / str(last)).rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    named = by_the_command_line = 0
    for number in range(num_flips):
        # Half of them in a file chosen alike among all, or the few small ones would never be hit.
        path = (
            chance.choice([p for p in paths if p.stat().st_size])
            if number % 2
            else chance.choices(paths, sizes)[0]
        )
        content = path.read_bytes()
        where, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        path.write_bytes(content[:where] + bytes([content[where] ^ bit]) + content[where + 1 :])
        step, damaged = files.newest_sound(checkpoints)
        named += step == before and len(damaged) == 1 and path.name in damaged[0]
        if number % 40 == 0:
            arguments = ("generate", "def ", "--checkpoint", str(runs.folder / "whole"), "--max-tokens", "1")
            _, err = runs.mw(*arguments)
            by_the_command_line += f"/{last}: is damaged: " in err and f"going on from step {before}" in err
        path.write_bytes(content)
    assert files.damage(checkpoints / str(last)) is None
    return {
        "flips": num_flips,
        "bytes": sum(sizes),
        "files": len(paths),
        "named": named,
        "commands": -(-num_flips // 40),
        "named_by_commands": by_the_command_line,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills and the bits")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        runs = Runs(folder)
        document = {
            "benchmark": "survival",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "kills": kills(runs, options.kills, options.steps, options.seed),
            "flips": flips(runs, options.flips, options.seed),
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
