"""The optional extension in C++ for CPUs (kernels.cc), for operations of generation that XLA runs slowly.

XLA for CPU multiplies few rows at half the speed of memory, and many rows at half the speed of the processor.
The extension reads weights in panels, an order into which an engine puts them once, when it starts. The
system's C++ compiler builds it in a few seconds at first use, into `cache_folder() / "native"`. It is not in
a wheel, since it is compiled with the headers of one version of JAX. If it cannot be built, `why_not_built`
gives the reason and XLA's own operations run.

It is compiled for the supported instructions of the processor, so one file serves all machines with equal
instructions. XLA calls it by names with a hash of its source and the instructions, so that
programs compiled with different builds differ, on disk as well.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from meshwright.files import cache_folder
from meshwright.native.processor import features
from meshwright.platforms import platform_of

_PANEL_ROWS = 32  # rows of w in a panel with AVX-512; with AVX2 a panel has 16
_STEP_BYTES = 4  # of a row, which a product sums at once
_SOURCE = Path(__file__).with_name("kernels.cc")
# Instructions by the system's names: (what is needed, what is used besides where the processor has it).
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl"), ("avx512_bf16", "avx512_vnni")
_AVX2 = ("avx2", "fma"), ("avx_vnni",)
_FLAGS = "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC"
_OPERATIONS = (
    "product",
    "widened_product",
    "grouped_product",
    "in_panels",
    "rows_of_panels",
    "once",
    "attention",
)
_COMPILERS = "c++", "g++", "clang++"
_TIMEOUT_SECONDS = 300  # 15 s at rest
_DIGEST_BYTES = hashlib.sha256().digest_size
_LOADING = threading.Lock()


class _NotAvailable(Exception):
    """The extension is not available, for a reason in words."""


def serves_mesh(mesh: jax.sharding.Mesh) -> bool:
    """Whether programs for this mesh call the extension, which is built first if necessary."""
    return platform_of(mesh).native and why_not_built() is None


def why_not_built() -> str | None:
    """The reason why this process has no extension; None once it is built, loaded and known to JAX."""
    with _LOADING:
        return _loaded()


def instructions() -> tuple[str, ...]:
    """Instructions that the extension uses, by the system's names; none if some are missing."""
    for needed, more in (_AVX512, _AVX2):
        if features().issuperset(needed):
            return (*needed, *(name for name in more if name in features()))
    return ()


@cache
def _loaded() -> str | None:
    try:
        if not instructions():
            missing = [name for name in _AVX2[0] if name not in features()]
            raise _NotAvailable(f"the processor has no {', '.join(missing)}")
        library = _library(cache_folder() / "native" / f"{_key()}.so")
        for name in _OPERATIONS:
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(_target(name), handler, platform="cpu")
    except _NotAvailable as reason:
        return str(reason)
    except OSError as error:
        return f"{error.filename or 'the library'}: {error.strerror or error}"
    return None


def has_whole_steps(size: int, dtype: DTypeLike) -> bool:
    """Whether weights w[O..., I...] can be in panels. size: numbers I of a device."""
    return size * jnp.dtype(dtype).itemsize % _STEP_BYTES == 0


def has_whole_groups(group: int) -> bool:
    """Whether int4 weights with a scale for each `group` inputs can be in panels: two share a byte."""
    return group % (2 * _STEP_BYTES) == 0


def has_whole_panels(rows: int) -> bool:
    """Whether panels of this number of rows are all full, so that another weight's panels may follow."""
    return rows % _PANEL_ROWS == 0


def panel_order(w: Array) -> Array:
    """The numbers of w[O, I], on one device, in the order that `product` reads."""
    return jax.ffi.ffi_call(_target("in_panels"), jax.ShapeDtypeStruct(w.shape, w.dtype))(w)


def product(x: Array, w: Array) -> Array:
    """y f32[R, O] of x[R, I] and w[O, I] in panels, on one device.

    Types: both f32, or w in bf16 or int8 and x in f32 or bf16. bf16 is widened if x is f32 or the processor
    has no product of bf16. A row of the result depends on its own row of x only, and a row of zeros takes no
    time. With int8 it is `quantised_product` of the row, except that XLA may multiply by the reciprocal of
    127 for its scale.
    """
    y = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_target("product"), y)(x, w)


