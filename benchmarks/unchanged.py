"""Plans, derived collectives and compiled programs of two checkouts, compared.

    python benchmarks/unchanged.py --src OLD/src --write before.json
    python benchmarks/unchanged.py --against before.json                  # of this checkout
    python benchmarks/unchanged.py --against before.json --only programs  # one part of it

A refactoring of the layouts, the cost model or the runtime changes none of these, and what another change
does to them is its list of effects. The second command prints what differs and exits 1 if anything does.

    plans        `mw plan train --layout`: seconds, bytes and breakdown of single layouts, which between
                 them use every axis, schedule, remat, ZeRO stage and dtype, experts, latents and windows
    searches     `mw plan train`: the layout that ranks first, with the same figures
    collectives  what is derived of those single layouts and of prefill and generation: how often a step
                 runs each operation, by tensor, axes and bytes
    documents    the JSON of other commands (`mw plan serve`, `mw model`, `mw shard`, `mw validate`, ...),
                 key by key, and the help of every command; without the seconds that a search took
    programs     SHA-256 of the optimised HLO of the layouts of the audit matrix and of every schedule,
                 optimizer, mixer of tokens and dtype, cut down to eight virtual CPU devices and tiny
                 models; without source lines, scopes and the compiler's own names

Every batch divides. It takes about ten minutes on two cores, most of it to compile. Both checkouts are
run by the interpreter that runs this file, so JAX and its compiler are the same.
"""

# Cases are tables of keyword arguments, which no type describes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false
import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.layout.layout_checks import check_fits

