"""One accelerator at work: the share of its rates that engine and training step reach. Prints JSON.

    python benchmarks/accelerator.py --minutes 12 [--rows generate_bf16,prefill] [-o FILE]

The file is written after each row. A row that is not expected to end in time is left out, and named.

    ceilings   bytes per second of a copy on the device, read and written, and FLOP/s of a product of bf16
    torch      seconds of the same steps by PyTorch, as captured graphs (accelerator_torch.py), on a GPU
    generate_bf16, generate_fp8, generate_int8
               a step of 1 to 256 streams of an 8B-shaped model at 1,024 positions, run as the engine runs it:
               its seconds; the share of them in which the HBM, at its rated bandwidth, reads the weights and
               the cache (at least 0.85 in bf16 and 0.75 in fp8 and int8, up to 64 streams); PyTorch's
               seconds over ours; and the kernels of the slowest
    prefill    prompts of 2,048 and 16,384 tokens: at least 0.55 of the rated FLOP/s
    train      a step on 4 sequences of 4,096 tokens of a model of 1B parameters in bf16 and in fp8: MFU, at
               least 0.52, seconds and compiled memory over the plan's, loss and norm of gradients of the
               first update
    http       ragged prompts and answers of 16 clients of the HTTP server: `mw bench serve`
    tokens     greedy answers of tiny models in f32: at least 1 - 1/32 equal transformers' on the CPU
    gradients  loss and gradients of a step in bf16 against those of this machine's CPU in f32, by norm
    layouts    as train, for all that a layout can ask of one chip and a few layers of other families
    families   loss and all gradients of tiny models of many families in f32 against the CPU's: the largest
               difference, relative to the tensor's largest entry

`--hardware h100` names the chip in the catalog, for ratings and prices; it is guessed from the device's name.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.audit.compile.compile import memory_by_cause
from meshwright.audit.numerics import tiny_model
from meshwright.audit.numerics.comparison import numerics_report
from meshwright.bench.serving_steps import steps
from meshwright.cost.serving_step import pass_cost
from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.load.loopback import words_of
from meshwright.models.config import ModelConfig
from meshwright.models.count import forward_flops_per_token, kv_read_bytes
from meshwright.models.hf import from_hf
from meshwright.models.presets import load_model
from meshwright.nn.files.weights import load_hf
from meshwright.nn.params import init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan.train import price
from meshwright.platforms import GPU
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import GREEDY, Request
from meshwright.serve.http.app import create_app
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.server import bind, running
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

Row = dict[str, Any]

BATCHES, CONTEXT, PROMPTS = (1, 16, 64, 256), 1024, (2048, 16384)
STEPS, ROUNDS = 30, 3
KERNELS = 16  # of the slowest program, that are named
TRAINED = ("remat=matmuls", "remat=matmuls,matmul_dtype=fp8")
# (model, of its layers the first so many or 0 for all, layout)
CASES = [
    *(
        ("llama-3.2-1b", 0, words)
        for words in (
            "remat=full",
            "remat=attention",
            "remat=alternate",
            "remat=matmuls",
            "remat=full,microbatches=4",
            "remat=full,matmul_dtype=fp8",
            "remat=full,matmul_dtype=int8",
            "remat=full,matmul_dtype=fp8,matmul_scales=tiles",
            "offload=true",
            "remat=full,offload_optimizer=true",
            "remat=full,master_weights=true",
            "remat=full,optimizer=lion",
            "remat=full,optimizer=adafactor",
            "remat=full,optimizer=muon",
        )
    ),
    ("mixtral-8x7b", 2, "remat=full"),
    ("mixtral-8x7b", 2, "remat=full,capacity=1.25"),
    ("deepseek-v2-lite", 4, "remat=full"),
    ("qwen3-30b-a3b", 4, "remat=full"),
    ("gpt-oss-20b", 4, "remat=full"),
    ("gemma-3-1b", 0, "remat=full"),
    ("gemma-2-2b", 0, "remat=full"),
    ("qwen3-0.6b", 0, "remat=full"),
]
FAMILIES = (
    "llama-3-8b", "qwen3-8b", "gemma-2-2b", "gemma-3-1b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b",
    "deepseek-v2-lite", "deepseek-v3",
)  # fmt: skip
DTYPES = {
    "bf16": {"weights_dtype": "bf16", "compute_dtype": "bf16"},
    "int8": {"weights_dtype": "int8", "compute_dtype": "bf16", "matmul_dtype": "int8"},
    "fp8": {"weights_dtype": "fp8", "compute_dtype": "bf16", "matmul_dtype": "fp8"},
}


def device_name() -> str:
    return jax.devices()[0].device_kind


def seconds_of(run: Callable[[], Any], repeats: int = 5) -> float:
    """The median of some runs, each to its end, after a first."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def ceilings(hardware: Hardware, _: argparse.Namespace) -> Row:
    size, width = 1 << 31, 8192
    array = jax.random.normal(jax.random.key(0), (size // 2,), jnp.bfloat16)
    a, b = (jax.random.normal(jax.random.key(seed), (width, width), jnp.bfloat16) for seed in (1, 2))
    negated, product = jax.jit(jnp.negative), jax.jit(lambda a, b: [a @ b, b @ a, a @ a, b @ b])
    return {
        "copy_bytes_per_second": 2 * size / seconds_of(lambda: negated(array)),
        "product_flops_per_second": 4 * 2 * width**3 / seconds_of(lambda: product(a, b)),
        "rated_bytes_per_second": hardware.chip.hbm_bytes_per_second,
        "rated_flops_per_second": hardware.chip.flops("bf16"),
    }


def tokens(_: Hardware, asked: argparse.Namespace) -> Row:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    common = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }
    shares: Row = {}
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 512, int(n)).tolist() for n in random.integers(3, 300, 16)]
    with whole_f32():
        for name, kind in {"llama": LlamaConfig, "qwen3": Qwen3Config}.items():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(kind(**common)).eval()
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
                mesh = device_mesh(layout, jax.devices()[:1])
                config = from_hf(json.loads((Path(folder) / "config.json").read_text()), name)
                params = load_hf(Path(folder), config, layout, mesh)
                runner = JaxRunner(params, config, layout, mesh, num_slots=8, context=384, chunk=128)
                runner.warm_up()
            with Engine(runner) as engine:
                ours = asyncio.run(answers(engine, prompts, 32))
            alike = 0
            for prompt, own in zip(prompts, ours, strict=True):
                with torch.no_grad():
                    theirs = model.generate(
                        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None
                    )[0, len(prompt) :]
                alike += int((np.asarray(theirs) == np.asarray(own)).sum())
            shares[f"{name}_alike"] = alike / (32 * len(prompts))
    return shares


