"""One accelerator at work: what its engine and training step reach of the chip. Prints JSON.

    python benchmarks/accelerator.py [--rows ceilings,tokens,gradients,generate,train,families] [-o FILE]

    ceilings   bytes per second of a copy on the device, read and written, and FLOP/s of a product of bf16
    tokens     greedy answers of tiny models in f32 beside transformers' on the CPU: at least 1 - 1/32 alike
    gradients  loss and gradients of a step in bf16 beside those of this machine's CPU in f32, by norm
    generate   seconds of a token of 1 to 64 streams of an 8B-shaped model beside those in which the HBM, at
               its rated bandwidth, gives the weights and the cache: at least 0.7 in bf16, 0.6 in int8. One
               figure is of steps alone, run as the engine runs them; another of streams of the engine. And a
               prompt as long as a chunk: its share of the rated FLOP/s
    train      a step on 4 sequences of 4,096 tokens of a model of 1B parameters, with all that a layout can
               ask of one chip, and of a few layers of other families: MFU, seconds and compiled memory over
               the plan's, loss and norm of gradients of the first update
    families   loss and all gradients of tiny models of many families in f32 beside the CPU's: the largest
               difference, relative to the tensor's largest entry

`--hardware h100` names the chip in the catalog, for ratings and prices; it is guessed from the device's name.
"""

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engine import some_tokens, times_of

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
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

Row = dict[str, Any]

BATCHES = 1, 4, 16, 64
SHORT, STREAMED = 128, 64  # positions
STEPS, ROUNDS = 20, 5
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
    "int8w": {"weights_dtype": "int8", "compute_dtype": "bf16"},
}


def device_name() -> str:
    return jax.devices()[0].device_kind


