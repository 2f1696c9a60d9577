"""Commands and options by their names in other programs, each with the words to type here instead."""

import re
from collections.abc import Collection
from itertools import pairwise

_PRODUCTS_IN_FP8 = ("--fp8",)
_MACHINE = "--hardware h100:8"
# Words to type here, each with the options of other programs that mean the same. Words are offered only to
# commands that have their first option, so an option may be listed several times.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "--batch-tokens, the sequences times --seq-len,": (
        "--global-batch", "--global-batch-size", "--gbs", "--batch-size", "--train-batch-size", "--batch",
        "--global-bs",
    ),
    "--seq-len": (
        "--sequence-length", "--max-seq-len", "--max-seq-length", "--context-length", "--seq-length", "--seq",
        "--context", "--ctx", "--max-length", "--block-size",
    ),
    "--set lora_rank=16": ("--lora", "--lora-rank", "--lora-r", "--peft"),
    "--set lora_rank=16 --weights-dtype nf4": ("--qlora", "--load-in-4bit"),
    "--lora": ("--lora-r", "--lora-rank", "--peft"),
    "--lora 16 --base-dtype nf4": ("--qlora", "--load-in-4bit", "--weights-dtype", "--quantization"),
    _MACHINE: (
        "--gpu", "--gpus", "--chip", "--chips", "--machine", "--num-gpus", "--device", "--devices",
        "--accelerator", "--gpu-type", "--tpu", "--num-devices", "--world-size", "--nproc-per-node",
        "--gpus-per-node",
    ),
    "--hardware h100:4x8, 4 hosts of 8,": ("--nodes", "--num-nodes", "--nnodes", "--hosts"),
    "--tensor 8": ("--tp", "--tp-size", "--tensor-parallel-size", "--tensor-parallel"),
    "--given tensor=8": (
        "--tp", "--tp-size", "--tensor-parallel-size", "--tensor-model-parallel-size", "--tensor-parallel",
        "--tensor", "--mp",
    ),
    "--given pipe=4": (
        "--pp", "--pp-size", "--pipeline-parallel-size", "--pipeline-model-parallel-size",
        "--pipeline-parallel", "--pipe", "--pipeline",
    ),
    "--given data=8": ("--dp", "--dp-size", "--data-parallel-size", "--data-parallel", "--ddp"),
    "--given context=2": ("--cp", "--context-parallel-size", "--context-parallel", "--sp-size"),
    "--given expert=8": (
        "--ep", "--expert-parallel-size", "--expert-model-parallel-size", "--expert-parallel",
    ),
    "--given fsdp=8": ("--fsdp", "--fsdp-size", "--shard", "--hsdp"),
    "--layout tensor=8": (
        "--tp", "--tp-size", "--tensor-parallel-size", "--tensor-model-parallel-size", "--tensor-parallel",
        "--mp",
    ),
    "--layout pipe=4": ("--pp", "--pp-size", "--pipeline-parallel-size", "--pipeline-model-parallel-size"),
    "--layout data=8": ("--dp", "--dp-size", "--data-parallel-size", "--data-parallel", "--ddp"),
    "--layout fsdp=8": ("--fsdp", "--zero3"),
    "--layout expert=8": ("--ep", "--ep-size", "--expert-parallel-size", "--enable-expert-parallel"),
    "--given zero=3": ("--zero", "--zero-stage", "--deepspeed-stage", "--stage", "--zero3"),
    "--given zero=1": ("--distributed-optimizer", "--use-distributed-optimizer", "--shard-optimizer"),
    "--given remat=full": (
        "--remat", "--gradient-checkpointing", "--activation-checkpointing", "--recompute",
        "--recompute-granularity", "--recompute-activations", "--checkpoint-activations",
    ),
    "--given microbatches=8": (
        "--microbatch", "--microbatches", "--micro-batches", "--gradient-accumulation-steps", "--grad-accum",
        "--accumulation",
    ),
    "--given microbatches=N, a replica's sequences divided by that size,": (
        "--micro-batch-size", "--mbs", "--per-device-train-batch-size", "--train-micro-batch-size-per-gpu",
    ),
    "--given sequence_parallel=true": ("--sp", "--sequence-parallel"),
    "--given schedule=interleaved": (
        "--pipeline-schedule", "--schedule", "--virtual-stages", "--vp", "--vpp",
        "--virtual-pipeline-parallel-size", "--num-layers-per-virtual-pipeline-stage",
    ),
    "--for deepspeed": ("--deepspeed", "--deepspeed-config", "--ds-config"),
    "--for torchtitan": ("--torchtitan", "--torch", "--pytorch"),
    "--for megatron": ("--framework", "--trainer", "--backend", "--program"),
    "--engine vllm": ("--framework", "--backend", "--server", "--software"),
    "--compute-dtype bf16": ("--mixed-precision", "--bf16", "--fp16", "--amp"),
    "--matmul-dtype fp8": _PRODUCTS_IN_FP8,
    "--given matmul_dtype=fp8": (*_PRODUCTS_IN_FP8, "--matmul-dtype"),
    "--weights-dtype": (
        "--dtype", "--precision", "--quantization", "--quantize", "--quant", "--load-in-8bit",
        "--load-in-4bit", "--weight-dtype", "--torch-dtype", "--bits",
    ),
    "--kv-dtype": ("--kv-cache-dtype", "--cache-dtype", "--kv-bits"),
    "--prompt-tokens": (
        "--input-len", "--input-tokens", "--isl", "--input-length", "--prompt-len", "--prompt-length",
        "--input", "--max-prompt-length", "--prefill-len", "--input-seq-len", "--random-input-len",
    ),
    "--output-tokens": (
        "--output-len", "--osl", "--output-length", "--max-new-tokens", "--generate-tokens",
        "--max-completion-length", "--max-response-length", "--completion-tokens", "--decode-len",
    ),
    "--max-tokens": ("--max-new-tokens", "--num-tokens", "--max-length", "--length", "--n-predict"),
    "--temperature": ("--temp",),
    "--top-p": ("--topp", "--nucleus"),
    "--rate": ("--qps", "--rps", "--request-rate", "--requests-per-second", "--load"),
    "--ttft": ("--ttft-slo", "--first-token", "--latency"),
    "--tpot": ("--tpot-slo", "--itl", "--inter-token-latency"),
    "--phase generate --batch": ("--concurrency", "--max-num-seqs", "--max-batch-size", "--batch-size"),
    "--slots": ("--concurrency", "--max-num-seqs", "--max-batch-size", "--batch-size", "--parallel"),
    "--context": ("--max-model-len", "--max-seq-len", "--ctx-size", "--context-length", "--max-total-tokens"),
    "--prompt-tokens and --output-tokens": (
        "--max-model-len", "--seq-len", "--max-seq-len", "--context-length",
    ),
    "--checkpoint": ("--model", "--model-path", "--weights", "--ckpt", "--pretrained", "--model-id"),
    "--from": ("--pretrained", "--base-model", "--model", "--init-from", "--checkpoint"),
    "--model": ("--model-name", "--model-id", "--arch", "--config", "--preset"),
    "--data": ("--dataset", "--train-data", "--data-path", "--train-file", "--corpus", "--dataset-path"),
    "--learning-rate": ("--lr", "--peak-lr", "--max-lr"),
    "--steps, the batches to train on,": (
        "--epochs", "--num-epochs", "--num-train-epochs", "--max-steps", "--train-iters", "--iterations",
        "--iters",
    ),
    "--optimizer": ("--optim", "--opt"),
    "--given optimizer=adafactor": ("--optim", "--optimizer", "--opt"),
    "--layout optimizer=adafactor,...": ("--optim", "--optimizer", "--opt"),
    "--clip-norm": ("--clip-grad", "--max-grad-norm", "--grad-clip", "--gradient-clipping"),
    "--weight-decay": ("--wd",),
    "--run": ("--output-dir", "--save", "--out-dir", "--output", "--out", "--run-dir", "--logdir", "-o"),
    "--resume": ("--resume-from-checkpoint", "--load", "--continue", "--resume-from"),
    "--checkpoint-every": ("--save-steps", "--save-interval", "--checkpoint-interval", "--save-every"),
    "-o": ("--out", "--save", "--out-file", "--outfile", "--file", "--write", "--html", "--export"),
    "--json": ("--format", "--output-format", "--jsonl", "--as-json", "--yaml"),
    "--explain": ("--verbose", "-v", "--why", "--details", "--detail", "--breakdown", "--full"),
    "--top": ("--topk", "--limit", "-n", "--max-results", "--num", "-k"),
    "--price": ("--cost", "--price-per-hour", "--gpu-price", "--hourly", "--cost-per-hour"),
    "--headroom": ("--memory-fraction", "--gpu-memory-utilization", "--margin", "--reserve"),
    "--max-price-per-hour": ("--budget", "--max-cost", "--max-price"),
    "--days": ("--deadline", "--duration"),
    "--tokens": ("--total-tokens", "--train-tokens", "--num-tokens", "--dataset-tokens"),
    "--set num_layers=32": ("--num-layers", "--layers"),
    "--set d_model=4096": ("--hidden-size", "--d-model"),
    "--set num_heads=32": ("--num-attention-heads",),
    "--set d_ff=14336": ("--ffn-hidden-size",),
    "--drafts": ("--num-speculative-tokens", "--speculative", "--speculative-tokens", "--spec-tokens"),
    "--mode": ("--disaggregated", "--disaggregation", "--chunked-prefill"),
    "--chunk": ("--chunked-prefill", "--chunked-prefill-size", "--max-num-batched-tokens", "--prefill-chunk"),
    "--prefix-cache": ("--enable-prefix-caching", "--prefix-caching"),
    "--replicas": ("--num-replicas", "--instances", "--data-parallel-size", "--dp"),
    "--api-key-file": ("--key",),
    "--dims B=1024,D=4096": ("--bytes", "--size", "--shape", "--message-size"),
    "--mesh X=8": ("--axes", "--axis", "--group", "--ranks"),
    "--requests": ("--num-prompts", "--num-requests"),
    "--tpot-p95": ("--tpot-p99", "--tpot-p90", "--itl-p95", "--itl-p99"),
    "--ttft-p95": ("--ttft-p99", "--ttft-p90"),
    "--ttft-p95 1s --tpot-p95 30ms": (
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
    "--fast": ("--quick", "--short"),
    "--url": ("--base-url", "--endpoint", "--host"),
}  # fmt: skip

