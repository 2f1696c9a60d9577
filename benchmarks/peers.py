"""The engine beside other inference software on the same cores, as ratios of runs in turns: prints JSON.

    python benchmarks/peers.py [--python PYTHON] [--peers ours,llama.cpp] [--rounds 3] [-o FILE]

    stream     new tokens per second of one stream behind a prompt of 76 tokens
    ragged     of 16 streams behind prompts of 16 to 128 tokens, all at once
    prefill    prompt tokens per second of a prompt of 512

The model has 134M parameters, random, written by transformers. Each peer is a process that lives throughout
and has all cores in its turn: bf16 beside bf16, int8 and int4 beside weights of 8 and 4 bits; ours computes
in float32 where `mw serve` does so by default. llama.cpp's own quantiser makes its weights (Q8_0, Q4_0).
With weights of 4 bits, its output projection has 6, and OpenVINO's embedding table and ours have 8.
A peer that cannot be had is skipped, with the reason.
PYTHON is the interpreter of an environment with the peers:

    python -m venv peers && peers/bin/pip install torch transformers gguf llama-cpp-python \
        openvino-genai optimum-intel

llama-cpp-python compiles llama.cpp for the machine that it is installed on, in some ten minutes. vLLM's
backend for CPUs is not among the peers.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, CONTEXT, NUM_TOKENS, STREAMS = 32_000, 640, 48, 16
PROMPTS = [
    np.random.default_rng(i).integers(3, VOCAB, int(n)).tolist()
    for i, n in enumerate(np.random.default_rng(0).integers(16, 129, STREAMS))
]
LONG = np.random.default_rng(STREAMS).integers(3, VOCAB, 512).tolist()
# (prompts, new tokens of each); of `prefill` the prompt's tokens are counted.
LOADS = {"stream": (PROMPTS[:1], NUM_TOKENS), "ragged": (PROMPTS, NUM_TOKENS), "prefill": ([LONG], 1)}

Answer = Callable[[Sequence[Sequence[int]], int], None]


def ours(folder: Path, dtype: str) -> Answer:
    import asyncio

    import jax
    from engine import GREEDY, INT8

    from meshwright.cli.service import served_dtypes
    from meshwright.layout import Layout
    from meshwright.models.model_files import read_model
    from meshwright.nn.files.weights import load_hf
    from meshwright.nn.start.compiled_cache import keep_compiled
    from meshwright.nn.start.device_mesh import device_mesh
    from meshwright.serve.device.runner import JaxRunner
    from meshwright.serve.engine.engine import Engine
    from meshwright.serve.engine.request import Request

    keep_compiled()
    config = read_model(folder)
    weights, computed = served_dtypes(config)
    layout = Layout.of(weights_dtype=weights, compute_dtype=computed)
    mesh = device_mesh(layout, jax.devices()[:1])
    params = load_hf(folder, config, layout, mesh)
    layout = layout.replace(
        **{"bf16": {}, "int8": INT8, "int4": {"weights_dtype": "int4", "matmul_dtype": "int8"}}[dtype]
    )
    runner = JaxRunner(params, config, layout, mesh, num_slots=STREAMS, context=CONTEXT)
    runner.warm_up()

    def answer(prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        async def one(engine: Engine, prompt: Sequence[int]) -> int:
            with engine.submit(Request(tuple(prompt), num_tokens, GREEDY)) as stream:
                return len([event async for event in stream])

        async def each(engine: Engine) -> list[int]:
            return await asyncio.gather(*(one(engine, prompt) for prompt in prompts))

        with Engine(runner, prefix_cache=False) as engine:
            assert asyncio.run(each(engine)) == [num_tokens] * len(prompts)

    return answer


def with_transformers(folder: Path, dtype: str) -> Answer:
    """Plain PyTorch with its cache; of several prompts one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    assert dtype == "bf16", "transformers has no narrow products for CPUs"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert made.shape[1] == longest + num_tokens

    return answer


