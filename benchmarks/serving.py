"""The engine beside transformers on torch with its own cache: tokens/s of a 134M LLaMA with random weights.

    python benchmarks/serving.py [--dtype f32] [--rounds 3] [-o benchmarks/results/serving.json]

    single       one stream
    ragged       16 streams whose prompts and answers differ in length; torch pads prompts on the left, and
                 its batch goes on until the longest answer is done
    prefill      one prompt of 512 tokens, up to the first token of its answer
    conversation the time to the first token of a tenth turn, with cached prefixes and without

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
from meshwright.nn.mesh import device_mesh
from meshwright.nn.params import init_params
from meshwright.serve.engine import Engine
from meshwright.serve.runner import JaxRunner
from meshwright.serve.sequence import Request, SamplingParams

CONFIG = ModelConfig("llama-134m", 12, 768, 2048, 12, 12, 64, 32_000, 2048)
NUM_SLOTS, CONTEXT = 16, 1024
RANDOM = np.random.default_rng(0)
SINGLE = [(64, 64)]
_BOTH = zip(RANDOM.integers(16, 257, 16), RANDOM.integers(16, 129, 16), strict=True)
RAGGED = [(int(prompt), int(answer)) for prompt, answer in _BOTH]
PREFILL = [(512, 1)]

Lengths = list[tuple[int, int]]  # of a prompt and of its answer


def some_tokens(count: int) -> tuple[int, ...]:
    return tuple(RANDOM.integers(0, CONFIG.vocab_size, count).tolist())


def ours(dtype: str) -> tuple[Callable[[Lengths], float], dict[str, float]]:
    """Seconds that the engine takes for prompts and answers of these lengths, and what starting it took."""
    layout = Layout.of(weights_dtype=dtype, compute_dtype=dtype)
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(CONFIG, layout, mesh, 0)
    runner = JaxRunner(params, CONFIG, layout, mesh, num_slots=NUM_SLOTS, context=CONTEXT)
    started = time.perf_counter()
    runner.warm_up()
    start = {"warm_up_seconds": time.perf_counter() - started}

    async def answers(engine: Engine, lengths: Lengths) -> None:
        requests = [
            Request(
                tuple(RANDOM.integers(0, CONFIG.vocab_size, prompt).tolist()), answer, SamplingParams(0.0)
            )
            for prompt, answer in lengths
        ]
        with engine.submit(*requests) as stream:
            async for _ in stream:
                pass

    def seconds(lengths: Lengths) -> float:
        with Engine(runner) as engine:
            started = time.perf_counter()
            asyncio.run(answers(engine, lengths))
            return time.perf_counter() - started

    def first_token_seconds(*, prefix_cache: bool) -> float:
        """Of the last of ten turns, each of 64 tokens more and an answer of 16."""

        async def chat(engine: Engine) -> float:
            tokens: list[int] = []
            first = 0.0
            for _ in range(10):
                tokens += some_tokens(64)
                started = time.perf_counter()
                with engine.submit(Request(tuple(tokens), 16, SamplingParams(0.0))) as stream:
                    answer = [(event.token, time.perf_counter()) async for event in stream]
                first = answer[0][1] - started
                tokens += [token for token, _ in answer]
            return first

        with Engine(runner, prefix_cache=prefix_cache) as engine:
            return asyncio.run(chat(engine))

    start["tenth_turn_ttft_seconds"] = first_token_seconds(prefix_cache=True)
    start["tenth_turn_ttft_seconds_without_prefixes"] = first_token_seconds(prefix_cache=False)
    return seconds, start


def torchs(dtype: str) -> Callable[[Lengths], float]:
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
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    whole: Any = transformers.LlamaForCausalLM(config)
    model = whole.to(kind).eval()

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    engine_seconds, start = ours(asked.dtype)
    torch_seconds = torchs(asked.dtype)
    results: dict[str, Any] = {}
    for name, lengths in {"single": SINGLE, "ragged": RAGGED, "prefill": PREFILL}.items():
        tokens = sum(prompt if name == "prefill" else answer for prompt, answer in lengths)
        for warm_up in (engine_seconds, torch_seconds):
            warm_up(lengths)
        pairs = [
            (tokens / engine_seconds(lengths), tokens / torch_seconds(lengths)) for _ in range(asked.rounds)
        ]
        results[name] = {
            "tokens_per_second": statistics.median(mine for mine, _ in pairs),
            "torch_tokens_per_second": statistics.median(theirs for _, theirs in pairs),
            "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
        }
        print(name, results[name], flush=True)
    document = {
        "benchmark": "serving",
        "machine": machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": asked.dtype,
        "rounds": asked.rounds,
        **start,
        "results": results,
    }
    text = json.dumps(document, indent=2) + "\n"
    print(text)
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
