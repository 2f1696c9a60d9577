"""Options of other programs by the words in their names: `--megatron_lm_tp_degree`, `--fsdp_version`."""

import re
from collections.abc import Collection
from itertools import pairwise

from meshwright.cli.other_values import (
    BATCH_TOKENS,
    HOSTS_OF_8,
    LOAD,
    MACHINE,
    PERCENTILES,
    SLICES,
    STEPS,
    dtype_here,
    with_value,
)

# Words that do not tell an option's subject.
_FILLERS = frozenset(
    re.findall(
        r"\w+",
        "num number n max maximum min use enable enabled the per of size sizes degree count default mode "
        "type name algo config configs args kwargs target avg mean total parallel parallelism set megatron "
        "lm ici dcn with to on in by for is",
    )
)
_AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep", "sequence": "sp"}
_NEGATIONS = {"no", "disable", "disabled", "without", "skip"}

# Words to type here, each with the words of options that mean the same: at least one word before the
# semicolon, and any after it. Every word of an option must be listed, or the option has a different meaning.
# The first entry whose option the command has is offered.
_MEANINGS: dict[str, str] = {
    "--tensor 8": "tp tensor",
    "--given tensor=8": "tp tensor",
    "--given pipe=4": "pp pipeline pipe stages",
    "--given context=2": "cp ulysses ring; context attention",
    "--given sequence_parallel=true": "sp",
    "--given data=8": "dp ddp replicate; data",
    "--given fsdp=8": "fsdp hsdp shard sharding sharded; shards data dp strategy model states transpose",
    "--given expert=8": "ep expert experts moe; model",
    "--given microbatches=8": (
        "accumulation accumulate microbatches micro ga gas; gradient gradients grad batches steps"
    ),
    "--given remat=attention": (
        "selective; checkpointing activation recompute recomputation remat granularity"
    ),
    "--given master_weights=true": "master; weights params fp32",
    "--set num_heads=32": "heads; attention query base",
    "--given remat=full": (
        "recompute recomputation remat rematerialization checkpointing; activation activations gradient "
        "method granularity policy selective full checkpoint modules"
    ),
    "--given zero=1": "zero; optimization stage optimizer",
    "--given offload_optimizer=true": "offload offloading; optimizer optim states state cpu memory host",
    "--given offload=true": "offload offloading; activation activations cpu",
    "--given schedule=interleaved,interleave=2": "virtual vp vpp interleave; pipeline pp stages chunks rank",
    "--given schedule=interleaved": "schedule interleaved vp vpp; pipeline pp virtual",
    "--layout tensor=8": "tp tensor; attention mlp",
    "--layout pipe=4": "pp pipeline; stages",
    "--layout data=8": "dp ddp; data",
    "--layout fsdp=8": "fsdp shard sharding",
    "--layout expert=8": "ep expert experts moe",
    "--smallest, for the fewest chips that suffice,": "fewest smallest; gpus gpu nodes chips auto",
    "--set num_layers=32": "layers; depth transformer decoder model base",
    "--set d_ff=14336": "mlp ffn intermediate feedforward; base dim hidden width",
    "--set d_model=4096": "emb embed embd embedding embeddings hidden; base dim width units features model",
    "--to": "qformat format; dtype output quantization weights",
    "--software pytorch-compiled": "compile compiled inductor; torch model",
    "--software megatron-te": "te transformer-engine",
    "--set lora_rank=16": "lora peft; r rank",
    "--drafts 3": "speculative draft drafts spec eagle medusa mtp; tokens model algorithm decoding k steps",
    "--prefix-hit 0.5": "prefix; caching cache hit rate",
    "--prefix-cache": "prefix radix; caching cache",
    "--chunk 512": "chunk chunked; prefill tokens batched",
    "--paged": "paged; attention kv cache",
    PERCENTILES: "p95 p99 p90 slo sla deadline; latency",
    "--smallest --days 30": "days deadline; budget max within time",
    "--ttft-p95": "ttft first-token; ms p95 latency",
    "--ttft 500ms": "first; token latency time target slo",
    "--max-price-per-hour": "budget limit cap; cost price hour hourly day daily week weekly month monthly",
    "--tpot-p95": "tpot itl; ms p95 latency",
    "--prompt-tokens": "input prompt isl; len length tokens seq random",
    "--output-tokens": "output answer completion osl response; len length tokens seq random size",
    "--rate 20": "rps qps rate req reqs; request requests second sec peak arrival",
    "--rate 20/min": "minute minutely rpm qpm; requests request traffic rate",
    "--rate 20/h": "hour hourly rph qph; requests request traffic rate",
    "--rate 20/month": "month monthly; requests request traffic rate",
    "--rate 20/week": "week weekly; requests request traffic rate",
    LOAD: "requests traffic; rate day daily hour",
    "--replicas 2": "replicas instances workers",
    "--slots": "seqs slots concurrency concurrent; batch requests running sequences",
    "--phase generate --batch": "seqs sequences batch bs; requests running",
    BATCH_TOKENS: "batch bs batchsize; sequences training device train global tokens local",
    "--lengths sharegpt": "sharegpt dataset workload distribution; length",
    "--given 'memory<=70GB'": "mem memory vram hbm; limit gpu",
    "--kv-dtype": "kv kvbits; cache dtype quant quantization bits precision",
    "--matmul-dtype fp8": "fp8 w8a8; activations matmul linear rowwise blockwise tensorwise scaling",
    "--given matmul_dtype=fp8": "fp8 float8; linear matmul format recipe hybrid rowwise blockwise tensorwise",
    "--given gradients_dtype=f32": "fp32; grads gradient gradients grad reduce accumulate allreduce",
    "--given gradients_dtype=bf16": "grads gradient gradients grad; dtype main reduce accumulation fp32 bf16",
    "--given optimizer_dtype=bf16": "moment moments mu nu exp optimizer; sq dtype precision state states",
    "--given optimizer=adafactor": "optimizer optim opt",
    "--weights-dtype": (
        "dtype quant quantization quantize bits wbits 4bit 8bit awq gptq bnb precision bit; method algorithm "
        "only weight weights params model torch load"
    ),
    "--price 2.5": "price cost spot reserved usd dollars hourly; hour gpu chip instance rate",
    "--currency EUR": "euro eur currency",
    "--judge": "reward scorer; model",
    "--samples 8": "generations samples rollouts rollout group; prompt",
    "--prompts": "batch bs queries; rollout train global prompts",
    HOSTS_OF_8: "node nodes hosts machine machines",
    SLICES: "slices slice pods; compile topology",
    MACHINE: (
        "machine machines processes gpu cluster topology gpus node nodes device devices chips cards "
        "accelerators accelerator tpus gres nproc ntasks; world hosts tasks task"
    ),
    "--tokens": "tokens; dataset corpus run budget",
    "--seq-len": "seq cutoff sequence ctx context; length len decoder encoder position model window",
    "--context": "ctx context seq; length len model tokens",
    "--model": "model arch architecture m; path id pretrained tokenizer",
    "--checkpoint": "weights ckpt checkpoint c model; path dir load",
    "--data": "data dataset corpus text d; path file files dir train training",
    "--learning-rate": "lr; learning peak rate",
    "--epochs 3": "epochs epoch passes; train",
    STEPS: "iters iterations steps; train",
    "--run": "logdir folder out output workdir; dir path directory base log save",
    "--from": "pretrained base init; model load weights",
    "--temperature": "temp t",
    "--best-of 8": "sequences best samples; return",
    "--max-tokens": "tokens predict; new",
    "-o": "output out save export write; file path plan dir",
    "--json": "json csv yaml jsonl; format output as",
    "--explain": "explain why details; full",
    "--top": "top rows results show display list limit; k",
}

