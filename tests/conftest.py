"""The environment of every test: eight virtual CPU devices, no network, repeatable examples.

It is set before anything imports JAX, and this file does not import JAX: tests of planning run without it.
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
# Broadcasting over a missing dimension is an error. Strict dtypes are a fixture, `strict_dtypes`, since
# optax 0.2 and jax.nn promote dtypes.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe, not as this terminal

# Bytecode: kept, whatever the environment says. Without it each worker compiles all tests (5 s), and each
# process that a test starts compiles the modules that it imports (0.4 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Compiled programs: an empty cache for the processes that a worker starts. JAX writes to it without a lock,
# so workers cannot share one.
_CACHE = tempfile.TemporaryDirectory(prefix="meshwright-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{_CACHE.name}/xla"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The native extension: the first process that needs it compiles it, in 18 s. It is kept for later runs, since
# its name is a hash of its source.
_NATIVE = Path(__file__).parents[1] / "build" / "tests-native"
_NATIVE.mkdir(parents=True, exist_ok=True)
(Path(_CACHE.name) / "meshwright").mkdir()
(Path(_CACHE.name) / "meshwright" / "native").symlink_to(_NATIVE)

# XLA: most of a test's time is LLVM, and small programs do not need its optimisations. XLA's own passes still
# run, so the HLO that audits read is a user's. tests/test_optimised.py runs with LLVM's optimisations.
_OLDER_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")  # 0.11 ends over an unknown flag
_FLAGS = (
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # 6% less processor time
    # A third of the time to compile (a training step: 0.9 s for 2.7, jax 0.10.2). The older emitters may fuse
    # a multiplication with an addition in one program and not in another; AVX has no such instruction.
    *(("--xla_cpu_use_fusion_emitters=false",) if _OLDER_EMITTERS else ()),
    "--xla_cpu_max_isa=AVX",
)
_GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_GIVEN, *(flag for flag in _FLAGS if flag not in _GIVEN)]).strip()

# Tracing: a tenth to a fifth of its time goes to source lines, which no test reads, and garbage collection.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
gc.set_threshold(400_000, 20, 10)

# Hypothesis: `make test` draws the same examples everywhere, `make nightly` random ones and prints a failing
# example as a blob to pin. No deadline: the first example of a property may compile a program.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# These rooms have modules that take a minute (at night 15): they start first, so that no worker ends alone.
_LONG = "tests/train/", "tests/serve/", "tests/nn/", "tests/audit/"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest rooms first; if `make nightly` gives a seed, sample the long lists of slow tests."""
    from tests.sampling import ALL, of_tonight

    items.sort(key=lambda item: [not item.nodeid.startswith(room) for room in _LONG])
    if (seed := os.environ.get("NIGHTLY_SEED", ALL)) != ALL:
        items[:], skipped = of_tonight(items, seed)
        config.hook.pytest_deselected(items=skipped)


def pytest_unconfigure() -> None:
    """Leave all objects to the end of the process: the last collections would visit some 3 GB of them."""
    gc.freeze()


@pytest.fixture(autouse=True)
def same_flags() -> Iterator[None]:
    """Restore XLA_FLAGS: a command sets them for its process, and a test process runs many commands.

    The cache of compiled programs is for the processes that tests start. In this one, writing to it takes 3%
    of the time and saves less.
    """
    flags = os.environ["XLA_FLAGS"]
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_enable_compilation_cache", False)
    yield
    os.environ["XLA_FLAGS"] = flags


@pytest.fixture
def all_devices() -> None:
    """Start JAX with the devices of all tests, before a command chooses fewer for its process."""
    import jax

    assert jax.device_count() == NUM_DEVICES


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
    """JAX refuses to promote dtypes implicitly: `pytestmark = pytest.mark.usefixtures("strict_dtypes")`."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium as playwright's Browser; tests that need it are skipped without it."""
    from tests.report.browser import CHROMIUM, chromium

    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with chromium() as opened:
        yield opened
