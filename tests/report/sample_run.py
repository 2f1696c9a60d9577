"""A run folder with made-up yet plausible figures: a small model, trained on cpu:8 as fsdp=4, tensor=2."""

import json
import random
from contextlib import chdir
from math import exp
from pathlib import Path

from meshwright.cli.main import main
from meshwright.files import write_whole
from meshwright.report.pages.measured_collectives import collectives_html
from meshwright.report.pages.run_page import build_report

_PLANNED = "plan train --model llama-3-8b --hardware v5p:4x4x4 --batch-tokens 1Mi --seq-len 4096 --tokens 1T"

BREAKDOWN = (
    ("mlp matmuls", 0.36, "compute"),
    ("attention matmuls", 0.15, "compute"),
    ("vocabulary", 0.19, "compute"),
    ("AllGather_fsdp weights", 0.12, "ici"),
    ("ReduceScatter_fsdp gradients", 0.10, "ici"),
    ("AllReduce_tensor activations", 0.05, "ici"),
    ("optimizer", 0.03, "hbm"),
)


def write_pages(folder: Path) -> dict[str, Path]:
    """A run's page, a plan's with its figures, and one of measured collectives."""
    with chdir(folder):  # a page that names a file has the same words wherever it is made
        write_whole(Path("run.html"), build_report(write_run(Path("demo"))))
    assert main([*_PLANNED.split(), "-o", str(folder / "plan.toml")]) == 0
    assert main(["report", str(folder / "plan.toml"), "-o", str(folder / "plan.html")]) == 0
    common = {"op": "all_gather", "axes": ["X"], "num_devices": 8, "predicted_seconds": 1e-5}
    results = [{**common, "bytes": 2**n, "seconds": 2e-6 * n} for n in range(10, 20)]
    document = {"hardware": "cpu:8", "mesh": {"X": 8}, "results": results}
    (folder / "collectives.html").write_text(collectives_html(document))
    return {path.stem: path for path in folder.glob("*.html")}


def write_run(folder: Path) -> Path:
    """The folder, filled with every document that a report reads."""
    (folder / "data").mkdir(parents=True)
    documents = {
        "plan.json": plan_document(),
        "audit.json": audit_document(),
        "completion.json": completion_document(),
        "data/corpus.json": corpus_document(),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics_lines()))
    (folder / "plan.toml").write_text(PLAN_TOML)
    return folder


PLAN_TOML = """\
model = "demo"
hardware = "runs/demo/machine.toml"

[layout]
data = 1
fsdp = 4
tensor = 2
remat = "none"

[workload]
batch_tokens = 8192
seq_len = 256
"""


def plan_document() -> dict:
    candidates = [candidate(*row) for row in _LAYOUTS]
    return {
        "best": candidates[0],
        "candidates": candidates,
        "assumptions": [
            "figures of cpu:8 measured on this machine by `mw calibrate`, not taken from a data sheet",
            "no collective hides under compute on virtual CPU devices: overlap 0.0",
            "attention counts the full T x T scores: the CPU kernel does not skip masked blocks",
            "Adam with two f32 moments and f32 master weights: 16 bytes a parameter with gradients",
        ],
        "search": {"considered": 30, "seconds": 0.0124},
        "model": {
            "name": "demo",
            "params": 5_244_160,
            "num_layers": 4,
            "d_model": 256,
            "d_ff": 768,
            "num_heads": 8,
            "num_kv_heads": 4,
            "d_head": 32,
            "vocab_size": 4096,
        },
        "hardware": {"spec": "cpu:8", "num_chips": 8, "chip": "cpu (calibrated)", "hbm_bytes": 1_050_000_000},
        "workload": {"batch_tokens": 8192, "seq_len": 256},
        "environment": {
            "meshwright": "0.2.0",
            "jax": "0.10.2",
            "python": "3.11.2",
            "platform": "Linux, 2 cores",
        },
        "shardings": {
            "weights": {
                "embed": "embed[V_tensor, D_fsdp]",
                "wq": "wq[D_fsdp, N_tensor, H]",
                "wk": "wk[D_fsdp, K_tensor, H]",
                "wv": "wv[D_fsdp, K_tensor, H]",
                "wo": "wo[N_tensor, H, D_fsdp]",
                "w_gate": "w_gate[D_fsdp, F_tensor]",
                "w_in": "w_in[D_fsdp, F_tensor]",
                "w_out": "w_out[F_tensor, D_fsdp]",
                "norm": "norm[D]",
            },
            "activations": {
                "x": "x[B_fsdp, T, D]",
                "q": "q[B_fsdp, T, N_tensor, H]",
                "hidden": "hidden[B_fsdp, T, F_tensor]",
            },
        },
    }


_LAYOUTS = (
    ("data=1,fsdp=4,tensor=2,remat=none", 0.412, 0.62, True, "compute"),
    ("data=1,fsdp=8,tensor=1,remat=none", 0.431, 0.59, True, "compute"),
    ("data=2,fsdp=4,tensor=1,remat=none", 0.448, 0.57, True, "compute"),
    ("data=2,fsdp=2,tensor=2,remat=none", 0.469, 0.54, True, "compute"),
    ("data=4,fsdp=2,tensor=1,remat=none", 0.497, 0.51, True, "ici"),
    ("data=1,fsdp=2,tensor=4,remat=none", 0.536, 0.47, True, "ici"),
    ("data=2,fsdp=1,tensor=4,remat=none", 0.588, 0.43, True, "ici"),
    ("data=8,fsdp=1,tensor=1,remat=none", 0.634, 0.40, False, "ici"),
)