# Words in names of options for a number of users, and of hosts. The answers below have 100 and 2 as examples.
_USERS = {"users", "clients", "user"}
HOSTS = {"nodes", "nnodes", "hosts", "num-nodes"}

# Answers that the table of whole options in other_words.py has too.
SHOWN = "it is shown; leave it out"
NO_DATA = "a plan needs no data; leave it out"
ONE_STEP = "a plan prices one step; --tokens 15T adds the time of a run"
EVALUATED = "the rest of the data is evaluated by itself; --eval NAME=PATH adds another text"
SAMPLED = "tokens are sampled with --temperature and --top-p; leave it out"
_IN_FILE = "the model's config.json, which --model takes, has it; --set num_layers=32 changes a field"
_OF_RUN = "a plan prices one step and writes no run; it belongs to the program that trains"
_OF_START = "a plan starts nothing; mw launch local, slurm or k8s starts a run of it"
_OF_PROGRAM = (
    "the speed of a program's kernels, overlap and collectives is in its record: --software megatron-te, or "
    "--for megatron"
)
# Answers that are true of every option with one of the words, by command; "" has answers for all commands,
# which are tried last. Earlier entries come first.
_SUBJECTS: dict[str, dict[str, str]] = {
    "mw plan train": {
        "attention is a fused kernel except with --software eager; leave it out": (
            "flash sdpa attn fused-attn"
        ),
        "it is predicted; to correct a plan by a measured run type --anchor metrics.jsonl": "mfu flops speed",
        "layouts are ranked by step time; leave it out": (
            "goal objective minimize maximize optimize sort order"
        ),
        "for energy type mw compare plan.toml": "power energy watts carbon tdp",
        "rollouts and updates are planned by mw plan rl": "rl grpo rollout rollouts",
        "inference is planned by mw plan serve": "inference speculative chunked-prefill kv-cache",
        "options are typed one by one; -o plan.toml keeps them with the plan": "yaml config-file cfg",
        NO_DATA: "dataset dataloader corpus text mmap shuffle blend split fim data-path",
        _OF_START: (
            "rdzv standalone master-addr master-port nodelist exclusive coordinator restart exclude "
            "constraint time walltime local-rank machine-rank port host ip hostfile partition account qos "
            "namespace pod image container restarts node-rank job service elastic queue endpoint ipc"
        ),
        _OF_RUN: (
            "log logging logs wandb tensorboard report save eval evaluation checkpoints ckpt resume hub push "
            "metric best callback tqdm project retain run-name inprocess otel trackio callbacks valid test "
            "profile debug delay logits"
        ),
        ONE_STEP: "epochs epoch iters iterations max-steps",
        "no step depends on it; leave it out": (
            "lr grad-norm warmup dropout decay beta beta1 beta2 eps epsilon adam clip clipping std noise "
            "rampup loss seed smoothing momentum scheduler neftune determinism rng init kl tokenizer coeff "
            "z-loss"
        ),
        "its states are split by --given zero=1, or fsdp=8; type --given offload_optimizer=true to keep them "
        "on the host": "zero zero3 distributed-optimizer optimizer optim",
        "number types are --weights-dtype, --compute-dtype and --given "
        "matmul_dtype=fp8,gradients_dtype=bf16": (
            "dtype fp8 fp16 bf16 fp32 tf32 fp4 float8 precision grads mxfp8 autocast amax"
        ),
        "--given remat=attention, matmuls or full recomputes activations": (
            "recompute remat checkpointing granularity activations activation-checkpoint"
        ),
        "--given offload=true keeps activations on the host, offload_optimizer=true the optimizer's states": (
            "offload offloading nvme cpu-offload"
        ),
        "collectives are priced by the hardware's links; --network names others between hosts, and mw "
        "hardware lists them": (
            "interconnect nccl gloo nic bandwidth fabric roce nvlink infiniband ib network "
            "distributed-backend ddp-backend dist-backend"
        ),
        _OF_PROGRAM: (
            "async attention fused fusion graph graphs kernel kernels overlap compile dynamo inductor bucket "
            "buckets ddp dispatcher p2p ub liger te transformer-engine prefetch gather allreduce rs ag "
            "jit workers autotune impl transformer mcore legacy engine"
        ),
        "--set lora_rank=16 adds adapters; leave other settings out": "lora peft dora adapter",
        "the search finds the mesh; --layout data=2,tensor=4 fixes it": "mesh axes axis pspec",
        "stages are --given pipe=4,schedule=interleaved,interleave=2; leave it out and the search splits the "
        "layers": "pipeline stage stages virtual interleave pp vp schedule",
        "--given fsdp=8 sets the number of shards, --given data=2 the number of replicas": (
            "fsdp hsdp shard sharding sharded dp replicas"
        ),
        "the model's config.json has experts, and --given expert=8 splits them; leave other settings out": (
            "moe expert experts router topk gemm etp"
        ),
        _IN_FILE: (
            "layer layers hidden heads head embedding embeddings position rope rotary yarn vocab vocabulary "
            "norm rmsnorm layernorm swiglu geglu gelu relu bias kv query qk mla mlp ffn intermediate tie "
            "untied untie tied window vision sliding mamba depth width dim gqa group"
        ),
        "a plan is for the chips of --hardware, on any machine; leave it out": "cuda tpu cpu",
        "it is the default; leave it out": "causal packing amp",
        "the machine is --hardware h100:4x8, 4 hosts of 8": (
            "gpus gpu nodes node gres nproc ntasks tasks devices"
        ),
    },
    "mw plan serve": {
        "--drafts 3 --acceptance 0.7 plans drafts": "speculative spec eagle draft lookahead",
        "the frontier lists tokens/s; add --tpot 30ms or --max-price-per-hour 50": (
            "tps throughput goal tokens-per output-speed"
        ),
        "a rate needs how often each asks: 100 "
        "users with a request a minute are --rate "
        "100/min; 100 requests at once are --phase "
        "generate --batch 100 --context 8k": ("users clients user concurrency concurrent inflight"),
        "the latency of an answer is --ttft 500ms, the first token, and --tpot 30ms, each further one": (
            "latency e2e response"
        ),
        "it plans and starts nothing; --engine vllm prints the line that does": (
            "port host api served log loglevel ssl uvicorn metrics download revision trust download-dir ipc "
            "chat tool parser template rank router routing"
        ),
        "--rate 20 finds the fewest replicas that hold it": (
            "autoscale autoscaling scale scaling replicas instances lb balancer"
        ),
        "weights and cache stay on the chips; leave it out": "offload cpu",
        "with --rate 20 separate pools for prefill and decoding are tried too": (
            "decode prefill pd disaggregation disaggregated disagg kv-transfer transfer prefill-workers "
            "decode-workers"
        ),
        "experts and attention of one layout are --layout tensor=8,expert=8 or data=8,expert=8": (
            "dp-attention moe ep expert experts eplb"
        ),
        "--prefix-hit 0.5 is the share of prompts that a prefix cache has; 0, the default, is none": (
            "prefix radix caching hicache"
        ),
        "the size of the cache follows from the memory; leave it out": "paged-kv kv-blocks gpu-blocks",
        "--rate 20 plans the cheapest service, no rate shows prices and speeds; leave it out": (
            "optimize optimise objective minimize maximize sort order"
        ),
        "each engine has a share of memory to use; --engine vllm plans with vLLM's": (
            "mem memory utilization gpu-memory"
        ),
        "--weights-dtype, --kv-dtype and --matmul-dtype name number types": (
            "kv quant quantization scales dtype precision fp8 bits"
        ),
        "--chunk 512 prefills in chunks": "chunk chunked batched",
        "it changes no plan, except through --engine vllm; leave it out": (
            "swap eager enforce cuda graph graphs flash attn attention kernel backend blocks block sched "
            "scheduler compile compilation page tokenizer seed load triton overlap async executor allreduce "
            "sleep lora loras"
        ),
        "sampling does not change a plan; leave it out": (
            "temperature sampling logprobs guided grammar stop top-k"
        ),
        _IN_FILE: "layers rope hidden heads override window",
        "the machine is --hardware h100:2x8, 2 hosts of 8": "gpus gpu nodes node nnodes devices",
    },
    "mw plan rl": {
        "rollouts on the trainer's chips and on chips of their own are compared; leave it out": (
            "vllm sglang colocate colocated hybrid"
        ),
        "it changes no plan; it is an option of mw train --rl": (
            "kl lr clip beta gamma epsilon entropy epochs ppo mini"
        ),
        "the split of chips is searched; leave it out": "gpus train rollout trainer generator actor ref",
        "no value model is planned; --judge scores rollouts and --reference-model gives the KL divergence": (
            "critic value reward"
        ),
    },
    "mw fit": {
        "it tries every split of the chips; leave it out": "tp pp dp tensor parallel layout",
        "all states stay on the chips; mw plan train --given offload_optimizer=true keeps some on the host": (
            "offload offloading ram host cpu"
        ),
        "it shows every way with its largest batch and context; leave it out": (
            "ngl threads layers tokens batch bs context lora quant finetune train training serve inference "
            "ctx len"
        ),
    },
    "mw train": {
        "the plan sets it: mw plan train --given microbatches=8": "accumulation accumulate micro micro-batch",
        "the plan sets it: mw plan train --compute-dtype bf16": "bf16 fp16 amp precision mixed tf32 fp8",
        "the plan sets it: mw plan train --layout fsdp=8": (
            "tp pp dp cp ep fsdp zero tensor deepspeed pipeline"
        ),
        "the plan sets it: mw plan train --given remat=full": "recompute remat checkpointing",
        "the plan sets it: mw plan train --set num_layers=16": (
            "vocab layers hidden heads width depth embed embd head layer"
        ),
        "metrics are written to metrics.jsonl; add --tensorboard": (
            "wandb mlflow report logger project logging log"
        ),
        "several processes are started by mw launch local -n 2 -- mw train plan.toml": (
            "nproc nnodes nodes rank rdzv master standalone processes machines"
        ),
        "the plan sets the batch: mw plan train --batch-tokens 1Mi --seq-len 8k": "batch bs seq length",
        "Adam's betas are the optimizer's own; --optimizer, --learning-rate, --weight-decay and --clip-norm "
        "set the rest": "optim adam beta beta1 beta2 eps epsilon momentum",
        "a tenth of the steps warm up, at most 2,000; --schedule sets the decay": "warmup scheduler",
        "dropout is not supported; leave it out": "dropout",
        "mw export RUN -o DIR writes a folder to upload": "hub push",
        "checkpoints are kept by --checkpoint-every 100 and --keep 2": "save ckpt checkpoint checkpoints",
        EVALUATED: "eval metric metrics best predict valid validation test",
        "on CPUs type JAX_PLATFORMS=cpu mw train": "cpu",
        "the plan sets the layout: mw plan train --layout data=8": "ddp sharding parallelism accelerator",
        "it is not supported; leave it out": "smoothing neftune",
        "the folder of the run is --run DIR": "run-name experiment",
        "rows of data are read by their keys; leave it out": "columns column label labels text-field field",
        "it is automatic; leave it out": (
            "tqdm liger cache torch workers prefetch dataloader pin compile flash attn fused tokenize"
        ),
        "the size of the model follows from the text and the machine; a PLAN.toml sets it: mw plan train": (
            "size params parameters"
        ),
    },
    "mw model": {SHOWN: "flops params parameters cache count size intensity"},
    "mw support": {
        "it shows every layout and machine; leave it out": "layout hardware phase tp pp dp gpu chip"
    },
    "mw hardware": {
        SHOWN: "memory bandwidth flops specs sources topology power",
    },
    "mw serve": {
        "--context 4k bounds prompt and answer together": "input prompt",
        "set --slots and --context, which need the memory": "gpu mem memory utilization gpu-memory",
        "the model has its folder's name; leave it out": "served name alias",
        "adapters are merged: mw export RUN -o DIR, then mw serve --checkpoint DIR": (
            "lora loras adapter adapters"
        ),
        "the template comes from the checkpoint's tokenizer_config.json; change chat_template there": (
            "chat template jinja"
        ),
        "the form of tool calls is known from the model; leave it out": "tool parser",
        "it serves on one host with --tensor N; copies are --replicas N": (
            "dp pp data pipeline nodes ep expert"
        ),
        "the folder of --checkpoint has it; leave it out": (
            "tokenizer load download revision rope override generation-config lookup"
        ),
        "drafts are --drafts 3, by --draft-checkpoint DIR if a smaller model makes them": (
            "speculative lookahead eagle draft medusa"
        ),
        "--mode disaggregated prefills separately; with --replicas 2 so does --prefill-replicas 1": (
            "disaggregation disaggregated pd kv-transfer prefill transfer"
        ),
        "evicted pages are kept on the host with --host-cache-bytes 8G": (
            "swap offload hicache hierarchical cpu-offload"
        ),
        "requests queue by --scheduling-policy fcfs or priority": "schedule scheduling policy priority",
        "metrics are at /metrics; leave it out": "metrics prometheus",
        "each request sets it; leave it out": (
            "tokens max-tokens max-new seed logprobs sampling temperature stop top-p top-k role penalty"
        ),
        "it runs here in JAX; leave it out": (
            "trust device enforce eager cuda graph backend attention compile"
        ),
        "prompts are cut in chunks of --chunk tokens; leave it out": "chunked batched",
        "a proxy in front of the server speaks TLS; leave it out": "ssl tls keyfile certfile cert",
        "requests are logged with --log-json": "log logging loglevel stats",
    },
    "mw bench serve": {
        "answers have the drawn length; with --no-ignore-eos they end at the end-of-sequence token": "eos",
        "it speaks OpenAI's API to any server; leave it out": "backend endpoint-type framework",
        "texts are random tokens of the given lengths; leave it out": "tokenizer dataset-path dataset-name",
        "percentiles p50, p95 and p99 are printed; leave it out": (
            "percentile percentiles percentile-metrics metric"
        ),
        "requests come as --concurrency N, or as a Poisson stream of --rate R": (
            "burstiness inf ramp arrival poisson"
        ),
        "goodput counts requests within --ttft 500ms and --tpot 30ms": "goodput slo",
    },
    "mw generate": {
        SAMPLED: "top-k k min-p repetition penalty",
        "beam search is not supported; --best-of 8 samples answers and prints the likeliest": "beam beams",
    },
    "mw launch": {
        "each process gets its rank and the coordinator's address; leave it out": (
            "rdzv master node-rank rank endpoint"
        ),
        "hosts come from the plan: mw plan train --hardware h100:2x8 -o plan.toml plans for 2 hosts, and mw "
        "launch slurm -- mw train plan.toml starts them; mw launch local starts processes on this host": (
            "n nnodes nodes node standalone ntasks gres gpus gpu hosts hostfile nproc"
        ),
    },
    "": {
        "it prints its answer, which --json > FILE keeps": "output out outfile",
        "open the written page in a browser; leave it out": "open browser",
        "notes go to stderr; add 2>/dev/null": "quiet silent progress q",
        "everything is printed; leave it out": "verbose debug v",
        "it is automatic; leave it out": "no-progress color colour yes y force",
    },
}


