"""For reference/json.md: the keys of every command's JSON document, read off documents that it printed.

Commands that plan are run when the page is made. Those that need JAX were run by

    python -m docs.generate.json_keys

which writes their keys to recorded.json; a slow test holds that file against the program.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.cli.main import BAD_INPUT
from meshwright.cli.main import main as mw
from meshwright.files import write_whole
from meshwright.layout.short import DEGREES
from meshwright.models.model_files import config_json
from meshwright.models.presets import load_model
from meshwright.validate.load_test_row import LoadTestRow

RECORDED = Path(__file__).with_name("recorded.json")
_STEP = "--model tiny --hardware cpu:8 --batch-tokens 8192 --seq-len 128"
_SERVED = "--model llama-2-13b --hardware v5e:2x4"
# {plan} is a plan of the first, {run} a run of a few steps.
PLANNING = {
    "mw plan train": "plan train --model llama-2-13b --hardware v5p:2x2x2 --batch-tokens 1M --seq-len 4096 "
    "--top 2 --explain --tokens 1T",
    "mw plan train --for": "plan train --model llama-3-8b --hardware h100:1x8 --batch-tokens 512k "
    "--seq-len 4k --top 1 --for torchtitan",
    "mw plan serve": f"plan serve {_SERVED} --prompt-tokens 2048 --output-tokens 256",
    "mw plan serve --rate": "plan serve --model llama-3.1-8b --hardware h100:1x1 --prompt-tokens 1k "
    "--output-tokens 128 --engine vllm --rate 8 --ttft-p95 1 --tpot-p95 0.03",
    "mw plan serve --phase": f"plan serve {_SERVED} --phase generate --batch 8 --context 4096",
    "mw compare": "compare {plan}",
    "mw model": "model llama-2-13b",
    "mw model --explain-config": "model --explain-config {config}",
    "mw fit": "fit llama-3-8b --hardware rtx4090",
    "mw fit, several machines": "fit llama-3-8b --hardware rtx4090,rtx3090",
    "mw fit, without a model": "fit --hardware rtx4090",
    "mw plan rl": (
        "plan rl --model llama-3-8b --hardware h100:2x8 --prompts 16 --samples 4 --prompt-tokens 256 "
        "--output-tokens 256 --crossover"
    ),
    "mw reshard": "reshard fsdp=8 data=2,tensor=4 --model llama-3-8b --hardware h100:8",
    "mw support": "support llama-2-13b",
    "mw hardware": "hardware v5e:4x4",
    "mw shard": 'shard "A[I_X, J] . B[J_X, K] -> C[I_X, K]" --mesh X=4,Y=2 --dims I=1024,J=4096,K=4096',
    "mw collective": 'collective "AllGather_X([B_X, D])" --mesh X=4 --dims B=64,D=64 --hardware v4p:4x1x1',
    "mw plot": "plot lookahead",
    "mw validate": "validate {rows}",
    "mw validate, load tests": "validate {tests}",
}
_TEST = {
    "id": "1",
    "source": "a run",
    "engine": "vllm",
    "model": "llama-3.1-8b",
    "system": "h100",
    "hardware": "h100:1x1",
    "chips": "1",
    "weight_dtype": "bf16",
    "mode": "together",
    "concurrency": "8",
    "prompt_len": "1000",
    "output_len": "100",
    "ttft_seconds": "0.1",
    "tpot_seconds": "0.01",
}
RUNNING = {
    "mw train": "train {plan} --data {corpus} --run {run} --steps 4",
    "mw audit": f"audit {_STEP} --layout data=8 --target cpu",
    "mw generate": "generate --checkpoint {run} def --max-tokens 4",
    "mw bench collectives": "bench collectives --hardware cpu:8 --sizes 4Ki,64Ki",
    "mw bench train": "bench train --model tiny --hardware cpu:8 --batch-tokens 512 --seq-len 64 --layouts 1",
    "mw reshard --audit --run": "reshard fsdp=8 data=2,tensor=4 --model tiny --hardware cpu:8 --audit --run",
    "mw doctor": "doctor",
}


def text() -> str:
    """A table of keys for each command that has a document."""
    parts = []
    for command, keys in {**planning_keys(), **recorded_keys()}.items():
        parts += [f"## `{command} --json`", "", "| key | value |", "|---|---|"]
        parts += [f"| `{key}` | {kind} |" for key, kind in keys.items()]
        parts.append("")
    return "\n".join(parts)


def planning_keys() -> dict[str, dict[str, str]]:
    """Of every command that plans: its keys and what their values are."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan.toml"
        _document(f"{PLANNING['mw plan train']} -o {plan}")
        rows = folder / "rows.csv"
        rows.write_text("\n".join(_published().splitlines()[:3]) + "\n")
        tests = folder / "tests.csv"
        names = [field.name for field in fields(LoadTestRow)]
        lines = [names, [_TEST.get(name, "") for name in names]]
        tests.write_text("".join(",".join(cells) + "\n" for cells in lines))
        config = folder / "config.json"
        config.write_text(json.dumps(config_json(load_model("llama-2-13b"))))
        return {
            command: keys_of(_document(text.format(plan=plan, rows=rows, tests=tests, config=config)))
            for command, text in PLANNING.items()
        }


