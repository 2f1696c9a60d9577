"""The host's processor: its instructions, and how this process uses its memory."""

import ctypes
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.platforms import PLATFORMS

if TYPE_CHECKING:
    from jax import Array

_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, and of Arm


@cache
def features() -> frozenset[str]:
    """The processor's instructions, by the system's names; none if it does not list them."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(named.split())


def multiplies_bf16() -> bool:
    """Whether the processor lists instructions for products of bf16.

    With them 24 products with weights of 768 x 2048 take 15 ms in bf16 and in f32 for one row, 15 ms and 36
    for 2 rows, 43 ms and 70 for 16 rows (jax 0.10.2, Zen 4, two busy cores). Without them XLA widens every
    operand.
    """
    return bool(_BF16 & features())


# Parameters of mallopt in glibc's malloc.h: when freed memory goes back to the system, the number of blocks
# that are mapped separately, and the number of heaps.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


@cache
def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees. Returns whether the C library can: only glibc does.

    XLA for CPU allocates the temporaries of a program for each run. glibc maps large ones and returns them,
    and the system then clears all of their pages: adding 1 to 65 MB took 140 ms, and 21 with memory that is
    kept (jax 0.10.2, Linux 6, two busy cores). It was 15% of a training step of 134M parameters. In return
    the process may hold the largest program's temporaries twice. Threads that start after this call share one
    heap: those of their own hold at most 64 MiB, and map larger arrays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    parameters = (_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)
    return all(mallopt(parameter, value) for parameter, value in parameters)


def give_back_freed_memory() -> None:
    """Return to the system the memory that this process has freed so far, also after `keep_freed_memory`.

    A compilation frees a lot: 200 of 600 MB for the two programs of the tiny model (jax 0.10.2).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Linux's transparent huge pages: what it grants, the bytes of one, and advice of madvise(2).
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_HUGEPAGE, _COLLAPSE = 14, 25


def put_in_huge_pages(arrays: "Iterable[Array]") -> int:
    """Ask Linux to keep arrays in host memory in huge pages. Returns the bytes of granted pages.

    Every step reads all weights, and a processor keeps the addresses of only a few pages of 4 KB, so that it
    has to look up most of them. A huge page is requested if these arrays fill at least half of it. Since
    Linux 6.1 it is made at once (MADV_COLLAPSE); in older versions, or if memory is short, later or never.
    A system that has no huge pages or refuses them is no error.
    """
    size = _huge_page_bytes()
    if not size:
        return 0
    filled = Counter[int]()
    for array in arrays:
        for shard in array.addressable_shards:
            if PLATFORMS[shard.device.platform].host_memory:
                begin = shard.data.unsafe_buffer_pointer()
                end = begin + shard.data.nbytes
                for page in range(begin // size, -(-end // size)):
                    filled[page] += min(end, (page + 1) * size) - max(begin, page * size)
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    granted = 0
    for page in sorted(page for page, count in filled.items() if 2 * count >= size):
        advise(page * size, size, _HUGEPAGE)
        granted += not advise(page * size, size, _COLLAPSE)
    return granted * size


def _huge_page_bytes() -> int:
    """The size of a huge page; 0 if the system has none or is configured to use none."""
    try:
        if "[never]" in (_HUGE / "enabled").read_text(encoding="utf-8"):
            return 0
        return int((_HUGE / "hpage_pmd_size").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