def words_of(option: str) -> list[str]:
    """The words of an option's name, in order; an axis of parallelism is one word.

    >>> words_of("--tensor-model-parallel-size"), words_of("--context_length")
    (['tp', 'size'], ['context', 'length'])
    """
    plain = option.replace("_", "-").lower().replace("-model-parallel", "-parallel")
    plain = re.sub(r"\b(in|out)-(?=(len|length|tokens|size)\b)", r"\1put-", plain)
    plain = re.sub(r"\b(gpu|chip|tpu|card|device)-?(hour|hr)s?\b", "hourly", plain)
    plain = re.sub(r"\bn(?=(gpu|chip|card|tpu|device)s?\b)", "", plain)  # --ngpu, --ngpus-per-node
    for axis, short in _AXES.items():
        plain = re.sub(rf"\b{axis}-parallel(ism)?\b", short, plain)
    return [word for word in re.split(r"[-.]", plain.lstrip("-")) if word]


def meaning(given: str, options: Collection[str]) -> str:
    """The words to type in place of an option, if all words of its name have that meaning; otherwise empty.

    >>> meaning("--megatron_lm_tp_degree", ["--given"]), meaning("--tp-comm-overlap-cfg", ["--given"])
    ('--given tensor=8', '')
    >>> meaning("--no-pipeline", ["--given"]), meaning("--no-sequence-parallel", ["--given"])
    ('--given pipe=1', '--given sequence_parallel=false')
    """
    words = words_of(given)
    if _NEGATIONS & set(words):
        rest = "-".join(word for word in words if word not in _NEGATIONS)
        ours = rest and meaning(rest, options)
        if flag := re.fullmatch(r"--given (\w+)=true", ours):
            return f"--given {flag[1]}=false"
        axis = re.fullmatch(r"--given (tensor|pipe|context|expert|fsdp|data)=\d+", ours)
        return f"--given {axis[1]}=1" if axis else ""
    subject = set(words) - _FILLERS
    if subject & {"price", "cost"} and {"max", "maximum"} & set(words):
        subject.add("cap")  # --max-price is a limit, though elsewhere `max` is a filler
    for ours, theirs in _MEANINGS.items():
        keys, _, others = (set(part.split()) for part in theirs.partition(";"))
        if ours.split()[0].rstrip(",") in options and subject & keys and subject <= keys | others:
            return ours
    return ""


