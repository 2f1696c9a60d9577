"""Slips at the command line: each is answered with what to type instead."""

import shlex
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.hardware import catalog
from meshwright.hardware.prices import ChipPrices
from meshwright.plan.verdict import price_words
from meshwright.units import parse_rate

TRAIN = "--model llama-3-8b --hardware h100:1x8 --batch-tokens 1Mi --seq-len 8192"
SERVE = "--model llama-3-8b --hardware h100:1x8"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("export runs/demo -o out --format gguf", "for GGUF type mw export RUN -o DIR, then llama.cpp's"),
        ("export runs/demo --gguf", "--gguf: it writes safetensors; for GGUF"),
        ("gguf runs/demo", "type mw export"),
        ("plan train $P --lr 3e-4", "type mw train plan.toml --learning-rate 3e-4"),
        ("plan train $P --epochs 3", "--tokens 15T adds the time of a run"),
        ("plan train $P --offload", "is --given offload=true here"),
        ("plan train $P --offload_optimizer", "is --given offload_optimizer=true here"),
        ("plan serve $S --tpot-p99 20ms", "is --tpot-p95 20ms, the planned percentile"),
        ("plan serve $S --temperature 0.7", "sampling does not change a plan"),
        ("train my.txt --gpu 0", "CUDA_VISIBLE_DEVICES=0"),
        ("train my.txt --hours 1", "type mw train my.txt --time 1h"),
        ("train", "mw train my.txt"),
        ("demo --quick", "--quick is --fast here"),
        ("ui --listen 0.0.0.0", "type ssh -L"),
        ("doctor --fix", "it changes nothing"),
        ("hlep", "did you mean help"),
        ("pln train", "did you mean plan"),
        ("plan-train", "type mw plan train"),
        ("train-plan", "type mw plan train"),
        ("plan training", "type mw plan train"),
        ("plan inference", "type mw plan serve"),
        ("plan", "name a command of mw plan: serve, rl, train"),
        ("plan train llama-3-8b h100:1x8", "write --model llama-3-8b --hardware h100:1x8"),
        ("plan train --model llama-3-8b --gpus 8", "--gpus is --hardware h100:8 here"),
        ("plan train $P --model llama3-8b", "did you mean llama-3-8b?"),
        ("plan train $P --model 'Llama 3 8B'", "did you mean llama-3-8b?"),
        ("plan train $P --model llama-8b", "did you mean llama-3-8b or"),
        ("plan train $P --model 70b", "or llama-3-70b"),
        ("plan train $P --model gpt-4", "take an open model"),
        ("plan train $P --hardware h100", "write h100:8, or h100:1 for a single chip"),
        ("plan train $P --hardware h100-big:1x8", "did you mean h100?"),
        ("plan train $P --hardware A100-SXM4-60GB:8", "did you mean a100?"),
        ("plan train $P --hardware tpu-v5p:4x4x4", "did you mean v5p?"),
        ("plan train $P --hardware v5p:4x4", "write v5p:2x2x4"),
        ("plan train $P --hardware v5lite-16", "did you mean v5e?"),
        ("plan train $P --hardware p5.48xlarge", "write h100:8"),
        ("plan train $P --hardware a3-megagpu-8g", "write h100:8"),
        ("plan train $P --hardware Standard_ND96isr_H100_v5", "write h100:8"),
        ("plan train $P --hardware dgx-h100", "write h100:8"),
        ("plan train $P --batch-size 128", "is --batch-tokens, the sequences times --seq-len"),
        ("plan train $P --gbs 128", "is --batch-tokens, the sequences"),
        ("plan train $P --seq 8192", "--seq is --seq-len here"),
        ("plan train $P --seq_len 8192", "--seq_len is --seq-len here"),
        ("plan train $P --max-seq-len 8192", "is --seq-len here"),
        ("plan train $P --batch-tokens 1MB", "4M (4e6)"),
        ("plan train $P --tp 8", "--tp is --given tensor=8 here"),
        ("plan train $P --tensor-model-parallel-size 8", "is --given tensor=8 here"),
        ("plan train $P --pp 2", "is --given pipe=2 here"),
        ("plan train $P --ep 2", "is --given expert=2 here"),
        ("plan train $P --layout tp=8", "write tensor=8"),
        ("plan train $P --layout tensor8", "write tensor=8"),
        ("plan train $P --layout 'tensor=2 data=4'", "joined by commas"),
        ("plan train $P --layout tensor=2", "fits: data=4,tensor=2 or tensor=8"),
        ("plan train $P --layout fsdp=8,remat=selective", "write remat=attention"),
        ("plan train $P --layout fsdp=8,recompute=full", "write remat=full"),
        ("plan train $P --layout fsdp=8,microbatch=4", "did you mean microbatches"),
        ("plan train $P --zero 3", "is --given zero=3 here"),
        ("plan train $P --fsdp", "is --given fsdp=8 here"),
        ("plan train $P --fp8", "is --given matmul_dtype=fp8 here"),
        ("plan train $P --dtype bf16", "is --weights-dtype here"),
        ("plan train $P --compute-dtype fp16", "fits: f32, bf16"),
        ("plan train $P --lora", "is --set lora_rank=16 here"),
        ("plan train $P --qlora", "is --set lora_rank=16 --weights-dtype nf4 here"),
        ("plan train $P --gradient-checkpointing", "is --given remat=full here"),
        ("plan train $P --gradient-accumulation-steps 8", "is --given microbatches=8 here"),
        ("plan train $P --optimizer adafactor", "is --given optimizer=adafactor here"),
        ("plan train $P --for megatrn", "did you mean megatron?"),
        ("plan train $P --for pytorch", "did you mean torchtitan?"),
        ("plan train $P --given 'memory<=70'", "write 70GB or 65GiB"),
        ("plan train $P --topk 3", "is --top here"),
        ("plan train $P --format json", "is --json here"),
        ("plan train $P -v", "-v is --explain here"),
        ("plan train $P --out x.toml", "is -o here"),
        ("plan train $P --headroom 10", "write 10% or 0.1"),
        ("plan serve $S --tpot 30", "write 30ms, or 30s"),
        ("plan serve $S --qps 20", "is --rate here"),
        ("plan serve $S -tp 4", "-tp is --layout tensor=4 here"),
        ("plan serve $S --enable_attention_dp", "experts and attention of one layout"),
        ("plan serve $S --isl 1k --osl 9 --rate 5 --max-num-seqs 64", "the batch follows from the load"),
        ("plan serve $S --max_tokens_in_paged_kv_cache 9", "the size of the cache follows from the memory"),
        ("train my.txt --model small", "the size of the model follows from the text"),
        ("fit llama-3-8b --hardware 'V100 16GB'", "mw hardware --template v100 > v100-16gb.toml"),
        ("plan serve $S --optimize cost", "--rate 20 plans the cheapest service"),
        ("plan train $P --spot", "prices are list prices on demand"),
        ("plan train $P --mesh X=4,Y=2", "--mesh X=4,Y=2 is --layout fsdp=4,tensor=2 here"),
        ("fit llama-3-8b --max-context", "it shows the largest batch and the longest context"),
        ("plan serve $S --kv_cache_free_gpu_mem_fraction 0.9", "each engine has a share of memory"),
        ("plan serve $S --isl 1024", "is --prompt-tokens here"),
        ("plan serve $S --max-model-len 8192", "is --prompt-tokens 7680 and --output-tokens 512 here"),
        ("plan serve $S --quantization fp8", "is --weights-dtype here"),
        ("plan serve $S --weights-dtype gguf", "fits: f32, bf16"),
        ("plan serve $S --kv-cache-dtype fp8", "is --kv-dtype here"),
        ("plan serve $S --prompt-tokens 8k", "add --prompt-tokens 8k --output-tokens 512"),
        ("serve --model llama-3-8b", "is --checkpoint here"),
        ("serve llama-3-8b", "such as mw serve --checkpoint"),
        ("train plan.toml --dataset a.jsonl", "is --data here"),
        ("train plan.toml --lr 1e-4", "is --learning-rate here"),
        ("train my-missing.txt", "give 'stdlib', 'stories', a folder"),
        ("generate --checkpoint a hi --temp 0.7", "is --temperature here"),
        ("chat", "type mw generate"),
        ("finetune", "type mw train --from DIR --lora 16"),
        ("models", "type mw model"),
        ("chips", "type mw hardware"),
        ("oom", "type mw fit"),
        ("benchmark", "type mw bench"),
        ("completion", "type mw --install-completion"),
        ("model llama3", "or llama-3-8b"),
        ("fit llama-3-8b --hardware macbook", "did you mean m4-max"),
        ("fit llama-3-8b --hardware aws-gpu:8", "did you mean trainium2 or"),
        ("fit llama-3-8b --gpu 4090", "--gpu is --hardware 4090 here"),
        ("fit --model llama-3-8b", "--model has no dashes here: mw fit MODEL"),
        ("plan train $P --vp 2", "is --given schedule=interleaved,interleave=2 here"),
        ("plan train $P --use-distributed-optimizer", "is --given zero=1 here"),
        ("plan train $P --layout zero3", "write fsdp=8"),
        ("plan train $P --layout ddp", "write data=8"),
        ("plan train $P --layout dp4tp2", "write data=4,tensor=2"),
        ("plan train $P --layout fsdp:8", "write fsdp=8"),
        ("plan train $P --layout 'fsdp=8;remat=full'", "joined by commas; write fsdp=8,remat=full"),
        ("plan train $P --layout fsdp=8,seq_len=4096", "write --seq-len 4096"),
        ("plan train $P --given 'pp>1'", "pp is pipe here; write pipe>1"),
        ("plan train $P --given 'tensor>=2 pipe=1'", "joined by commas; write tensor>=2,pipe=1"),
        ("plan train $P --given 'mfu>50%'", "it is a result, and layouts are ranked by it"),
        ("plan train $P --price 2,5", "write 2.5"),
        (
            "plan train $P --price '2.5 usd' --currency EUR",
            "is in EUR and USD; write the price in one currency",
        ),
        ("plan serve $S --price '$2,h100=2 EUR'", "is not a price of a chip-hour"),
        ("plan train $P --headroom 10GB", "--given 'memory<=70GB'"),
        ("plan train $P --top all", "is not a whole number; write 10"),
        ("plan train $P --weights-dtype 8bit", "write fp8 or mxfp8 or int8"),
        ("plan train $P --software vllm", "type mw plan serve --engine vllm"),
        ("plan train $P --set layers=16", "write num_layers"),
        ("plan train $P --tokens 15 trillion", "quote '15 trillion', or leave it out"),
        ("plan train $P --smallest 4", "takes no value; leave out '4'"),
        ("plan train $P --output", "--output is last and has no value"),
        ("plan train $P --headrom 10%", "did you mean --headroom?"),
        ("plan train $P --tensor-parallelism 4", "is --given tensor=4 here"),
        ("plan train $P --flash-attn", "attention is a fused kernel"),
        ("plan train $P --n-layers 32", "is --set num_layers=32 here"),
        ("plan train $P --max-gpus 64", "--smallest finds the fewest"),
        ("plan train $P --dataset c4", "a plan needs no data"),
        ("plan train $P --mfu 0.4", "it is predicted"),
        ("plan train $P --interconnect nvlink", "--network names others between hosts"),
        ("plan train $P --target tpu", "it is an option of mw audit, mw tune and mw reshard"),
        ("plan train $P --quiet", "2>/dev/null"),
        ("plan train $P --model llama.gguf", "give the folder that has its config.json"),
        ("plan train $P --hardware local", "did you mean cpu:8?"),
        ("plan train $P --parallelism.tensor_parallel_degree 8", "is --given tensor=8 here"),
        ("plan train $P --data-parallel-sharding-strategy x", "is --given fsdp=8 here"),
        ("plan train $P --attention-dropout 0.1", "no step depends on it; leave it out"),
        ("plan train $P --distributed-backend nccl", "--network names others"),
        ("plan serve $S --enforce-eager", "it changes no plan"),
        ("train plan.toml --gradient-accumulation-steps 4", "mw plan train --given microbatches=8"),
        ("train plan.toml --bf16", "mw plan train --compute-dtype bf16"),
        ("train plan.toml --wandb", "add --tensorboard"),
        ("train my.txt --vocab-size 8000", "mw plan train --set"),
        ("generate --checkpoint a hi --num-return-sequences 4", "is --best-of 4 here"),
        ("model llama-3-8b --flops", "it is shown; leave it out"),
        ("fit llama-3-8b on rtx4090", "write --hardware rtx4090"),
        ("plan train $P --model-parallel-size 8", "is --given tensor=8 here"),
        ("plan train $P --strategy ddp", "is --given data=8 here"),
        ("plan train $P --max_epochs 3", "a plan prices one step"),
        ("plan train $P --time-limit 30d", "is --smallest --days 30 here"),
        ("plan train $P --compare a100:8", "joined by commas"),
        ("plan serve $S --p95-latency 2s", "is --ttft-p95 2s, of the first token, with"),
        ("plan serve $S --avg-input 1024", "is --prompt-tokens here"),
        ("plan serve $S --stages 4", "is --layout pipe=4 here"),
        ("plan train $P --ep-size 4", "is --given expert=4 here"),
        ("fit llama-3-8b --finetune", "it shows every way"),
        ("audit plan.toml --verbose", "everything is printed; leave it out"),
        ("train plan.toml --batch-size 8", "mw plan train --batch-tokens 1Mi"),
        ("train plan.toml --eval-steps 100", "--eval NAME=PATH adds another text"),
        ("serve --checkpoint a --gpu 0", "CUDA_VISIBLE_DEVICES=0"),
        ("shard 'A[I,J] B[J,K]' --mesh X=4", "write A[I, J] . B[J, K]"),
        ("compare a.toml --vs b.toml", "name both: mw compare a.toml b.toml"),
        ("plan --model llama-3-8b", "name a command of mw plan before --model: mw plan serve"),
        ("launch -n 4 train plan.toml", "name a command of mw launch before -n: mw launch local"),
        ("plan serve $S --rate ten", "write 20 (requests per second), 20/s or 1200/min"),
        ("plan serve $S --tensor-parallel-size 4", "is --layout tensor=4 here"),
        ("plan serve $S --gpu-memory-utilization 0.9", "--engine vllm plans with vLLM's"),
        ("plan serve $S --speculative-model x", "is --drafts 3 here"),
        ("plan serve $S --users 100", "a rate needs how often each asks"),
        ("plan serve $S --enable-prefix-caching", "is --prefix-hit 0.5, the share"),
        ("plan serve $S --lengths my.jsonl", "write --trace my.jsonl"),
        ("plan serve $S --engine megatron", "type mw plan train --software megatron"),
        ("plan train model=llama-3-8b seq_len=8192", "write --model llama-3-8b --seq-len 8192"),
        ("plan train -model llama-3-8b", "options have two dashes; write --model llama-3-8b"),
        ("plan train $P --layout [data=8,zero=2]", "no brackets or quotes; write data=8,zero=2"),
        ("plan train $P --layout data8,zero2", "write data=8,zero=2"),
        ("plan train $P --layout auto", "leave it out, and all layouts are searched"),
        ("plan train $P --given (tensor=8)", "no brackets or quotes; write tensor=8"),
        ("plan train $P --seq-len 8192,16384", "is not a count, but several"),
        ("plan train $P --max-seconds 10m", "write 10min or 10ms"),
        ("plan train $P --recompute-granularity selective", "is --given remat=attention here"),
        ("plan train $P --parallel_schedule ZBVZeroBubble", "is --given schedule=zb-v here"),
        ("plan train $P --gpu-memory-utilization 0.85", "is --headroom 15%"),
        ("plan train $P --gres=gpu:8", "is --hardware h100:1x8 here"),
        ("plan train $P --accelerator-type v5p-128", "is --hardware v5p:64 here"),
        ("plan train $P --hardware h100:64 --nodes 8", "is --hardware h100:8x8, 8 hosts of 8, here"),
        ("plan train $P --hardware v5p:4x4x4 --nodes 8", "is --hardware v5p:4x4x4, here"),
        ("plan serve $S --price /hr", "a shell takes $2 for a variable"),
        ("plan train $P --price", "without it the list price is used"),
        ("plan train $P --num-query-groups 8", "is --set num_kv_heads=8 here"),
        ("plan train $P --num-experts 64", "is in the model's config.json"),
        ("plan train $P --overlap-param-gather", "is in its record: --software"),
        ("plan train $P --rdzv-endpoint a:1", "a plan starts nothing"),
        ("plan serve $S --tpot 50tok/s", "write its time, 20ms"),
        ("plan serve $S --weights-dtype bf16 fp8", "write --weights-dtype bf16,fp8"),
        ("plan serve $S --for vllm", "is --engine vllm here"),
        ("plan serve $S --max-concurrency 64", "is --phase generate --batch 64 --context 8k here"),
        ("train plan.toml --layout fsdp=8", "the plan sets it: mw plan train --layout fsdp=8"),
        ("plan train $P --master-weights", "is --given master_weights=true here"),
        ("plan train $P --grad-dtype fp32", "is --given gradients_dtype=f32 here"),
        ("plan train $P --attention-heads 16", "is --set num_heads=16 here"),
        ("plan train $P --node-count 2", "is --hardware h100:2x8, 2 hosts of 8"),
        ("generate --checkpoint a hi --top-k 40", "sampled with --temperature and --top-p"),
        ("nvidia-smi", "type mw doctor"),
        ("sbatch", "type mw launch slurm"),
        ("plan rl $S --num-generations 8", "is --samples here"),
        ("plan rl $S --algorithm grpo", "only the samples of a prompt change the plan"),
        ("plan rl $S --kl 0.1", "it is an option of mw train --rl"),
        ("fit llama-3-8b 4090", "write --hardware 4090"),
        ("fit llama-3-8b --load-in-4bit", "leave it out"),
        ("fit llama-3-8b --vram 24GB", "memory belongs to a chip"),
        ("fit llama-3-8b --hardware m3", "did you mean m3-ultra?"),
        ("fit llama-3-8b --tp 8", "it tries every split of the chips"),
        ("model llama-3-8b --dtype int4", "type mw fit MODEL"),
        ("hardware --list", "type mw hardware for the list"),
        ("train llama-3-8b --data a.jsonl", "first type mw plan train --model llama-3-8b"),
        ("serve --checkpoint a --served-model-name x", "the model has its folder's name"),
        ("eval runs/demo", "type mw report runs/demo"),
        ("roofline llama-3-8b", "type mw plot"),
        ("merge-lora runs/x", "type mw export"),
        ("llama-3-8b fit", "type mw fit llama-3-8b"),
        ("zzz", "which layout: mw plan train"),
        ("--json plan train $P", "options follow the command: mw plan train ... --json"),
        (
            "plan train $P --tp 8 --pp 2 --zero 1",
            "--pp is --given pipe=2 here; --zero is --given zero=1 here",
        ),
        (
            "plan train --model h100:8 --hardware llama-3-8b --batch-tokens 1M --seq-len 8k",
            "write --hardware h100:8",
        ),
        ("plan train $P --layout ici_fsdp_parallelism=8", "is fsdp=8 here"),
        ("plan train $P --layout fsdp=8,optimizer=adam8bit", "write optimizer=adamw,optimizer_dtype=int8"),
        ("plan train $P --layout fsdp=8,weights_dtype=fp8", "matmul_dtype = fp8 multiplies in it"),
        ("plan train $P --given 'chips<=4'", "the machine is --hardware h100:4"),
        ("plan train $P --hardware h100:1x16", "write h100:2x8"),
        ("plan train $P --hardware g5.12xlarge", "the catalog lacks this cloud machine"),
        ("plan train $P --hardware g6e.48xlarge", "write l40s:8"),
        ("plan train $P -o plan.txt", "write -o plan.toml"),
        ("report runs/demo -o page.pdf", "write -o page.html"),
        ("plan serve $S --lengths 2k/200", "write --prompt-tokens 2k --output-tokens 200"),
        ("plan serve $S --max-price-per-hour 2,50", "write 2.50"),
        ("bench serve --concurrency 1,2,4", "run it once for each number"),
        ("bench serve localhost:8000", "write --url localhost:8000"),
        (
            "serve --checkpoint meta-llama/Llama-3.1-8B",
            "type hf download meta-llama/Llama-3.1-8B --local-dir",
        ),
        ("train plan.toml --data https://example.com/x.jsonl", "download it first: curl -LO"),
        ("train plan.toml --data 'a.jsonl b.jsonl'", "write --data a.jsonl --data b.jsonl"),
        ("train stdlib", "mw train plan.toml --data stdlib"),
        ("train --from none --data a.jsonl", "--from none: there is no such folder; it takes a Hugging Face"),
        ("train plan.toml --from llama --lora r16", "write 16"),
        ("train --plan plan.toml", "has no dashes here"),
        ("plan train --model llama-3-8b h100:8 --batch-tokens 1M --seq-len 8k", "write --hardware h100:8"),
        ("plan train $P --batch-tokens 1M --seq-len 8.192", "write 8192"),
        ("plan train $P --hardware h200-64", "write h200:64"),
        ("plan train $P --hardware a100-40:8", "did you mean a100-40gb?"),
        ("plan train $P --hardware p4d", "for a p4d.24xlarge"),
        ("plan train $P --hardware blackwell:8", "did you mean b200"),
        ("plan train $P --model stable-diffusion", "of another model give its config.json"),
        ("plan train $P --given '4>=tensor'", "write tensor<=4"),
        ("plan train $P --given tensor=2,4", "write tensor>=2,tensor<=4"),
        ("plan train $P --given 'tensor!=8,9'", "write tensor!=8,tensor!=9"),
        ("plan train $P --given 'remat=none|full'", "a condition has one value; write remat=none"),
        ("plan train $P --given 'tensor<=4 and pipe == 1'", "write tensor<=4,pipe=1"),
        ("plan train $P --layout fsdp==8", "write fsdp=8"),
        ("plan train $P --layout fsdp=8,offload=optimizer", "write offload_optimizer=true"),
        ("plan train $P --layout fsdp=8,activation_checkpointing=true", "write remat=full"),
        ("plan train $P --layout plan.toml", "mw compare plan.toml prices its plan"),
        ("plan train $P --layout tensor = 8", "write --layout tensor=8 without spaces"),
        ("plan train $P --parallelism tp=8", "write --layout tp=8"),
        ("plan train $P --set num_layers=16,32", "run it once for each value"),
        ("plan train $P --trainer.train_batch_size 256", "is --batch-tokens, the sequences"),
        ("plan train $P --mixed-precision fp8", "is --given matmul_dtype=fp8 here"),
        ("plan train $P --epoch 3", "--tokens 15T adds the time of a run"),
        ("plan serve $S --max-cost-per-hour 100", "is --max-price-per-hour"),
        ("plan serve $S --tokens-per-second 50", "add --tpot 30ms"),
        ("serve --checkpoint a --disable-radix-cache", "is --no-prefix-cache here"),
        ("reshard --from fsdp=8 --to tensor=8", "mw reshard BEFORE AFTER"),
        ("audit train.py step", "write mw audit train.py:step"),
        ("generate --checkpoint a -p hi", "mw generate PROMPT"),
        ("hardware rtx 4090", "write mw hardware rtx4090"),
        ("gpu-count llama-3-70b", "type mw plan train --model llama-3-70b --smallest"),
        ("gpu-memory llama-3-70b", "type mw fit"),
        ("python -m vllm.entrypoints.openai.api_server", "type mw serve"),
        ("launch torchrun -n 8 -- mw train plan.toml", "type mw launch local"),
        ("plan train $P --hardware v5p-512:8", "write v5p:256"),
        ("plan train $P --hardware 64", "name the chip too: h100:64"),
        ("plan train $P --hardware tpu:64", "did you mean v5p or v6e?"),
        ("plan train $P --layout tensor-8", "write tensor=8"),
        ("plan train $P --given 'remat is full'", "write remat=full"),
        ("plan train $P --given 'zero in [1,2]'", "write zero>=1,zero<=2"),
        ("plan train $P --set num_layers 16", "write --set num_layers=16"),
        ("plan train $P --currency rupees", "write three letters, such as USD"),
        ("plan serve $S --max-batch-tokens 8192", "is --chunk here"),
        ("plan rl $S --rollout-n 8", "is --samples 8 here"),
        ("generate --checkpoint a hi -n 20", "-n is --max-tokens here"),
        ("compare llama-3-8b --hardware h100:8", "write MODEL@HARDWARE"),
        ("fit llama-3-8b --on rtx4090", "write --hardware rtx4090"),
        ("fit llama-3-8b --hardware 24GB", "these have 24 GB: a10, l4"),
        ("hardware h100 --compare a100", "type mw compare"),
        ("compare llama-3-8b:h100:8", "write llama-3-8b@h100:8"),
        ("generate --checkpoint a --file prompt.txt", 'write mw generate "$(cat prompt.txt)"'),
        ("launch slurm -N 4 -- mw train plan.toml", "hosts come from the plan"),
        ("train plan.toml --from llama --qlora", "is --lora 16 --base-dtype nf4 here"),
    ],
)
def test_a_slip_is_answered_with_what_to_type(
    typed: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(typed.replace("$P", TRAIN).replace("$S", SERVE))
    assert main(words) == 2
    assert answer in capsys.readouterr().err


def test_keys_of_other_files_are_named(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.toml"
    path.write_text("hidden_size = 64\n")
    assert main(["model", str(path)]) == 2
    assert "'hidden_size' is unknown; write d_model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "name", "text", "answer"),
    [
        ("audit {}", "plan.yaml", "model: x", "is YAML"),
        ("audit {}", "plan.json", '{"best": {}, "candidates": []}', "is the document of a plan"),
        ("train {}", "data.csv", "text,label", "write its rows as JSON lines"),
        ("train {}", "a.jsonl.gz", "", "unpack it first"),
        ("serve --checkpoint {}", "model.gguf", "GGUF", "take the model's Hugging Face folder"),
        ("model {}", "plan.toml", "[layout]\n[workload]", "is a plan"),
        ("fit {}", "chip.toml", "hbm_bytes = 1", "describes a chip; type --hardware"),
        ("model {}", "config.json", '{"model_type": "llama",}', "remove the comma before }"),
        ("audit {}", "plam.tml", None, "did you mean"),
        ("model {}", "adapter/adapter_config.json", "{}", "is a LoRA adapter"),
        ("serve --checkpoint {}", "bin/pytorch_model.bin", "", "has pytorch_model.bin and no config.json"),
    ],
)
def test_files_of_another_kind_are_named(
    typed: str, name: str, text: str | None, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "plan.tml" if text is None else path).write_text(text or "")
    given = path.parent if path.parent != tmp_path else path
    assert main(typed.format(given).split()) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["–model", "—model", "–-model"])