# Words to type here, each with single words that occur in other programs' options (`tp` in `--my-tp`). For
# options that _OPTIONS lacks; the first entry whose option the command has is offered.
_WORDS_OF_OPTIONS: dict[str, str] = {
    "--smallest, for the fewest chips that suffice,": "fewest smallest min-gpus max-gpus max-nodes auto",
    "--software megatron-te": "te transformer-engine comm-overlap overlap",
    "--given zero=1": "zero optimizer distributed",
    "--given remat=full": "recompute checkpointing checkpoint remat rematerialization",
    "--given offload=true": "offload offloading",
    "--given expert=8": "ep expert experts moe",
    "--given tensor=8": "tp tensor model-parallel",
    "--given pipe=4": "pp pipeline stages",
    "--given context=2": "cp ring ulysses",
    "--given data=8": "dp ddp",
    "--given fsdp=8": "strategy fsdp shard sharding sharded hsdp",
    "--layout expert=8": "ep expert experts moe",
    "--layout tensor=8": "tp tensor",
    "--layout data=8": "dp ddp",
    "--tensor 8": "tp tensor",
    "--set num_layers=32": "layers depth",
    "--set vocab_size=32000": "vocab vocabulary",
    "--set num_heads=32": "heads",
    "--set d_ff=14336": "ffn intermediate mlp-dim",
    "--set d_model=4096": "hidden dim width d-model",
    "--network infiniband": "network interconnect nic ib infiniband nvlink bandwidth roce fabric",
    "--software pytorch-compiled": "compile compiled inductor",
    "--drafts 3": "speculative draft drafts spec eagle medusa mtp",
    "--prefix-hit 0.5": "prefix caching",
    "--prefix-cache": "prefix caching",
    "--chunk 512": "chunk chunked prefill batched-tokens",
    "--paged": "paged page block blocks",
    "--ttft-p95 1s --tpot-p95 30ms": "p95 p99 p90 slo sla",
    "--prompt-tokens": "input prompt",
    "--output-tokens": "output-len answer completion avg-output output-size",
    "--rate 20": "users rps qps requests rate traffic clients",
    "--replicas 2": "replicas instances workers",
    "--slots": "seqs sequences batch parallel concurrency",
    "--phase generate --batch": "batch seqs sequences concurrency bs",
    "--batch-tokens, the sequences times --seq-len,": "batch bs",
    "--lengths sharegpt": "dataset data workload distribution",
    "--given 'memory<=70GB'": "mem memory vram hbm",
    "--headroom 10%": "fraction utilization reserve",
    "--kv-dtype": "kv cache",
    "--weights-dtype": "dtype quant quantization quantize bits 4bit 8bit awq gptq bnb precision",
    "--price 2.5": "price cost spot reserved usd dollars hourly",
    "--currency EUR": "euro eur currency",
    "--judge": "reward scorer critic",
    "--samples 8": "generations samples rollouts group",
    "--prompts": "batch bs queries",
    "--hardware h100:8": "gpu gpus node nodes device devices chips cards accelerators tpus world hosts",
    "--model": "model arch architecture m",
    "--seq-len": "seq sequence context ctx length len",
    "--context": "ctx length len context",
    "--checkpoint": "model weights ckpt checkpoint c",
    "--data": "data dataset corpus text d",
    "--learning-rate": "lr learning",
    "--steps": "epochs iters iterations steps",
    "--run": "dir logdir folder out output",
    "--from": "pretrained base init load",
    "--temperature": "temp t",
    "--best-of 8": "return-sequences best samples beams beam",
    "--max-tokens": "tokens new n predict",
    "-o": "output out save file export write",
    "--json": "json format csv yaml jsonl",
    "--explain": "explain verbose debug why details",
    "--top": "top rows results",
}
# Answers, each with single words of options that have no counterpart here, by command; those of "" are for
# every command and are tried last.
_WORDS_OF_ANSWERS: dict[str, dict[str, str]] = {
    "mw plan train": {
        "no step depends on it; leave it out": "lr warmup dropout decay beta beta1 adam clip",
        "a plan needs no data; leave it out": "dataset data-path train-data corpus tokenizer text seed",
        "attention is a fused kernel but with --software eager; leave it out": "flash attn attention fused",
        "collectives are priced by the hardware's links; --network names others": "backend nccl gloo",
        "it is predicted; to correct a plan by a measured run type --anchor metrics.jsonl": "mfu flops speed",
        "a plan prices one step; --tokens 15T adds the time of a run": "epochs iters iterations steps",
        "layouts are ranked by step time; leave it out": "goal objective metric optimize minimize maximize",
        "for energy type mw compare plan.toml": "power energy watts carbon tdp",
        "it is the default; leave it out": "causal packing flash-attn shuffle amp",
    },
    "mw plan serve": {
        "the frontier lists tokens/s; add --tpot 30ms or --max-price-per-hour 50": "tps throughput goal",
        "it plans and starts nothing; --engine vllm prints the line that does": "port host api served name",
        "with --rate 20 pools apart are tried too": "pd disaggregation disaggregated disagg",
        "it changes no plan; leave it out": "swap eager enforce trust seed tokenizer",
        "attention is a fused kernel; leave it out": "flash attn attention",
    },
    "mw plan rl": {
        "rollouts on the same chips and apart are compared; leave it out": "vllm sglang colocate colocated",
        "it changes no plan; it is an option of mw train --rl": "kl lr clip beta gamma epsilon",
        "the split of chips is searched; leave it out": "gpus train rollout trainer generator",
    },
    "mw fit": {
        "it tries every split of the chips; leave it out": "tp pp dp tensor parallel layout",
        "it shows every way with its largest batch and context; leave it out": (
            "batch bs context lora quant finetune train training serve inference"
        ),
    },
    "mw train": {
        "the plan sets it: mw plan train --given microbatches=8": "accumulation accumulate micro micro-batch",
        "the plan sets it: mw plan train --compute-dtype bf16": "bf16 fp16 amp precision mixed",
        "the plan sets it: mw plan train --layout fsdp=8": "tp pp dp cp ep fsdp zero tensor deepspeed",
        "the plan sets it: mw plan train --set num_layers=16": "vocab layers hidden heads width depth",
        "metrics are written to metrics.jsonl; add --tensorboard": "wandb mlflow report logger project",
        "it is automatic; leave it out": "workers prefetch dataloader pin compile",
    },
    "mw model": {"it is shown; leave it out": "flops params parameters memory cache count size intensity"},
    "mw hardware": {
        "it is shown; leave it out": "memory bandwidth flops specs sources topology power",
    },
    "mw serve": {
        "set --slots and --context, which need the memory": "gpu mem memory utilization",
        "the model has its folder's name; leave it out": "served name alias",
        "it runs here in JAX; leave it out": "trust device enforce eager cuda",
    },
    "": {
        "notes go to stderr; add 2>/dev/null": "quiet silent progress q",
        "everything is printed; leave it out": "verbose debug v",
        "it is automatic; leave it out": "no-progress color colour yes y force",
    },
}

