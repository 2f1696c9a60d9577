"""What the host's memory costs, seen in a process of its own."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.native import processor
from meshwright.native.processor import keep_freed_memory, put_in_huge_pages

# Pages that the system clears for 64 MiB that were allocated, written and freed once before.
FAULTS = """
import resource, sys
from meshwright.native.processor import keep_freed_memory

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


# Prints the page faults of arrays that are allocated again, by a thread as XLA allocates them.
FAULTS_OF_THREADS = """
import resource, threading
from meshwright.native.processor import keep_freed_memory
keep_freed_memory()
def fill():
    bytearray(b"x") * 100_000_000
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_threads_reuse_freed_arrays() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library has no mallopt")
    command = [sys.executable, "-c", FAULTS_OF_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # 24,000 pages of 4 KiB are mapped otherwise


# Resident bytes after 64 MiB were allocated, written and freed, and once these were given back.
RESIDENT = """
from pathlib import Path
from meshwright.native.processor import give_back_freed_memory, keep_freed_memory

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


def huge_bytes(begin: int, end: int) -> int:
    """Bytes of huge pages in the mappings of this process that lie between two addresses."""
    found, is_there = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            first, last = (int(address, 16) for address in word.split("-"))
            is_there = first < end and last > begin
        elif word == "AnonHugePages:" and is_there:
            found += int(line.split()[1]) * 1024
    return found


def test_arrays_lie_in_huge_pages_that_they_fill_together() -> None:
    """Of a megabyte each, of which none fills a page of two by itself; what stands in them stays."""
    arrays = [jnp.full(1 << 18, number, jnp.float32) for number in range(32)]
    granted = put_in_huge_pages(arrays)
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(array, number)
    if not granted:
        pytest.skip("the system grants no huge pages")
    places = [array.unsafe_buffer_pointer() for array in arrays]
    assert granted <= huge_bytes(min(places), max(places) + arrays[0].nbytes)
    assert put_in_huge_pages([jnp.zeros(8)]) == 0


def test_a_kernel_that_refuses_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def madvise(address: int, size: int, advice: int) -> int:
        asked.append(advice)
        return -1

    monkeypatch.setattr(processor, "_huge_page_bytes", lambda: 4096)
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    assert put_in_huge_pages([jnp.zeros(1 << 14)]) == 0
    assert set(asked) == {processor._HUGEPAGE, processor._COLLAPSE}


@pytest.mark.parametrize("enabled", [None, "always madvise [never]\n"])
def test_a_system_without_huge_pages_is_asked_for_none(
    enabled: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_HUGE", tmp_path)
    if enabled:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(processor.ctypes, "CDLL", None)
    assert put_in_huge_pages([jnp.zeros(1 << 20)]) == 0
