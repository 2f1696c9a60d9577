"""The document of `mw plan train`: what --json prints and what lies beside plan.toml as plan.json."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshwright import __version__
from meshwright.audit.second_opinion import Opinion
from meshwright.errors import PlanError
from meshwright.files import write_whole
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.explain.explanation import Explanation
from meshwright.plan.smallest import Smallest
from meshwright.plan.train import Search
from meshwright.plan_file import Plan, save_plan, shardings

_PACKAGES = ("jax", "jaxlib", "libtpu")


def plan_document(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    found: Search,
    num_candidates: int,
    said: Explanation | None,
    sizing: Smallest | None = None,
    opinions: Sequence[Opinion] = (),
) -> dict:
    """The keys of contract.md (best, candidates, assumptions, search), then why, then what they are about."""
    return {
        "best": found.best.to_dict(),
        "candidates": [candidate.to_dict() for candidate in found.candidates[:num_candidates]],
        "assumptions": list(found.assumptions),
        "search": {"considered": found.considered, "seconds": found.seconds},
        **(said.to_dict() if said else {}),
        **({"smallest": sizing.to_dict()} if sizing else {}),
        **({"audit": [opinion.to_dict() for opinion in opinions]} if opinions else {}),
        "model": asdict(config) | {"params": count_params(config).total},
        "hardware": {
            "spec": hardware.spec,
            "chip": hardware.chip.name,
            "kind": hardware.chip.kind,
            "num_chips": hardware.num_chips,
            "hbm_bytes": hardware.chip.hbm_bytes,
        },
        "workload": {
            "batch_tokens": workload.num_tokens,
            "seq_len": workload.seq_len,
            "num_sequences": workload.num_sequences,
        },
        "shardings": shardings(config, found.best.layout),
        "environment": environment(),
    }


def write_plan(path: Path, plan: Plan, document: dict) -> Path:
    """plan.toml and, whole or not at all, its plan.json, which is returned."""
    check_output(path)
    save_plan(plan, path)
    return write_whole(path.with_suffix(".json"), json.dumps(document, indent=1))


def check_output(path: Path) -> None:
    """Raises PlanError where the plan's figures would overwrite it."""
    if path.suffix == ".json":
        raise PlanError(
            f"-o {path}: the plan is TOML, and the .json beside it holds its figures; name a .toml"
        )


def environment() -> dict[str, str]:
    """Versions and the machine, as far as they can be had without importing JAX."""
    found = {"meshwright": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