_RATE_OF_LEARNING = "--lr", "--learning-rate", "--peak-lr", "--weight-decay", "--wd", "--warmup"
_LENGTH_OF_RUN = "--epochs", "--num-epochs", "--num-train-epochs", "--steps", "--max-steps", "--train-iters"
# Answers to options that have no counterpart in a command, by command.
_ANSWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "mw fit": {
        "it shows LoRA, QLoRA and every number type, each with its largest batch; leave it out": (
            "--load-in-4bit", "--load-in-8bit", "--quantization", "--quantize", "--dtype", "--weights-dtype",
            "--bits", "--lora", "--qlora", "--batch-size", "--batch", "--kv-dtype", "--precision",
            "--4bit", "--8bit", "--training", "--inference", "--train", "--serve",
        ),
        "memory belongs to a chip; type --hardware rtx4090, or edit mw hardware --template rtx4090": (
            "--vram", "--memory", "--gpu-memory", "--ram", "--mem",
        ),
    },
    "mw model": {
        "mw model counts parameters; for bytes by number type and batch type mw fit MODEL": (
            "--quantize", "--quantization", "--dtype", "--weights-dtype", "--batch", "--batch-size",
            "--load-in-4bit", "--bits", "--hardware", "--gpu",
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
    },
    "mw plan train": {
        "a plan needs no data; leave it out": ("--data",),
        "repeat --hardware to compare machines": ("--compare", "--vs", "--versus", "--against"),
        "with --smallest and --tokens 15T type --days 30": ("--time-limit", "--max-time", "--wall-time"),
        "no step depends on it; type mw train plan.toml --learning-rate 3e-4": _RATE_OF_LEARNING,
        "a plan prices one step; --tokens 15T adds the time of a run": _LENGTH_OF_RUN,
    },
    "mw plan serve": {
        "sampling does not change a plan; type mw generate --temperature 0.7": (
            "--temperature", "--temp", "--top-p",
        ),
        "each engine keeps its own share; --engine vllm plans with vLLM's": (
            "--gpu-memory-utilization", "--mem-fraction-static", "--headroom", "--memory-fraction",
        ),
    },
    "mw train": {
        "the plan sets it: mw plan train --batch-tokens 1Mi --seq-len 8k": (
            "--batch-size", "--max-length", "--max-seq-length", "--seq-len", "--seq-length", "--block-size",
            "--batch-tokens", "--cutoff-len", "--train-batch-size", "--global-batch-size",
        ),
        "the rest of the data is evaluated by itself; --eval NAME=PATH adds another text": (
            "--eval-steps", "--eval-every", "--eval-interval", "--evaluation-strategy", "--do-eval",
        ),
        "a run takes all devices of its plan; hide others with CUDA_VISIBLE_DEVICES=0": (
            "--gpu", "--gpus", "--device",
        ),
        "a run ends after --steps batches; it goes on with --resume": (
            "--hours", "--minutes", "--time", "--max-time",
        ),
    },
    "mw compare": {
        "name both: mw compare a.toml b.toml": ("--vs", "--versus", "--with", "--against", "--baseline"),
    },
    "mw serve": {
        "a server takes all devices; hide others with CUDA_VISIBLE_DEVICES=0": (
            "--gpu", "--gpus", "--device",
        ),
    },
    "mw ui": {
        "it listens on this machine only; on another, type ssh -L 8765:localhost:8765 THIS_HOST": (
            "--listen", "--host", "--bind", "--address", "--share",
        ),
    },
    "mw doctor": {
        "it changes nothing; each line with a fault names its remedy": ("--fix", "--repair", "--install"),
    },
}  # fmt: skip

