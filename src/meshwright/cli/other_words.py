"""Commands and options by their names in other programs, each with the words to type here instead."""

import re
from collections.abc import Collection

from meshwright.cli.other_notation import is_collective
from meshwright.cli.other_subjects import EVALUATED, NO_DATA, ONE_STEP, SAMPLED, SHOWN, words_of
from meshwright.cli.other_values import (
    BATCH_TOKENS,
    HOSTS_OF_8,
    KINDS_OF_CHIPS,
    MACHINE,
    PERCENTILES,
    SLICES,
    STEPS,
    dtype_here,
    time_here,
    with_value,
)

# difflib's least ratio of similarity for a typing error, and for a name that no table explains.
TYPO, ALIKE = 0.85, 0.7
# Axes of a layout, each with the options of other programs for its degree. A command takes them as words of
# --given or, without that option, of --layout.
_AXES: dict[str, tuple[str, ...]] = {
    "tensor=8": (
        "--tp", "--tp-size", "--tensor-parallel-size", "--tensor-model-parallel-size", "--tensor-parallel",
        "--tensor", "--mp", "--model-parallel-size", "--model-parallel",
    ),
    "pipe=4": (
        "--pp", "--pp-size", "--pipeline-parallel-size", "--pipeline-model-parallel-size",
        "--pipeline-parallel", "--pipe", "--pipeline", "--stages", "--num-stages", "--pipeline-stages",
    ),
    "data=8": ("--dp", "--dp-size", "--data-parallel-size", "--data-parallel", "--ddp"),
    "expert=8": (
        "--ep", "--ep-size", "--expert-parallel-size", "--expert-model-parallel-size", "--expert-parallel",
    ),
    "fsdp=8": ("--fsdp", "--fsdp-size", "--shard"),
    "data=2,fsdp=4": ("--hsdp",),
}  # fmt: skip
QLORA = "--lora 16 --base-dtype nf4"
# Words to type here, each with the options of other programs that mean the same. Words are offered only to
# commands that have their first option, so an option may be listed several times.
_OPTIONS: dict[str, tuple[str, ...]] = {
    BATCH_TOKENS: (
        "--per-device-train-batch-size", "--per-device-batch-size", "--global-batch",
        "--global-batch-size", "--gbs", "--batch-size", "--bsz", "--global-bsz", "--gbsz",
        "--per-device-batch", "--batch-size-per-chip", "--batch-size-per-device", "--train-batch-size",
        "--batch", "--global-bs", "--b",
    ),
    "--batch-tokens": (
        "--tokens-per-step", "--tokens-per-batch", "--step-tokens", "--global-batch-tokens",
        "--tokens-per-global-batch", "--tokens-in-batch",
    ),
    "--seq-len": (
        "--sequence-length", "--max-model-len", "--max-context", "--max-context-length", "--n-ctx",
        "--num-ctx", "--window", "--max-seq-len", "--max-seq-length", "--context-length", "--seq-length",
        "--seq", "--context", "--ctx", "--len", "--length", "--tokens", "--max-length", "--block-size",
        "--max-target-length", "--model-max-length", "--sl", "--t", "--s",
    ),
    "--set lora_rank=16": ("--lora", "--lora-rank", "--lora-r", "--peft"),
    "--set lora_rank=16 --weights-dtype nf4": ("--qlora", "--load-in-4bit"),
    "--lora": ("--lora-r", "--lora-rank", "--peft", "--r", "--rank"),
    QLORA: (
        "--qlora", "--load-in-4bit", "--weights-dtype", "--quantization", "--quantize", "--quant", "--bits",
    ),
    MACHINE: (
        "--gpu", "--gpus", "--chip", "--chips", "--machine", "--num-gpus", "--device", "--devices",
        "--accelerator", "--gpu-type", "--tpu", "--accelerator-type", "--tpu-type", "--machine-type",
        "--topology", "--instance-type", "--instance", "--gres", "--gpus-per-task", "--num-devices",
        "--world-size", "--nproc-per-node", "--gpus-per-node", "--count", "--quantity",
    ),
    SLICES: (
        "--num-slices", "--slices", "--num-pods", "--dcn-data-parallelism", "--n-slices",
    ),
    HOSTS_OF_8: ("--nodes", "--num-nodes", "--nnodes", "--hosts"),
    "--tensor 8": ("--tp", "--tp-size", "--tensor-parallel-size", "--tensor-parallel"),
    "--tensor 8, since a server splits each layer and has no stages,": _AXES["pipe=4"],
    **{f"{option} {axis}": theirs for option in ("--given", "--layout") for axis, theirs in _AXES.items()},
    "--given context=2": ("--cp", "--context-parallel-size", "--context-parallel", "--sp-size"),
    "--set num_kv_heads=8": (
        "--num-query-groups", "--num-key-value-heads", "--num-kv-heads", "--kv-heads", "--n-kv-heads",
    ),
    "--layout expert=all": ("--enable-expert-parallel", "--enable-ep-moe", "--enable-ep"),
    "--given zero=3": ("--zero", "--zero-stage", "--deepspeed-stage", "--stage", "--zero3"),
    "--given zero=2": ("--zero2", "--zero-2", "--no-reshard-after-forward"),
    "--given zero=1": (
        "--zero1", "--zero-1", "--distributed-optimizer", "--use-distributed-optimizer", "--shard-optimizer",
    ),
    "--given remat=full": (
        "--activation-checkpoint", "--activation-checkpoint-mode", "--ac", "--remat",
        "--activation-checkpointing",
        "--gradient-checkpointing", "--recompute",
        "--recompute-granularity", "--checkpoint-activations",
    ),
    "--given remat=attention": ("--recompute-activations",),  # Megatron recomputes selectively
    "--given microbatches=8": (
        "--microbatch", "--microbatches", "--micro-batches", "--gradient-accumulation-steps", "--grad-accum",
        "--accumulation", "--accumulate-grad-batches",
    ),
    "--given microbatches=N, a replica's sequences divided by that size,": (
        "--micro-batch-size", "--mbs", "--train-micro-batch-size-per-gpu",
    ),
    "--given sequence_parallel=true": ("--sp", "--sequence-parallel"),
    "--given schedule=interleaved": ("--pipeline-schedule", "--schedule", "--pipeline-parallel-schedule"),
    "--given schedule=interleaved,interleave=2": (
        "--virtual-stages", "--vp", "--vpp", "--virtual-pipeline-parallel-size",
        "--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank",
    ),
    "--given schedule=interleaved,interleave=C, the layers of a stage divided by that number,": (
        "--num-layers-per-virtual-pipeline-stage",
    ),
    "--for deepspeed": ("--use-deepspeed", "--deepspeed", "--deepspeed-config", "--ds-config"),
    "--for torchtitan": ("--torchtitan", "--torch", "--pytorch"),
    "--for megatron": ("--use-megatron-lm",),
    "--for NAME": ("--framework", "--trainer", "--program"),
    "--engine NAME": ("--for", "--framework", "--backend", "--server", "--software"),
    "--compute-dtype bf16": ("--mixed-precision", "--bf16", "--fp16", "--amp"),
    "--matmul-dtype fp8": ("--fp8",),
    "--given matmul_dtype=fp8": ("--fp8", "--matmul-dtype"),
    "--weights-dtype int8": ("--load-in-8bit", "--8bit", "--int8"),
    "--weights-dtype int4": ("--load-in-4bit", "--4bit", "--int4", "--gptq", "--awq"),
    "--weights-dtype": (
        "--dtype", "--precision", "--quantization", "--quantize", "--quant", "--weight-dtype",
        "--torch-dtype", "--bits",
    ),
    "--kv-dtype": ("--kv-cache-dtype", "--cache-dtype", "--kv-bits"),
    "--requests-per-minute 100": ("--rate-limit", "--max-rpm", "--rpm", "--request-limit"),
    "--prompt-tokens": (
        "--in", "--tokens-in", "--prompt", "--prefill",
        "--input-len", "--input-tokens", "--isl", "--input-length", "--prompt-len", "--prompt-length",
        "--input", "--max-prompt-length", "--prefill-len", "--input-seq-len", "--random-input-len",
    ),
    "--output-tokens": (
        "--tokens-out",
        "--output-len", "--osl", "--output-length", "--max-new-tokens", "--generate-tokens",
        "--max-completion-length", "--max-response-length", "--completion-tokens", "--decode-len",
        "--generate", "--decode", "--gen", "--response-len",
        "--max-tokens", "--gen-len", "--gen-tokens", "--generation-len", "--decode-tokens",
    ),
    "--max-tokens": ("--max-new-tokens", "--num-tokens", "--max-length", "--length", "--n-predict", "-n"),
    "--temperature": ("--temp",),
    "--top-p": ("--topp", "--nucleus"),
    "--rate": ("--qps", "--rps", "--request-rate", "--requests-per-second", "--load"),
    "--ttft": ("--ttft-slo", "--slo-ttft", "--target-ttft", "--first-token"),
    "--tpot": ("--tpot-slo", "--slo-tpot", "--target-tpot", "--itl", "--inter-token-latency"),
    "--phase generate --batch 32 --context 8k": (
        "--max-num-seqs", "--max-batch-size", "--batch-size", "--max-running-requests", "--max-batch",
        "--concurrency", "--max-concurrency", "--batch-sizes",
    ),
    "--slots": (
        "--concurrency", "--max-num-seqs", "--max-running-requests", "--max-batch-size", "--batch-size",
        "--parallel", "--max-batch",
    ),
    "--batch": ("--batch-size", "--bs", "--sequences", "--num-sequences", "--concurrency"),
    "--context": (
        "--max-model-len", "--max-seq-len", "--ctx-size", "--context-length", "--max-total-tokens",
        "--seq-len", "--kv-len", "--kv-length", "--cache-len", "--cache-length", "--ctx",
    ),
    "--prompt-tokens and --output-tokens": (
        "--max-model-len", "--seq-len", "--max-seq-len", "--context-length",
    ),
    "--checkpoint": (
        "--model-name-or-path", "--model", "--model-path", "--weights", "--ckpt", "--pretrained",
        "--model-id",
    ),
    "--to": (
        "--dtype", "--weights-dtype", "--bits", "--quantization", "--quantize", "--quant", "--scheme",
        "--precision", "--type", "--qtype", "--format",
    ),
    "--from": (
        "--model-name-or-path", "--pretrained-model-name-or-path", "--pretrained", "--base-model", "--model",
        "--init-from", "--checkpoint",
    ),
    "--model": ("--model-name-or-path", "--model-name", "--model-id", "--arch", "--config", "--preset"),
    "--data": ("--dataset", "--train-data", "--data-path", "--train-file", "--corpus", "--dataset-path"),
    "--learning-rate": ("--lr", "--peak-lr", "--max-lr"),
    "--epochs 3": ("--num-epochs", "--num-train-epochs", "--epoch", "--max-epochs", "--n-epochs", "--passes"),
    STEPS: ("--max-steps", "--train-iters", "--iterations", "--iters"),
    "--optimizer": ("--optim", "--opt"),
    "--given optimizer=adamw,optimizer_dtype=int8": (
        "--adam8bit", "--8bit-adam", "--use-8bit-adam", "--adamw-8bit",
    ),
    "--given optimizer=adafactor": ("--optim", "--optimizer", "--opt"),
    "--layout optimizer=adafactor,...": ("--optim", "--optimizer", "--opt"),
    "--clip-norm": ("--clip-grad", "--max-grad-norm", "--grad-clip", "--gradient-clipping"),
    "--weight-decay": ("--wd",),
    "--run": (
        "--save-dir", "--checkpoint-dir", "--ckpt-dir", "--output-dir", "--save", "--out-dir",
        "--output", "--out", "--run-dir", "--logdir", "-o", "--base-output-directory", "--output-directory",
        "--workdir", "--log-dir", "--experiment-dir",
    ),
    "--resume": ("--resume-from-checkpoint", "--load", "--continue", "--resume-from"),
    "--checkpoint-every": (
        "--save-steps", "--save-interval", "--checkpoint-interval", "--save-every",
        "--ckpt-interval", "--ckpt-every", "--ckpt-freq", "--checkpoint-freq", "--save-freq",
    ),
    "-o": (
        "--out", "--save", "--out-file", "--outfile", "--file", "--write", "--html", "--export", "--toml",
        "--emit",
    ),
    "--json": ("--format", "--output-format", "--jsonl", "--as-json", "--yaml"),
    "--explain": ("--verbose", "-v", "--why", "--details", "--detail", "--breakdown", "--full"),
    "--top": ("--n-best", "--num-results", "--topk", "--limit", "-n", "--max-results", "--num", "-k"),
    "--ideal": ("--roofline", "--theoretical", "--speed-of-light", "--best-case"),
    "--price": ("--cost", "--price-per-hour", "--gpu-price", "--hourly", "--cost-per-hour"),
    "--headroom": ("--margin", "--reserve"),
    "--headroom 10%, the share to leave free,": (
        "--memory-fraction", "--gpu-memory-utilization", "--mem-fraction-static",
        "--per-process-gpu-memory-fraction", "--xla-python-client-mem-fraction",
    ),
    "--budget": (
        "--max-cost", "--total-budget", "--max-budget", "--max-total-cost", "--spend", "--max-spend",
    ),
    "--max-price-per-hour": (
        "--budget", "--max-cost", "--max-price", "--max-cost-per-hour", "--max-hourly-cost",
        "--hourly-budget", "--budget-per-hour", "--price-limit", "--max-price-hour",
    ),
    "--smallest --days 30": (
        "--deadline", "--duration", "--in-days", "--finish-in", "--time-limit", "--within", "--max-days",
        "--max-time", "--wall-time", "--weeks", "--months", "--hours", "--max-hours", "--finish",
        "--walltime",
        "--train-hours",
    ),
    "--tokens, the samples times --seq-len,": ("--train-samples", "--num-train-samples", "--total-samples"),
    "--tokens": ("--total-tokens", "--train-tokens", "--num-tokens", "--dataset-tokens"),
    "--set vocab_size=32000": ("--vocab-size", "--vocab", "--n-vocab", "--padded-vocab-size"),
    "--set num_layers=32": ("--num-layers", "--layers", "--n-layer", "--n-layers", "--depth"),
    "--set d_model=4096": (
        "--hidden-size", "--d-model", "--hidden", "--n-embd", "--embd", "--width", "--dim",
    ),
    "--set num_heads=32": ("--num-attention-heads", "--heads", "--n-head", "--n-heads"),
    "--set d_ff=14336": ("--ffn-hidden-size",),
    "--draft-checkpoint": ("--speculative-model", "--draft-model", "--draft-model-path", "--draft"),
    "--drafts": ("--num-speculative-tokens", "--speculative", "--speculative-tokens", "--spec-tokens"),
    "--mode": ("--disaggregated", "--disaggregation", "--chunked-prefill"),
    "--prefix-hit 0.5, the share of prompts in the cache,": ("--enable-prefix-caching", "--prefix-caching"),
    "--chunk": (
        "--chunked-prefill", "--chunked-prefill-size", "--max-num-batched-tokens", "--prefill-chunk",
        "--max-num-tokens", "--max-batch-tokens",
    ),
    "--no-prefix-cache": (
        "--disable-radix-cache", "--no-enable-prefix-caching", "--disable-prefix-caching",
    ),
    "--host 0.0.0.0": ("--bind-all", "--public", "--expose", "--all-interfaces", "--external"),
    "--host 0.0.0.0 --port 8000": ("--bind", "--listen", "--address", "--addr", "--bind-address"),
    "--target gpu": ("--backend", "--platform", "--device", "--accelerator", "--compiler"),
    "--hlo": ("--xla-dump", "--hlo-file", "--xla-dump-to", "--dump", "--module"),
    "--cors-origin": ("--allowed-origins", "--cors", "--cors-allow-origins"),
    "--keep": ("--save-total-limit", "--keep-last", "--max-checkpoints"),
    "--concurrency": (
        "--max-concurrency", "--parallel", "--num-workers", "--users", "--clients", "--concurrent-users",
    ),
    "--best-of 8": ("--n", "--num-samples"),
    "--lengths": ("--dataset-name", "--dataset", "--workload"),
    "--prefix-cache": ("--enable-prefix-caching", "--prefix-caching"),
    "--replicas": ("--num-replicas", "--instances", "--data-parallel-size", "--dp"),
    "--api-key-file": ("--key",),
    "--dims B=1024,D=4096": ("--bytes", "--size", "--shape", "--message-size"),
    "--mesh X=8": ("--axes", "--axis", "--axis-sizes", "--mesh-shape", "--mesh-axes", "--group", "--ranks"),
    "--requests": ("--num-prompts", "--num-requests", "--total", "--total-requests", "--count"),
    "--duration": ("--for",),
    "--tpot-p95": ("--itl-p95",),
    "--tpot-p95 30ms, the planned percentile,": (
        "--tpot-p99", "--tpot-p90", "--tpot-p50", "--itl-p99", "--itl-p90", "--itl-p50",
    ),
    "--ttft-p95 1s, the planned percentile,": (
        "--ttft-p99", "--ttft-p90", "--ttft-p50", "--p99-ttft", "--p90-ttft", "--p50-ttft",
    ),
    "--ttft-p95 1s": ("--p95-ttft",),
    "--tpot-p95 30ms": ("--p95-tpot", "--p95-itl", "--p99-tpot", "--p99-itl"),
    PERCENTILES: (
        "--p99", "--p95", "--p90", "--slo", "--sla", "--latency-slo", "--goodput",
    ),
    "--samples": (
        "--num-generations", "--group-size", "--n", "--num-samples", "--rollouts-per-prompt", "--n-samples",
        "--num-samples-per-prompt", "--g",
    ),
    "--prompts": (
        "--rollout-batch-size", "--train-batch-size", "--batch-size", "--num-prompts", "--global-batch-size",
        "--prompt-batch-size",
    ),
    "--judge": ("--reward-model", "--rm", "--reward", "--critic"),
    "--processes": ("--nproc", "--nproc-per-node", "--np", "-np"),
    "--given offload=true": ("--offload", "--cpu-offload", "--activation-offload"),
    "--given offload_optimizer=true": ("--offload-optimizer", "--optimizer-offload"),
    "--fast": ("--quick", "--short", "--time", "--seconds", "--duration", "--minutes"),
    "--version": ("-v", "-V", "--ver", "--about"),
    "--url http://localhost:8000": ("--port",),
    "--url": ("--base-url", "--endpoint", "--host"),
}  # fmt: skip