@contextmanager
def whole_f32() -> Iterator[None]:
    """Products of f32 are not of TF32, in every thread."""
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", None)


async def answers(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    async def one(prompt: list[int]) -> list[int]:
        with engine.submit(Request(tuple(prompt), num_tokens, GREEDY)) as stream:
            return [event.token async for event in stream]

    return await asyncio.gather(*map(one, prompts))


def gradients(_: Hardware, asked: argparse.Namespace) -> Row:
    """Both steps begin with the same weights; compared are the first update's loss and norm of gradients."""
    config = replace(
        load_model("llama-3.2-1b"), num_layers=2, d_model=512, d_ff=1024, num_heads=8, num_kv_heads=2,
        d_head=64, vocab_size=1024,
    )  # fmt: skip
    workload, optimizer = Workload(2, seq_len=512), OptimizerConfig(1e-3, total_steps=10, warmup_steps=1)
    batch = np.random.default_rng(0).integers(0, config.vocab_size, (2, 513), np.int32)
    figures: dict[str, dict[str, float]] = {}
    for platform, dtype in {"cpu": "f32", jax.default_backend(): "bf16"}.items():
        layout = Layout.of(compute_dtype=dtype)
        mesh = device_mesh(layout, jax.devices(platform)[:1])
        step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1e12, mesh=mesh)
        _, metrics = step.step(step.init(0), batch)
        figures[platform] = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
    return figures