# Command lines to type here, each with the commands that people try.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "demo": ("quickstart", "init", "tutorial", "example", "examples", "start", "hello", "try"),
    "plan train": (
        "estimate", "search", "optimize", "optimise", "layout", "layouts", "parallelism", "autotune", "cost",
        "mfu", "solve", "plan-training", "planner", "predict",
    ),
    "plan serve": ("size", "capacity", "deploy", "frontier", "inference", "plan-serving"),
    "train --from DIR --lora 16": ("finetune", "fine-tune", "sft", "lora", "qlora", "peft", "adapt"),
    "train plan.toml --rl": ("rl", "grpo", "ppo", "rlhf", "dpo"),
    "generate": ("chat", "run", "infer", "complete", "prompt", "sample", "ask"),
    "serve": ("server", "api", "host", "openai", "up"),
    "model": (
        "models", "list", "ls", "presets", "params", "parameters", "count", "inspect", "show", "summary",
        "flops", "list-models",
    ),
    "hardware": (
        "chips", "gpus", "gpu", "tpu", "tpus", "devices", "machines", "machine", "chip", "accelerators",
    ),
    "fit": ("memory", "vram", "oom", "fits", "will-it-fit", "can-i-run", "mem"),
    "audit": ("check", "verify", "lint", "hlo", "analyze", "analyse", "inspect-hlo", "profile"),
    "bench serve": ("loadtest", "load-test", "load", "stress", "simulate"),
    "bench": ("benchmark", "benchmarks", "perf", "measure"),
    "doctor": ("env", "info", "status", "diagnose", "test", "setup", "install"),
    "export": ("convert", "to-hf", "save", "merge", "gguf", "ollama", "push"),
    "reshard": ("convert-checkpoint", "resharding"),
    "quantize": ("quantise", "quant", "awq", "gptq"),
    "shard": ("einsum", "sharding", "derive"),
    "collective": ("all-reduce", "allreduce", "all-gather", "allgather", "nccl", "comms"),
    "ui": ("web", "gui", "dashboard", "app", "explore", "studio"),
    "report": ("html", "visualize", "visualise", "render"),
    "compare": ("diff", "vs"),
    "validate": ("evaluate", "accuracy", "score"),
    "launch": ("torchrun", "mpirun", "srun", "slurm", "k8s", "ray"),
    "--install-completion": ("completion", "completions", "complete-shell"),
    "CMD --help": ("man", "docs", "usage", "explain"),
    "train my.txt": ("pretrain", "fit-model", "learn"),
}  # fmt: skip


