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
# What is compiled for an audit is kept by content: a test neither finds nor leaves anything there.
_CACHE = tempfile.TemporaryDirectory(prefix="meshwright-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Most of what tests wait for is LLVM: small programs gain nothing from its optimizations, and XLA's own
# passes, whose HLO the audits read, stay as they are. The older code for fusions compiles in a third of the
# time (a step of training: 0.9 s for 2.7, jax 0.10.2). In some programs it fuses multiplications with
# additions, and one number would be rounded in several ways: AVX has no such instruction. From jaxlib 0.11 on
# there is the newer code alone, and XLA ends the process over a flag that it does not know.
_OLDER_CODE = importlib.metadata.version("jaxlib").startswith("0.10.")
_FLAGS = (
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
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
