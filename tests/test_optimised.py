"""Programs as users compile them, with all of LLVM's optimisations: conftest.py switches most of them off."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.train.processes import Runs, exact_lines

# A fused multiplication and addition rounds once: in 20 steps a loss of 5 changes by less than this share.
TOLERANCE = 2e-4


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Processes with the flags of the tests."""
    return Runs(tmp_path, "cpu:8", "fsdp=4,tensor=2")


@pytest.mark.slow
def test_training_computes_the_numbers_of_the_tests(runs: Runs, tmp_path: Path):
    """mw train, once with the flags of a user and once with those of the tests."""
    losses = {}
    for name, flags in (("optimised", ""), ("plain", runs.environment["XLA_FLAGS"])):
        command = runs.begin(tmp_path / name, "--steps", "20")
        runs.environment |= {"XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"xla-{name}")}
        runs.mw(*command)
        losses[name] = [line["loss"] for line in exact_lines(tmp_path / name, ["loss"])]
    assert len(losses["plain"]) > 1 and losses["plain"][-1] < losses["plain"][0]
    assert losses["optimised"] == pytest.approx(losses["plain"], rel=TOLERANCE)


def test_an_audit_of_the_optimised_step_matches(runs: Runs):
    """The compiled collectives do not depend on the optimisations."""
    runs.environment["XLA_FLAGS"] = ""
    out, _ = runs.mw("audit", str(runs.plan), "--no-numerics", "--json")
    document: dict[str, Any] = json.loads(out)
    assert document["verdict"] == "match"