def test_typographic_dashes_are_options(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", typed]) == 2
    assert "mw collective has no --model;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "value"),
    [("20/s", 20.0), ("20 rps", 20.0), ("1,200/min", 20.0), ("72k per hour", 20.0)],
)
def test_rates_are_read_with_their_unit(typed: str, value: float) -> None:
    assert parse_rate(typed) == value


@pytest.mark.parametrize(
    "typed", ["RTX 4090", "1 x RTX 4090", "rtx-4090", "1x4090", "4090", "NVIDIA GeForce RTX 4090", "4090s"]
)
def test_chips_are_read_as_shops_write_them(typed: str) -> None:
    assert catalog.load(f"{catalog.usual(typed)}".partition(":")[0] + ":1").chip.name == "rtx4090"


def test_a_price_of_the_user_has_no_source_of_the_catalog() -> None:
    [machine] = ChipPrices("$2.50/h", None).of([catalog.load("h100:8")])
    assert price_words(machine.chip) == "2.50 USD a chip-hour"


@pytest.mark.parametrize("typed", ["2.5 per gpu hour", "2.5/gpu/h", "$2.5 per card-hour"])
def test_a_price_may_name_the_chip_and_the_hour(typed: str) -> None:
    [machine] = ChipPrices(typed, None).of([catalog.load("h100:8")])
    assert price_words(machine.chip) == "2.50 USD a chip-hour"


@pytest.mark.parametrize("typed", ["2.5 eur", "€2.50", "h100=2.5 EUR/h"])
def test_a_price_brings_its_currency(typed: str) -> None:
    [machine] = ChipPrices(typed, None).of([catalog.load("h100:8")])
    assert price_words(machine.chip) == "2.50 EUR a chip-hour"


def test_an_offered_line_prints_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    typed = f"plan train {TRAIN} --precision bf16 --torch-dtype f32"
    assert main(shlex.split(typed)) == 2
    assert "warning" not in capsys.readouterr().err
