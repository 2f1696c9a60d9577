"""Plans held against TPU and GPU compilers: results/audit_matrix.json, and the table in read-an-audit.md.

    python benchmarks/audit_matrix.py              # compile what the JSON lacks ([tpu], [cuda12])
    python benchmarks/audit_matrix.py --only 70b   # of those, the cases that have this in their text
    python benchmarks/audit_matrix.py --again 8b   # compile anew the cases that have this in their text
    python benchmarks/audit_matrix.py --table      # only write the table

One compile after another, on any machine; each takes some seconds to two minutes on two cores. Where the
compilers are in environments of their own, one run in each, with `--only v5` or `--only h100` and the like.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from meshwright.audit.plan_audit import audit_plan
from meshwright.errors import MeshwrightError
from meshwright.files import write_whole
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

ROOT = Path(__file__).parents[1]
RESULTS, DOCUMENT = ROOT / "benchmarks/results/audit_matrix.json", ROOT / "docs/how-to/read-an-audit.md"
PACKAGES = ("jax", "libtpu", "jax-cuda12-plugin")
START, END = "<!-- matrix -->", "<!-- end of matrix -->"


@dataclass(frozen=True)
class Case:
    """A row. num_layers: of the model's layers the first so many, all where None."""

    model: str
    hardware: str
    layout: str
    num_sequences: int
    seq_len: int
    phase: str = "train"
    num_layers: int | None = None

    @property
    def text(self) -> str:
        return f"{self.model} {self.phase} {self.hardware} {self.layout}"

    @property
    def plan(self) -> Plan:
        model = load_model(self.model)
        model = replace(model, num_layers=self.num_layers or model.num_layers)
        workload = Workload(self.num_sequences, self.seq_len, self.phase)
        return Plan(model, self.hardware, workload, Layout.parse(self.layout))


# Positions of a sequence in the cases of MIXERS.
_POSITIONS = 4096


@dataclass(frozen=True)
class Mixer:
    """Layers of a model with a mixer, so that each kind is among them, and its layout of generation.

    tpu, gpu: layers in training, None for all. A whole model takes XLA for TPUs minutes; in a few layers, the
    head is most of the memory. generating: layers of a step of generation, which are no loop. tpu_positions:
    of a sequence in training on TPUs; fewer if compiling takes too long (DeepSeek-V4: 20 minutes for 1,024).
    """

    tpu: int | None
    gpu: int | None
    generating: int
    layout: str = "tensor=8"
    sequences: int = 16  # of a batch in training
    tpu_positions: int = _POSITIONS

    def trained(self, hardware: str) -> tuple[int, int | None]:
        """Positions of a sequence and layers in training."""
        return (_POSITIONS, self.gpu) if hardware.startswith("h100") else (self.tpu_positions, self.tpu)


MIXERS = {
    "qwen3.5-27b": Mixer(4, None, 4, "data=2,tensor=4"),
    "kimi-linear-48b-a3b": Mixer(4, 4, 4),
    "codestral-mamba-7b": Mixer(2, None, 4),
    "falcon-mamba-7b": Mixer(2, None, 4),
    "minimax-text-01": Mixer(2, 2, 2),
    "lfm2-1.2b": Mixer(4, None, 4),
    "falcon-h1-7b": Mixer(2, None, 4, "data=8"),
    "recurrentgemma-2b": Mixer(3, None, 3, "data=8"),
    "deepseek-v3.2": Mixer(4, 4, 4),
    "deepseek-v4-flash": Mixer(4, 3, 4, "data=2,kv_replicas=4", sequences=8, tpu_positions=1024),
    "minimax-m3": Mixer(4, 4, 4, "data=2,tensor=4"),
}