def candidate(layout: str, step_seconds: float, mfu: float, fits: bool, bound: str) -> dict:
    degrees = dict(part.split("=") for part in layout.split(","))
    shards = int(degrees["fsdp"]) * int(degrees["tensor"])
    parts = {
        "weights": 20_976_640 // shards,
        "gradients": 20_976_640 // shards,
        "optimizer": 41_953_280 // shards,
        "activations": 148_000_000,
        "buffers": 26_500_000 + 9_000_000 * (8 // shards - 1) * 13,
    }
    extra = step_seconds - 0.412
    seconds = {name: 0.412 * share for name, share, _ in BREAKDOWN}
    seconds["ReduceScatter_fsdp gradients"] += extra * 0.7
    seconds["AllReduce_tensor activations"] += extra * 0.3
    return {
        "layout": layout,
        "mesh": {axis: int(degrees[axis]) for axis in ("data", "fsdp", "tensor")},
        "step_seconds": step_seconds,
        "mfu": mfu,
        "hfu": mfu,
        "tflops_per_chip": 0.081,
        "tokens_per_second_per_chip": 8192 / step_seconds / 8,
        "bytes_per_chip": {**parts, "total": sum(parts.values())},
        "fits": fits,
        "bound": bound,
        "breakdown": [
            {"name": name, "seconds": seconds[name], "share": seconds[name] / step_seconds, "bound": kind}
            for name, _, kind in BREAKDOWN
        ],
    }


def metrics_lines(num_steps: int = 300, log_every: int = 5) -> list[dict]:
    noise = random.Random(7)
    return [_metrics_line(step, num_steps, noise) for step in range(log_every, num_steps + 1, log_every)]


def _metrics_line(step: int, num_steps: int, noise: random.Random) -> dict:
    loss = 3.02 + 5.4 * exp(-step / 42) + noise.gauss(0, 0.05)
    seconds = 0.447 * (1 + abs(noise.gauss(0, 0.035))) + (0.11 if step in (85, 210) else 0)
    line = {
        "step": step,
        "loss": loss,
        "tokens_per_second": 8192 / seconds,
        "mfu": 0.62 * 0.412 / seconds,
        "step_seconds": seconds,
        "planned_step_seconds": 0.412,
        "learning_rate": 3e-3 * min(step / 30, 1),
        "grad_norm": 0.8 + noise.random() * 0.3,
    }
    if step % 25 == 0 or step == num_steps:
        line["validation_loss"] = loss + 0.09 + noise.gauss(0, 0.015)
    return line


def corpus_document() -> dict:
    return {
        "source": "stdlib",
        "unigram_entropy": 6.718,
        "num_train_tokens": 3_412_992,
        "num_validation_tokens": 261_120,
        "vocab_size": 4096,
        "num_files": 563,
    }


def completion_document() -> dict:
    return {
        "prompt": "def ",
        "text": "__init__(self, name, *, default=None):\n        self.name = name\n"
        "        self._default = default\n\n    def __repr__(self):\n"
        "        return '<%s %r>' % (type(self).__name__, self.name)\n",
        "model": "demo",
        "ttft_seconds": 0.0312,
        "tpot_seconds": 0.0094,
    }


def collective(op: str, axes: list[str], num_bytes: int, count: int, tensor: str, direction: str) -> dict:
    return {
        "op": op,
        "axes": axes,
        "bytes": num_bytes,
        "count": count,
        "tensor": tensor,
        "direction": direction,
    }


def audit_document() -> dict:
    rows = [row for tensor, size in _GATHERED for row in _weight_rows(tensor, size)]
    residual = collective("all_reduce", ["tensor"], 2_097_152, 8, "x", "forward")
    rows.append(_row(residual, residual, "match", ""))
    rows.append(_row(residual | {"direction": "backward"}, residual | {"direction": "backward"}, "match", ""))
    stray = collective("all_gather", ["tensor"], 32_768, 1, "logits", "backward")
    rows.append(_row(None, stray, "unplanned", "target logit gathered by the loss's gradient"))
    return {
        "verdict": "differs",
        "target": "cpu",
        "compile_seconds": 6.42,
        "rows": rows,
        "planned": [row["planned"] for row in rows if row["planned"]],
        "emitted": [row["emitted"] for row in rows if row["emitted"]],
        "unplanned": [stray],
        "missing": [],
        "bytes": {"planned": 87_031_808, "compiled": 87_064_576},
        "flops": {"planned": 2.5769e11, "compiled": 2.5776e11},
        "memory": {"planned": 173_000_000, "compiled": 188_400_000},
    }


_GATHERED = (
    ("wq", 131_072),
    ("wk", 65_536),
    ("wv", 65_536),
    ("wo", 131_072),
    ("w_gate", 393_216),
    ("w_in", 393_216),
    ("w_out", 393_216),
)


def _weight_rows(tensor: str, size: int) -> list[dict]:
    gather = collective("all_gather", ["fsdp"], size, 4, tensor, "forward")
    scatter = collective("reduce_scatter", ["fsdp"], size, 4, tensor, "backward")
    summed = scatter | {"op": "all_reduce"}
    note = "all-reduce, then each device keeps its slice: how XLA writes it on CPU"
    return [_row(gather, gather, "match", ""), _row(scatter, summed, "equivalent", note)]


def _row(planned: dict | None, emitted: dict | None, status: str, note: str) -> dict:
    known = planned or emitted or {}
    row = {"tensor": known["tensor"], "direction": known["direction"], "status": status, "note": note}
    return row | {"planned": planned, "emitted": emitted}
