"""A real `mw serve` under load beside `mw bench serve --plan` on this machine as calibrated: prints JSON.

    python benchmarks/own_server.py [--model 15M] [--machine machine.toml] [--requests 96] [--rounds 3]

A LLaMA with random weights is planned on the machine that `mw calibrate` has measured, served by a
process of its own with that plan, and loaded over HTTP; the simulation gets the same traffic. The machine is
faster in one minute than in another, so each round has a calibration before its loads and one behind them,
and what is simulated is the mean of both. Ratios are measured over simulated, medians over the rounds. Asked:
throughput and median time per token within 15%, p95 of the time to first token within 30%. The client that
loads the server runs on the same cores, of which the simulation counts what calibration found of a client.

    closed     as many requests at once as the server has slots
    half       Poisson arrivals at half the throughput of the closed loop
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

from meshwright.load.filler_text import Words

# Layers, d_model, d_ff, heads.
MODELS = {"15M": (6, 288, 768, 6), "110M": (12, 768, 2048, 12)}
VOCAB, CONTEXT = 32_000, 512
SLOTS, PROMPT, ANSWER = 8, 96, 48
TARGETS = {"throughput": 0.15, "tpot_p50": 0.15, "ttft_p95": 0.30}


def config_of(size: str) -> dict[str, Any]:
    """The config.json of a model of MODELS."""
    layers, d, f, heads = MODELS[size]
    return {
        "num_hidden_layers": layers,
        "hidden_size": d,
        "intermediate_size": f,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A model with random weights in Hugging Face's form, and a tokenizer of one word a token."""
    random, vocab, d = np.random.default_rng(0), config["vocab_size"], config["hidden_size"]
    f = config["intermediate_size"]

    def weight(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(vocab, d), "model.norm.weight": np.ones(d, np.float32)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}self_attn.{name}_proj.weight": weight(d, d) for name in "qkvo"}
        tensors |= {f"{at}mlp.{name}_proj.weight": weight(f, d) for name in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = weight(d, f)
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{at}{name}.weight": np.ones(d, np.float32) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    known = dict.fromkeys(["<s>", "</s>", "<unk>", *Words.words(5000, "vocabulary").split()])
    names = [*known, *(f"t{number}" for number in range(vocab - len(known)))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def mw(*words: object) -> str:
    """What `mw` prints."""
    command = [sys.executable, "-m", "meshwright", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


# By kind of load, its traffic and the figures of the server.
Loads = dict[str, tuple[list[object], dict[str, float]]]

# Runs a command that Linux ends with its parent, however that one ends.
_WITH_ITS_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
assert ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def served(folder: Path, *words: object) -> Iterator[str]:
    """The address of a server of the checkpoint, started with these words; it ends with this process."""
    command = [sys.executable, "-c", _WITH_ITS_PARENT, sys.executable, "-m", "meshwright", "serve"]
    command += ["--checkpoint", folder, "--port", "0", *map(str, words), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = None
        for line in process.stdout:
            if found := re.search(r"http://[\w.:]+", line):
                break
        assert found, "the server did not start"
        yield found.group()
    finally:
        process.terminate()
        process.wait(60)


def under(load: Sequence[object], *where: object) -> dict[str, Any]:
    """The figures of one load test."""
    lengths = ["--lengths", "alpaca", "--prompt-tokens", PROMPT, "--output-tokens", ANSWER]
    found = json.loads(mw("bench", "serve", *where, *lengths, *load, "--json"))
    assert not found["errors"], found["error_messages"]
    return {
        "throughput": found["new_tokens_per_second"],
        "tpot_p50": found["tpot_seconds"]["p50"],
        "ttft_p95": found["ttft_seconds"]["p95"],
        "ttft_p50": found["ttft_seconds"]["p50"],
        "requests_per_second": found["requests_per_second"],
    }


def planned(folder: Path, machine: Path | None, name: str) -> Path:
    """The plan of the model on the machine, which is calibrated now where no file describes it."""
    if machine is None:
        machine = folder / f"machine-{name}.toml"
        mw("calibrate", "--hardware", "cpu:1", "-o", machine)
    words = ["--phase", "generate", "--batch", SLOTS, "--context", CONTEXT, "--layout", "tensor=1"]
    plan = folder / f"plan-{name}.toml"
    mw("plan", "serve", "--model", folder / "config.json", "--hardware", machine, *words, "-o", plan)
    return plan


def loads(url: str, requests: int) -> Loads:
    """The server under every kind of load, one after the other."""
    found, rate = Loads(), 1.0
    for name in ("closed", "half"):
        how = ["--concurrency", SLOTS] if name == "closed" else ["--rate", rate]
        traffic = [*how, "--requests", requests]
        found[name] = traffic, under(traffic, "--url", url)
        rate = found[name][1]["requests_per_second"] / 2
    return found


def beside(measured: Loads, plans: Sequence[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """By kind of load, the figures of the server and those simulated, a mean over the plans."""
    found = {}
    for name, (traffic, figures) in measured.items():
        of_plans = [under(traffic, "--plan", plan) for plan in plans]
        simulated = {key: mean(one[key] for one in of_plans) for key in figures}
        ratio = {key: figures[key] / simulated[key] for key in figures}
        found[name] = {"measured": figures, "simulated": simulated, "ratio": ratio}
    return found


def medians(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds of one kind of load, the ratios of each, and whether they are as asked."""
    found: dict[str, Any] = {
        side: {key: median(one[side][key] for one in rounds) for key in figures}
        for side, figures in rounds[0].items()
    }
    found["rounds"] = [one["ratio"] for one in rounds]
    found["within"] = {key: abs(found["ratio"][key] - 1) <= most for key, most in TARGETS.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="15M", help="the size")
    parser.add_argument("--machine", type=Path, help="of mw calibrate --hardware cpu:1; measured if left out")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        write_checkpoint(folder, config_of(asked.model))
        plans = [planned(folder, asked.machine, "0")]
        load = os.getloadavg()[0]
        rounds = []
        with served(folder, plans[0]) as url:
            under(["--requests", 2 * SLOTS], "--url", url)  # what the first requests compile and fill
            for number in range(1, asked.rounds + 1):
                measured = loads(url, asked.requests)
                plans.append(planned(folder, asked.machine, str(number)))
                rounds.append(beside(measured, plans[-2:]))
    results = {name: medians([one[name] for one in rounds]) for name in rounds[0]}
    document = {
        "benchmark": "own_server",
        "command": f"python benchmarks/own_server.py --model {asked.model} --requests {asked.requests}"
        f" --rounds {asked.rounds}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, JAX {version('jax')}",
        "load_average": load,
        "targets": TARGETS,
        "results": results,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
