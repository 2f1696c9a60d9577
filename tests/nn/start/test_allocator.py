"""Large arrays reuse freed memory, in threads as well."""

import platform
import subprocess
import sys

import pytest

# Prints the page faults of arrays that are allocated again, by a thread as XLA allocates them.
FAULTS = """
import resource, threading
from meshwright.nn.start.allocator import keep_freed_memory
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_arrays_are_reused():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # 24,000 pages of 4 KiB are mapped otherwise