# One-letter options of other programs, each with the options of mw that it may mean; the first that the
# command has counts. -c is a context in llama.cpp and a checkpoint in others.
_LETTERS: dict[str, tuple[str, ...]] = {
    "-m": ("--model", "--checkpoint", "--from", "--mesh"),
    "-c": ("--context", "--concurrency", "--checkpoint"), "-n": ("--max-tokens", "--requests"),
    "-p": ("--port",), "-t": ("--temperature",), "-d": ("--data", "--dims", "--hardware"),
    "-g": ("--hardware",),
    "-b": ("--batch-tokens", "--batch"), "-s": ("--seq-len", "--steps", "--seed"), "-l": ("--layout",),
    "-r": ("--run", "--rate"), "-e": ("--engine", "--eval"), "-u": ("--url",), "-f": ("--for",),
    "-j": ("--json",),
}  # fmt: skip
_LONG = {"-g": "--gpus", "-N": "--nodes"}  # options of schedulers
_PHASES = {"--prefill": "prefill", "--decode": "generate", "--generate": "generate"}
_MOST_RANKS = 64  # larger numbers are lengths of a context, smaller ones its ranks
_MOST_SAMPLES = 16  # larger numbers of `--n` are tokens of an answer
_SHORT = 5  # characters, with dashes: --tps is not --tp
_RATE_OF_LEARNING = "--lr", "--learning-rate", "--peak-lr", "--weight-decay", "--wd", "--warmup"
_LENGTH_OF_RUN = "--epochs", "--num-epochs", "--num-train-epochs", "--steps", "--max-steps", "--train-iters"
_CHEAPEST = "--cheapest", "--cheap", "--min-cost", "--lowest-cost"
_DEVICES = "--gpu", "--gpus", "--device"
# Answers to options that have no counterpart in a command, by command.
_ANSWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "mw fit": {
        "it shows LoRA, QLoRA and every number type, each with its largest batch; leave it out": (
            "--load-in-4bit", "--load-in-8bit", "--quantization", "--quantize", "--dtype", "--weights-dtype",
            "--bits", "--lora", "--qlora", "--batch-size", "--batch", "--kv-dtype", "--precision",
            "--4bit", "--8bit", "--int4", "--int8", "--fp8", "--bf16", "--fp16", "--q4",
            "--training", "--inference", "--train", "--serve", "--method", "--mode",
        ),
        "memory belongs to a chip, which --hardware names; mw hardware --template rtx4090 is one to edit": (
            "--vram", "--memory", "--gpu-memory", "--ram", "--mem",
        ),
    },
    "mw model": {
        SHOWN: ("--kv-cache", "--cache", "--flops", "--params", "--kv", "--heads"),
        "mw model counts parameters; for bytes by number type and batch type mw fit MODEL": (
            "--quantize", "--quantization", "--dtype", "--weights-dtype",
            "--load-in-4bit", "--bits", "--hardware", "--gpu", "--memory", "--vram",
        ),
    },
    "mw hardware": {
        "type mw hardware for the list, mw hardware h100 for a chip, mw hardware h100:8 for a machine": (
            "--list", "--all", "--gpus", "--chips", "--name", "--chip", "--gpu", "-l", "--hardware",
        ),
    },
    "mw plan rl": {
        "only the samples of a prompt change the plan: --samples 8": ("--algorithm", "--algo", "--method"),
    },
    "mw export": {
        "it writes safetensors; for GGUF type mw export RUN -o DIR, then llama.cpp's convert_hf_to_gguf.py": (
            "--format", "--gguf", "--outtype", "--to", "--type",
        ),
        "it writes a Hugging Face folder; leave it out": ("--hf", "--huggingface", "--safetensors"),
    },
    "mw plan train": {
        NO_DATA: ("--data",),
        "their number is in the model's config.json, which --model takes; --given expert=8 splits them over "
        "chips": (
            "--num-experts", "--n-experts", "--num-local-experts", "--moe-num-experts",
        ),
        "--hardware h100:64 is the most, and --smallest finds the fewest that suffice": (
            "--max-gpus", "--max-nodes", "--max-chips", "--min-gpus",
        ),
        "--smallest finds the fewest chips, and mw compare the cheapest of several plans": _CHEAPEST,
        "machines joined by commas are compared: --hardware h100:8,a100:8": (
            "--compare", "--vs", "--versus", "--against",
        ),
        "no step depends on it; type mw train plan.toml --learning-rate 3e-4": _RATE_OF_LEARNING,
        ONE_STEP: _LENGTH_OF_RUN,
    },
    "mw plan serve": {
        "the frontier has the price of a million tokens; --max-price-per-hour 50 bounds the machine's": (
            "--cost-per-million-tokens", "--price-per-million-tokens", "--max-cost-per-token",
            "--cost-per-token", "--price-per-token", "--usd-per-million", "--cost-per-million",
        ),
        "lengths are --prompt-tokens 2k --output-tokens 500": (
            "--input-output-ratio", "--ratio", "--io-ratio", "--isl-osl",
        ),
        "--rate 20 finds the fewest servers that hold it": ("--smallest", "--max-gpus", "--min-gpus"),
        "the frontier has the price of each, and --rate 20 finds the cheapest that holds it": _CHEAPEST,
        "the whole frontier is printed; leave it out": ("--top", "--limit", "--topk"),
        "a plan is of requests, --prompt-tokens 1k --output-tokens 256; --rate 20 adds a load": (
            "--tokens", "--num-tokens", "--total-tokens",
        ),
        "sampling does not change a plan; type mw generate --temperature 0.7": (
            "--temperature", "--temp", "--top-p",
        ),
        "each engine keeps its own share; --engine vllm plans with vLLM's": (
            "--gpu-memory-utilization", "--mem-fraction-static", "--headroom", "--memory-fraction",
        ),
    },
    "mw train": {
        "the plan sets it: mw plan train --batch-tokens 1Mi --seq-len 8k": (
            "--batch-size", "--batch", "--bs",
            "--max-length", "--max-seq-length", "--seq-len", "--seq-length", "--block-size", "--ctx",
            "--context", "--context-length",
            "--batch-tokens", "--cutoff-len", "--train-batch-size", "--global-batch-size",
        ),
        EVALUATED: (
            "--eval-steps", "--eval-every", "--eval-interval", "--evaluation-strategy", "--do-eval",
        ),
        "a run takes all devices of its plan; hide others with CUDA_VISIBLE_DEVICES=0": _DEVICES,
        "the schedule sets it: --schedule cosine or wsd, --schedule-steps N": (
            "--min-lr", "--lr-min", "--final-lr", "--lr-decay-iters", "--min-learning-rate",
        ),
        "the model and its layout are in a PLAN.toml, which mw plan train -o PLAN.toml writes": (
            "--config", "--config-file", "--yaml", "--cfg", "--strategy",
        ),
    },
    "mw generate": {
        'the prompt is an argument; write mw generate "$(cat prompt.txt)"': (
            "--file", "--prompt-file", "--input", "--input-file", "-f", "-i",
        ),
        SAMPLED: ("--top-k", "--topk", "--min-p"),
    },
    "mw compare": {
        "plans are compared by the price of a million tokens; leave it out": (
            "--tokens", "--total-tokens", "--train-tokens", "--num-tokens",
        ),
        "write MODEL@HARDWARE: mw compare llama-3-8b@h100:8 llama-3-8b@a100:8": (
            "--hardware", "--model", "--gpu",
        ),
        "name both: mw compare a.toml b.toml": ("--vs", "--versus", "--with", "--against", "--baseline"),
    },
    "mw serve": {
        "a server takes all devices; hide others with CUDA_VISIBLE_DEVICES=0": _DEVICES,
    },
    "mw quantize": {
        "weights are rounded to the type of --to: int8, fp8 or int4; leave it out": (
            "--method", "--algorithm", "--calibration", "--calib-data", "--group-size", "--q-group-size",
        ),
    },
    "mw ui": {
        "it listens on this machine only; on another, type ssh -L 8765:localhost:8765 THIS_HOST": (
            "--listen", "--host", "--bind", "--address", "--share",
        ),
    },
    "mw reshard": {
        "it moves weights from one plan's layout to another's: mw reshard before.toml after.toml": (
            "--tp", "--pp", "--dp", "--fsdp", "--layout", "--tensor-parallel-size", "--to-layout",
        ),
    },
    "mw report": {
        "it writes one HTML page, -o report.html, which a browser prints as PDF": (
            "--format", "--pdf", "--type", "--output-format",
        ),
    },
    "mw doctor": {
        "it changes nothing; each line with a fault names its remedy": ("--fix", "--repair", "--install"),
    },
}  # fmt: skip

