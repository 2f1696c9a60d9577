"""Errors with and without each rule of the generic records, over the sources that did not suggest it.

A rule that two sources suggested is also scored on the rows of each (`by_the_other`): for these rows the
other source alone would have suggested it.

    python benchmarks/ablation.py > benchmarks/results/ablation.json

Every change is made to a copy of the records, and benchmarks/published/training.csv is predicted again.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks/published/training.csv"


@dataclass(frozen=True)
class Rule:
    """A rule and its reverse.

    files: the records, each changed by re.sub(pattern, text), line by line; the result has the rule as it
    was, or lacks it. suggested: a part of the name of each source that suggested it.
    """

    name: str
    files: tuple[str, ...]
    pattern: str
    text: str
    suggested: tuple[str, ...]


RULES = (
    Rule(
        "InfiniBand's share does not fall with nodes (was nodes ** -0.231)",
        ("hardware/networks/cards.toml",),
        r"^share = ([\d.]+)$",
        r"share = \1\nfalloff = 0.231",
        ("Ultra-Scale",),
    ),
    Rule(
        "host_flush_seconds is nanotron's (was of all eager programs)",
        ("programs/eager.toml",),
        r"^eager = true$",
        "eager = true\nhost_flush_seconds = 1.2",
        ("Ultra-Scale",),
    ),
    Rule(
        "host_node_seconds is nanotron's (was of all eager programs)",
        ("programs/eager.toml",),
        r"^eager = true$",
        "eager = true\nhost_node_seconds = 0.00072",
        ("Ultra-Scale",),
    ),
    Rule(
        "whole logits before the loss are Aleph Alpha's (were Megatron-LM's)",
        ("programs/megatron-lm.toml",),
        r"^loss_arrays = 2$",
        "whole_logits = true\nloss_arrays = 4",
        ("Aleph Alpha",),
    ),
    Rule(
        "sharded gradients are summed in the products' type by PyTorch's default",
        ("programs/compiled.toml", "programs/eager.toml"),
        r"^narrow_sums = true$",
        "narrow_sums = false",
        ("llm-foundry", "IBM"),
    ),
    Rule(
        "a token goes to a node once, since 2025 (DeepEP)",
        ("programs/te.toml",),
        r"^once_since = 2025$",
        "once_since = 9999",
        ("Megatron-Bridge",),
    ),
    Rule(
        "expert groups take ranks of tensor and context first if that is faster",
        ("programs/megatron-core.toml",),
        r"^folds_experts = true$",
        "folds_experts = false",
        ("Megatron-Bridge", "v25.05"),
    ),
    Rule(
        "launches of Transformer Engine's modules take 20 us (were fitted: 63)",
        ("programs/te.toml",),
        r"^host_seconds = [\d.e-]+$",
        "host_seconds = 6.31e-05",
        ("Megatron-Bridge",),
    ),
    Rule(
        "NCCL's all-to-all reaches 43 GB/s in an NVL72 (RAPIDS)",
        ("programs/nemo-25.04.toml",),
        r"^exchange_bytes_per_second = [\d_]+$",
        "",
        (),
    ),
    Rule(
        "no flash attention for heads above 128 on Blackwell before cuDNN 9.11 (Transformer Engine)",
        ("programs/nemo-25.04.toml",),
        r"^narrow_flash_from = [\d.]+$",
        "",
        (),
    ),
)


def main() -> None:
    kept = document(ROOT / "src")
    rules = []
    for rule in RULES:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "src"
            shutil.copytree(ROOT / "src", source)
            for name in rule.files:
                file = source / "meshwright" / name
                before = file.read_text(encoding="utf-8")
                after = re.sub(rule.pattern, rule.text, before, flags=re.MULTILINE)
                assert after != before, rule.name
                file.write_text(after, encoding="utf-8")
            rules.append({"rule": rule.name, **compared(rule, kept, document(source))})
        print(rules[-1], file=sys.stderr)
    machine = {"python": platform.python_version(), "cpu": platform.machine()}
    print(json.dumps({"benchmark": "ablation", "machine": machine, "rules": rules}, indent=1))


def document(source: Path) -> dict:
    """The document of mw validate with the package in a folder."""
    command = [sys.executable, "-m", "meshwright", "validate", str(TABLE), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def compared(rule: Rule, kept: dict, changed: dict) -> dict:
    """Errors with the rule and without it.

    They are of other sources' rows that the rule changes, and, if several sources suggested it, of each one's
    rows.
    """
    pairs = [
        (one, other)
        for one, other in zip(kept["rows"], changed["rows"], strict=True)
        if one["predicted"] is not None
    ]
    others = [pair for pair in pairs if not any(words in pair[0]["source"] for words in rule.suggested)]
    moved = [pair for pair in others if pair[0]["predicted"] != pair[1]["predicted"]]
    suggesting = {
        words: [pair for pair in pairs if words in pair[0]["source"]]
        for words in (rule.suggested if len(rule.suggested) > 1 else ())
    }
    return {
        "suggested_by": list(rule.suggested),
        "rows": len(others),
        "rows_changed": len(moved),
        "sources_changed": sorted({one["source"] for one, _ in moved}),
        **with_and_without(moved),
        "by_the_other": {
            words: {"rows": len(rows), **with_and_without(rows)} for words, rows in suggesting.items()
        },
    }


def with_and_without(pairs: list[tuple[dict, dict]]) -> dict:
    """The errors of rows that were predicted with a rule and without it."""
    return {"with": errors([one for one, _ in pairs]), "without": errors([other for _, other in pairs])}


def errors(rows: list[dict]) -> dict | None:
    """The median and the 90th percentile of absolute errors."""
    found = sorted(abs(row["error"]) for row in rows)
    if not found:
        return None
    return {"median": found[len(found) // 2], "p90": found[min(len(found) - 1, int(0.9 * len(found)))]}


if __name__ == "__main__":
    main()