def option_here(given: str, options: Collection[str], value: str = "") -> str:
    """The words to type in place of another program's option; empty if none are known.

    options: of the command. value: the value given; it replaces the example's if it fits.

    >>> option_here("--tensor_parallel_size", ["--model", "--given"], "4")
    '--given tensor=4'
    >>> option_here("--gpu", ["--hardware"], "4090"), option_here("--gpus", ["--hardware"], "16")
    ('--hardware 4090', '--hardware h100:16')
    """
    plain = given.replace("_", "-").lower()
    for ours, theirs in _OPTIONS.items():
        first_option = ours.split()[0].rstrip(",")
        if plain in theirs and first_option in options:
            return _with_value(ours, value)
    return plain if plain in options and plain != given else ""


def _words_of(option: str) -> set[str]:
    """The words of an option, and each two neighbours joined.

    >>> sorted(_words_of("--max-gpus"))
    ['gpus', 'max', 'max-gpus']
    """
    words = re.split(r"[-.]", option.lstrip("-"))
    return {*words, *(f"{first}-{second}" for first, second in pairwise(words))}


def _with_value(words: str, value: str) -> str:
    """`words` with the given value in place of their example's, if it fits."""
    if words == _MACHINE and value:
        from meshwright.errors import HardwareError
        from meshwright.hardware.catalog import load, usual  # here, since most command lines are right

        try:
            load(f"{usual(value)}:1")
            return f"--hardware {value}"
        except HardwareError:
            return f"--hardware h100:{value}" if value.isdigit() else words
    return re.sub(r"(?<=[= ])\d+$", value, words) if value.isdigit() else words


