"""Requests as people type them: the line that is offered parses, and does what was asked."""

import re
import shlex
from pathlib import Path

import pytest

from meshwright.cli.corrected_line import corrected_line, notes_of
from meshwright.cli.line_checks import run_fault
from meshwright.cli.line_commands import of_typed
from meshwright.cli.line_pieces import pieces_of
from meshwright.cli.main import COMMANDS


@pytest.fixture(autouse=True)
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("Some words.\n")


# Requests, each with words of the line.
REQUESTS = [
    # unknown options by their words, by their values, and left out with the rest kept
    ("plan train --model Llama-3.1-70B-Instruct --cluster h100x256 --tokens-per-step 4M --context 8192",
     "--hardware h100:256 --batch-tokens 4M --seq-len 8192"),
    ("plan train --model llama-3-70b --hardware h100:256 --global-bsz 4M --seq 8192 --grad-accum 4",
     "--batch-tokens 4M --seq-len 8192 --given microbatches=4"),
    ("plan train --model gemma3-27b --hardware tpu7x-64 --per-device-batch 2 --seq-len 8k",
     "--hardware tpu7x:64 --batch-tokens 1048576 --seq-len 8k"),
    ("plan train --model llama-3-70b --hardware h100:128 --gbs 256 --seq 4k --megatron", "--for megatron"),
    ("plan train --spec '{\"model\": \"llama-3-8b\"}' --json", "--model llama-3-8b --json --hardware h100:8"),
    ("plan train -m llama-3-8b -hw h100:8 -b 1M -s 4k -j", "--batch-tokens 1M --seq-len 4k --json"),
    ("tco llama-3-70b --years 3 --hardware h100:8", "plan train --model llama-3-70b --hardware h100:8"),
    ("fit --model llama-3.1-8b --hardware h100:1 --max-model-len 32768", "--seq-len 32768"),
    ("fit qwen2.5-14b --hardware rtx4090:2 --4bit", "fit qwen2.5-14b --hardware rtx4090:2"),
    ("generate 'to be or not' --top_k 40 --temp 1.2", "--temperature 1.2 --checkpoint runs/demo"),
    ("bench serve --host localhost --port 8000 --request-rate inf --num-prompts 50",
     "--url http://localhost:8000 --requests 50"),
    ("pretrain_gpt.py --num-layers 32 --hidden-size 4096 --tensor-model-parallel-size 2",
     "plan train --for megatron --set num_layers=32,d_model=4096 --given tensor=2 --model llama-7b"),
    ("megatron_gpt_pretraining.py --hidden-size 4096 --num-layers 32",
     "plan train --for nemo --set d_model=4096,num_layers=32 --model llama-7b"),
    # machines and models under other names
    ("plan train llama3.1:70b --hardware '256 x H100 SXM5 80GB' --gbs 1024 --sl 8192",
     "--hardware '256 x H100 SXM5 80GB' --batch-tokens 8388608"),
    ("plan train --arch llama-70b --accelerators 256 --accelerator-type H100-80GB-HBM3 --gbs 2048 --seq 4096",
     "--model llama-3.3-70b --hardware h100:256 --batch-tokens 8388608"),
    ("plan train --model gemma-2-27b --hardware v5e-256 x2 --batch-tokens 2M --seq-len 4096",
     "--hardware '2*v5e:256'"),
    ("fit llama-3.1-8b --hardware 4090+4090 --context 16k", "--hardware 4090+4090 --seq-len 16k"),
    # machines that hold the model, the same number of chips for all, and a context for the sequences
    ("cheaper h100 or v5p for llama-3-70b", "--hardware h100:32,v5p:32"),
    ("how much would it cost to train llama 3 8b on 1 trillion tokens", "--tokens 1T --hardware h100:64"),
    ("plan train --model llama-3-70b --hardware h100:64 --seq-length 32768 --gbs 64",
     "--seq-len 32768 --batch-tokens 2097152 --set max_seq_len=32768"),
    ("plan train --model llama-3-8b --hardware h100:8 --batch-tokens 8k --seq-len 8k",
     "--batch-tokens 8192 --seq-len 8k"),
    ("train my.txt --gpu 0 --max-steps 20 --ctx 128",
     "--model tiny --set max_seq_len=128 --hardware cpu:8 --batch-tokens 2048 -o plan.toml && mw train"),
    ("fit llama3 8b --hardware 'GeForce RTX 4090' --num-gpus 2", "fit llama-3-8b --hardware rtx4090:2"),
    ("fit llama-3-8b --gpus rtx4090,rtx4090", "fit llama-3-8b --hardware rtx4090:2"),
    ("plan train --model llama-3-8b --hardware h100x8 --nodes 4 --batch-tokens 1M --seq-len 8k",
     "--hardware h100:4x8 --batch-tokens 1M --seq-len 8k"),
    # values of their own form: percentiles, shares of a mesh, recomputation, numbers in words, ways to train
    ("plan serve --model llama-3.1-70b --hardware h100 --rate 20 --isl 1k --osl 200 --itl-p95 30ms",
     "--tpot-p95 30ms"),
    ("plan train --model llama-3-70b --hardware h100:256 --batch-tokens 4M --seq-len 8k --hsdp 8",
     "--given data=8,fsdp=32"),
    ("plan train --model llama-3-70b --hardware h100:64 --gbs 512 --seq 4k --recompute-activations",
     "--given remat=attention"),
    ("plan train --model mistral-7b --hardware v5p-64 --batch-tokens 1M --remat_policy minimal_offloaded",
     "--given remat=matmuls,offload=true"),
    ("plan train --model llama-3-8b --hardware h100:8 --gbs 128 --seq 8k --precision bf16-mixed",
     "--compute-dtype bf16"),
    ("plan train --model llama-3-8b --hardware h100:8 --tokens-per-batch 4 million --seq-len 8k",
     "--batch-tokens 4M --seq-len 8k"),
    ("plan train --model llama-3-70b --hardware h100:64 --gbs 256 --seq 4k --pp 2 --virtual-pipeline 5",
     "--given pipe=2,schedule=interleaved,interleave=5"),
    ("finetune --model llama-3-8b --hardware rtx4090:2 --method qlora", "--lora 16 --base-dtype nf4"),
    ("compare llama-3-8b@h100:64 llama-3-8b@a100:64 --price",
     "compare llama-3-8b@h100:64 llama-3-8b@a100:64 "),
    # values that state what they are: times, money, layouts, parts of a mesh that are excluded
    ("plan train --model llama-3-8b --hardware h100:64 --tokens 1T --finish-by '2 weeks'",
     "--smallest --days 14"),
    ("plan train --model llama-3-70b --hardware h100:256 --tokens 15T --rate-per-gpu-hour 2", "--price 2"),
    ("plan serve --model llama-3.1-70b --hardware h100:8 --isl 1k --osl 500 --eur 2.1", "--price '2.1 EUR'"),
    ("plan train --model llama-3-70b --hardware h100:256 --fix tensor=8", "--given tensor=8"),
    ("plan train --model llama-3-70b --hardware h100:256 --exclude pipe", "--given pipe=1"),
    ("plan train --model gpt-3-175b --hardware a100:256 --rampup-batch-size 32 32 200000 --gbs 1536 --seq 2k",
     "--batch-tokens 3145728 --seq-len 2k"),
    ("plan train --model llama-3-8b --hardware v5p-128 --batch-tokens 2M --dcn_fsdp_parallelism 2",
     "--hardware '2*v5p:64'"),
    ("plan train --model llama-3-8b --hardware v5p-64 --per_device_batch_size 0.5 --max_target_length 8192",
     "--batch-tokens 131072"),
    ("plan serve --model llama-3.1-70b --gpu h100 --rate 20 --in-len 1500 --out-len 300 --max-ttft 800ms",
     "--prompt-tokens 1500 --output-tokens 300 --ttft-p95 800ms"),
    ("plan serve --model llama-3.1-70b --hardware h100 --rate 20 --isl 1k --osl 200 --monthly-budget 50k",
     "--max-price-per-hour 68.49"),
    ("plan train --model llama-3-70b --hardware v5p:4x4x8 --optimizer_memory_host_offload true",
     "--given offload_optimizer=true"),
    ("plan train --model llama-3-8b --hardware h100:8 --gbs 128 --fp8-hybrid", "--given matmul_dtype=fp8"),
    ("plan train --model gpt2 --hardware mac --batch 8 --seq 512", "--hardware m4-max:1 --batch-tokens 4096"),
    ("plan serve --model llama-3.1-8b --hardware l40s --peak-rate 40", "--rate 40"),
    ("fit llama-3-8b --vram 2x24GB", "fit llama-3-8b --hardware a10:2"),
    ("bench serve --base-url http://localhost:8000 --dataset-name random --random-input-len 512 --osl 9",
     "--url http://localhost:8000 --prompt-tokens 512 --output-tokens 9"),
    ("plan serve --model llama-3.1-70b --hardware h100 --rate 20 --workload 1000:200",
     "--prompt-tokens 1000 --output-tokens 200"),
    ("plan train --model llama-3-70b --hardware h100:256 --fsdp-shards 64", "--given fsdp=64"),
    ("serve --checkpoint runs/demo --max-batch-size 16 --max-input-len 1024", "--slots 16"),
    ("plan train --model llama-3-70b --hardware h100:256 --tokens 15T --cost-per-hour 700",
     "--max-price-per-hour 700"),
    ("fit llama3.1-8b-q4 --hardware 4090", "fit llama-3.1-8b --hardware 4090"),
    ("plan train --model llama-3-70b --hardware h100:64 --tp 8 --no-sequence-parallel",
     "--given tensor=8,sequence_parallel=false"),
    ("fits llama-3-8b --gpus 2x4090", "fit llama-3-8b --hardware rtx4090:2"),
    ("hardware list --filter h100 --json", "hardware h100 --json"),
    ("cost llama-3-70b h100:256 2T", "--hardware h100:256 --tokens 2T"),
    ("generate Once upon a time --checkpoint runs/demo", "generate 'Once upon a time' --checkpoint"),
    # questions
    ("what is the biggest model i can finetune on 2 4090s", "fit --hardware 4090:2"),
    ("which models run on a macbook", "fit --hardware m4-max"),
    ("fit 24gb", "fit --hardware a10"),
    ("size of llama-3-8b in int4", "fit llama-3-8b"),
    ("'$' per million tokens llama-3.1-70b h100", "plan serve --model llama-3.1-70b --hardware h100"),
    ("cost-per-token --model llama-3.1-8b --hardware l4", "plan serve --model llama-3.1-8b --hardware l4"),
    ("how many h100 for 20 requests per second of llama 3.1 70b",
     "plan serve --model llama-3.1-70b --hardware h100 --rate 20/second --prompt-tokens 1k"),
    ("check layout tp=8 pp=16 dp=4 llama-3-405b h100:512",
     "plan train --model llama-3.1-405b --hardware h100:512 --given tensor=8,pipe=16,data=4"),
    ("help me choose a gpu", "hardware"),
    ("capabilities --json", "help"),
    # bounds, kinds of chips as values, ranges of lengths, hosts of a torus, a bare chip for a layout
    ("plan train --model llama-3-70b --hardware h100:256 --batch-tokens 4M --seq-len 8k --max-tp 8",
     "--given 'tensor<=8'"),
    ("fit llama-3-70b --offload cpu --hardware 4090:2", "fit llama-3-70b --hardware 4090:2"),
    ("plan serve --model llama-3.1-70b --hardware h100 --prompt-tokens 1k..4k --output-tokens 200-400",
     "--prompt-tokens 2560 --output-tokens 300"),
    ("plan train --model llama3-8b --accelerator-type v5litepod-256 --num-nodes 1 --gbs 512 --seq 2048",
     "--model llama-3-8b --hardware v5e:256 --batch-tokens 1048576"),
    ("plan serve --model qwen3-235b-a22b --gpu h200 --tp 8 --max-concurrency 128 --isl 2048 --osl 256",
     "--hardware h200:8 --layout tensor=8 --phase generate --batch 128 --context 2304"),
    # one word with a name, money, and load tests
    ("max context llama-3.1-8b 4090", "fit llama-3.1-8b --hardware 4090"),
    ("bandwidth v5e", "hardware v5e"),
    ("layers llama-3-70b", "model llama-3-70b"),
    ("slo llama-3.1-70b h100:8 ttft 1s tpot 30ms", "--hardware h100:8 --ttft 1s --tpot 30ms"),
    ("budget 100000 --model llama-3-8b", "--model llama-3-8b --tokens 1T --budget 100000 --hardware h100:64"),
    ("benchmark --backend vllm --model runs/demo --base-url http://localhost:8000",
     "bench serve --model runs/demo --url http://localhost:8000"),
    # counts after a comma, memory of several cards, several strategies, units of names, words of schemes
    ("fit llama-3-8b --hardware '4090, 2 cards' --ctx 8k", "--hardware '4090, 2 cards' --seq-len 8k"),
    ("fit qwen3-32b --hardware 2x24gb", "fit qwen3-32b --hardware a10:2"),
    ("fit llama-3.1-8b --hardware l4 --max-context", "fit llama-3.1-8b --hardware l4"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --batch-tokens 4Mi --seq-len 8k --strategy fsdp+tp",
     "--given 'fsdp>1,tensor>1'"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --ici_fsdp_transpose_parallelism 4",
     "--given fsdp=4"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --quantization aqt_int8",
     "--given matmul_dtype=int8"),
    ("plan serve --model llama-3.1-70b --hardware h100 --isl 1k --osl 200 --rpm 1200", "--rate 1200/min"),
    ("plan serve --model llama-3.1-70b --hardware h100:8 --isl 1k --osl 200 --use_fp8_rowwise",
     "--matmul-dtype fp8"),
    # values of a form: defaults, paths, variants of a type, lengths of runs, flags of kinds of prices
    ("plan serve --model llama-3.1-70b --hardware h100:8 --isl 1k --osl 200 --tp 8 --dtype auto",
     "--layout tensor=8"),
    ("bench serve --backend vllm --model runs/demo --endpoint /v1/completions --num-prompts 200",
     "bench serve --model runs/demo --requests 200 --url http://127.0.0.1:8000"),
    ("plan train --model llama-3-70b --hardware h100:64 --batch-tokens 4Mi --seq-len 8k --fp8-format hybrid",
     "--given matmul_dtype=fp8"),
    ("plan train --model llama-3-70b --hardware h100:64 --train-samples 1000000 --gbs 512 --seq-length 8192",
     "--tokens 8192000000 --batch-tokens 4194304"),
    ("plan train --model llama-3-70b --hardware h100:64 --train-iters 1000 --gbs 512 --seq-length 8192",
     "--tokens 4194304000 --batch-tokens 4194304"),
    ("plan serve --model llama-3.1-70b --hardware h100:8 --isl 1k --osl 200 --quant_algo FP8 "
     "--kv_cache_quant_algo FP8", "--weights-dtype fp8 --kv-dtype fp8"),
    ("plan train --model llama-3-8b --hardware h100:64 --batch-tokens 4M --seq-len 8k --spot",
     "--seq-len 8k"),
    ("train --from llama/ --data chats.jsonl --load_in_4bit --lora_r 32",
     "train --from llama/ --data chats.jsonl --base-dtype nf4 --lora 32"),
    # the same machine twice, slices, moments, forms of weights, sizes of a small model
    ("fit llama-3-8b --hardware rtx4090 rtx4090", "--hardware rtx4090:2"),
    ("plan train --model llama-3-70b --hardware h100:64 --gbs 512 --seq 8k --roofline", "--ideal"),
    ("plan train --model llama-3-70b --hardware v5e-256 --compile_topology_num_slices 2",
     "--hardware '2*v5e:256'"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --opt_type adamw --mu_dtype bfloat16",
     "--given optimizer=adamw,optimizer_dtype=bf16"),
    ("quantize --checkpoint runs/demo --qformat fp8 -o out", "quantize runs/demo --to fp8 -o out"),
    ("train --data my.txt --layers 6 --heads 6 --embed 384",
     "--set num_layers=6,num_heads=6,d_model=384,num_kv_heads=6"),
    # degrees of sequences, modules, moments, steps of bare chips, lists of batches, sums without {U_X}
    ("fit llama-3-8b --hardware 4090 4090", "--hardware rtx4090:2"),
    ("train --from ./base --data chats.jsonl --lora 16 --quantize 4",
     "--data chats.jsonl --lora 16 --base-dtype nf4"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --ici_sequence_parallelism 2", "--given context=2"),
    ("plan train --model llama-3-70b --hardware h100:64 --recompute-modules core_attn --exp-avg-dtype bf16",
     "--given remat=attention,optimizer_dtype=bf16"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --remat_policy offload", "--given offload=true"),
    ("plan serve --model llama-3.1-8b --hardware h100 --isl 2k --osl 500 --max-running-requests 128",
     "--hardware h100:1 --phase generate --batch 128 --context 2548"),
    ("quantize runs/demo --quant fp8 --output_dir out", "quantize runs/demo --to fp8 -o out"),
    ("collective 'AllReduce_X(A[B, D])' --mesh X=8,Y=4 --dims B=1024,D=8192 --hardware v4p:8x4x1",
     "'AllReduce_X([B, D]{U_X})' --mesh X=8,Y=4"),
    # chunks of stages, slices twice, sizes in MaxText's names, prices apart, a batch with lengths
    ("plan train --model gpt-3-175b --hardware a100-80gb:512 --gbs 1536 --seq 2048 --pp 8 --interleave 3",
     "--given pipe=8,schedule=interleaved,interleave=3"),
    ("plan train --model llama-3-70b --hardware v5p-256 --num-slices 4 --dcn_data_parallelism 4",
     "--hardware '4*v5p:128'"),
    ("plan train --base_emb_dim 4096 --base_num_decoder_layers 32 --base_mlp_dim 11008 --hardware v5e-64",
     "--set d_model=4096,num_layers=32,d_ff=11008"),
    ("compare llama-3-70b@h100:256 llama-3-70b@b200:128 --price h100=2.5 b200=5",
     "--price h100=2.5,b200=5 --batch-tokens 4M --seq-len 8k"),
    ("plan serve --model llama-3.1-70b --hardware h200:8 --isl 1000 --osl 1000 --tp 8 --batch 256",
     "--layout tensor=8 --batch 256 --phase generate --context 2000"),
    ("plan serve --model llama-3.1-70b --hardware 8xh100 --isl 1000 --osl 1000 --weight_only_precision int4",
     "--weights-dtype int4"),
    ("plan train --model llama-3-70b --hardware v5p:4x8x8 --dtype bfloat16 --weight_dtype float32",
     "--compute-dtype bfloat16 --weights-dtype float32"),
    # counts, rates and meshes under shorter names
    ("fit mixtral-8x7b --hardware rtx4090 --ngpu 2", "--hardware rtx4090:2"),
    ("plan serve --model llama-3.1-70b --hardware h100 --req-per-sec 20 --isl 1500 --osl 300", "--rate 20"),
    ("collective 'AllGather_X(A[I_X, J])' --axis-sizes X=8 --dims I=1024,J=1024 --hardware v5e:8",
     "--mesh X=8 --dims I=1024,J=1024"),
    ("plan train --model llama-3-8b --hardware 'Tesla T4 x4' --batch-tokens 64k --seq-len 2048 --lora",
     "--hardware 'Tesla T4 x4'"),
    # a mesh of the machine, and a number type by the beginning of its name
    ("collective 'AllGather_Y([E_Y, F])' --hardware v5e:8x16 --dims E=2048,F=8192", "--mesh X=8,Y=16"),
    ("collective 'AllGather_X([E_X, F])' --hardware h100:8 --dims E=2048,F=8192", "--mesh X=8"),
    ("collective 'AllGather_X([B_X, D])' --mesh X=4 --hardware v5e:4x4 --dims B=8,D=8 --dtype bfloat",
     "--dtype bf16"),
    # a chip's roofline, and collectives over an axis of a torus
    ("roofline int8 v5e", "plot roofline v5e"),
    ("collective all-gather --axis X --size 34MB --hardware v5e:4x4",
     "'AllGather_X([B_X])' --mesh X=4,Y=4 --dims B=17000000"),
    ("comms reduce_scatter v5p:4x4x4 --axis Y 128MiB bf16",
     "'ReduceScatter_{Y,B}([B]{U_Y})' --mesh X=4,Y=4,Z=4 --dims B=67108864 --hardware v5p:4x4x4"),
    ("collective 'AllGather([B_X, D_Y], X)' --mesh X=4,Y=4 --dims B=1024,D=4096 --hardware v5e:4x4",
     "'AllGather_X([B_X, D_Y])' --mesh X=4,Y=4"),
    ("collective ReduceScatter --mesh X=8 --dims B=1024,D=8192 --hardware v5e",
     "'ReduceScatter_{X,B}([B, D]{U_X})' --mesh X=8 --dims B=1024,D=8192 --hardware v5e:8"),
    ("shard 'A[I_X,J] * B[J,K]' -m X=4 -d I=512,J=512,K=512", "--mesh X=4 --dims I=512,J=512,K=512"),
    ("collective 'AllToAll_X(A[I_X,J])' --mesh 8 --dims I=1k,J=1k --hardware v5e:8",
     "'AllToAll_X([I_X,J] -> [I, J_X])' --mesh X=8"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "words"), REQUESTS)
def test_a_request_gets_a_line_that_parses(typed: str, words: str) -> None:
    line = corrected_line(shlex.split(typed), list(COMMANDS))
    assert words in line
    assert all(notes_of(shlex.split(typed), line).values())  # each word that is left out has a reason
    for part in re.findall(r"mw (?!help\b)((?:(?! && | \(--).)+)", line):
        found = of_typed(shlex.split(part))
        assert found is not None, part
        command, rest = found
        assert command.parses(rest), part
        assert not run_fault(command, pieces_of(rest, command)), part