# Command lines to type here, each with the commands that people try.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("capabilities", "schema", "commands", "options", "manual", "faq"),
    "demo": ("quickstart", "init", "tutorial", "example", "examples", "start", "hello", "try"),
    "plan train": (
        "estimate", "search", "optimize", "optimise", "layout", "layouts", "parallelism", "cost",
        "tco", "budget", "roi", "feasibility", "quote", "invoice", "spend", "simulate-training",
        "mfu", "solve", "plan-training", "planner", "predict",
    ),
    "plan train --smallest": ("how-many", "how-many-gpus", "how-many-chips", "gpus-needed", "smallest"),
    "plan serve": (
        "size", "capacity", "sizing", "slo", "latency", "throughput", "qps", "frontier",
        "inference", "plan-serving", "cost-per-token", "price-per-token", "token-price", "token-cost",
        "cost-per-million-tokens", "price-per-million-tokens",
    ),
    "train --from DIR --lora 16": ("finetune", "fine-tune", "sft", "lora", "qlora", "peft", "adapt"),
    "train plan.toml --rl": ("rl", "grpo", "ppo", "rlhf", "dpo"),
    "generate": ("chat", "run", "infer", "complete", "prompt", "sample", "ask"),
    "serve --checkpoint DIR": (
        "server", "api", "host", "openai", "up", "vllm", "sglang", "tgi", "trtllm-serve",
        "trtllm", "ollama", "lmdeploy", "sglang.launch_server", "triton",
    ),
    "model": (
        "arithmetic", "ai", "flop", "compute", "param",
        "models", "list", "ls", "presets", "params", "parameters", "count", "inspect", "show", "summary",
        "flops", "list-models", "cache", "intensity", "arithmetic-intensity", "kv", "kv-cache", "config",
    ),
    "hardware": (
        "specs", "spec", "datasheet", "chips", "gpus", "gpu", "tpu", "tpus", "devices", "machines",
        "machine", "chip", "accelerators",
    ),
    "fit": ("memory", "vram", "oom", "fits", "will-it-fit", "can-i-run", "mem"),
    "audit": ("check", "verify", "test", "lint", "hlo", "analyze", "analyse", "inspect-hlo"),
    "bench serve --url URL": ("loadtest", "load-test", "load", "stress", "simulate"),
    "bench": ("benchmark", "benchmarks", "perf", "measure"),
    "doctor": (
        "env", "info", "status", "diagnose", "setup", "install", "nvidia-smi", "smi", "rocm-smi",
        "nvtop", "top",
    ),
    "export": ("to-hf", "save", "merge", "gguf", "push"),
    "tune": ("autotune", "autotuning", "tuning", "optimize-plan"),
    "reshard": ("resharding",),
    "quantize": ("quantise", "quant", "awq", "gptq"),
    "shard": ("einsum", "sharding", "derive"),
    "collective": ("nccl", "comms"),  # and each collective's name
    "ui": ("web", "gui", "dashboard", "app", "explore", "studio"),
    "report": ("html", "visualize", "visualise", "render"),
    "compare": ("diff", "vs"),
    "validate": ("accuracy", "score"),
    "launch slurm -- mw train plan.toml": ("sbatch", "srun", "slurm", "salloc", "squeue"),
    "launch k8s --image IMAGE -- mw train plan.toml": (
        "kubectl", "k8s", "kubernetes", "helm", "kueue", "xpk",
    ),
    "launch local -n 2 -- mw train plan.toml": (
        "torchrun", "mpirun", "mpiexec", "accelerate", "deepspeed", "ray", "distributed",
    ),
    "--install-completion": ("completion", "completions", "complete-shell"),
    "CMD --help": ("man", "docs", "usage", "explain"),
    "train my.txt": ("pretrain", "fit-model", "learn", "tokenize", "tokenise", "prepare-data", "preprocess"),
    "train --run RUN --resume": ("resume", "continue", "restart", "resume-training"),
    "plot roofline": ("roofline", "rooflines"),
    "plot": ("curves", "graph", "chart", "figure"),
}  # fmt: skip