def answer_here(given: str, command: str) -> str:
    """The answer to an option that has no counterpart in a command; empty if none is known.

    >>> answer_here("--epochs", "mw plan train")
    '--epochs: a plan prices one step; --tokens 15T adds the time of a run'
    """
    plain = given.replace("_", "-").lower()
    answers = _ANSWERS.get(command, {}).items()
    return next((f"{given}: {answer}" for answer, options in answers if plain in options), "")


def option_by_words(given: str, options: Collection[str], value: str = "") -> str:
    """The words to type in place of an option, by single words of its name; empty if none is known.

    >>> option_by_words("--enable-prefix-caching", ["--prefix-hit"])
    '--prefix-hit 0.5'
    """
    words = _words_of(given.replace("_", "-").lower())
    for ours, theirs in _WORDS_OF_OPTIONS.items():
        if ours.split()[0].rstrip(",") in options and words & set(theirs.split()):
            return _with_value(ours, value)
    return ""


def answer_by_words(given: str, command: str) -> str:
    """The answer to an option by single words of its name; empty if none is known.

    command: "" for the answers of every command.

    >>> answer_by_words("--use-flash-attn", "mw plan train")
    '--use-flash-attn: attention is a fused kernel but with --software eager; leave it out'
    """
    words = _words_of(given.replace("_", "-").lower())
    for answer, theirs in _WORDS_OF_ANSWERS.get(command, {}).items():
        if words & set(theirs.split()):
            return f"{given}: {answer}"
    return ""