# Figures further apart than this differ; sums in another order do not.
TOLERANCE = 1e-9
MAX_LINES_A_CASE = 12
# model, hardware, sequences, tokens of one, layout
LAYOUTS = [
    # Degrees, ZeRO and remat.
    ("llama-3-8b", "v5p:4x4x4", 128, 4096, "fsdp=64"),
    ("llama-3-8b", "v5p:4x4x4", 128, 4096, "fsdp=64,zero=1"),
    ("llama-3-8b", "v5p:4x4x4", 128, 4096, "data=64,zero=1,microbatches=2,remat=matmuls"),
    ("llama-3-8b", "v5p:4x4x4", 128, 4096, "data=64,zero=2,microbatches=2,remat=attention"),
    ("llama-3-8b", "v5p:4x4x4", 128, 4096, "data=64,remat=full"),
    ("llama-3-8b", "v5p:4x4x4", 128, 4096, "data=4,fsdp=16,zero=2,remat=alternate"),
    ("llama-3-8b", "v5e:16x16", 256, 4096, "fsdp=64,tensor=4,sequence_parallel=true,remat=full"),
    ("llama-3-8b", "v5e:16x16", 256, 4096, "data=4,fsdp=16,tensor=4,remat=full"),
    ("llama-3-70b", "v5p:16x16x16", 1024, 4096, "fsdp=1024,tensor=4,sequence_parallel=true,remat=full"),
    ("llama-3-70b", "v5p:8x8x8", 512, 4096, "fsdp=512,remat=full"),
    ("llama-3-70b", "v6e:16x16", 256, 4096, "fsdp=64,tensor=4,sequence_parallel=true,remat=full"),
    ("llama-3-8b", "2*v5p:4x4x4", 256, 4096, "data=8,fsdp=16,remat=full"),
    ("llama-3.2-1b", "v5e:4x4", 32, 2048, "fsdp=4,tensor=4,sequence_parallel=true,remat=matmuls"),
    ("llama-3.2-1b", "cpu:8", 16, 512, "data=2,fsdp=2,tensor=2,weights_dtype=f32,compute_dtype=f32"),
    # Long sequences.
    ("llama-3-8b", "v5p:4x4x4", 64, 8192, "fsdp=16,context=4,remat=full"),
    ("llama-3.1-70b", "h100:4x8", 4, 131072, "fsdp=4,context=8,zero_context=true,remat=full"),
    ("llama-3.1-8b", "v5e:4x4", 2, 131072, "fsdp=2,context=8,context_method=ring,remat=full"),
    ("llama-3.1-8b", "h100:2x8", 2, 65536, "context=4,tensor=4,sequence_parallel=true,microbatches=2"),
    # A second tensor axis.
    ("llama-3.1-405b", "v5p:8x8x8", 64, 8192, "fsdp=32,tensor=8,tensor2=2,remat=full"),
    # Pipelines.
    ("llama-3.1-405b", "h100:64x8", 512, 4096, "fsdp=64,tensor=8,sequence_parallel=true,remat=full"),
    ("llama-3.1-405b", "h100:64x8", 128, 8192, "data=4,tensor=8,pipe=16,microbatches=32,schedule=gpipe"),
    ("llama-3.1-405b", "h100:64x8", 128, 8192, "fsdp=4,tensor=8,pipe=16,microbatches=32,schedule=1f1b"),
    ("llama-3.1-405b", "h100:64x8", 128, 8192, "data=4,tensor=8,pipe=16,microbatches=32,interleave=8"),
    ("llama-3.1-405b", "h100:64x8", 128, 8192, "fsdp=4,tensor=8,pipe=16,microbatches=32,schedule=zb-h1"),
    ("llama-3.1-405b", "h100:64x8", 128, 8192, "data=4,tensor=8,pipe=16,microbatches=32,schedule=zb-v"),
    ("llama-3.1-405b", "h100:64x8", 128, 8192, "fsdp=4,tensor=8,pipe=16,microbatches=32,schedule=dualpipe"),
    ("llama-3-70b", "h100:8x8", 64, 4096, "fsdp=8,tensor=8,sequence_parallel=true,remat=full"),
    ("llama-3-70b", "a100-80gb:8x8", 64, 4096, "data=2,tensor=4,pipe=8,microbatches=16,interleave=2,zero=1"),
    # Dtypes and where the state is held.
    ("llama-3-70b", "h100:8x8", 64, 4096, "fsdp=64,remat=full,matmul_dtype=fp8"),
    ("llama-3-70b", "h100:8x8", 64, 4096, "fsdp=64,remat=full,offload=true,gradients_dtype=f32"),
    ("llama-3-70b", "b200:4x8", 32, 4096, "fsdp=32,remat=full,optimizer_dtype=bf16,master_weights=true"),
    # Other architectures: plain MLP, windows, experts, latents, sinks.
    ("gpt-3-175b", "a100-80gb:128x8", 1536, 2048, "data=16,tensor=8,pipe=8,microbatches=48,interleave=2"),
    ("gemma-2-9b", "v5e:8x8", 64, 8192, "fsdp=16,tensor=4,remat=full"),
    ("gemma-3-27b", "v5p:4x4x4", 64, 8192, "fsdp=16,tensor=4,sequence_parallel=true,remat=full"),
    ("mistral-7b", "h100:2x8", 32, 8192, "fsdp=16,remat=full"),
    ("mixtral-8x7b", "h100:16x8", 256, 4096, "fsdp=32,expert=8,tensor=4,sequence_parallel=true,remat=full"),
    ("mixtral-8x7b", "v5p:4x4x4", 128, 4096, "fsdp=64,expert=4,remat=full"),
    ("qwen3-30b-a3b", "h100:8x8", 128, 4096, "fsdp=64,expert=64,remat=full"),
    ("gpt-oss-120b", "h100:8x8", 64, 4096, "fsdp=64,expert=32,remat=full"),
    (
        "deepseek-v3",
        "h800:256x8",
        4096,
        4096,
        "data=128,pipe=16,expert=64,microbatches=32,schedule=dualpipe,zero=1",
    ),
    (
        "deepseek-v3",
        "h100:256x8",
        4096,
        4096,
        "fsdp=256,tensor=8,sequence_parallel=true,expert=64,remat=full",
    ),
    ("llama-4-scout", "h100:32x8", 256, 8192, "fsdp=32,tensor=8,sequence_parallel=true,expert=16,remat=full"),
]
# model, hardware, sequences, tokens of one: numbers that every layout of such a machine divides
SEARCHES = [
    ("llama-3-8b", "v5p:4x4x4", 512, 4096),
    ("llama-3-8b", "v5e:16x16", 1024, 4096),
    ("llama-3-70b", "v5p:16x16x16", 4096, 4096),
    ("llama-3-70b", "h100:16x8", 1024, 4096),
    ("llama-3.1-405b", "h100:64x8", 2048, 8192),
    ("llama-3.1-405b", "v5p:16x16x16", 4096, 4096),
    ("gemma-3-27b", "v5e:16x16", 1024, 4096),
    ("mixtral-8x7b", "h100:16x8", 1024, 4096),
    ("deepseek-v3", "h100:256x8", 8192, 4096),
    ("llama-3.2-1b", "cpu:8", 64, 512),
]
# model, hardware, sequences, positions of the cache, layout, phase
INFERENCE = [
    (*case, phase)
    for phase in ("prefill", "generate")
    for case in [
        ("llama-3-8b", "v5e:4x4", 64, 4096, "data=4,tensor=4"),
        ("llama-3-70b", "h200:1x8", 64, 4096, "tensor=8"),
        ("llama-3.1-405b", "b200:1x8", 16, 4096, "tensor=8"),
        ("gemma-3-27b", "v5e:4x4", 64, 4096, "data=4,tensor=4"),
        ("deepseek-v3", "h200:2x8", 64, 4096, "tensor=16"),
    ]
]
PHASES = ("prefill", "generate")
TABLES = Path(__file__).parent / "published"
NAMES = "llama-3-8b llama-2-13b gemma-2-9b gemma-3-27b mixtral-8x7b qwen3-30b-a3b deepseek-v3 gpt-oss-120b"
NAMES = [*NAMES.split(), "llama-4-scout", "phi-3-mini", "gpt-3-175b", "mistral-7b"]
HELPED = "plan train,plan serve,train,serve,generate,audit,tune,validate,bench serve,model,shard,launch"
HELPED = HELPED.split(",")
TINY = {"d_model": 64, "d_ff": 128, "num_heads": 8, "num_kv_heads": 8, "d_head": 8, "vocab_size": 128}
MODELS = {
    "llama": {"num_layers": 2, "tied_embeddings": False},
    "gemma": {
        "num_layers": 3,  # a period of local and global layers, and one layer more
        "tied_embeddings": True,
        "sliding_window": 5,
        "global_every": 2,
        "rope_theta_local": 100.0,
        "norm_offset": True,
        "qk_norm": True,
        "post_norms": True,
        "scale_embedding": True,
        "activation": "gelu",
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
    },
    "gpt": {
        "num_layers": 2,
        "norm": "layer",
        "norm_bias": True,
        "positions": "learned",
        "gated": False,
        "activation": "gelu",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
}
PROGRAMS = [
    ("llama", "train", "data=8"),
    ("llama", "train", "data=8,zero=1"),
    ("llama", "train", "data=8,zero=1,microbatches=2"),
    ("llama", "train", "data=8,zero=2,microbatches=2"),
    ("llama", "train", "fsdp=8"),
    ("llama", "train", "fsdp=8,remat=full"),
    ("llama", "train", "data=4,fsdp=2,remat=full"),
    ("llama", "train", "data=2,fsdp=4,microbatches=2,remat=full"),
    ("llama", "train", "data=2,tensor=4"),
    ("llama", "train", "data=2,tensor=4,sequence_parallel=true"),
    ("llama", "train", "data=2,tensor=4,zero=1,sequence_parallel=true,remat=full"),
    ("llama", "train", "fsdp=2,tensor=4,sequence_parallel=true,remat=matmuls"),
    ("llama", "train", "data=2,fsdp=2,tensor=2"),
    ("llama", "train", "fsdp=2,context=4"),
    ("llama", "train", "tensor=8,sequence_parallel=true"),
    *((model, "train", "data=2,fsdp=2,tensor=2") for model in ("gemma", "gpt")),
    *((model, "train", "fsdp=4,tensor=2,sequence_parallel=true,remat=full") for model in ("gemma", "gpt")),
    *((model, phase, "data=4,tensor=2") for model in MODELS for phase in ("prefill", "generate")),
    *(("llama", phase, "tensor=8") for phase in ("prefill", "generate")),
]
_MOE = {"num_experts": 8, "experts_per_token": 2, "d_ff": 32}
MODELS |= {
    "mixture": MODELS["llama"] | {"moe": _MOE},
    "latent": MODELS["llama"]
    | {
        "d_head": 12,
        "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "q_rank": 24},
        "moe": _MOE | {"num_shared_experts": 1, "num_dense_layers": 1},
    },
    "grouped": MODELS["llama"] | {"num_kv_heads": 2},
}
PROGRAMS += [
    *(("grouped", phase, "data=2,tensor=2,kv_replicas=2") for phase in ("train", "prefill", "generate")),
    ("llama", "train", "fsdp=2,context=4,context_method=ring"),
    ("llama", "train", "fsdp=2,context=4,context_method=ulysses"),
    ("llama", "train", "data=2,tensor=2,tensor2=2"),
    ("llama", "train", "data=2,pipe=2,tensor=2,microbatches=4,schedule=lanes"),
    ("llama", "train", "data=4,pipe=2,microbatches=4,schedule=lanes"),
    ("llama", "train", "fsdp=4,pipe=2,microbatches=4,schedule=lanes,zero=1"),
    *(("mixture", "train", f"fsdp=8,expert={degree}") for degree in (2, 4, 8)),
    ("mixture", "train", "fsdp=4,expert=2,tensor=2,sequence_parallel=true,remat=full"),
    ("mixture", "train", "fsdp=8,expert=4,capacity=1.25"),
    ("mixture", "train", "fsdp=8,expert=4,expert_nodes=2,dispatch=once"),
    ("latent", "train", "fsdp=4,tensor=2"),
    ("latent", "train", "fsdp=8,expert=4,remat=full"),
    *((model, phase, "data=2,tensor=4") for model in ("mixture", "latent") for phase in PHASES),
    *(("llama", phase, f"tensor=8,weights_dtype={dtype}") for dtype in ("int8", "int4") for phase in PHASES),
    ("llama", "generate", "tensor=8,kv_dtype=int8"),
    *(("llama", "train", f"fsdp=8,optimizer={name}") for name in ("adafactor", "lion", "muon")),
    ("llama", "train", "fsdp=8,optimizer_dtype=bf16,master_weights=true,weights_dtype=bf16"),
    *(("llama", "train", f"fsdp=8,matmul_dtype={dtype}") for dtype in ("int8", "fp8", "fp4")),
]
STEPS = """
plan serve --model llama-3-8b --hardware v5e:4x4 --phase generate --batch 32 --context 8k
plan serve --model llama-3-70b --hardware h100:1x8 --phase prefill --prompt-tokens 8k
plan serve --model deepseek-v3 --hardware h200:1x8 --phase generate --batch 16 --context 4k
plan train --model llama-3-8b --hardware h100 --batch-tokens 4Mi --seq-len 8192 --smallest
"""
PROMPTS = ["--prompt-tokens", "8k", "--output-tokens", "512"]
ON_V5E = ["--mesh", "X=4,Y=2", "--dims", "I=512,J=4096,K=4096", "--hardware", "v5e:4x2"]
ON_V4P = ["--mesh", "X=4,Y=4,Z=4", "--dims", "B=1024,D=4096", "--dtype", "bf16", "--hardware", "v4p:4x4x4"]
DOCUMENTS = [
    *(line.split() for line in STEPS.strip().splitlines()),
    ["plan", "serve", "--model", "llama-3-70b", "--hardware", "v5e,h100", *PROMPTS, "--tpot", "0.03"],
    ["plan", "serve", "--model", "mixtral-8x7b", "--hardware", "h100:1x8", *PROMPTS, "--paged"],
    ["plan", "serve", "--model", "deepseek-v3", "--hardware", "h200:2x8", *PROMPTS, "--weights-dtype", "fp8"],
    ["plan", "serve", "--model", "gemma-3-27b", "--hardware", "v5e:4x4", *PROMPTS, "--explain"],
    ["plan", "serve", "--model", "llama-3-8b", "--hardware", "h100:1x8", "--lengths", "sharegpt", "--paged"],
    ["plan", "serve", "--model", "llama-3-8b", "--hardware", "a100-80gb:1x4", *PROMPTS, "--chunk", "512"],
    ["plan", "serve", "--model", "llama-3-8b", "--hardware", "v5e:2x2", *PROMPTS, "--ideal"],
    ["plan", "serve", "--model", "llama-3-8b", "--hardware", "h100:1x1", *PROMPTS, "--drafts", "4"],
    *(
        f"plan train --model {model} --hardware {hardware} --batch-tokens 4Mi --seq-len 4096 {rest}".split()
        for model, hardware, rest in [
            ("llama-3-70b", "h100:16x8", "--explain --tokens 2000000000000 --critical-batch 16M"),
            ("llama-3-8b", "v5p:4x4x4", "--explain --any --top 50"),
            ("mixtral-8x7b", "h100:8x8", "--software megatron --explain"),
            ("llama-3-8b", "h100:4x8", "--software pytorch-eager --given tensor<=2 --top 30"),
            ("llama-3-8b", "a100-80gb:4x8", "--software deepspeed --given zero=3"),
            (
                "gpt-3-175b",
                "a100-80gb:32x8",
                "--software megatron-te --any --given pipe>=2 --set max_seq_len=4096",
            ),
            ("llama-3-8b", "h100:1x1", "--explain"),
            ("qwen3-30b-a3b", "b200:2x8", "--set lora_rank=16"),
        ]
    ),
    *(["model", name, "--seq-len", "8k"] for name in NAMES),
    *(["support", name] for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-3-27b")),
    ["hardware"],
    *(["hardware", name] for name in ("h100", "v5p", "cpu", "mi300x", "gb200-nvl72")),
    ["shard", "A[I_X, J] . B[J_X, K] -> C[I_X, K]", "--mesh", "X=4,Y=2", "--dims", "I=1024,J=4096,K=4096"],
    ["shard", "A[I, J_X] . B[J_X, K_Y] -> C[I, K_Y]", *ON_V5E, "--backward"],
    ["collective", "AllGather_X([B_X, D_Y])", *ON_V4P],
    ["collective", "AllReduce_Z([B_X, D_Y]{U_Z})", *ON_V4P],
    *(
        ["validate", f"{TABLES}/{name}"]
        for name in ("training.csv", "nanotron.csv", "aleph-alpha-failed.csv")
    ),
    *([*command.split(), "--help"] for command in HELPED),
]
# Keys whose values are of the machine that runs this.
_OF_THIS_RUN = re.compile(r"(^|/)(search/seconds|compile_seconds)$")
PARTS = ("plans", "searches", "collectives", "documents", "programs")


# What is recorded: by case, figures by name


def plans(src: Path) -> Iterator[tuple[str, dict]]:
    for *case, layout in LAYOUTS:
        yield name(*case, layout), planned(src, *case, "--layout", layout)


def searches(src: Path) -> Iterator[tuple[str, dict]]:
    for case in SEARCHES:
        yield name(*case), planned(src, *case)


def planned(src: Path, model: str, hardware: str, sequences: int, seq_len: int, *options: str) -> dict:
    """The figures of the best layout; exit code 1 says that it does not fit."""
    asked = ["--model", model, "--hardware", hardware, "--batch-tokens", str(sequences * seq_len)]
    asked += ["--seq-len", str(seq_len), "--json", *options]
    program = "from meshwright.cli.main import run; run()"
    done = in_checkout(src, "-c", program, "plan", "train", *asked)
    if done.returncode > 1:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    best = json.loads(done.stdout)["best"]
    return {
        "layout": best["layout"],
        "step_seconds": best["step_seconds"],
        **{f"bytes: {cause}": value for cause, value in best["bytes_per_chip"].items()},
        **{f"seconds: {term['name']}": term["seconds"] for term in best["breakdown"]},
    }


def in_checkout(src: Path, *arguments: str) -> subprocess.CompletedProcess:
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "PYTHONPATH": str(src), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def here(part: str, src: Path) -> Iterator[tuple[str, dict]]:
    """A part that needs the package: this file again, in a process that imports that of `src`."""
    done = in_checkout(src, __file__, "--src", str(src), "--inside", part)
    if done.returncode:
        raise SystemExit(f"{part}: {done.stderr}")
    for line in done.stdout.splitlines():
        yield tuple(json.loads(line))


def collectives() -> Iterator[tuple[str, dict]]:
    """How often a step runs each collective, by what it is."""
    from meshwright.audit.compile.planned_program import planned_step
    from meshwright.errors import MeshwrightError
    from meshwright.hardware.catalog import load
    from meshwright.layout import Layout
    from meshwright.layout.workload import Workload
    from meshwright.models.presets import load_model
    from meshwright.plan_file import Plan

    for model, hardware, sequences, seq_len, layout, phase in [*((*c, "train") for c in LAYOUTS), *INFERENCE]:
        counts: dict[str, float] = {}
        try:
            workload = Workload(sequences, seq_len, phase)
            plan = Plan(load_model(model), hardware, workload, Layout.parse(layout))
            step = planned_step(plan, load(hardware))
            planned = step.collectives if hasattr(step, "collectives") else step.transfers  # as it once was
            for found in (one.to_dict() for one in planned):
                what = f"{found['op']} {found['tensor']} over {'·'.join(found['axes'])}"
                key = f"{what} ({found['direction']}), {found['bytes']:.12g} bytes"
                counts[key] = counts.get(key, 0) + found["count"]
        except MeshwrightError as error:
            counts = {"refused": str(error)}
        yield name(model, hardware, sequences, seq_len, layout, phase), counts


def documents() -> Iterator[tuple[str, dict]]:
    """The JSON document of each command, flat: a figure by its path in the document."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from meshwright.cli.main import main

    for command in DOCUMENTS:
        out, err = StringIO(), StringIO()
        has_json = "--help" not in command
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*command, "--json"] if has_json else command)
        found: dict[str, object] = {"exit": code}
        if not has_json or code > 1 or not out.getvalue():
            found |= {
                f"line {at}": line for at, line in enumerate((out.getvalue() + err.getvalue()).splitlines())
            }
        else:
            found |= dict(flat(json.loads(out.getvalue())))
        yield " ".join(word.removeprefix(f"{TABLES}/") for word in command), found


def flat(document: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    else:
        if not _OF_THIS_RUN.search(path):
            yield path, document
        return
    for key, value in items:
        yield from flat(value, f"{path}/{key}" if path else str(key))


def programs() -> Iterator[tuple[str, dict]]:
    """The optimised program of each case, as a hash, and how many instructions it has."""
    import jax

    from meshwright.errors import MeshwrightError
    from meshwright.layout import Layout
    from meshwright.layout.workload import Workload
    from meshwright.models import config as models  # the tables' own file is newer than some checkouts
    from meshwright.serve.device.programs import workload_step
    from meshwright.train.optimizers import OptimizerConfig
    from meshwright.train.step import CompiledStep

    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
    for model, phase, text in PROGRAMS:
        shape = TINY | MODELS[model]
        tables = {"moe": models.MoE, "mla": models.MLA}
        shape |= {key: kind(**shape[key]) for key, kind in tables.items() if key in shape}
        config = models.ModelConfig(name=model, max_seq_len=64, **shape)
        dtypes = {"weights_dtype": "f32", "compute_dtype": "f32"}
        layout = Layout.parse(text, **dtypes)
        workload = Workload(16, 32, phase)
        try:
            check_fits(layout, config, workload.num_sequences, workload.seq_len)
            if phase == "train":
                step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1.0)
                jitted, arguments, mesh = (
                    step.jitted,
                    (step.abstract_state(), step.abstract_tokens()),
                    step.mesh,
                )
            else:
                jitted, arguments, mesh = workload_step(config, layout, workload, phase)
        except MeshwrightError as error:
            yield f"{model} {phase} {text}", {"refused": str(error)}
            continue
        with jax.set_mesh(mesh):
            hlo = anonymous(jitted.lower(*arguments).compile().as_text())
        digest = hashlib.sha256(hlo.encode()).hexdigest()
        yield f"{model} {phase} {text}", {"sha256": digest, "instructions": hlo.count(" = ")}


def anonymous(hlo: str) -> str:
    """A program without what names its source; its values are numbered as they come."""
    body = "\n".join(line for line in hlo.splitlines() if line.startswith((" ", "%", "ENTRY", "}")))
    body = re.sub(r",? (metadata|frontend_attributes)=\{[^{}]*\}", "", body)
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), body)


def name(model: str, hardware: str, sequences: int, seq_len: int, *rest: str) -> str:
    return " ".join([model, hardware, f"{sequences}x{seq_len}", *rest])


# What differs


def differences(before: dict, after: dict) -> Iterator[tuple[str, str, object, object]]:
    """(part and case, figure, before, after); None where one side has no such figure."""
    for part in (part for part in PARTS if part in after):
        for case in before[part] | after[part]:
            old, new = before[part].get(case, {}), after[part].get(case, {})
            for figure in old | new:
                if not same(old.get(figure), new.get(figure)):
                    yield f"{part}: {case}", figure, old.get(figure), new.get(figure)


def same(old: object, new: object) -> bool:
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(new - old) <= TOLERANCE * max(abs(old), abs(new))
    return old == new


def show(found: list[tuple[str, str, object, object]]) -> None:
    for case in dict.fromkeys(case for case, *_ in found):
        print(case)
        lines = [rest for where, *rest in found if where == case]
        for figure, old, new in lines[:MAX_LINES_A_CASE]:
            print(f"  {figure}: {old} -> {new}{relative(old, new)}")
        if len(lines) > MAX_LINES_A_CASE:
            print(f"  and {len(lines) - MAX_LINES_A_CASE} more")


def relative(old: object, new: object) -> str:
    if isinstance(old, int | float) and isinstance(new, int | float) and old:
        return f"  ({new / old - 1:+.2%})"
    return ""


def recorded(src: Path, parts: list[str]) -> dict:
    sources = {"plans": plans, "searches": searches}
    found = {}
    for part in parts:
        print(f"{part} of {src}", file=sys.stderr, flush=True)
        found[part] = dict(sources[part](src) if part in sources else here(part, src))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--src", type=Path, default=Path(__file__).parents[1] / "src", help="the checkout's src"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="record to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with what was recorded there")
    parser.add_argument("--only", choices=PARTS, action="append", help="record only this part")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        parts = {"collectives": collectives, "documents": documents, "programs": programs}
        for item in parts[asked.inside]():
            print(json.dumps(item), flush=True)
        return
    after = recorded(asked.src.resolve(), asked.only or list(PARTS))
    if asked.write:
        asked.write.write_text(json.dumps(after, indent=1) + "\n")
    if asked.against:
        found = list(differences(json.loads(asked.against.read_text()), after))
        show(found)
        sizes = ", ".join(f"{len(cases)} {part}" for part, cases in after.items())
        print(f"{len(found)} figures of {len({case for case, *_ in found})} cases differ; compared: {sizes}")
        raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