class OnDemand(dict[Any, Any]):
    """Programs of a runner, each compiled when it first runs: a benchmark needs few of them."""

    def __init__(self, lowered: Callable[[Any], Any]) -> None:
        super().__init__()
        self._lowered = lowered

    def __bool__(self) -> bool:
        return True

    def __missing__(self, key: Any) -> Any:
        self[key] = self._lowered(key).compile()
        return self[key]


def on_demand(config: ModelConfig, dtype: str, **how: Any) -> JaxRunner:
    """A runner with random weights that compiles on demand."""
    layout = Layout.of(**DTYPES["bf16"])
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(config, layout, mesh, 0)
    runner = JaxRunner(params, config, layout.replace(**DTYPES[dtype]), mesh, **how)
    runner._steps = OnDemand(lambda shape: runner._lowered(runner._step_of(shape)))
    runner._choices = OnDemand(
        lambda choice: runner._programs.choice(
            choice.num_logits, choice.needs, with_edits=choice.with_edits, with_guesses=choice.with_guesses
        )
    )
    runner._cache.pools, runner._last = runner._programs.empty()
    return runner


def weights_read(runner: JaxRunner, config: ModelConfig) -> int:
    """Bytes of the weights that a step reads: all but the table of which rows are looked up."""
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    whole = nbytes(runner._params)
    return whole if config.tied_embeddings else whole - nbytes(runner._params["embed"])


def baseline(_: Hardware, asked: argparse.Namespace) -> Row:
    """In a process of its own, before this one takes the device's memory."""
    command = [sys.executable, str(Path(__file__).with_name("accelerator_torch.py")), "--model", asked.model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr else "it failed"}
    return json.loads(done.stdout.splitlines()[-1])


def generate(dtype: str) -> Callable[[Hardware, argparse.Namespace], Row]:
    def row(hardware: Hardware, asked: argparse.Namespace) -> Row:
        config, rows = load_model(asked.model), {}
        runner = on_demand(config, dtype, num_slots=BATCHES[-1], context=CONTEXT, chunk=CONTEXT)
        weights, layout = weights_read(runner, config), runner._programs.layout
        runs = {batch: steps(runner, batch, 1, CONTEXT, STEPS) for batch in BATCHES}
        for batch, run in runs.items():
            seconds = seconds_of(run, ROUNDS) / STEPS
            read = weights + batch * kv_read_bytes(config, CONTEXT)
            priced, _ = pass_cost(config, layout.at("generate"), hardware, batch, 1, CONTEXT)
            rows[str(batch)] = {
                "seconds": seconds,
                "share_of_hbm_bound": read / hardware.chip.hbm_bytes_per_second / seconds,
                "seconds_over_price": seconds / priced.seconds,
                **over_torch(asked, dtype, f"generate_{batch}", seconds),
            }
        slowest = min(runs, key=lambda batch: rows[str(batch)]["share_of_hbm_bound"])
        rows["slowest"] = {"batch": slowest, "kernels": kernels(runs[slowest], STEPS)}
        return rows

    return row


def over_torch(asked: argparse.Namespace, dtype: str, name: str, seconds: float) -> Row:
    """PyTorch's seconds over ours; nothing if they were not measured."""
    theirs = asked.torch.get(dtype, {}).get(name)
    return {} if theirs is None else {"speed_over_torch": theirs / seconds}


def prefill(hardware: Hardware, asked: argparse.Namespace) -> Row:
    rows: Row = {}
    config, longest = load_model(asked.model), max(PROMPTS)
    config = replace(config, max_seq_len=longest)
    runner = on_demand(config, "bf16", num_slots=1, context=longest, chunk=longest)
    for length in PROMPTS:
        run = steps(runner, 1, length, length, 1)
        seconds = seconds_of(run, ROUNDS)
        priced, _ = pass_cost(config, runner._programs.layout.at("prefill"), hardware, 1, length, length)
        flops = length * forward_flops_per_token(config, length)
        rows[str(length)] = {
            "seconds": seconds,
            "share_of_flops": flops / seconds / hardware.chip.flops("bf16"),
            "seconds_over_price": seconds / priced.seconds,
            **over_torch(asked, "bf16", f"prefill_{length}", seconds),
            "kernels": kernels(run, 1),
        }
    return rows


