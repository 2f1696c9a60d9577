"""The engine beside transformers on torch with its own cache: tokens/s of a 134M LLaMA with random weights.

    python benchmarks/serving.py [--dtype bf16] [--weights-dtype int8] [--other f32] [--rounds 1] [-o FILE]

    single       one stream
    ragged       16 streams whose prompts and answers differ in length; torch pads prompts on the left, and
                 its batch goes on until the longest answer is done
    prefill      one prompt of 512 tokens, up to the first token of its answer

With --other f32 or bf16 the other is the engine in that type: which of them a CPU is to serve in. What the
engine's own features save is in engine.py.

Both take turns in one process, and a ratio is the median over the rounds: so what else the machine does falls
on both. Their weights are alike in shape and type, not in value.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from training import machine

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.params import init_params
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.compiled_cache import keep_compiled
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Request, SamplingParams

CONFIG = ModelConfig("llama-134m", 12, 768, 2048, 12, 12, 64, 32_000, 2048)
NUM_SLOTS, CONTEXT = 16, 640
RANDOM = np.random.default_rng(0)
SINGLE = [(64, 24)]
_BOTH = zip(RANDOM.integers(16, 257, 16), RANDOM.integers(8, 33, 16), strict=True)
RAGGED = [(int(prompt), int(answer)) for prompt, answer in _BOTH]
PREFILL = [(512, 1)]
GREEDY = SamplingParams(temperature=0.0)

Lengths = list[tuple[int, int]]  # of a prompt and of its answer
Seconds = Callable[[Lengths], float]


def some_tokens(count: int) -> tuple[int, ...]:
    return tuple(RANDOM.integers(0, CONFIG.vocab_size, count).tolist())


def new_runner(layout: Layout, num_slots: int) -> JaxRunner:
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(CONFIG, as_read(layout), mesh, 0)
    runner = JaxRunner(params, CONFIG, layout, mesh, num_slots=num_slots, context=CONTEXT)
    runner.warm_up()
    return runner


def seconds_of(runner: JaxRunner) -> Seconds:
    """Seconds that an engine takes for prompts and answers of these lengths."""

    async def answers(engine: Engine, lengths: Lengths) -> None:
        with engine.submit(*[Request(some_tokens(n), answer, GREEDY) for n, answer in lengths]) as stream:
            async for _ in stream:
                pass

    def seconds(lengths: Lengths) -> float:
        with Engine(runner) as engine:
            started = time.perf_counter()
            asyncio.run(answers(engine, lengths))
            return time.perf_counter() - started

    return seconds


def torchs(dtype: str) -> Seconds:
    """Seconds that transformers' generate takes for the same."""
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.d_model,
        intermediate_size=CONFIG.d_ff,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        max_position_embeddings=CONFIG.max_seq_len,
        tie_word_embeddings=False,
    )
    whole: Any = transformers.LlamaForCausalLM(config)
    model = whole.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval()

    def seconds(lengths: Lengths) -> float:
        longest = max(prompt for prompt, _ in lengths)
        tokens = torch.randint(0, CONFIG.vocab_size, (len(lengths), longest))
        mask = torch.tensor([[0] * (longest - prompt) + [1] * prompt for prompt, _ in lengths])
        num_tokens = max(answer for _, answer in lengths)
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.perf_counter() - started

    return seconds


def compared(
    mine: Callable[[], float], theirs: Callable[[], float], num_tokens: int, rounds: int
) -> dict[str, float]:
    """Tokens a second of both, in turns, and the ratio of mine to theirs, after a first round."""
    pairs = [(num_tokens / mine(), num_tokens / theirs()) for _ in range(rounds + 1)][1:]
    return {
        "tokens_per_second": statistics.median(one for one, _ in pairs),
        "other_tokens_per_second": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(one / other for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    parser.add_argument("--weights-dtype", default=None, choices=["int8"])
    parser.add_argument("--other", default="torch", choices=["torch", "f32", "bf16"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    keep_compiled()
    layout = Layout.of(weights_dtype=asked.weights_dtype or asked.dtype, compute_dtype=asked.dtype)
    if asked.weights_dtype:
        layout = layout.replace(matmul_dtype="int8")
    started = time.perf_counter()
    many = new_runner(layout, NUM_SLOTS)
    one = new_runner(layout, 1) if asked.other == "torch" else many
    document: dict[str, Any] = {
        "benchmark": "serving",
        "machine": machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **vars(asked) | {"output": None},
        "start_seconds": time.perf_counter() - started,
    }
    engine, single = seconds_of(many), seconds_of(one)
    if asked.other == "torch":
        theirs = torchs(asked.dtype)
    else:
        theirs_layout = Layout.of(weights_dtype=asked.other, compute_dtype=asked.other)
        theirs = seconds_of(new_runner(theirs_layout, NUM_SLOTS))
    results = document["results"] = {}
    rows: dict[str, tuple[Seconds, Seconds, Lengths, int]] = {
        "single": (single, theirs, SINGLE, 24),
        "ragged": (engine, theirs, RAGGED, sum(answer for _, answer in RAGGED)),
        "prefill": (engine, theirs, PREFILL, 512),
    }
    for name, (mine, other, lengths, num_tokens) in rows.items():
        results[name] = compared(
            lambda mine=mine, lengths=lengths: mine(lengths),
            lambda other=other, lengths=lengths: other(lengths),
            num_tokens,
            asked.rounds,
        )
        print(name, results[name], flush=True)
    text = json.dumps(document, indent=2) + "\n"
    print(text)
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