CASES = [
    Case("llama-3.2-1b", "v5e:4x4", "data=16,zero=1", 32, 2048),
    Case("llama-3.2-1b", "v5e:4x4", "data=16,zero=2,microbatches=2", 32, 2048),
    Case("llama-3.2-1b", "v5p:2x2x4", "data=16", 32, 2048),
    Case("llama-3.2-1b", "v5e:4x4", "fsdp=16", 32, 2048),
    Case("llama-3.2-1b", "v5e:4x4", "fsdp=16,remat=full", 32, 2048),
    Case("llama-3.2-1b", "v5e:4x4", "data=2,tensor=8", 16, 2048),
    Case("llama-3.2-1b", "v5e:4x4", "data=2,tensor=8,sequence_parallel=true", 16, 2048),
    Case("llama-3.2-1b", "v5e:4x4", "fsdp=4,tensor=4,sequence_parallel=true,remat=matmuls", 32, 2048),
    Case("llama-3.2-1b", "v6e:4x4", "fsdp=16", 32, 2048),
    Case("llama-3.2-1b", "v6e:4x4", "data=4,fsdp=4", 32, 2048),
    Case("llama-3.2-1b", "v5p:2x2x4", "data=2,fsdp=4,tensor=2", 32, 2048),
    Case("llama-3.2-1b", "v5p:2x2x4", "fsdp=4,context=4", 16, 2048),
    Case("llama-3.2-1b", "v5p:2x2x4", "fsdp=4,pipe=4,microbatches=8,schedule=lanes", 64, 2048),
    Case("llama-3-8b", "v5p:4x4x4", "fsdp=64", 128, 4096),
    Case("llama-3-8b", "v5p:4x4x4", "data=4,fsdp=16,remat=full", 128, 4096),
    Case("llama-3-8b", "v5p:4x4x4", "fsdp=16,tensor=4,sequence_parallel=true", 128, 4096),
    Case("llama-3-8b", "v5e:16x16", "fsdp=256,remat=full", 256, 4096),
    Case("llama-3-8b", "v5e:16x16", "fsdp=64,tensor=4,sequence_parallel=true,remat=full", 256, 4096),
    Case("llama-3-8b", "v6e:8x8", "fsdp=64,remat=full", 128, 4096),
    Case("llama-3-8b", "v6e:8x8", "data=8,tensor=8,zero=1,sequence_parallel=true,remat=full", 64, 4096),
    Case("llama-3-70b", "v5p:16x16x16", "fsdp=1024,tensor=4,sequence_parallel=true,remat=full", 1024, 4096),
    Case("llama-3-70b", "v5p:8x8x8", "fsdp=512,remat=full", 512, 4096),
    Case("llama-3-70b", "v6e:16x16", "fsdp=64,tensor=4,sequence_parallel=true,remat=full", 256, 4096),
    Case("llama-3.1-405b", "v5p:16x16x16", "fsdp=512,tensor=8,sequence_parallel=true,remat=full", 1024, 4096),
    Case("llama-3.1-405b", "v6e:16x16", "fsdp=32,tensor=8,sequence_parallel=true,remat=full", 64, 4096),
    Case("llama-3.2-1b", "2*v5e:4x4", "data=2,fsdp=16", 64, 2048),
    Case("llama-3.2-1b", "2*v5e:4x4", "data=8,tensor=4", 64, 2048),
    Case("llama-3-8b", "2*v5p:4x4x4", "data=8,fsdp=16,remat=full", 256, 4096),
    Case("llama-3-8b", "v5e:4x4", "data=4,tensor=4", 4, 4096, "prefill"),
    Case("llama-3-8b", "v5e:4x4", "data=4,tensor=4", 64, 4096, "generate"),
    Case("llama-3.2-1b", "h100:1x8", "data=8,zero=1", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "data=8,zero=1,microbatches=2", 32, 4096),
    Case("llama-3.2-1b", "h200:2x8", "data=16,zero=2,microbatches=2", 64, 4096),
    Case("llama-3.2-1b", "a100-80gb:2x8", "fsdp=16", 32, 4096),
    Case("llama-3-8b", "h100:1x8", "fsdp=8,remat=full", 16, 4096),
    Case("llama-3-8b", "h100:2x8", "data=2,fsdp=4,tensor=2,remat=full", 32, 4096),
    Case("llama-3-8b", "h100:2x8", "data=2,fsdp=8,microbatches=2,remat=full", 64, 4096),
    Case("llama-3-8b", "b200:1x8", "tensor=8,sequence_parallel=true", 16, 4096),
    Case("llama-3-8b", "h100:1x8", "tensor=8", 4, 4096, "prefill"),
    Case("llama-3-8b", "h100:1x8", "tensor=8", 64, 4096, "generate"),
    Case("llama-3-70b", "h100:8x8", "fsdp=64,remat=full", 64, 4096),
    Case("llama-3-70b", "h100:8x8", "fsdp=8,tensor=8,sequence_parallel=true,remat=full", 64, 4096),
    Case("llama-3-70b", "b200:4x8", "fsdp=4,tensor=8,sequence_parallel=true,remat=full", 32, 4096),
    Case("llama-3-70b", "h200:1x8", "tensor=8", 4, 4096, "prefill"),
    Case("llama-3-70b", "h200:1x8", "tensor=8", 64, 4096, "generate"),
    Case("llama-3.1-405b", "h100:64x8", "fsdp=64,tensor=8,sequence_parallel=true,remat=full", 512, 4096),
    Case(
        "llama-3.1-405b", "b200:16x8", "data=2,fsdp=8,tensor=8,sequence_parallel=true,remat=full", 128, 4096
    ),
    Case("llama-3.1-405b", "b200:1x8", "tensor=8", 16, 4096, "generate"),
    Case("mixtral-8x7b", "h100:1x8", "fsdp=8,remat=full", 16, 4096, "train", 2),
    Case("mixtral-8x7b", "h100:1x8", "fsdp=8,expert=8,remat=full", 16, 4096, "train", 2),
    Case("mixtral-8x7b", "h100:1x8", "fsdp=8,expert=8,remat=full,capacity=1.25", 16, 4096, "train", 2),
    Case(
        "mixtral-8x7b",
        "h100:1x8",
        "fsdp=4,expert=4,tensor=2,sequence_parallel=true,remat=full",
        16,
        4096,
        "train",
        2,
    ),
    Case("mixtral-8x7b", "h100:2x8", "fsdp=16,expert=8,remat=full", 32, 4096, "train", 2),
    Case("mixtral-8x7b", "h100:8x8", "fsdp=64,expert=8,remat=full", 64, 4096),
    Case("mixtral-8x7b", "h100:8x8", "fsdp=32,expert=8,tensor=2,sequence_parallel=true,remat=full", 64, 4096),
    Case("mixtral-8x7b", "h100:1x8", "tensor=8", 4, 4096, "prefill", 2),
    Case("mixtral-8x7b", "h100:1x8", "tensor=8", 64, 4096, "generate", 2),
    Case("mixtral-8x22b", "h100:16x8", "fsdp=128,expert=8,remat=full", 128, 4096),
    Case("deepseek-v2-lite", "h100:1x8", "fsdp=8,remat=full", 16, 4096, "train", 3),
    Case("deepseek-v2-lite", "h100:1x8", "fsdp=8,expert=8,remat=full", 16, 4096, "train", 3),
    Case(
        "deepseek-v2-lite",
        "h100:1x8",
        "fsdp=4,expert=4,tensor=2,sequence_parallel=true,remat=full",
        16,
        4096,
        "train",
        3,
    ),
    Case("gpt-oss-20b", "h100:1x8", "fsdp=8,remat=full", 16, 4096, "train", 2),
    Case("gpt-oss-20b", "h100:1x8", "fsdp=8,expert=8,remat=full", 16, 4096, "train", 2),
    Case("qwen3-30b-a3b", "h100:1x8", "fsdp=8,expert=8,remat=full", 16, 4096, "train", 2),
    Case("qwen3-30b-a3b", "h200:4x8", "fsdp=32,expert=8,remat=full", 64, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=4,context=2", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=2,context=4,context_method=ulysses", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=2,pipe=4,microbatches=8,schedule=lanes", 32, 4096),
    Case("llama-3.2-1b", "h100:1x8", "data=2,pipe=4,microbatches=8,schedule=lanes,zero=1", 32, 4096),
    Case("llama-3.2-1b", "h100:1x8", "data=2,pipe=4,microbatches=8,schedule=zb-h1", 16, 2048),
    Case("llama-3.2-1b", "h100:1x8", "data=2,pipe=4,microbatches=8,schedule=dualpipe,remat=full", 16, 2048),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,offload=true", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,offload_optimizer=true", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,optimizer=lion", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,optimizer=adafactor", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,optimizer=muon", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,master_weights=true", 16, 4096),
    Case("llama-3.2-1b", "h100:1x8", "fsdp=8,matmul_dtype=fp8", 16, 4096),
    Case("llama-3.2-1b", "b200:1x8", "fsdp=8,matmul_dtype=fp4", 16, 4096),
    Case("gemma-2-2b", "h100:1x8", "fsdp=8,remat=full", 16, 4096),
    Case("gemma-3-1b", "h100:1x8", "fsdp=8,remat=full", 16, 4096),
    Case("qwen3-8b", "h100:1x8", "fsdp=4,tensor=2,sequence_parallel=true,remat=full", 16, 4096),
    Case("llama-3-8b", "h100:1x8", "tensor=8,weights_dtype=int8", 64, 4096, "generate"),
    Case("llama-3-8b", "h100:1x8", "tensor=8,weights_dtype=fp8,matmul_dtype=fp8", 64, 4096, "generate"),
    Case("mistral-7b-v0.1", "h100:1x8", "fsdp=8,remat=full", 8, 8192),
    Case(
        "mixtral-8x7b",
        "v5p:2x2x2",
        "fsdp=4,expert=4,tensor=2,sequence_parallel=true,remat=full",
        8,
        4096,
        "train",
        2,
    ),
    Case("mixtral-8x7b", "v5p:2x2x2", "fsdp=8,expert=8,remat=full", 8, 4096, "train", 2),
    Case("mixtral-8x7b", "v5p:2x2x2", "fsdp=8,remat=full", 8, 4096, "train", 2),
    Case("deepseek-v2-lite", "v5p:2x2x2", "fsdp=8,expert=8,remat=full", 8, 4096, "train", 3),
    Case("gpt-oss-20b", "v5p:2x2x2", "fsdp=8,expert=8,remat=full", 8, 4096, "train", 4),
    Case("llama-3.2-1b", "v5p:2x2x2", "fsdp=8,offload=true", 16, 2048),
    Case("llama-3.2-1b", "v5p:2x2x2", "fsdp=4,context=2,context_method=ulysses", 16, 2048),
    Case("qwen3-0.6b", "v5e:2x4", "fsdp=8", 16, 2048),
    *(
        Case(model, hardware, layout, num_sequences, seq_len, phase, num_layers)
        for hardware in ("v5p:2x2x2", "h100:1x8")
        for model, mixer in MIXERS.items()
        for layout, num_sequences, phase, (seq_len, num_layers) in (
            ("fsdp=8,remat=full", mixer.sequences, "train", mixer.trained(hardware)),
            (mixer.layout, 64, "generate", (_POSITIONS, mixer.generating)),
        )
    ),
]