# Answers to commands that mw lacks and no command replaces, each with the commands that are typed.
_NO_COMMANDS: dict[str, tuple[str, ...]] = {
    "models come from the hub: hf download OWNER/NAME --local-dir NAME, then mw serve --checkpoint NAME": (
        "pull", "download", "get", "fetch", "hf", "huggingface-cli",
    ),
    "a run's log is its metrics.jsonl: tail -f RUN/metrics.jsonl; mw report RUN -o report.html draws it": (
        "log", "logs", "tail", "history", "monitor", "watch", "tensorboard", "wandb", "trace",
    ),
    "for a server type curl http://localhost:8000/health; for this machine mw doctor": (
        "health", "healthcheck", "ping", "ready", "ps",
    ),
    "for a server type curl http://localhost:8000/metrics; for a run tail RUN/metrics.jsonl": (
        "metrics", "stats", "prometheus",
    ),
    "mw launch k8s -- mw train plan.toml writes a manifest, which kubectl apply -f takes": (
        "apply", "rollout", "scale", "autoscale", "namespace", "pods",
    ),
    "mw export FOLDER -o exported writes the folder of a run as a Hugging Face model, which --from DIR and "
    "--checkpoint DIR read; Megatron's and GGUF files are converted by their own programs": (
        "convert", "convert-checkpoint", "import", "ckpt-convert", "convert-hf",
    ),
    "the price of a chip-hour is in mw hardware h100, and --price 2.5 sets it in mw plan train and mw "
    "plan serve": (
        "price", "prices", "pricing", "costs", "billing",
    ),
    "type pip install -U meshwright": ("upgrade", "update", "self-update"),
    "a run or a server ends with Ctrl-C, or by the scheduler that started it: scancel, kubectl delete": (
        "stop", "kill", "cancel", "down", "delete", "drain", "shutdown", "terminate", "abort", "quit",
    ),
    "machines are made with your cloud's own command; mw plan train --hardware v5p:64 plans for one": (
        "gcloud", "aws", "az", "sky", "cluster", "create", "provision", "vm", "instance",
    ),
    "mw plan serve sizes a service, mw serve --checkpoint DIR runs one, and mw launch k8s --serve "
    "--image IMAGE -- mw serve --checkpoint DIR writes a manifest": (
        "deploy", "deployment", "deploy-model",
    ),
    "a run evaluates itself: mw train plan.toml --eval NAME=PATH; RUN/metrics.jsonl has the losses": (
        "eval", "evaluate", "perplexity", "ppl", "lm-eval",
    ),
    "it needs no account; leave it out": ("login", "logout", "whoami", "auth"),
    "mw audit plan.toml lists its collectives, and mw train plan.toml --profile DIR records a profile": (
        "profile", "profiler", "nsys", "ncu", "xprof", "perfetto", "xplane",
    ),
}  # fmt: skip