def command_here(given: str, commands: Collection[str]) -> str:
    """The command line to type in place of an unknown command; empty if none is known.

    >>> command_here("finetune", ["train"]), command_here("plan-train", ["plan"])
    ('mw train --from DIR --lora 16', 'mw plan train')
    """
    plain = given.replace("_", "-").lower()
    for ours, theirs in _COMMANDS.items():
        if plain in theirs:
            return f"mw {ours}"
    words = plain.split("-")
    for order in (words, words[::-1]):  # plan-train, train-plan
        if len(order) == 2 and order[0] in commands and order[0] in ("plan", "bench"):
            return f"mw {order[0]} {subcommand_here(order[1]) or order[1]}"
    return ""


# Commands of `mw plan` and `mw bench`, each with the words that people try.
_SUBCOMMANDS = {
    "train": ("training", "pretrain", "pretraining", "finetune", "fit"),
    "serve": ("serving", "inference", "infer", "server", "generate", "decode", "prefill", "deploy"),
    "rl": ("rlhf", "grpo", "ppo", "reinforcement", "post-training"),
    "matmul": ("gemm", "matmuls", "mfu"),
    "collectives": ("nccl", "comms", "all-reduce", "collective", "network"),
}


def subcommand_here(given: str) -> str:
    """The command of `mw plan` or `mw bench` for another word; empty if none is known."""
    return next((ours for ours, theirs in _SUBCOMMANDS.items() if given.lower() in theirs), "")
