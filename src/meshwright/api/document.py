"""The document of `mw plan train`, for --json and for the plan.json next to plan.toml."""

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
from meshwright.files import check_writable, write_whole
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.assumptions import intervals_of
from meshwright.plan.candidate import Candidate
from meshwright.plan.evidence import evidence_of
from meshwright.plan.explain.explanation import Explanation
from meshwright.plan.launch_settings import LaunchSettings
from meshwright.plan.smallest import Smallest
from meshwright.plan.spread import between_layouts
from meshwright.plan.train import Search
from meshwright.plan.verdict import asked_of, verdict_of
from meshwright.plan_file import Plan, save_plan, written_shardings
from meshwright.units import format_count, format_number_of

_PACKAGES = ("jax", "jaxlib", "libtpu")


def _interval(candidate: Candidate, least: float) -> dict:
    """The intervals of its step time and memory, and whether it may be as fast as the best.

    least: seconds of the best.
    """
    intervals, seconds = intervals_of(candidate), candidate.step_seconds
    is_known = intervals["step_seconds_interval"] is not None
    return intervals | {"as_fast_within_interval": seconds <= least * between_layouts() if is_known else None}


def plan_document(
    config: ModelConfig,
    hardware: Hardware,
    batch_tokens: int,
    search: Search,
    num_candidates: int,
    explanation: Explanation | None,
    sizing: Smallest | None = None,
    opinions: Sequence[Opinion] = (),
    launch: LaunchSettings | None = None,
) -> dict:
    """The keys of docs/reference/json.md: best, candidates, assumptions and search, explanation, then inputs.

    batch_tokens: the requested tokens of a batch.
    """
    workload = search.workload
    least = search.best.step_seconds
    candidates = [
        candidate.to_dict()
        | {"tie": search.is_tie(candidate)}
        | _interval(candidate, least)
        | {"evidence": evidence_of(config, candidate, workload.seq_len).to_dict()}
        for candidate in search.candidates[:num_candidates]
    ]
    return {
        "notices": list(search.notices),
        "asked": asked_of(search, hardware),
        "verdict": verdict_of(config, hardware, batch_tokens, search),
        "best": candidates[0],
        "candidates": candidates,
        "faster": search.faster.to_dict() if search.faster else None,
        "assumptions": list(search.assumptions),
        "search": {"considered": search.considered, "seconds": search.seconds},
        **(explanation.to_dict() if explanation else {}),
        **({"smallest": sizing.to_dict()} if sizing else {}),
        **({"audit": [opinion.to_dict() for opinion in opinions]} if opinions else {}),
        **({"launch": launch.to_dict()} if launch else {}),
        # As it is read back: tuples become lists.
        "model": json.loads(json.dumps(asdict(config))) | {"params": count_params(config).total},
        "hardware": {
            "spec": hardware.spec,
            "chip": hardware.chip.name,
            "kind": hardware.chip.kind,
            "num_chips": hardware.num_chips,
            "software": hardware.software.name,
            "hbm_bytes": hardware.chip.hbm_bytes,
            "usable_bytes": hardware.chip.program_bytes,
        },
        "workload": {
            "batch_tokens": workload.num_tokens,
            "seq_len": workload.seq_len,
            "num_sequences": workload.num_sequences,
            "asked_batch_tokens": batch_tokens,
        },
        "shardings": written_shardings(config, search.best.layout),
        "environment": versions(),
    }


def heading(document: dict, layout: Layout) -> str:
    """The heading of a document's table of layouts. layout: one of these, for its dtypes."""
    model, hardware, workload = (document[key] for key in ("model", "hardware", "workload"))
    tokens, asked = workload["batch_tokens"], workload["asked_batch_tokens"]
    note = f"; {asked:,} asked for" if asked != tokens else ""
    return (
        f"{model['name']} ({format_count(model['params'])} parameters) on {hardware['spec']} "
        f"({format_number_of(hardware['num_chips'], 'device')}), "
        f"{format_number_of(workload['num_sequences'], 'sequence')} of "
        f"{workload['seq_len']:,} tokens ({tokens:,} tokens{note}), weights "
        f"{layout.precision.weights_dtype}, compute {layout.precision.compute_dtype}"
    )


def write_plan(path: Path, plan: Plan, document: dict) -> Path:
    """Write plan.toml and plan.json, each atomically; returns the path of the latter."""
    check_output(path)
    save_plan(plan, path)
    return write_whole(path.with_suffix(".json"), json.dumps(document, indent=1))


def check_output(path: Path) -> None:
    """Raise PlanError for a file that is not for TOML, OutputError if it cannot be written."""
    if path.name in ("json", "yaml", "csv", "html"):
        page = f", and mw report plan.toml -o plan.{path.name} a page" if path.name == "html" else ""
        raise PlanError(f"-o {path} is a file's path; --json prints JSON, -o plan.toml writes the plan{page}")
    if path.suffix == ".json":
        raise PlanError(
            f"-o {path}: the plan is TOML, and the .json next to it holds its figures; name a .toml"
        )
    if path.suffix in (".yaml", ".yml", ".txt", ".md", ".csv", ".html", ".py"):
        page = f"; for a page type mw report plan.toml -o {path}" if path.suffix == ".html" else ""
        raise PlanError(f"-o {path}: a plan is TOML; write -o {path.with_suffix('.toml')}{page}")
    check_writable(path)


def versions() -> dict[str, str]:
    """Versions and the machine, without importing JAX."""
    known = {"meshwright": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known | {"platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