def no_command(given: str) -> str:
    """The answer to a command without a counterpart in mw; empty if none is known.

    >>> no_command("whoami")
    'it needs no account; leave it out'
    """
    plain = given.replace("_", "-").lower()
    return next((answer for answer, theirs in _NO_COMMANDS.items() if plain in theirs), "")


def option_here(given: str, options: Collection[str], value: str = "") -> str:
    """The words to type in place of another program's option; empty if none are known.

    options: of the command. value: the value given; it replaces the example's if it fits.

    >>> option_here("--tensor_parallel_size", ["--model", "--given"], "4")
    '--given tensor=4'
    >>> option_here("--gpu", ["--hardware"], "4090"), option_here("--gpus", ["--hardware"], "16")
    ('--hardware 4090', '--hardware h100:16')
    """
    plain = _LONG.get(given, _plain(given))
    if words := next(filter(None, (read(plain, value, options) for read in _BY_VALUE)), ""):
        return words
    unit = next((unit for unit in ("hour", "week", "month") if unit in plain), "")
    if unit and value.isdecimal() and "--days" in options:
        value = f"{value} {unit}s"
    if words := _of_table(plain, value, options):
        return words
    letter = f"-{given.lstrip('-')}"
    if letter in options and len(letter) == 2:
        return letter
    letters = [name for name in _LETTERS.get(letter, ()) if name in options]
    if letter == "-c" and not value.isdigit():
        letters = letters[::-1]
    return letters[0] if letters else plain if plain in options and plain != given else ""


