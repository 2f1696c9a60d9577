"""Collect settings of load tests from a checkout of InferenceX: a CSV.

    git clone https://github.com/SemiAnalysisAI/InferenceX
    cd src/meshwright/validate
    python ../../../benchmarks/load_test_recipes.py InferenceX > load_test_recipes.csv
    python ../../../benchmarks/load_test_recipes.py InferenceX --one-pool > one_pool_recipes.csv

Reads the searches of up to three commits a month, since later commits replace searches. A search with pools
apart (prefill and decode on different devices) names the workers and degrees of both pools, and a recipe
whose name has the decode workers' batch and draft tokens (`ctx1_gen3_dep8_batch384_mtp3`). A search with one
pool names its degrees, and whether it drafts tokens; models that no search drafts for are left out. No
measured figure is read. Needs PyYAML.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_SEARCHES = (".github/configs/nvidia-master.yaml", "configs/nvidia-master.yaml")
_MODELS = {
    "dsr1": "deepseek-v3", "gptoss": "gpt-oss-120b", "kimik2.5": "kimi-k2.5", "qwen3.5": "qwen3.5-397b-a17b",
    "minimaxm2.5": "minimax-m2.5", "glm5": "glm-5",
}  # fmt: skip
_TYPES = {"fp4": "nvfp4", "fp8": "fp8", "bf16": "bf16", "int4": "int4"}
_ENGINES = {"dynamo-trt": "trtllm", "dynamo-sglang": "sglang", "dynamo-vllm": "vllm"}
_ONE_POOL_ENGINES = {"trt": "trtllm", "sglang": "sglang", "vllm": "vllm"}
_CHIPS = {"gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}
_GPUS_OF_NODE = 4  # of GB200: its oldest searches of SGLang name the number of nodes, not the degrees
# Draft tokens of searches that do not name their number: SGLang's --speculative-num-steps in these recipes.
_DRAFTS = 2
_HEAD = (
    "engine,chip,model,weights,prompt_len,output_len,concurrency,prefill_workers,prefill_chips,prefill_data,"
    "decode_workers,decode_chips,decode_data,decode_batch,drafts"
)
_ONE_POOL_HEAD = (
    "engine,version,chip,model,weights,prompt_len,output_len,chips,data,splits_experts,drafts,concurrencies"
)


def _git(checkout: Path, *words: str) -> str:
    """The command's output; empty if it fails, as for a file that a commit has not."""
    command = ["git", "-C", checkout, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _commits(checkout: Path) -> list[str]:
    """Commits that changed the searches, at most three a month."""
    lines = _git(checkout, "log", "--format=%h %ad", "--date=short", "--", *_SEARCHES).splitlines()
    if not lines:
        sys.exit(f"{checkout} is no checkout with {', '.join(_SEARCHES)}")
    thirds = {(date[:7], min(int(date[8:]) // 11, 2)): commit for commit, date in map(str.split, lines)}
    return list(thirds.values())


def _concurrencies(search: Mapping[str, Any]) -> Iterator[int]:
    if "conc-list" in search:
        yield from search["conc-list"]
    elif "conc-start" in search:
        number = search["conc-start"]
        while number < search["conc-end"]:
            yield number
            number *= 2
        yield search["conc-end"]


def _settings(pool: Mapping[str, Any]) -> dict[str, str]:
    lines = pool.get("additional-settings") or []
    return dict(line.split("=", 1) for line in lines if isinstance(line, str) and "=" in line)


def _pool(engine: str, pool: Mapping[str, Any], nodes: str | None) -> tuple[int, int, int]:
    """(workers, devices of one, whether each device has sequences of its own)."""
    workers, chips = pool.get("num-worker") or 0, max(pool.get("tp", 1), pool.get("ep", 1))
    if engine == "sglang" and nodes and workers:
        chips = int(nodes) * _GPUS_OF_NODE // workers
    return workers, chips, int(bool(pool.get("dp-attn")))


def _searches(entry: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pairs of lengths and a search of them."""
    runs = entry.get("seq-len-configs") or (entry.get("scenarios") or {}).get("fixed-seq-len") or []
    yield from ((run, search) for run in runs for search in run.get("search-space", []))


def _one_pool_drafts(engine: str, model: str, *, is_data_parallel: bool) -> int:
    """Draft tokens of a search with one pool, by the launch scripts (benchmarks/single_node/*_mtp.sh)."""
    if engine == "trtllm":
        return 1 if is_data_parallel else 3  # MTP, by DP_ATTENTION
    return 2 if model == "deepseek-v3" else 3  # --speculative-num-steps


def _one_pool_lines(entry: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    engine, model = _ONE_POOL_ENGINES.get(entry["framework"]), _MODELS.get(entry["model-prefix"])
    if not engine or not model:
        return
    chip, tag = entry["runner"].partition("-")[0], entry["image"].rpartition(":")[2]
    version = re.sub(r"-cu\d+.*$|-amd64$", "", tag.removeprefix("v"))
    for run, search in _searches(entry):
        if "tp" not in search or search.get("pp", 1) != 1:
            continue
        is_data_parallel = bool(search.get("dp-attn"))
        drafts = 0
        if search.get("spec-decoding", "none") != "none":
            drafts = _one_pool_drafts(engine, model, is_data_parallel=is_data_parallel)
        head = (engine, version, _CHIPS.get(chip, chip), model, _TYPES[entry["precision"]])
        rest = (search["tp"], int(is_data_parallel), int(search.get("ep", 1) > 1), drafts)
        for concurrency in _concurrencies(search):
            yield (*head, run["isl"], run["osl"], *rest, concurrency)


def _of_drafting_models(lines: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """The lines whose engine, chip, model and type some search drafts tokens for.

    Lines that differ only in their last cell, the concurrency, become one.
    """

    def key(line: tuple[Any, ...]) -> tuple[Any, ...]:
        return line[0], *line[2:5]

    drafting = {key(line) for line in lines if line[-2]}
    joined: dict[tuple[Any, ...], list[int]] = {}
    for *rest, concurrency in sorted(lines):
        joined.setdefault(tuple(rest), []).append(concurrency)
    return {(*line, " ".join(map(str, each))) for line, each in joined.items() if key(line) in drafting}


def _lines(entry: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    engine, model = _ENGINES.get(entry["framework"]), _MODELS.get(entry["model-prefix"])
    if not engine or not model:
        return
    chip = entry["runner"].partition("-")[0]
    for run, search in _searches(entry):
        prefill, decode = search.get("prefill"), search.get("decode")
        if not prefill or not decode or any(pool.get("pp", 1) != 1 for pool in (prefill, decode)):
            continue
        named = _settings(prefill) | _settings(decode)
        recipe = named.get("CONFIG_FILE", "")
        batch, heads = (re.search(pattern, recipe) for pattern in (r"batch(\d+)", r"mtp(\d)"))
        size = int(batch[1]) if batch else int(named.get("DECODE_MAX_BATCH_SIZE", 0))
        drafts = int(heads[1]) if heads else int(named.get("DECODE_MTP_SIZE") or 0)
        if search.get("spec-decoding", "none") != "none":
            drafts = drafts or _DRAFTS
        pools = [
            _pool(engine, pool, named.get(nodes))
            for pool, nodes in ((prefill, "PREFILL_NODES"), (decode, "DECODE_NODES"))
        ]
        if not all(workers and chips for workers, chips, _ in pools):
            continue
        rest = (*pools[0], *pools[1], size if engine == "trtllm" else 0, drafts)
        head = (engine, _CHIPS.get(chip, chip), model, _TYPES[entry["precision"]], run["isl"], run["osl"])
        yield from ((*head, concurrency, *rest) for concurrency in _concurrencies(search))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--one-pool", action="store_true")
    options = parser.parse_args()
    checkout, lines_of = options.checkout, _one_pool_lines if options.one_pool else _lines
    lines = set[tuple[Any, ...]]()
    for commit in _commits(checkout):
        for path in _SEARCHES:
            entries = yaml.load(
                _git(checkout, "show", f"{commit}:{path}"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            )
            for entry in (entries or {}).values():
                if isinstance(entry, dict) and entry.get("precision") in _TYPES:
                    lines.update(lines_of(entry))
    if options.one_pool:
        lines = _of_drafting_models(lines)
    print(_ONE_POOL_HEAD if options.one_pool else _HEAD)
    for line in sorted(lines):
        print(*line, sep=",")


if __name__ == "__main__":
    main()
