"""What the host's memory costs, seen in a process of its own."""

import subprocess
import sys

import pytest

from meshwright.nn.cpu import keep_freed_memory

# Pages that the system clears for 64 MiB that were allocated, written and freed once before.
FAULTS = """
import resource, sys
from meshwright.nn.cpu import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (1 << 26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
faults()
print(faults())
"""


def faults(how: str) -> int:
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_memory_that_is_kept_is_not_cleared_again() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library has no mallopt")
    given_back = faults("give back")
    if given_back < 1000:
        pytest.skip(f"the system clears 64 MiB in {given_back} pieces")
    assert faults("keep") < given_back / 100


# Resident bytes after 64 MiB were allocated, written and freed, and once these were given back.
RESIDENT = """
from pathlib import Path
from meshwright.nn.cpu import give_back_freed_memory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

keep_freed_memory()
b"x" * (1 << 26)
print(resident())
give_back_freed_memory()
print(resident())
"""


def test_memory_that_is_kept_can_be_given_back() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library has no mallopt")
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept - left > 60_000_000