def _of_table(plain: str, value: str, options: Collection[str]) -> str:
    """The words of `_OPTIONS` for a name, the first of which the command has; "" if there are none."""
    from meshwright.dtypes import types_for  # here, since most command lines are right

    names = (plain, *_other_number(plain))
    meant = (ours for name in names for ours, theirs in _OPTIONS.items() if name in theirs)
    ours = next((ours for ours in meant if ours.split()[0].rstrip(",") in options), "")
    # A type for products only: not of activations, or, in training, of weights.
    is_compute = ours.startswith("--compute-dtype") and value not in types_for("activations")
    is_training = ours.startswith("--weights-dtype") and "--batch-tokens" in options
    narrow = dtype_here(value)
    # Programs that train quantise the operands of products: MaxText's --quantization int8.
    is_of_products = is_compute or (is_training and (narrow == "fp8" or plain.startswith("--quant")))
    if is_of_products and "--given" in options and narrow in types_for("operands"):
        return f"--given matmul_dtype={narrow}"
    return with_value(ours, value)


def _of_ranks(plain: str, value: str, options: Collection[str]) -> str:
    """The words for a number of context ranks, such as --context 2 or --sequence-parallelism 2; else "".

    A large --context is a length, and --sequence-parallel without a degree is Megatron's flag.
    """
    if not value.isdecimal() or "--given" not in options:
        return ""
    words = set(words_of(plain))
    is_degree = "sp" in words and words <= {"sp", "ici", "size", "degree"} and int(value) > 1
    is_few = plain == "--context" and int(value) <= _MOST_RANKS
    return f"--given context={value}" if is_degree or is_few else ""


