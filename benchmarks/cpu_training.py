"""Tokens/s of a training step on one CPU: ours, plain JAX and torch.compile in turns. Prints JSON.

    python benchmarks/cpu_training.py [--model 15m] [--rounds 5] > benchmarks/results/cpu_training.json

All train one LLaMA with AdamW on float32 weights, gradients clipped by their norm. `plain` is the model as it
is written down, differentiated by JAX; `torch` the same with its fused attention and AdamW. Each has its own
process, where memory is allocated as it does itself; they take turns, and ratios are medians over the rounds,
best type beside best type. `cpu_seconds` of a step leave out what other processes take of the cores. All live
at once: 134m takes several gigabytes each, so there `--dtypes f32` alone where the host has less than 32.
Targets: at least 0.75 times torch and 1.8 times plain JAX.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from training import machine, use_cpu_devices

use_cpu_devices(1)

import jax.numpy as jnp  # noqa: E402 - the devices are fixed when JAX starts
import numpy as np  # noqa: E402
import torch  # noqa: E402
from plain import B1, B2, CLIP, DECAY, RATE, PlainStep, plain_weights  # noqa: E402
from torch.nn import functional  # noqa: E402

from meshwright.layout import Layout  # noqa: E402
from meshwright.layout.workload import Workload  # noqa: E402
from meshwright.models.config import ModelConfig  # noqa: E402
from meshwright.models.count import count_params  # noqa: E402
from meshwright.native.processor import keep_freed_memory, multiplies_bf16  # noqa: E402
from meshwright.train.optimizers import OptimizerConfig  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402

# 15m: of karpathy/llama2.c, "stories15M". 134m: as benchmarks/serving.py has it.
MODELS = {
    "15m": ModelConfig("llama-15m", 6, 288, 768, 6, 6, 48, 32_000, 256, tied_embeddings=True),
    "134m": ModelConfig("llama-134m", 12, 768, 2048, 12, 12, 64, 32_000, 2048),
}
TARGETS = {"torch": 0.75, "plain": 1.8}
JAX_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

Step = Callable[[np.ndarray], float]  # of rows[B, T+1], trained on: the loss


def ours(config: ModelConfig, dtype: str, workload: Workload) -> Step:
    """The step that `mw train` runs, with the heap that it sets."""
    keep_freed_memory()
    optimizer = OptimizerConfig(RATE, 1, 1000, schedule="constant")
    layout = Layout.of(weights_dtype="f32", compute_dtype=dtype)
    step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1e11)
    state = step.init(0)

    def run(rows: np.ndarray) -> float:
        nonlocal state
        state, metrics = step.step(state, rows)
        return float(metrics["loss"])

    return run


def plain(config: ModelConfig, dtype: str, workload: Workload) -> Step:
    """The model as one writes it down."""
    step = PlainStep(config, JAX_DTYPES[dtype], plain_weights(config))
    return lambda rows: step(jnp.asarray(rows))


# torch


class TorchLayer(torch.nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.d_head = config.num_heads, config.d_head
        width, kv_width = config.num_heads * config.d_head, config.num_kv_heads * config.d_head
        linear = partial(torch.nn.Linear, bias=False)
        self.norm1, self.norm2 = (torch.nn.RMSNorm(config.d_model, eps=1e-5) for _ in range(2))
        self.qkv = linear(config.d_model, width + 2 * kv_width)
        self.out = linear(width, config.d_model)
        self.gate, self.up = (linear(config.d_model, config.d_ff) for _ in range(2))
        self.down = linear(config.d_ff, config.d_model)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.num_heads, self.d_head).permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(
            _turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(a.transpose(1, 2).reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class TorchModel(torch.nn.Module):
    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.d_model)
        self.layers = torch.nn.ModuleList(TorchLayer(config) for _ in range(config.num_layers))
        self.norm = torch.nn.RMSNorm(config.d_model, eps=1e-5)
        self.head = torch.nn.Linear(config.d_model, config.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.02)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight
        half = config.d_head // 2
        angles = torch.arange(seq_len)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def torchs(config: ModelConfig, dtype: str, workload: Workload) -> Step:
    """torch.compile's; in bf16 by autocast, which keeps weights in float32."""
    torch.manual_seed(0)
    model = TorchModel(config, workload.seq_len)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, RATE, (B1, B2), weight_decay=DECAY, fused=True)
    compiled: Any = torch.compile(model)

    def run(rows: np.ndarray) -> float:
        with torch.autocast("cpu", TORCH_DTYPES[dtype], enabled=dtype != "f32"):
            loss = compiled(torch.from_numpy(rows).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


# In turns, each in a process of its own


class Turn(NamedTuple):
    """One step: seconds of the clock, those of the processor, and the loss."""

    seconds: float
    cpu_seconds: float
    loss: float


MAKERS = {"ours": ours, "plain": plain, "torch": torchs}


def serve(who: str, dtype: str, config: ModelConfig, workload: Workload) -> None:
    """Takes a step for each line of standard input, and prints it."""
    torch.set_num_threads(os.cpu_count() or 1)
    step = MAKERS[who](config, dtype, workload)
    shape = workload.num_sequences, workload.seq_len + 1
    rows = np.random.default_rng(1).integers(0, config.vocab_size, shape, np.int32)
    for _ in sys.stdin:
        started, used = time.perf_counter(), time.process_time()
        loss = step(rows)
        print(json.dumps([time.perf_counter() - started, time.process_time() - used, loss]), flush=True)


class Worker:
    """A process that runs `serve`."""

    def __init__(self, name: str, options: list[str]) -> None:
        command = [sys.executable, __file__, "--serve", *name.split(), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self) -> Turn:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return Turn(*json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def in_turns(names: list[str], options: list[str], rounds: int) -> dict[str, list[Turn]]:
    """The steps of each after two, of which the first compiles."""
    workers = {name: Worker(name, options) for name in names}
    found: dict[str, list[Turn]] = {name: [worker.turn(), worker.turn()] for name, worker in workers.items()}
    for _ in range(rounds):
        for name, worker in workers.items():
            found[name].append(worker.turn())
    for worker in workers.values():
        worker.end()
    return found


def best(seconds: dict[str, list[float]], who: str) -> str:
    """The name of who's fastest type."""
    own = [name for name in seconds if name.startswith(who)]
    return min(own, key=lambda name: statistics.median(seconds[name]))


def ratios(seconds: dict[str, list[float]], others: list[str]) -> dict[str, dict[str, Any]]:
    """How many times as fast as each of the others we are, by these seconds."""
    mine, found = best(seconds, "ours"), {}
    for who in others:
        name = best(seconds, who)
        each = [theirs / own for own, theirs in zip(seconds[mine], seconds[name], strict=True)]
        found[who] = {"of": [mine, name], "ratio": statistics.median(each), "target": TARGETS[who]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="15m", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--who", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--serve", nargs=2, metavar=("WHO", "DTYPE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    config, workload = MODELS[asked.model], Workload(asked.sequences, seq_len=asked.seq_len)
    if asked.serve:
        who, dtype = asked.serve
        serve(who, dtype, config, workload)
        return
    shape = ["--model", asked.model, "--sequences", str(asked.sequences), "--seq-len", str(asked.seq_len)]
    names = [f"{who} {dtype}" for dtype in asked.dtypes for who in asked.who]
    found = in_turns(names, shape, asked.rounds)
    seconds = {name: [turn.seconds for turn in turns[2:]] for name, turns in found.items()}
    cpu_seconds = {name: [turn.cpu_seconds for turn in turns[2:]] for name, turns in found.items()}
    others = [who for who in asked.who if who != "ours"]
    document = {
        "benchmark": "cpu_training",
        "command": f"python benchmarks/cpu_training.py {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{processor()}, {machine()}, torch {torch.__version__}",
        "multiplies_bf16": multiplies_bf16(),
        "load_average": os.getloadavg()[0],
        "parameters": count_params(config).total,
        "tokens_per_second": {
            name: workload.num_tokens / statistics.median(each) for name, each in seconds.items()
        },
        "cpu_seconds": {name: statistics.median(each) for name, each in cpu_seconds.items()},
        "losses": {name: [turn.loss for turn in turns[:3]] for name, turns in found.items()},
        "ratios": ratios(seconds, others),
        "ratios_of_cpu_seconds": ratios(cpu_seconds, others),
    }
    print(json.dumps(document, indent=1))


def processor() -> str:
    """The processor's name, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