def http(hardware: Hardware, asked: argparse.Namespace) -> Row:
    config, layout = load_model(asked.model), Layout.of(**DTYPES["bf16"])
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(config, layout, mesh, 0)
    runner = JaxRunner(params, config, layout, mesh, num_slots=16, context=CONTEXT, chunk=256)
    del params
    runner.warm_up(only_greedy=True)
    with Engine(runner) as engine:
        app = create_app(engine, words_of(runner.vocab_size), "m", ClientLimits())
        with running(app, bind("127.0.0.1", 0)) as url:
            command = [sys.executable, "-m", "meshwright", "bench", "serve", "--url", url]
            command += ["--requests", "96", "--concurrency", "16", "--prompt-tokens", "200"]
            command += ["--output-tokens", "100", "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr or done.stdout)[-300:]}
    return json.loads(done.stdout)


class Steps:
    """Some steps in a row on one batch."""

    COUNT = 3

    def __init__(self, step: CompiledStep) -> None:
        shape = (step.batch_sequences, step.seq_len + 1)
        tokens = np.random.default_rng(0).integers(0, step.config.vocab_size, shape)
        self.step, self._state, self._tokens = step, step.init(0), tokens.astype(np.int32)

    def __call__(self) -> Any:
        for _ in range(self.COUNT):
            metrics = self.one()
        return metrics

    def one(self) -> dict[str, Any]:
        self._state, metrics = self.step.step(self._state, self._tokens)
        return metrics


def train(hardware: Hardware, asked: argparse.Namespace) -> Row:
    return trained([("llama-3.2-1b", 0, words) for words in TRAINED], hardware, asked)


def layouts(hardware: Hardware, asked: argparse.Namespace) -> Row:
    return trained(
        [case for case in CASES if re.search(asked.cases, " ".join(map(str, case)))], hardware, asked
    )


def trained(cases: list[tuple[str, int, str]], hardware: Hardware, asked: argparse.Namespace) -> Row:
    rows: Row = {}
    for case in cases:
        name = " ".join(map(str, case))
        try:
            step, num_bytes = compiled_step(*case, asked.train_length, hardware)
            run = Steps(step)
            rows[name] = against_plan(run, num_bytes, hardware) | {"kernels": kernels(run, Steps.COUNT)}
        except (MeshwrightError, jax.errors.JaxRuntimeError) as error:
            rows[name] = {"error": str(error).splitlines()[0][:200]}
    return rows


def compiled_step(
    model: str, num_layers: int, words: str, seq_len: int, hardware: Hardware
) -> tuple[CompiledStep, int]:
    """The step of a model's first layers (0: all), and the bytes that its program takes."""
    config = load_model(model)
    config = replace(config, num_layers=num_layers or config.num_layers)
    layout, workload = Layout.parse(words), Workload(4, seq_len=seq_len)
    optimizer = OptimizerConfig(1e-3, total_steps=1000, warmup_steps=10)
    mesh = device_mesh(layout, jax.devices()[:1])
    peak = hardware.chip.flops("bf16")
    step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=peak, mesh=mesh)
    with jax.set_mesh(mesh):
        compiled = step.jitted.lower(step.abstract_state(), step.abstract_tokens()).compile()
    figures = memory_by_cause(compiled, GPU.compiler)
    return step, figures["total"] if figures else 0