def audited(case: Case) -> dict:
    """What the table says of a case, and the differences in words."""
    try:
        found = audit_plan(
            case.plan, load(case.hardware).chip.kind, lambda what: print(what, file=sys.stderr, flush=True)
        )
    except MeshwrightError as error:
        return {**asdict(case), "verdict": "refused", "why": str(error)}
    said = [f"{one['tensor']} {one['direction']}: {one['what']}" for one in found["findings"]]
    said += [one["what"] for one in found["compiler_warnings"]] + found["not_understood"]
    ratios = {
        name: found[name]["compiled"] / found[name]["planned"]
        for name in ("bytes", "sent", "flops", "memory")
        if found[name]["compiled"] and found[name]["planned"]
    }
    if seconds := found["step_seconds"]["scheduled"]:
        ratios["step"] = seconds / found["step_seconds"]["planned"]
    return {
        **asdict(case),
        "verdict": found["verdict"],
        "compiled_over_planned": ratios,
        "memory_bytes": found["memory"]["compiled"],
        "compile_seconds": found["compile_seconds"],
        "differences": said,
    }


def run(only: str, again: str | None) -> None:
    """Every case that the JSON lacks, each written when it is there."""
    known = {_key(one): one for one in _read()["cases"]}
    for case in (one for one in CASES if only in one.text):
        key = _key(asdict(case))
        if key not in known or (again and again in case.text):
            known[key] = audited(case)
            _write([known[k] for k in map(_key, map(asdict, CASES)) if k in known])
        print(case.text, known[key]["verdict"], file=sys.stderr, flush=True)