def widened_product(x: Array, w: Array) -> Array:
    """y f32[R, O] of x[R, I] in f32 or bf16 and int8 w[O, I] in panels, on one device, without rounding x."""
    y = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_target("widened_product"), y)(x, w)


def grouped_int4_product(x: Array, w: Array, scales: Array, *, rounds: bool = False) -> Array:
    """y f32[R, O] of x[R, I] in f32 or bf16, int4 w i8[O, I / 2] and scales f32[O, G], both in panels.

    On one device. I / G is 8, 16 or 32. Each group's products are summed before they are multiplied by its
    scale. rounds: round each row of x to int8 with a scale first, as `product` does; sums of groups are then
    exact. A row of the result depends on its own row of x only.
    """
    y = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_target("grouped_product"), y)(x, w, scales, rounds=rounds)


def rows_of_panels(w: Array, ids: Array) -> Array:
    """Rows[..., I] of w[O, I] in panels, on one device, for ids i32[...] from 0 to O - 1."""
    rows = jax.ShapeDtypeStruct((ids.size, w.shape[1]), w.dtype)
    made = jax.ffi.ffi_call(_target("rows_of_panels"), rows)(w, jnp.ravel(ids))
    return jnp.reshape(made, (*ids.shape, -1))


def once(x: Array) -> Array:
    """x, on one device, computed a single time however many operations read it.

    XLA for CPU drops its optimization barriers before it fuses, and computes sines again for every head.
    """
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(_target("once"), same, input_output_aliases={0: 0})(x)


def attends(pools: Any) -> bool:
    """Whether `attention` reads such pools: of keys and values, in f32, int8 or the bits of bf16."""
    first = jax.tree.leaves(pools)[0]
    return first.ndim == 4 and first.dtype in (jnp.float32, jnp.uint16, jnp.int8)


def attention(
    q: Array,
    positions: Array,
    tables: Array,
    pools: Any,
    *,
    scale: float,
    softcap: float,
    window: int,
    chunked: bool,
) -> Array:
    """out f32[R, Q, N, O] of q f32[R, Q, N, H] over the pages of each row, as `PagedCache.attend` has it.

    On one device. positions i32[R, Q]; tables i32[R, P]; pools: a pytree of k[B, K, S, H] and v[B, K, S, O],
    both f32, both the bits of bf16 (u16), or both int8 with scales. softcap, window: 0 for none.
    """
    arrays = jax.tree.leaves(pools)
    values = arrays[len(arrays) // 2]
    out = jax.ShapeDtypeStruct((*q.shape[:3], values.shape[-1]), jnp.float32)
    return jax.ffi.ffi_call(_target("attention"), out)(
        q,
        positions,
        tables,
        *arrays,
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        window=np.int64(window),
        chunked=np.int64(chunked),
    )


def _flags() -> list[str]:
    return [*_FLAGS, *(f"-m{name.replace('_', '')}" for name in instructions())]


@cache
def _key() -> str:
    parts = _SOURCE.read_text(encoding="utf-8"), jax.__version__, " ".join(_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _target(name: str) -> str:
    return f"meshwright_{name}_{_key()}"


def _library(path: Path) -> Any:
    """The library at `path`, built if it is missing or incomplete: an incomplete one ends the process."""
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # processes that start together compile it once
            if not _is_whole(path):
                _build(path)
        finally:
            os.close(folder)
    return ctypes.CDLL(str(path))


def _is_whole(path: Path) -> bool:
    """Whether the digest at the end of the file, which the loader ignores, matches the rest."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _build(path: Path) -> None:
    """Compile to a temporary file and rename it to `path`, so that no reader sees an incomplete file."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if not compiler:
        raise _NotAvailable("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    command = [compiler, *_flags(), f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(partial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            reason = next((line for line in lines if "error" in line), lines[0])
            raise _NotAvailable(f"{compiler} cannot compile it: {reason}")
        with partial.open("ab") as file:
            file.write(hashlib.sha256(partial.read_bytes()).digest())
        partial.replace(path)
    except subprocess.TimeoutExpired:
        raise _NotAvailable(f"{compiler} took more than {_TIMEOUT_SECONDS} s to compile it") from None
    finally:
        partial.unlink(missing_ok=True)
