"""What every test stands on: eight virtual CPU devices, no network, repeatable examples.

The environment is set before anything imports JAX, and without importing it: the tests of the
planning half must run, and be seen to run, without JAX.
"""

import gc
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

NUM_DEVICES = 8

assert "jax" not in sys.modules, "JAX is imported before tests/conftest.py could choose its devices"

os.environ["JAX_PLATFORMS"] = "cpu"
# A shape that broadcasts by accident is an error. Strict dtypes cannot be the rule for all tests, since
# optax 0.2 and jax.nn promote inside; `strict_dtypes` switches them on where the code is all ours.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # as wide as a pipe, whatever terminal the tests run in
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# What is compiled for an audit is kept by content: a test neither finds nor leaves anything there. The native
# extension takes a C++ compiler ten seconds and is built once: the first process hands its folder to workers.
_CACHE = tempfile.TemporaryDirectory(prefix="meshwright-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
_NATIVE = Path(os.environ.setdefault("MESHWRIGHT_TEST_NATIVE", f"{_CACHE.name}/native"))
_NATIVE.mkdir(exist_ok=True)
(Path(_CACHE.name) / "meshwright").mkdir()
(Path(_CACHE.name) / "meshwright" / "native").symlink_to(_NATIVE)

# A program that one test has compiled is read by the next that needs the very same: JAX's key has all of it,
# the compiler's version and its flags. JAX writes without a lock, so each worker, with the processes that it
# starts, has a folder of its own. A sixth less of the time of tests/serve (jax 0.10.2).
os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{_CACHE.name}/xla"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Most of what tests wait for is LLVM: small programs gain nothing from its optimizations, and XLA's own
# passes, whose HLO the audits read, stay as they are. The older code for fusions compiles in a third of the
# time (a step of training: 0.9 s for 2.7, jax 0.10.2). In some programs it fuses multiplications with
# additions, and one number would be rounded in several ways: AVX has no such instruction. From jaxlib 0.11 on
# there is the newer code alone, and XLA ends the process over a flag that it does not know. Not to split a
# program among threads takes 6% less of all processors.
_OLDER_CODE = importlib.metadata.version("jaxlib").startswith("0.10.")
_FLAGS = (
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(("--xla_cpu_use_fusion_emitters=false",) if _OLDER_CODE else ()),
    "--xla_cpu_max_isa=AVX",
)
_SET = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_SET, *(flag for flag in _FLAGS if flag not in _SET)]).strip()

# Of a tenth to a fifth of the time: the places of a program's lines, which no test reads of what it compiled,
# and collections of garbage, of which tracing makes little that is cyclic.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
gc.set_threshold(50_000, 10, 10)

# `make test` draws the same examples everywhere, `make nightly` random ones; what one of these finds is
# printed as a blob to be pinned. No deadline: the first example of a property may compile a program.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


# In this order: modules that take up to a minute, at night tests/train/test_searched.py a quarter of an hour.
# One that began last would leave the other workers without work.
_LONG = "tests/train/", "tests/serve/", "tests/nn/", "tests/audit/"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest rooms first; of long lists of slow tests a share, where `make nightly` gives a seed."""
    from tests.sampling import ALL, of_tonight

    items.sort(key=lambda item: [not item.nodeid.startswith(room) for room in _LONG])
    if (seed := os.environ.get("NIGHTLY_SEED", ALL)) != ALL:
        items[:], left = of_tonight(items, seed)
        config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def same_flags() -> Iterator[None]:
    """XLA_FLAGS as they were: a command sets them for its own process, and this one runs many."""
    flags = os.environ["XLA_FLAGS"]
    yield
    os.environ["XLA_FLAGS"] = flags


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
    """JAX refuses to promote dtypes implicitly: `pytestmark = pytest.mark.usefixtures("strict_dtypes")`."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium as playwright's Browser; the tests that need it are skipped where there is none."""
    from tests.report.browser import CHROMIUM, chromium

    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with chromium() as opened:
        yield opened
