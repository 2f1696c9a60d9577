"""What the host's processor multiplies fast, and what its memory costs."""

import ctypes
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array

_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, and of Arm


@cache
def features() -> frozenset[str]:
    """The processor's instructions, by the system's names of them; none where it does not tell."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(named.split())


def multiplies_bf16() -> bool:
    """Whether the processor has instructions for products of bf16; False where the system does not tell.

    With them 24 products with weights of 768 x 2048 take as long in bf16 as in f32 for one row (15 ms), for
    2 rows 15 ms against 36, for 16 rows 43 against 70 (jax 0.10.2, Zen 4, two busy cores). Without them XLA
    widens every operand.
    """
    return bool(_BF16 & features())


# Parameters of mallopt in glibc's malloc.h: when what is freed goes back to the system, and how many blocks
# are mapped each by itself.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


@cache
def keep_freed_memory() -> bool:
    """Makes this process keep what it frees; whether the C library can, which glibc alone does.

    XLA for CPU allocates the temporaries of a program anew each time that it runs, glibc maps large ones and
    gives them back, and the system clears every page of them again: adding 1 to 65 MB took 140 ms, and with
    memory that is kept 21 (jax 0.10.2, Linux 6, two busy cores).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def give_back_freed_memory() -> None:
    """Gives the system what this process has freed so far, even where it keeps that from now on.

    A compilation leaves much: of the tiny model's two programs 200 of 600 MB (jax 0.10.2).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Linux's transparent huge pages: what it grants, the bytes of one, and advice of madvise(2).
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_HUGEPAGE, _COLLAPSE = 14, 25


def put_in_huge_pages(arrays: "Iterable[Array]") -> int:
    """Asks Linux to keep what these arrays have in host memory in huge pages; the bytes of those it granted.

    Every step reads all weights, and a processor knows the addresses of so few pages of 4 KB that it looks up
    those of most. Arrays are put together in the pages that they fill by half or more; others of this process
    may lie in the rest. From Linux 6.1 on it happens at once (MADV_COLLAPSE), before it or where memory is
    short some time later or never. Nothing fails where a system has no such pages or refuses them.
    """
    size = _huge_page_bytes()
    if not size:
        return 0
    filled = Counter[int]()
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu":
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
    """The size of a huge page; 0 where the system has none, or its owner wants none."""
    try:
        if "[never]" in (_HUGE / "enabled").read_text(encoding="utf-8"):
            return 0
        return int((_HUGE / "hpage_pmd_size").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