def meaning_with_value(given: str, options: Collection[str], value: str) -> str:
    """The words of `meaning` with the value in the place of the example's.

    If the option's name is a number type, its value is a variant of the type, and is dropped:
    --fp8-format hybrid.

    >>> meaning_with_value("--fp8-format", ["--given"], "hybrid")
    '--given matmul_dtype=fp8'
    >>> meaning_with_value("--gas", ["--given"], "4")
    '--given microbatches=4'
    """
    ours = meaning(given, options)
    is_variant = any(ours.endswith(f"dtype={word}") for word in words_of(given)) and not dtype_here(value)
    return ours if is_variant else with_value(ours, value)


def is_of_users(given: str) -> bool:
    """Whether an option's name is that of a number of users."""
    return bool(set(words_of(given)) & _USERS)


def subject(given: str, command: str, value: str = "") -> str:
    """The answer to an option by single words of its name; empty if none is known.

    command: "" for the answers of every command. value: the value given; a number of users or hosts, or of
    the names in a list of hosts, replaces the example's.

    >>> subject("--lr-warmup-iters", "mw plan train")
    '--lr-warmup-iters: a plan prices one step; --tokens 15T adds the time of a run'
    >>> subject("--use-flash-attn", "mw plan train")
    '--use-flash-attn: attention is a fused kernel except with --software eager; leave it out'
    """
    words = words_of(given)
    pairs = [pair for each in pairwise(words) for pair in (each, each[::-1])]  # in either order
    names = {*words, *map("-".join, pairs)}
    answers = _SUBJECTS.get(command) or _SUBJECTS.get(command.rpartition(" ")[0], {})
    answer = next((answer for answer, theirs in answers.items() if names & set(theirs.split())), "")
    if names & _USERS and value.isdecimal():
        answer = re.sub(r"\b100\b", value, answer)
    value = str(value.count(",") + 1) if "," in value else value
    if names & HOSTS and value.isdecimal():
        answer = re.sub(r":\dx8\b", f":{value}x8", re.sub(r"\b\d hosts", f"{value} hosts", answer))
    return f"{given}: {answer}" if answer else ""