def against_plan(run: Steps, num_bytes: int, hardware: Hardware) -> Row:
    step, first = run.step, run.one()
    seconds = seconds_of(run, 3) / Steps.COUNT
    planned = price(step.config, hardware, step.workload, step.layout)
    return {
        **{name: float(first[name]) for name in ("loss", "grad_norm")},
        "seconds": seconds,
        "mfu": step.flops_per_step / seconds / step.peak_flops_per_second,
        "seconds_over_price": seconds / planned.step_seconds,
        "bytes": num_bytes,
        "bytes_over_plan": num_bytes / planned.memory.total,
    }


def families(_: Hardware, asked: argparse.Namespace) -> Row:
    with whole_f32(), ThreadPoolExecutor(8) as threads:
        return dict(zip(FAMILIES, threads.map(family_difference, FAMILIES), strict=True))


def family_difference(model: str) -> Row:
    """Loss and gradients on this accelerator beside the CPU's, from the same weights."""
    config, workload = tiny_model(load_model(model)), Workload(2, seq_len=64)
    config = replace(config, max_seq_len=64)
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 65), np.int32)
    optimizer = OptimizerConfig(1e-3, total_steps=10, warmup_steps=1)
    meshes = [device_mesh(layout, jax.devices(name)[:1]) for name in (jax.default_backend(), "cpu")]
    params = jax.device_get(init_params(config, layout, meshes[-1], 0))
    ours, theirs = (
        CompiledStep(
            config, layout, workload, optimizer, chip_flops_per_second=1e12, mesh=mesh
        ).whole_gradients(params, tokens)
        for mesh in meshes
    )
    report = numerics_report(*ours, *theirs)
    return {name: report[name] for name in ("loss", "worst")}


def kernels(run: Callable[[], Any], count: int) -> list[list[Any]]:
    """The kernels of a run of `count` steps: [name, runs a step, microseconds a step], the longest first."""
    totals: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        for trace in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
                streams = [line for line in plane.lines if line.name.startswith("Stream")]
                for event in (event for line in streams for event in line.events):
                    of_kernel = totals.setdefault(event.name[:80], [0, 0.0])
                    of_kernel[0] += 1 / count
                    of_kernel[1] += event.duration_ns / 1e3 / count
    longest = sorted(totals.items(), key=lambda row: -row[1][1])[:KERNELS]
    return [[name, round(runs, 2), round(microseconds, 1)] for name, (runs, microseconds) in longest]


# The rows, and the seconds that each is expected to take on an H100 with 16 processors.
ROWS: dict[str, tuple[Callable[[Hardware, argparse.Namespace], Row], float]] = {
    "torch": (baseline, 40),
    "ceilings": (ceilings, 10),
    "generate_bf16": (generate("bf16"), 60),
    "generate_fp8": (generate("fp8"), 60),
    "generate_int8": (generate("int8"), 60),
    "prefill": (prefill, 60),
    "train": (train, 60),
    "http": (http, 120),
    "tokens": (tokens, 60),
    "gradients": (gradients, 40),
    "families": (families, 90),
    "layouts": (layouts, 600),
}


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--hardware", default="")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--train-length", type=int, default=4096)
    parser.add_argument("--cases", default="", help="layouts: only those whose words match this pattern")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    asked.torch = {}
    document: dict[str, Any] = {"benchmark": "accelerator", "results": {}, "left_out": []}
    hardware = None
    for name in asked.rows.split(","):
        run, expected = ROWS[name]
        if time.monotonic() - started + expected > 60 * asked.minutes:
            document["left_out"].append(name)
            continue
        if hardware is None and run is not baseline:
            hardware = catalog.load(f"{asked.hardware or ('h200' if 'H200' in device_name() else 'h100')}:1")
            document |= {"device": device_name(), "jax": jax.__version__}
        before = time.monotonic()
        try:
            row = run(hardware, asked)  # type: ignore[arg-type]
        except (MeshwrightError, jax.errors.JaxRuntimeError) as error:  # the other rows still count
            row = {"error": str(error).splitlines()[0][:300]}
        if run is baseline:
            asked.torch = row.get("seconds", {})
        document["results"][name] = row | {"row_seconds": round(time.monotonic() - before, 1)}
        print(name, json.dumps(document["results"][name]), flush=True)
        if asked.output:
            asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