def _of_machine_price(plain: str, value: str, options: Collection[str]) -> str:
    """The words for a price an hour too high for one chip, such as --cost-per-hour 700; "" for others."""
    is_price = plain in ("--cost-per-hour", "--price-per-hour", "--hourly-cost", "--hourly-price")
    is_high = re.fullmatch(r"\$?\d{3,}(\.\d+)?", value) is not None
    return "--max-price-per-hour" if is_price and is_high and "--max-price-per-hour" in options else ""


def _of_slices(plain: str, value: str, options: Collection[str]) -> str:
    """The words for MaxText's division over slices, such as --dcn_fsdp_parallelism 2; "" for others."""
    is_over_slices = re.fullmatch(r"--dcn-\w+-parallelism", plain) and "--hardware" in options
    return with_value(SLICES, value) if is_over_slices and value not in ("", "1", "-1") else ""


def _of_run_time(plain: str, value: str, options: Collection[str]) -> str:
    """The words for the time of a run or a load test, such as --minutes 30; "" for others."""
    timed = next((ours for ours in ("--time", "--duration") if ours in options and ours != plain), "")
    return f"{timed} {time_here(plain, value) if value else '2h'}" if timed and _is_of_time(plain) else ""


def _of_remat(plain: str, value: str, options: Collection[str]) -> str:
    """The words for recomputation under another name, such as --checkpoint full; "" for others."""
    from meshwright.layout.short import value_here

    recomputed = value_here("remat", value) if "checkpoint" in plain and "--given" in options else ""
    return f"--given {recomputed}" if recomputed else ""


def _of_mixed(plain: str, value: str, options: Collection[str]) -> str:
    """The words for PyTorch Lightning's --precision bf16-mixed; "" for others."""
    is_mixed = "mixed" in value.lower() and "--compute-dtype" in options
    return "--compute-dtype bf16" if is_mixed else ""


def _of_answers(plain: str, value: str, options: Collection[str]) -> str:
    """The words for tokens of an answer under a short name, --n or --out; "" for others."""
    is_many = plain == "--n" and value.isdecimal() and int(value) > _MOST_SAMPLES
    if is_many and "--max-tokens" in options:
        return "--max-tokens"
    is_number = plain == "--out" and value[:1].isdigit()
    return "--output-tokens" if is_number and "--output-tokens" in options else ""


# Words in the name of an option for a run's time: at least one of the first set, others of the second.
_TIMES = {
    *("hours", "hour", "minutes", "minute", "mins", "seconds", "days"),
    *("time", "walltime", "runtime", "duration"),
}
_WITH_TIMES = {"max", "train", "training", "run", "wall", "limit", "total", "num", "for", "test", "benchmark"}


def _is_of_time(plain: str) -> bool:
    """Whether an option is for the time of a run or a load test."""
    words = set(plain.strip("-").split("-"))
    return bool(words & _TIMES) and words <= _TIMES | _WITH_TIMES


def _program_named(plain: str, value: str, options: Collection[str]) -> str:
    """The words for a flag with the name of a training program or an engine, such as --megatron; else ""."""
    from meshwright.engines.serving_engine import ENGINES
    from meshwright.programs.launcher import LAUNCHERS

    name = plain.lstrip("-")
    named = (("--for", LAUNCHERS), ("--engine", ENGINES))
    option = next((option for option, known in named if option in options and name in known), "")
    return f"{option} {name}" if option and value.lower() in ("", "true") else ""


def _phase(plain: str, value: str, options: Collection[str]) -> str:
    """The words for an option that names a phase, such as --decode or --mode decode; "" for others."""
    named = f"--{value}" if plain in ("--mode", "--stage") else "" if value[:1].isdigit() else plain
    return f"--phase {_PHASES[named]}" if named in _PHASES and "--phase" in options else ""


def _target(plain: str, value: str, options: Collection[str]) -> str:
    """The words for an option that names a kind of chip without a value, such as --gpu; "" for others."""
    kind = plain.strip("-")
    return f"--target {kind}" if not value and "--target" in options and kind in KINDS_OF_CHIPS else ""


def _of_type(plain: str, value: str, options: Collection[str]) -> str:
    """The words for an option that names a number type, such as --fp32 or --int8-kv; "" for others."""
    names = [part for part in plain.strip("-").split("-") if part not in ("cache", "use")]
    use = next((part for part in names if part in ("kv", "weights")), "")
    types = [dtype_here(part) for part in names if part != use]
    option = f"--{use}-dtype" if use else "--dtype"
    is_type = len(types) == 1 and types[0] and option in options and (use or "--weights-dtype" not in options)
    return f"{option} {types[0]}" if is_type and not value else ""


# Readers of options whose value decides; the first that knows the option counts.
_BY_VALUE = (
    _of_machine_price, _of_ranks, _of_slices, _program_named, _phase, _target, _of_type, _of_run_time,
    _of_remat, _of_mixed, _of_answers,
)  # fmt: skip

# Names of settings that are unclear without their group: --activation_checkpoint.mode.
_WITH_GROUPS = {"mode", "enable", "enabled", "type", "policy", "recipe"}


