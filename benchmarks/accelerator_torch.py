"""A LLaMA-shaped model in PyTorch with captured graphs, for comparison in accelerator.py. Prints JSON.

    python benchmarks/accelerator_torch.py [--dtypes bf16,fp8,int8] [--batches 1,16,64,256]

Weights are random. The cache of keys and values has a fixed size, [B, K, S, H] a layer; queries, keys and
values are one product, and so are gate and up. A step is captured once as a CUDA graph and replayed. Weights
and inputs of products are bf16, fp8 with a scale a row, or int8 with a scale a row.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model

_INT8_ROWS = 32  # PyTorch's product of int8 takes no fewer rows than 17


class Product:
    """x[n, in] times a random weight[out, in], bf16[n, out]."""

    def __init__(self, num_out: int, num_in: int, dtype: str, device: str) -> None:
        self.dtype = dtype
        weight = torch.randn(num_out, num_in, device=device, dtype=torch.bfloat16) / math.sqrt(num_in)
        if dtype == "bf16":
            self.weight = weight
            return
        most = 127.0 if dtype == "int8" else 448.0
        self.scales = (weight.abs().amax(1, keepdim=True).float() / most).T.contiguous()
        narrow = weight.float() / self.scales.T
        self.weight = narrow.round().to(torch.int8) if dtype == "int8" else narrow.to(torch.float8_e4m3fn)

    def __call__(self, x: Tensor) -> Tensor:
        if self.dtype == "bf16":
            return x @ self.weight.T
        most = 127.0 if self.dtype == "int8" else 448.0
        scales = x.abs().amax(1, keepdim=True).float().clamp(min=1e-6) / most
        if self.dtype == "fp8":
            narrow = (x / scales).to(torch.float8_e4m3fn)
            return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                narrow, self.weight.T, scale_a=scales, scale_b=self.scales, out_dtype=torch.bfloat16
            )
        narrow = (x / scales).round().to(torch.int8)
        missing = max(0, _INT8_ROWS - len(x))
        int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
        summed = int_mm(F.pad(narrow, (0, 0, 0, missing)), self.weight.T)[: len(x)]
        return (summed * scales * self.scales).to(torch.bfloat16)


class Llama:
    """The model with a cache of `context` positions for each of `num_sequences` sequences."""

    def __init__(
        self, config: ModelConfig, dtype: str, num_sequences: int, context: int, device: str = "cuda"
    ) -> None:
        self.config, self.device = config, device
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.d_head
        make = lambda num_out, num_in: Product(num_out, num_in, dtype, device)  # noqa: E731
        self.layers = [
            (
                make((heads + 2 * kv_heads) * width, config.d_model),
                make(config.d_model, heads * width),
                make(2 * config.d_ff, config.d_model),
                make(config.d_model, config.d_ff),
            )
            for _ in range(config.num_layers)
        ]
        self.embed = torch.randn(config.vocab_size, config.d_model, device=device, dtype=torch.bfloat16)
        self.head = Product(config.vocab_size, config.d_model, "bf16", device)
        self.norm = torch.ones(config.d_model, device=device, dtype=torch.bfloat16)
        frequencies = 500000.0 ** (-torch.arange(0, width, 2, device=device).float() / width)
        angles = torch.arange(context, device=device).float()[:, None] * frequencies
        self.turns = torch.cat([angles.cos(), angles.cos()], 1), torch.cat([-angles.sin(), angles.sin()], 1)
        self.resize(num_sequences, context)

    def resize(self, num_sequences: int, context: int) -> None:
        """A cache for another number of sequences."""
        shape = num_sequences, self.config.num_kv_heads, context, self.config.d_head
        self.cache = [
            [torch.zeros(shape, device=self.device, dtype=torch.bfloat16) for _ in range(2)]
            for _ in self.layers
        ]

    def weight_bytes(self) -> int:
        products = [product for layer in self.layers for product in layer] + [self.head]
        return sum(product.weight.nbytes for product in products)

    def _turned(self, x: Tensor, first: int, length: int) -> Tensor:
        cos, sin = (table[first : first + length].to(x.dtype)[:, None] for table in self.turns)
        half = x.shape[-1] // 2
        return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin

    def __call__(self, tokens: Tensor, first: int) -> Tensor:
        """The likeliest next token i64[B] after tokens i64[B, T], whose positions begin at `first`."""
        config = self.config
        num_sequences, length = tokens.shape
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.d_head
        x = self.embed[tokens.reshape(-1)]
        for (qkv, out, up, down), (keys, values) in zip(self.layers, self.cache, strict=True):
            normed = F.rms_norm(x, (config.d_model,), self.norm)
            joined = qkv(normed).view(num_sequences, length, heads + 2 * kv_heads, width)
            q, k, v = joined.split([heads, kv_heads, kv_heads], 2)
            q, k = self._turned(q, first, length), self._turned(k, first, length)
            keys[:, :, first : first + length] = k.transpose(1, 2)
            values[:, :, first : first + length] = v.transpose(1, 2)
            if length == 1:  # heads of a group are queries of one key head
                mixed = F.scaled_dot_product_attention(
                    q.view(num_sequences, kv_heads, heads // kv_heads, width),
                    keys[:, :, : first + 1],
                    values[:, :, : first + 1],
                )
            else:
                mixed = F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
                ).transpose(1, 2)
            x = x + out(mixed.reshape(num_sequences * length, heads * width))
            gate, linear = up(F.rms_norm(x, (config.d_model,), self.norm)).chunk(2, -1)
            x = x + down(F.silu(gate) * linear)
        last = F.rms_norm(x.view(num_sequences, length, -1)[:, -1], (config.d_model,), self.norm)
        return self.head(last).argmax(-1)


def captured(model: Llama, num_sequences: int, length: int, first: int) -> Callable[[], None]:
    """A step as a CUDA graph, to be replayed."""
    tokens = torch.ones(num_sequences, length, dtype=torch.long, device=model.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            model(tokens, first)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        chosen = model(tokens, first)
        if length == 1:
            tokens.copy_(chosen[:, None])
    return graph.replay


def replay_seconds(replay: Callable[[], None], count: int, rounds: int = 3) -> float:
    """The median of some rounds, each of `count` replays in a row."""
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            replay()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / count)
    return statistics.median(seconds[1:])


def rows(
    config: ModelConfig, dtype: str, batches: list[int], context: int, prompts: list[int]
) -> dict[str, float]:
    """Seconds of a step that generates at the end of `context`, by batch, and of whole prompts by length."""
    model = Llama(config, dtype, 1, context)
    seconds = {}
    for batch in batches:
        model.resize(batch, context)
        seconds[f"generate_{batch}"] = replay_seconds(captured(model, batch, 1, context - 1), 20)
    for length in prompts:
        model = Llama(config, dtype, 1, length) if length > context else model
        model.resize(1, max(length, context))
        seconds[f"prefill_{length}"] = replay_seconds(captured(model, 1, length, 0), 3)
    return seconds


def main() -> None:
    numbers = lambda text: [int(part) for part in text.split(",") if part]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--dtypes", default="bf16,fp8,int8")
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", type=numbers, default=[2048, 16384])
    asked = parser.parse_args()
    config, seconds = load_model(asked.model), {}
    for dtype in asked.dtypes.split(","):
        try:
            prompts = asked.prompts if dtype == "bf16" else []
            seconds[dtype] = rows(config, dtype, asked.batches, asked.context, prompts)
        except RuntimeError as error:  # of PyTorch: no such product, or too little memory
            seconds[dtype] = {"error": str(error).splitlines()[0]}
        torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