def recorded_keys() -> dict[str, dict[str, str]]:
    """Of every command that needs JAX: what was recorded."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def running_keys() -> dict[str, dict[str, str]]:
    """Of every command that needs JAX: its keys, by running each on 8 virtual devices."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        corpus, run, plan = folder / "corpus", folder / "run", folder / "plan.toml"
        corpus.mkdir()
        (corpus / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 4000)
        _document(f"plan train {_STEP} --runnable -o {plan}")
        words = {"corpus": corpus, "run": run, "plan": plan}
        return {command: keys_of(_document(text.format(**words))) for command, text in RUNNING.items()}


def keys_of(document: object) -> dict[str, str]:
    """The path of every value in a document and its kind, in the order in which they stand.

    >>> keys_of({"best": {"mfu": 0.5}, "rows": [{"id": "a"}, {"id": "b", "error": None}]})
    {'best.mfu': 'number', 'rows[].id': 'text', 'rows[].error': 'null'}
    """
    found: dict[str, list[str]] = {}
    for path, kind in _values(document, ""):
        kinds = found.setdefault(path, [])
        if kind not in kinds:
            kinds.append(kind)
    return {path: " or ".join(kinds) for path, kinds in found.items()}


# Keys under which each name is a chip, an axis, a source: not the name of a key.
_TABLES = frozenset(
    (
        "by_chip chips degrees engines mesh models modes placement softwares sources systems weights_dtype "
        + " ".join(DEGREES)
    ).split()
)
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}


def _values(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        last = path.rpartition(".")[2]
        named = last in _TABLES or not all(str(key).isidentifier() for key in value)
        for key, inner in value.items():
            name = "*" if named else key
            yield from _values(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _values(inner, f"{path}[]")
    else:
        yield path, "empty" if isinstance(value, dict | list) else _KINDS[type(value)]


def _document(text: str) -> dict:
    """The document of a command. Raises SystemExit where it prints none."""
    result, notes = StringIO(), StringIO()
    with redirect_stdout(result), redirect_stderr(notes):
        code = mw([*shlex.split(text), "--json"])
    if code == BAD_INPUT or not result.getvalue():
        raise SystemExit(f"mw {text}: exit code {code}: {notes.getvalue()[-400:]}")
    return json.loads(result.getvalue())


def _published() -> str:
    root = Path(__file__).parents[2]
    return (root / "benchmarks" / "published" / "training.csv").read_text(encoding="utf-8")


if __name__ == "__main__":
    write_whole(RECORDED, json.dumps(running_keys(), indent=1) + "\n")
    sys.stdout.write(f"wrote {RECORDED}\n")