def _plain(option: str) -> str:
    """An option as the tables have it: in lower case, with dashes, without the groups before its last dot.

    >>> _plain("--training.seq_len"), _plain("-N"), _plain("--activation_checkpoint.mode")
    ('--seq-len', '-N', '--activation-checkpoint-mode')
    """
    if len(option) == 2:
        return option
    group, _, name = option.lstrip("-").rpartition(".")
    if name in _WITH_GROUPS and group:
        name = f"{group.rpartition('.')[2]}-{name}"
    return f"--{name.replace('_', '-').lower()}"


# Answers that depend on the form of the value. Each row: the beginning of the command; words, one of them in
# the option's name (no words: any name); the form as a regular expression; the answer.
_BY_FORM: tuple[tuple[str, str, str, str], ...] = (
    ("mw fit", "max longest largest biggest", "",
     "it shows the largest batch and the longest context of every way; leave it out"),
    ("mw plan serve", "max longest largest biggest", "",
     "the frontier shows the largest batch of each layout; leave it out"),
    ("mw plan", "spot reserved preemptible ondemand", "",
     "prices are list prices on demand; --price 2.5 is your own, of a chip-hour"),
    ("mw train", "model size", "nano|mini|small|medium|base|large|big|xl",
     "the size of the model follows from the text and the machine; a PLAN.toml sets it: mw plan train"),
    ("mw bench serve", "endpoint path route", r"/\S*",
     "it calls /v1/completions, or /v1/chat/completions with --chat; leave it out"),
    ("", "", "auto|automatic|default", "it is the default; leave it out"),
)  # fmt: skip


def answer_here(given: str, command: str, value: str) -> str:
    """The answer to an option that has no counterpart in a command; empty if none is known.

    value: the value given; without one `--max-context` asks for the longest.

    >>> answer_here("--epochs", "mw plan train", "3")
    '--epochs: a plan prices one step; --tokens 15T adds the time of a run'
    >>> answer_here("--max-context", "mw fit", "")
    '--max-context: it shows the largest batch and the longest context of every way; leave it out'
    """
    plain = _plain(given)
    words = set(words_of(plain))
    for path, named, form, answer in _BY_FORM:
        is_named = not named or words & {*named.split()}
        if command.startswith(path) and is_named and re.fullmatch(form, value.lower()):
            return f"{given}: {answer}"
    names = {plain, *_other_number(plain)}
    answers = _ANSWERS.get(command, {}).items()
    return next((f"{given}: {answer}" for answer, options in answers if not names.isdisjoint(options)), "")


def _other_number(option: str) -> tuple[str, ...]:
    """An option in the plural for one in the singular, and the other way round; none for short options."""
    if len(option) <= _SHORT:
        return ()
    return (option[:-1],) if option.endswith("s") else (f"{option}s",)


def command_here(given: str, commands: Collection[str]) -> str:
    """The command line to type in place of an unknown command; empty if none is known.

    >>> command_here("finetune", ["train"]), command_here("plan-train", ["plan"])
    ('mw train --from DIR --lora 16', 'mw plan train')
    """
    plain = given.replace("_", "-").lower()
    if is_collective(plain):
        return "mw collective"
    for ours, theirs in _COMMANDS.items():
        if plain in theirs:
            return f"mw {ours}"
    words = plain.split("-")
    for order in (words, words[::-1]):  # plan-train, train-plan
        if len(order) == 2 and order[0] in commands and order[0] in ("plan", "bench"):
            return f"mw {order[0]} {subcommand_here(order[1]) or order[1]}"
    return ""


_VERBS = {"merge", "convert", "quantize", "quantise", "train", "export", "serve", "push", "benchmark"}
_NUMBERS, _OF_CHIPS = {"count", "num", "number", "many", "needed"}, {"gpu", "gpus", "chips", "nodes", "tpus"}


def command_of_words(given: str, commands: Collection[str]) -> str:
    """The command line for an unknown command of several words, by the word that tells its subject.

    >>> command_of_words("merge-lora", ["export"]), command_of_words("vram-use", ["fit"])
    ('mw export', 'mw fit')
    """
    words = re.split(r"[-_ .]", given.lower())
    if set(words) & _NUMBERS and set(words) & _OF_CHIPS:
        return "mw plan train --smallest"
    # The first word counts if it is a verb, otherwise the last one: merge-lora, gpu-memory.
    for word in words if words[0] in _VERBS else words[::-1]:
        if ours := f"mw {word}" if word in commands else command_here(word, commands):
            return ours
    return ""


# Commands of `mw plan`, `mw bench` and `mw launch`, each with the words that people try.
_SUBCOMMANDS = {
    "local": ("torchrun", "mpirun", "accelerate", "here", "processes", "deepspeed", "multiprocess"),
    "slurm": ("sbatch", "srun", "hpc"),
    "k8s": ("kubernetes", "kubectl", "jobset", "kueue", "gke", "helm"),
    "train": ("training", "pretrain", "pretraining", "finetune", "fit"),
    "serve": (
        "serving", "inference", "infer", "server", "generate", "decode", "prefill", "deploy", "latency",
        "throughput", "load",
    ),
    "rl": ("rlhf", "grpo", "ppo", "reinforcement", "post-training"),
    "roofline": ("rooflines", "ridge", "intensity"),
    "strategies": ("layouts", "parallelism", "batch", "mfu", "scaling"),
    "decode": ("generation", "generate", "serving", "inference"),
    "lookahead": ("speculation", "speculative", "drafts"),
    "fsdp": ("zero", "sharding", "shards"),
    "bandwidth": ("collective", "collectives", "network"),
    "latency": ("devices", "hops"),
    "matmul": ("gemm", "matmuls", "mfu"),
    "collectives": ("nccl", "comms", "collective", "network", "bandwidth", "links"),
}  # fmt: skip


def subcommand_here(given: str, known: Collection[str] = ()) -> str:
    """The command of a group, such as `mw plan`, for another word; empty if none is known.

    known: the commands of the group; empty if it may be any group's command.

    >>> subcommand_here("generation", ["decode"]), subcommand_here("generate")
    ('decode', 'serve')
    """
    word = "collective" if is_collective(given) else given.lower()
    meant = (ours for ours, theirs in _SUBCOMMANDS.items() if word in theirs)
    return next((ours for ours in meant if not known or ours in known), "")