def _key(case: dict) -> tuple:
    names = ("model", "hardware", "layout", "num_sequences", "seq_len")
    return (*(case[name] for name in names), case.get("phase", "train"), case.get("num_layers"))


def _read() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": []}


def _write(cases: list[dict]) -> None:
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    known = _read().get("environment", {})
    before = known.get("compiler_peak_bytes") or 0
    environment = {
        **{name: _version(name) or known.get(name) for name in PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "compiler_peak_bytes": max(children, before) or None,  # of all cases, also of those of earlier runs
    }
    write_whole(RESULTS, json.dumps({"environment": environment, "cases": cases}, indent=1) + "\n")


def _version(name: str) -> str | None:
    """Of a package; None of the compiler that another environment has."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(cases: list[dict]) -> str:
    """Markdown: a row a case, differences below."""
    lines = [
        "| model | step | hardware | layout | verdict | moved | sent | FLOPs | memory | time | compiled in |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for case in cases:
        ratios = case.get("compiled_over_planned", {})
        names = ("bytes", "sent", "flops", "memory", "step")
        cells = [f"{ratios[name]:.3f}" if name in ratios else "–" for name in names]
        remarks = grouped(case.get("differences", [])) or ([case["why"]] if "why" in case else [])
        if remarks and (said := "; ".join(remarks)) not in notes:
            notes.append(said)
        mark = f" [{notes.index('; '.join(remarks)) + 1}]" if remarks else ""
        seconds = f"{case['compile_seconds']:.0f} s" if "compile_seconds" in case else "–"
        layout = case["layout"].replace(",", ", ")
        layers = case.get("num_layers")
        row = [
            f"{case['model']}, {layers} layers" if layers else case["model"],
            case.get("phase", "train"),
            f"`{case['hardware']}`",
            f"`{layout}`",
            f"{case['verdict']}{mark}",
            *cells,
            seconds,
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"{at}. {note}" for at, note in enumerate(notes, start=1))])


def grouped(differences: list[str]) -> list[str]:
    """Differences that are alike but for their tensor, as one each."""
    tensors: dict[str, list[str]] = {}
    for line in differences:
        where, colon, what = line.partition(": ")
        tensor = where.split(" ")[0] if colon else ""
        tensors.setdefault(what.removeprefix(f"{tensor}: ") if colon else line, []).append(
            where if colon else ""
        )
    return [
        f"{', '.join(sorted(filter(None, names)))}: {what}".removeprefix(": ")
        for what, names in tensors.items()
    ]


def write_table() -> None:
    """The table between its marks in the document."""
    found = _read()
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    versions = ", ".join(f"{name} {found['environment'][name]}" for name in PACKAGES)
    text = f"{START}\n{versions}; compiled over planned:\n\n{table(found['cases'])}\n{END}"
    write_whole(DOCUMENT, before + text + after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--again", metavar="TEXT", help="compile the cases anew that have this in their text")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases that have this in their text")
    parser.add_argument("--table", action="store_true", help="only write docs/how-to/read-an-audit.md")
    asked = parser.parse_args()
    if not asked.table:
        run(asked.only, asked.again)
    write_table()