def with_llama_cpp(folder: Path, dtype: str) -> Answer:
    """llama.cpp on all cores: the prompts in batches, then a token of each stream a step."""
    lib = import_module("llama_cpp")

    file, wide = folder / f"{dtype}.gguf", folder / "bf16.gguf"
    if not wide.exists():
        write_gguf(folder, wide)
    lib.llama_backend_init()
    if not file.exists():
        options = lib.llama_model_quantize_default_params()
        options.ftype = {"int8": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": lib.LLAMA_FTYPE_MOSTLY_Q4_0}[dtype]
        status = lib.llama_model_quantize(str(wide).encode(), str(file).encode(), ctypes.byref(options))
        assert status == 0, "llama.cpp does not quantise the model"
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    how = lib.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_ubatch, how.n_seq_max = STREAMS * CONTEXT, 2048, 512, STREAMS
    how.n_threads = how.n_threads_batch = os.cpu_count() or 1
    context = lib.llama_init_from_model(model, how)
    assert context, "llama.cpp refuses the model"
    batch = lib.llama_batch_init(2048, 0, 1)

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest next token of each (token, position, sequence, is wanted) that is wanted."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert lib.llama_decode(context, batch) == 0
        wanted = [i for i, row in enumerate(rows) if row[3]]
        return [
            int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (VOCAB,)).argmax())
            for i in wanted
        ]

    def answer(prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        rows = [
            (token, i, number, i == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        last = [one for begin in range(0, len(rows), 2048) for one in decode(rows[begin : begin + 2048])]
        for step in range(num_tokens - 1):
            last = decode([(one, len(prompts[n]) + step, n, True) for n, one in enumerate(last)])

    return answer


def write_gguf(folder: Path, file: Path) -> None:
    """The checkpoint in llama.cpp's format: bf16, norms in f32."""
    import torch
    from safetensors.torch import load_file

    gguf = import_module("gguf")

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kind = config["num_attention_heads"], gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        x = tensor.to(torch.float32).numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rotated in pairs there, here in halves
            x = x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
        stored = kind.F32 if x.ndim == 1 else kind.BF16
        there = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(there, gguf.quants.quantize(np.ascontiguousarray(x), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_openvino(folder: Path, dtype: str) -> Answer:
    """OpenVINO GenAI's continuous batching of the model as optimum exports it; weights may be narrow."""
    ov, genai = import_module("openvino"), import_module("openvino_genai")

    there = folder / f"openvino-{dtype}"
    if not there.exists():
        intel = import_module("optimum.intel")

        bits = {"bf16": {}, "int8": {"bits": 8}, "int4": {"bits": 4, "sym": True, "group_size": 32}}[dtype]
        narrow = intel.OVWeightQuantizationConfig(**bits) if bits else None
        model = intel.OVModelForCausalLM.from_pretrained(
            folder, export=True, compile=False, load_in_8bit=False, quantization_config=narrow
        )
        model.save_pretrained(there)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, STREAMS, False
    pipe = genai.ContinuousBatchingPipeline(
        str(there), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}, {}
    )

    def answer(prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        how = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipe.add_request(number, ov.Tensor(np.array([prompt], np.int64)), how)
            for number, prompt in enumerate(prompts)
        ]
        while pipe.has_non_finished_requests():
            pipe.step()
        assert [len(one.read_all()[0].generated_ids) for one in handles] == [num_tokens] * len(prompts)

    return answer


PEERS: dict[str, Callable[[Path, str], Answer]] = {
    "ours": ours,
    "transformers": with_transformers,
    "llama.cpp": with_llama_cpp,
    "openvino": with_openvino,
}
PACKAGES = {
    "ours": ("jax", "jaxlib"),
    "transformers": ("transformers", "torch"),
    "llama.cpp": ("llama_cpp_python",),
    "openvino": ("openvino_genai", "openvino"),
}


def work(name: str, dtype: str, folder: Path) -> None:
    """A peer's process: says what it is, then the tokens per second of each load that it is told."""
    from importlib.metadata import version

    try:
        answer = PEERS[name](folder, dtype)
    except Exception as reason:  # of whatever kind a peer has: it cannot be had
        print(
            json.dumps({"error": f"{type(reason).__name__}: {str(reason).splitlines()[0]}"[:200]}), flush=True
        )
        return
    said = {"versions": {package: version(package) for package in PACKAGES[name]}}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        prompts, num_tokens = LOADS[line.strip()]
        started = time.perf_counter()
        answer(prompts, num_tokens)
        seconds = time.perf_counter() - started
        count = len(prompts[0]) if num_tokens == 1 else len(prompts) * num_tokens
        print(json.dumps(count / seconds), flush=True)


WRITE = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, max_position_embeddings=2048, tie_word_embeddings=False,
)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


def measured(python: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Medians of every peer that there is, in turns, and of the ratios to ours of the same turn."""
    results: dict[str, Any] = {"skipped": {}, "versions": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "llama-134m")
        subprocess.run([python, "-c", WRITE, str(folder)], check=True)
        for dtype in ("bf16", "int8", "int4"):
            with ExitStack() as stack:
                workers: dict[str, subprocess.Popen[str]] = {}
                for name in names:
                    command = [sys.executable if name == "ours" else python, __file__]
                    process = stack.enter_context(
                        subprocess.Popen(
                            [*command, "--worker", name, dtype, str(folder)],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                    )
                    said = next(_said(process), {"error": "it ended without a word"})
                    if "error" in said:
                        results["skipped"][f"{name} {dtype}"] = said["error"]
                        continue
                    workers[name], results["versions"][name] = process, said["versions"]
                for load in LOADS:
                    turns = [
                        {name: _asked(worker, load) for name, worker in workers.items()}
                        for _ in range(rounds + 1)
                    ][1:]
                    medians = {name: statistics.median(turn[name] for turn in turns) for name in workers}
                    ratios = {
                        name: statistics.median(turn["ours"] / turn[name] for turn in turns)
                        for name in workers
                        if name != "ours" and "ours" in workers
                    }
                    found = {"tokens_per_second": medians, "ours_over": ratios}
                    results[f"{dtype}_{load}"] = found
                    print(dtype, load, found, file=sys.stderr, flush=True)
                for worker in workers.values():
                    worker.communicate()
    return results


def _said(process: "subprocess.Popen[str]") -> Any:
    """What a worker prints in JSON; its libraries may print something else."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            yield json.loads(line)
        except ValueError:
            print(line, end="", file=sys.stderr)


def _asked(worker: "subprocess.Popen[str]", load: str) -> float:
    assert worker.stdin is not None
    worker.stdin.write(f"{load}\n")
    worker.stdin.flush()
    return next(_said(worker))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", nargs=3, metavar=("PEER", "DTYPE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        name, dtype, folder = asked.worker
        work(name, dtype, Path(folder))
        return
    from training import machine

    command = f"python benchmarks/peers.py --peers {asked.peers} --rounds {asked.rounds}"
    document = {
        "benchmark": "peers",
        "machine": machine(),
        "command": command,
        "load_before": os.getloadavg()[0],
        "results": measured(asked.python, asked.peers.split(","), asked.rounds),
    }
    text = json.dumps(document, indent=2)
    print(text)
    if asked.output:
        asked.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