def seconds_of(run: Callable[[], Any], repeats: int = 5) -> float:
    """The median of some runs, each to its end, after a first."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


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
    found: Row = {}
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
            found[f"{name}_alike"] = alike / (32 * len(prompts))
    return found


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
    found: dict[str, dict[str, float]] = {}
    for platform, dtype in {"cpu": "f32", jax.default_backend(): "bf16"}.items():
        layout = Layout.of(compute_dtype=dtype)
        mesh = device_mesh(layout, jax.devices(platform)[:1])
        step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1e12, mesh=mesh)
        _, metrics = step.step(step.init(0), batch)
        found[platform] = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
    return found


def steps_seconds(runner: JaxRunner, num_sequences: int, context: int) -> float:
    """Seconds of a step that generates behind so many positions."""
    return seconds_of(steps(runner, num_sequences, 1, context, STEPS), ROUNDS) / STEPS


async def stream_seconds(engine: Engine, num_streams: int, prompt: int, num_tokens: int) -> float:
    """The median time between two tokens of so many streams at once."""
    prompts = [some_tokens(prompt, seed, engine.vocab_size) for seed in range(num_streams)]
    found = await asyncio.gather(*(times_of(engine, one, num_tokens) for one in prompts))
    last_first = max(times[0] for times in found)
    return float(np.median(np.concatenate([np.diff([t for t in one if t >= last_first]) for one in found])))


def weights_read(runner: JaxRunner, config: ModelConfig) -> int:
    """Bytes of the weights that a step reads: all but the table of which rows are looked up."""
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    whole = nbytes(runner._params)
    return whole if config.tied_embeddings else whole - nbytes(runner._params["embed"])


def generate(hardware: Hardware, asked: argparse.Namespace) -> Row:
    config, found = load_model(asked.model), {}
    for dtype in asked.dtypes.split(","):
        layout = Layout.of(**DTYPES["bf16"])
        mesh = device_mesh(layout, jax.devices()[:1])
        params = init_params(config, layout, mesh, 0)
        layout, how = layout.replace(**DTYPES[dtype]), {"context": asked.context, "chunk": asked.chunk}
        runner = JaxRunner(params, config, layout, mesh, num_slots=BATCHES[-1], **how)
        del params
        started = time.perf_counter()
        runner.warm_up()
        found[f"{dtype}_warm_up_seconds"] = time.perf_counter() - started
        for name, row in figures(runner, config, layout, hardware):
            found[f"{dtype}_{name}"] = row
            print(dtype, name, row, flush=True)
        if asked.profile:
            for batch in (1, BATCHES[-1]):
                profile(asked.profile / f"{dtype}_{batch}.json", partial(steps_seconds, runner, batch, SHORT))
        del runner
    return found


def figures(
    runner: JaxRunner, config: ModelConfig, layout: Layout, hardware: Hardware
) -> Iterator[tuple[str, Row]]:
    """Of steps by batch and context, of a prompt as long as a chunk, and of streams of the engine."""
    weights, chip = weights_read(runner, config), hardware.chip

    def beside(batch: int, context: int, seconds: float) -> Row:
        read = weights + batch * kv_read_bytes(config, context)
        priced, _ = pass_cost(config, layout.at("generate"), hardware, batch, 1, context)
        bound = read / chip.hbm_bytes_per_second
        return {
            "seconds": seconds,
            "share_of_hbm_bound": bound / seconds,
            "seconds_over_price": seconds / priced.seconds,
        }

    for batch in BATCHES:
        for context in (SHORT, runner.limits.context):
            seconds = steps_seconds(runner, batch, context)
            yield f"{batch}_{context}", beside(batch, context, seconds)
    length = runner.limits.chunk
    seconds = seconds_of(steps(runner, 1, length, length, 1))
    flops = length * forward_flops_per_token(config, length)
    priced, _ = pass_cost(config, layout.at("prefill"), hardware, 1, length, length)
    yield (
        f"prefill_{length}",
        {
            "seconds": seconds,
            "share_of_flops": flops / seconds / chip.flops("bf16"),
            "seconds_over_price": seconds / priced.seconds,
        },
    )
    with Engine(runner, prefix_cache=False) as engine:
        for batch in BATCHES:
            seconds = asyncio.run(stream_seconds(engine, batch, STREAMED, STREAMED))
            yield f"{batch}_streams", beside(batch, STREAMED + STREAMED // 2, seconds)


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
    found: Row = {}
    for case in CASES:
        name = " ".join(map(str, case))
        if not re.search(asked.cases, name):
            continue
        try:
            step, num_bytes = compiled_step(*case, asked.train_length, hardware)
            run = Steps(step)
            found[name] = against_plan(run, num_bytes, hardware)
            if asked.profile:
                profile(asked.profile / f"{re.sub(r'[^a-z0-9.]+', '_', name)}.json", run)
        except (MeshwrightError, jax.errors.JaxRuntimeError) as error:
            found[name] = {"error": str(error).splitlines()[0][:200]}
        print(name, found[name], flush=True)
    return found


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


def profile(file: Path, run: Callable[[], Any]) -> None:
    """Kernels of a run by the nanoseconds they take."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [trace] = Path(folder).rglob("*.xplane.pb")
        kernels: dict[str, list[float]] = {}
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            if "/device:" in plane.name:
                for line in plane.lines:
                    for event in line.events:
                        one = kernels.setdefault(f"{line.name[:12]} {event.name}"[:120], [0, 0.0])
                        one[0] += 1
                        one[1] += event.duration_ns
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted(kernels.items(), key=lambda row: -row[1][1])[:60]
    file.write_text(json.dumps(rows, indent=0), encoding="utf-8")


def main() -> None:
    rows = {
        "ceilings": ceilings,
        "tokens": tokens,
        "gradients": gradients,
        "generate": generate,
        "train": train,
        "families": families,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(rows))
    parser.add_argument("--hardware", default="")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--train-length", type=int, default=4096)
    parser.add_argument("--dtypes", default="bf16,int8")
    parser.add_argument("--cases", default="", help="train: those in whose words this pattern is")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    name = asked.hardware or ("h200" if "H200" in device_name() else "h100")
    hardware = catalog.load(f"{name}:1")
    document: dict[str, Any] = {"benchmark": "accelerator", "device": device_name(), "jax": jax.__version__}
    document["results"] = {}
    for row in asked.rows.split(","):
        document["results"][row] = rows[row](hardware, asked)
        print(row, json.dumps(document["results"][row]), flush=True)
        if asked.output:
            asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
