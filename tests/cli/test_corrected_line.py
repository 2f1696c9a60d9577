"""The whole line to type in place of a wrong one: every fault replaced, and accepted by the parser."""

import shlex
from pathlib import Path

import pytest

from meshwright.cli.main import main

TRAIN = "--model llama-3-8b --hardware h100:8 --batch-tokens 1M --seq-len 8k"
SERVE = "--model llama-3-8b --hardware h100:8 --prompt-tokens 1k --output-tokens 200"


def _answer(typed: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(typed.replace("$P", TRAIN).replace("$S", SERVE))) == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        # several options at once
        ("plan train --modle llama-3-8b --hardwear h100:8 --batch-tokns 1M --seqlen 8k", "plan train $P"),
        (
            "plan train --model gpt-3-175b --hardware a100-80gb:128x8 --global-batch-size 1536 --seq-length "
            "2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --recompute-activations "
            "--use-distributed-optimizer",
            "plan train --model gpt-3-175b --hardware a100-80gb:128x8 --batch-tokens 3145728 --seq-len 2048 "
            "--given tensor=8,pipe=16,remat=attention,zero=1",
        ),
        (
            "plan train --model llama-2-70b --hardware v5e:16x16 --per_device_batch_size 4 "
            "--max_target_length 2048",
            "plan train --model llama-2-70b --hardware v5e:16x16 --batch-tokens 2097152 --seq-len 2048",
        ),
        (
            "plan serve --model llama-3-8b --hardware h100:8 --qps 5 --p99-ttft 2s --isl 1k --osl 200",
            "plan serve --model llama-3-8b --hardware h100:8 --rate 5 --ttft-p95 2s --prompt-tokens 1k "
            "--output-tokens 200",
        ),
        ("serve --checkpoint a --bind 0.0.0.0:80", "serve --checkpoint a --host 0.0.0.0 --port 80"),
        ("generate -m a -p hi -n 8 --temp 0", "generate --checkpoint a hi --max-tokens 8 --temperature 0"),
        (
            "plan serve $S --ttft-p99 500 --tpot-p99 50 --max-model-len 8192",
            "plan serve $S --ttft 500ms --tpot 50ms",  # percentiles and a context belong to other plans
        ),
        ("bench serve -u a:80 -c 3 -n 9", "bench serve --url a:80 --concurrency 3 --requests 9"),
        ("plan serve $S --requests-per-day 2M", "plan serve $S --rate 2M/day"),
        ("export a --out b", "export a -o b"),
        ("model --model_id mistral-7b --context 8k", "model mistral-7b --seq-len 8k"),
        ("plan serve $S --requests 1M/day", "plan serve $S --rate 1M/day"),
        ("audit plan.toml --chip tpu", "audit plan.toml --target tpu"),
        ("generate hi runs/b", "generate hi --checkpoint runs/b"),
        ("completion --shell fish", "--install-completion"),
        # an option inside a layout
        (
            "plan train $P --layout tensor=4 --sequence-parallel",
            "plan train $P --layout data=2,tensor=4,sequence_parallel=true",
        ),
        # values
        ("plan train $P --tokens 1,5T", "plan train $P --tokens 1.5T"),
        ("plan train $P --given tensor=1..4", "plan train $P --given 'tensor>=1,tensor<=4'"),
        ("plan train $P --layout best", "plan train $P"),
        ("plan serve $S --ttft 200 --tpot 20", "plan serve $S --ttft 200ms --tpot 20ms"),
        ("plan serve $S --kv-cache-dtype fp8_e5m2", "plan serve $S --kv-dtype fp8"),
        ("plan serve $S --rate 3,5", "plan serve $S --rate 3.5"),
        ("model llama3-8b --flops", "model llama-3-8b"),
        ("plan train $P --given 'tp=8 pp=1'", "plan train $P --given tensor=8,pipe=1"),
        ("plan serve $S --engine vLLM", "plan serve $S --engine vllm"),
        (
            "plan train --model llama-3-8b --hardware dgx-h100:2 --batch-tokens 1M --seq-len 8k",
            "plan train --model llama-3-8b --hardware h100:2x8 --batch-tokens 1M --seq-len 8k",
        ),
        # words without an option
        ("plan train llama-3-8b h100:8 1M 8k", "plan train $P"),
        ("plan train --model llama-3-8b --hardware 8 x h100 --batch-tokens 1M --seq-len 8k",
         "plan train $P"),
        ("fit model=llama-3-8b hardware=rtx4090", "fit llama-3-8b --hardware rtx4090"),
        # another command
        ("plna trian $P", "plan train $P"),
        ("train plan $P", "plan train $P"),
        ("serve plan $S", "plan serve $S"),
        ("plan $P", "plan train $P"),
        ("finetune --model a --data b.jsonl --lora_r 8", "train --from a --data b.jsonl --lora 8"),
        ("compare h100:8 b200:8 --model llama-3-8b --batch-tokens 1M --seq-len 8k",
         "plan train --hardware h100:8,b200:8 --model llama-3-8b --batch-tokens 1M --seq-len 8k"),
        ("launch sbatch plan.toml --partition gpu", "launch slurm --partition gpu -- mw train plan.toml"),
        ("reshard --from a.toml --to b.toml", "reshard a.toml b.toml"),
        (
            "torchrun --nnodes=4 --nproc-per-node=8 a.py --tensor-model-parallel-size 8 --seq-length 4096 "
            "--global-batch-size 256 --model llama-3-8b",
            "plan train --hardware h100:4x8 --given tensor=8 --seq-len 4096 --batch-tokens 1048576 --model "
            "llama-3-8b",
        ),
        ("vllm serve models/b --tensor-parallel-size 2", "serve --checkpoint models/b --tensor 2"),
        # the notation
        ("shard 'A[I_x, J] * B[J, K_y]' --mesh 2x2",
         "shard 'A[I_X, J] . B[J, K_Y]' --mesh X=2,Y=2 --dims I=512,J=512,K=512"),
        ("shard ij,jk->ik --mesh X=2 --dims i=8,j=8,k=8",
         "shard 'A[I, J] . B[J, K] -> C[I, K]' --mesh X=2 --dims I=8,J=8,K=8"),
        ("collective 'AllReduce([B_X, D])' --mesh X:4,Y:4 --dims B=1k,D=4k",
         "collective 'AllReduce_Y([B_X, D]{U_Y})' --mesh X=4,Y=4 --dims B=1k,D=4k --hardware h100:16"),
    ],
)  # fmt: skip
def test_the_whole_line_is_named(typed: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = shlex.join(["mw", *shlex.split(line.replace("$P", TRAIN).replace("$S", SERVE))])
    assert _answer(typed, capsys).partition(" (--")[0].endswith(f"type {wanted}")


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a plan, a script, a text and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text("[layout]\n[workload]\n")
    (tmp_path / "b.toml").write_text("[layout]\n[workload]\n")
    (tmp_path / "train.py").write_text("def step(w): ...\n")
    (tmp_path / "my.txt").write_text("Some words.\n")
    (tmp_path / "ckpt").mkdir()
    return tmp_path


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        # copied with the line
        ("mw plan train $P --jsn", "plan train $P --json"),
        ("'$' mw plan train $P", "plan train $P"),
        ("plan train ' --model' llama-3-8b --hardware h100:8 --batch-tokens 1M --seq-len 8k",
         "plan train $P"),
        ("plan train '--model llama-3-8b --hardware h100:8' --batch-tokens 1M --seq-len 8k",
         "plan train $P"),
        ("plan train /model llama-3-8b /hardware h100:8 --batch-tokens 1M --seq-len 8k", "plan train $P"),
        # words of a sentence
        ("plan train llama-3-8b on h100:8 --batch-tokens 1M --seq-len 8k", "plan train $P"),
        ("can i run llama-3-8b on a 4090", "fit llama-3-8b --hardware 4090"),
        ("does llama-3-8b fit on 2x4090?", "fit llama-3-8b --hardware rtx4090:2"),
        ("compare cloud prices for h100", "hardware h100"),
        ("can two 4090s run llama 70b", "fit llama-3.3-70b --hardware 4090:2"),
        (
            "cost llama-3-8b 2T tokens on 64 h100 at $2/hour batch size 512 context 4k",
            "plan train --model llama-3-8b --hardware h100:64 --tokens 2T --price 2 --batch-tokens 2097152 "
            "--seq-len 4k",
        ),
        (
            "serve llama-3-70b on h100:8 to 900 users with 2k prompts and 300 token answers under 500ms",
            "plan serve --model llama-3-70b --hardware h100:8 --rate 900/min --prompt-tokens 2k "
            "--output-tokens 300 --ttft 500ms",
        ),
        ("which is cheaper h100:8 or a100-80gb:16 for serving llama-3-8b, 5M requests a month, 1k in 100 out",
         "plan serve --model llama-3-8b --hardware h100:8,a100-80gb:16 --rate 5M/month --prompt-tokens 1k "
         "--output-tokens 100"),
        ("model info meta-llama/Llama-3.1-8B", "model meta-llama/Llama-3.1-8B"),
        # dimensions by their letters, sizes of models, and runs to go on with
        ("plan serve --model llama-2-13b --hardware v5e:4x4 --phase generate --B 32 --S 8192",
         "plan serve --model llama-2-13b --hardware v5e:4x4 --phase generate --batch 32 --context 8192"),
        ("plan train --model gpt2 --hardware rtx4090:2 --B 32 --T 1024 --L 6",
         "plan train --model gpt2 --hardware rtx4090:2 --batch-tokens 32768 --seq-len 1024 "
         "--set num_layers=6"),
        ("model llama-3-70b --kv int8 --T 8192", "model llama-3-70b --kv-dtype int8 --seq-len 8192"),
        ("fit 8b --context 16k", "fit llama-3.1-8b --seq-len 16k"),
        ("plan train $P --strategy 'FSDP=4, TP=2'", "plan train $P --layout fsdp=4,tensor=2"),
        ("plan serve $S --monthly-requests 3M", "plan serve $S --rate 3M/month"),
        ("train a.txt --optimizer adam --lr 1", "train a.txt --optimizer adamw --learning-rate 1"),
        ("resume runs/new --epochs 2", "train --epochs 2 --run runs/new --resume"),
        ("restart --run runs/new", "train --run runs/new --resume"),
        ("vllm bench serve --num-prompts 200 --request-rate 4",
         "bench serve --requests 200 --rate 4 --url http://127.0.0.1:8000"),
        ("compare gpt2 tiny on rtx4090 --batch-tokens 1M --seq-len 1k",
         "compare gpt2@rtx4090 tiny@rtx4090 --batch-tokens 1M --seq-len 1k"),
        ("how long to train gpt2 on 10B tokens with 4 a100s",
         "plan train --model gpt2 --hardware a100-80gb:4 --tokens 10B --batch-tokens 4M --seq-len 1024"),
        ("compare --models gpt2,tiny --hardware rtx4090 --batch-tokens 1M --seq-len 1k",
         "compare gpt2@rtx4090 tiny@rtx4090 --batch-tokens 1M --seq-len 1k"),
        ("launch k8s a.toml --namespace ml --image b/c:1", "launch k8s --image b/c:1 -- mw train a.toml"),
        ("plan train $P --weeks 6 --tokens 500B", "plan train $P --smallest --days 42 --tokens 500B"),
        ("plan train $P --activation_checkpoint.mode selective", "plan train $P --given remat=attention"),
        ("plan train $P --layout 'X=4 Y=2'", "plan train $P --layout fsdp=4,tensor=2"),
        ("plan train $P --layout 'FSDP 4, TP 2'", "plan train $P --layout fsdp=4,tensor=2"),
        ("fit gpt2 -gpu rtx4090", "fit gpt2 --hardware rtx4090"),
        ("collective all-to-all --bytes 64MB --mesh X=8 --hardware v5p",
         "collective 'AllToAll_X([B_X, D] -> [B, D_X])' --mesh X=8 --dims B=4000000,D=8 --hardware v5p:8"),
        ("collective AllGather_X A[I_X,J] --mesh X=4 --dims I=8,J=8 --hardware v5e:4",
         "collective 'AllGather_X(A[I_X,J])' --mesh X=4 --dims I=8,J=8 --hardware v5e:4"),
        # the length of a run
        ("train my.txt --minutes 30", "train my.txt --time 30min"),
        ("train my.txt --max_train_hours 2", "train my.txt --time 2h"),
        ("train my.txt --walltime 01:30:00", "train my.txt --time 90min"),
        ("train my.txt --num_train_epochs 3", "train my.txt --epochs 3"),
        ("plan serve $S --concurrent-users 40", "plan serve $S --rate 40/min"),
        ("compare plan.toml vs b.toml --jsn", "compare plan.toml b.toml --json"),
        # a verb and the kind of its object
        ("explain plan.toml", "compare plan.toml"),
        ("optimize plan.toml", "tune plan.toml"),
        ("profile train.py", "audit train.py:step"),
        ("chat ckpt", "generate --checkpoint ckpt 'Once upon a time'"),
        ("finetune ckpt my.txt", "train --from ckpt --data my.txt"),
        ("quantise ckpt --bits 4 -o out", "quantize ckpt --to int4 -o out"),
        ("benchmark serving --url a:80 --users 3", "bench serve --url a:80 --concurrency 3"),
        ("plot roofline --model llama-3-8b --hardware v5e",
         "plot strategies --model llama-3-8b --hardware v5e:4x4"),
        ("launch -n 2 -- mw train plan.toml", "launch local -n 2 -- mw train plan.toml"),
        # an option in place of an argument, and the other way round
        ("train --config plan.toml --data my.txt", "train plan.toml --data my.txt"),
        ("train --data my.txt", "train my.txt"),
        ("train --resume-from ckpt/checkpoints/100", "train --run ckpt --resume"),
        ("serve ckpt -p 8000", "serve --checkpoint ckpt --port 8000"),
        ("serve ckpt --host 0.0.0.0:80", "serve --checkpoint ckpt --host 0.0.0.0 --port 80"),
        ("ui 8080", "ui --port 8080"),
        ("audit train.py step v5e:4x4", "audit train.py:step --hardware v5e:4x4"),
        ("compare plan.toml,b.toml", "compare plan.toml b.toml"),
        ("fit llama-3-8b@rtx4090", "fit llama-3-8b --hardware rtx4090"),
        # values
        ("plan serve $S --rate 5 --slo ttft=1s,tpot=50ms",
         "plan serve $S --rate 5 --ttft-p95 1s --tpot-p95 50ms"),
        ("plan serve $S --ttft 'p95<1s'", "plan serve $S --ttft 1s"),
        ("plan serve $S --rate 5 req/s", "plan serve $S --rate '5 req/s'"),
        ("plan serve $S --requests-per-hour 5000", "plan serve $S --rate 5000/h"),
        ("plan serve $S --prefix-caching 60%", "plan serve $S --prefix-hit 0.6"),
        ("plan serve --model llama-3-8b --hardware h100:8 --phase decode --batch 1 --context 8k",
         "plan serve --model llama-3-8b --hardware h100:8 --phase generate --batch 1 --context 8k"),
        ("plan train --model llama-3-8b --hardware v5p:4,4,4 --batch-tokens 1M --seq-len 8k",
         "plan train --model llama-3-8b --hardware v5p:4x4x4 --batch-tokens 1M --seq-len 8k"),
        ("plan train --model llama-3-8b --hardware H100 x 8 --batch-tokens 1M --seq-len 8k", "plan train $P"),
        ("plan train $P --given tensor=8 pipe=1", "plan train $P --given tensor=8,pipe=1"),
        ("plan train $P --no-tp", "plan train $P --given tensor=1"),
        # options whose value depends on others
        (
            "plan train --model llama-3-70b --hardware h100:64 --tp 8 --pp 4 --mbs 1 --gbs 1024 --seq 4096",
            "plan train --model llama-3-70b --hardware h100:64 --given tensor=8,pipe=4,microbatches=512 "
            "--batch-tokens 4194304 --seq-len 4096",
        ),
        ("bench serve --url a:80 --rps 5 --duration 60s", "bench serve --url a:80 --rate 5 --duration 60s"),
        (
            "plan serve $S --max-num-seqs 64",
            "plan serve --model llama-3-8b --hardware h100:8 --phase generate --batch 64 --context 1224",
        ),
        (
            "plan serve --model deepseek-v3 --hardware h200:16 --dp 2 --enable-expert-parallel --isl 1k "
            "--osl 9",
            "plan serve --model deepseek-v3 --hardware h200:16 --layout data=2,tensor=8,expert=16 "
            "--prompt-tokens 1k --output-tokens 9",
        ),
        ("plan train --model llama-3-70b --hardware v5p:64 --tokens 4M --seqlen 4096",
         "plan train --model llama-3-70b --hardware v5p:64 --batch-tokens 4M --seq-len 4096"),
        ("plan train --model llama-3-70b --hardware v5p:64 --BS 4e6 --T 4096",
         "plan train --model llama-3-70b --hardware v5p:64 --batch-tokens 4e6 --seq-len 4096"),
        ("plan train --model llama-3-8b --hardware h100 8 --batch-tokens 1M --seq-len 8k", "plan train $P"),
        ("plan train llama-3-8b on 8 h100 1M 8k", "plan train $P"),
        # several machines, of which one is incomplete
        ("compare h100 vs v5p:64 --model llama-3-8b --batch-tokens 1M --seq-len 8k",
         "plan train --hardware h100:8,v5p:64 --model llama-3-8b --batch-tokens 1M --seq-len 8k"),
        # paths and help of Windows
        (r"train '.\a.txt' --output 'C:\runs\1'", "train a.txt --run /mnt/c/runs/1"),
        ("report plan.toml --pdf -o report.pdf", "report plan.toml -o report.html"),
        ("all-gather 'A[I_X,J]' --mesh X=4 --dims I=1k,J=4k --hardware v5e:4",
         "collective 'AllGather_X([I_X,J])' --mesh X=4 --dims I=1k,J=4k --hardware v5e:4"),
        ("collective AllReduce --axis X --mesh X=16 --bytes 1GB --hardware v5e:16",
         "collective 'AllReduce_X([B]{U_X})' --mesh X=16 --dims B=500000000 --hardware v5e:16"),
        ("roofline v5e", "plot roofline v5e"),
        ("plan train -m llama3.1-70b -g 256 --gpu h100 --global-batch-size 512 --seq 8192",
         "plan train --model llama-3.1-70b --hardware h100:256 --batch-tokens 4194304 --seq-len 8192"),
        ("plan train --model llama-3-8b --hardware v6e:16x16 --num_slices 4 --batch-tokens 4M --seq-len 8192",
         "plan train --model llama-3-8b --hardware '4*v6e:16x16' --batch-tokens 4M --seq-len 8192"),
        ("plan train --model gpt2-xl --hardware h100:64 --batch-tokens 1M --seq-len 1k --layout tp4 pp4 dp4",
         "plan train --model gpt2-xl --hardware h100:64 --batch-tokens 1M --seq-len 1k "
         "--given tensor=4,pipe=4,data=4"),
        ('plan train --json \'{"model":"gpt2","hardware":"v5e:4x4","batch_tokens":"1M","seq_len":1024}\'',
         "plan train --json --model gpt2 --hardware v5e:4x4 --batch-tokens 1M --seq-len 1024"),
        ("plan train --num-layers 96 --hidden-size 12288 --hardware a100:64 --batch-tokens 1M --seq-len 2048",
         "plan train --set num_layers=96,d_model=12288 --hardware a100:64 --batch-tokens 1M --seq-len 2048 "
         "--model gpt-3-175b"),
        ("fit llama-3.3-70b --hardware macbook", "fit llama-3.3-70b --hardware m4-max"),
        ("lora ./absent", "train --from ./absent --lora 16 --data chats.jsonl"),
        ("reduce-scatter 256MiB on 8 h100",
         "collective 'ReduceScatter_{X,B}([B]{U_X})' --mesh X=8 --dims B=134217728 --hardware h100:8"),
        ("list hardware", "hardware"),
        ("hardware compare h100 b200", "plan train --hardware h100:32,b200:32 --model llama-3-70b "
         "--batch-tokens 4M --seq-len 4096"),
        ("compare llama-3-8b@h100:64 llama-3-8b@v6e:8x8 --tokens 1T",
         "compare llama-3-8b@h100:64 llama-3-8b@v6e:8x8 --batch-tokens 4M --seq-len 8k"),
        ("allgather 1GB v5p:4x4x4",
         "collective 'AllGather_X([B_X])' --mesh X=64 --dims B=500000000 --hardware v5p:4x4x4"),
        ("audit absent.py --hardware v5e-16", "audit absent.py:step --hardware v5e-16"),
        ("serve ./absent --tp 4 --max-num-seqs 128", "serve --checkpoint ./absent --tensor 4 --slots 128"),
        ("serve --checkpoint absent --bind-all", "serve --checkpoint absent --host 0.0.0.0"),
        ("what is the arithmetic intensity of llama-3-8b at batch 64", "model llama-3-8b --batch 64"),
        ("kv-cache llama-2-7b --context 4096 --batch 16", "model llama-2-7b --seq-len 4096 --batch 16"),
        ("flops gpt-3 --tokens 300B", "model gpt-3 --tokens 300B"),
        ("convert runs/absent hf/", "export runs/absent -o hf/"),
        ("does llama-3-8b fit rtx4090 or rtx3090", "fit llama-3-8b --hardware rtx4090,rtx3090"),
        # words of a shell on Windows, and of the book
        ("PLAN TRAIN --MODEL llama-3-8b --HARDWARE h100:8 --BATCH-TOKENS 1M --SEQ-LEN 8k", "plan train $P"),
        ("plan train --model:llama-3-8b --hardware:h100:8 --batch-tokens:1M --seq-len:8k", "plan train $P"),
        ("plan train --model llama-3-8b --hardware h100:8 --batch-tokens 4.000.000 --seq-len 8k",
         "plan train --model llama-3-8b --hardware h100:8 --batch-tokens 4000000 --seq-len 8k"),
        ("shard 'A[B_X, D] * W[D, F_Y]' --mesh X=8,Y=4 --B 4k --D 8k --F 2k",
         "shard 'A[B_X, D] . W[D, F_Y]' --mesh X=8,Y=4 --dims B=4k,D=8k,F=2k"),
        ("shard 'A[I_{XY}, J] . B[J, K]' --mesh X=4,Y=2 --dims I=8,J=8,K=8",
         "shard 'A[I_XY, J] . B[J, K]' --mesh X=4,Y=2 --dims I=8,J=8,K=8"),
        ("plan serve --phase decode --model llama-3-8b --hardware v5e:4x4 --batch 32 --kv-len 8192",
         "plan serve --phase generate --model llama-3-8b --hardware v5e:4x4 --batch 32 --context 8192"),
        ("plan serve --model llama-3-8b --hardware h100:8 --max-model-len 8192",
         "plan serve --model llama-3-8b --hardware h100:8 --prompt-tokens 7680 --output-tokens 512"),
        ("plan serve $S 20 requests per second", "plan serve $S --rate 20/second"),
        ("bench throughput --model llama-3-8b --hardware h100:8 --input-len 1k --output-len 200",
         "plan serve $S"),
        ("plan train $P --time-limit 14d --tokens 2T", "plan train $P --smallest --days 14 --tokens 2T"),
        ("status ckpt", "report ckpt"),
        ("train --run ckpt --resume latest --max-steps 9", "train --run ckpt --resume --steps 9"),
        ("audit train.py --hardware h100:8", "audit train.py:step --hardware h100:8"),
        # options that stand for all chips, or for a number that was dropped
        ("plan train $P --strategy fsdp", "plan train $P --given fsdp=8"),
        ("plan train $P --tp=2 --pp=2 --dp=2 --vpp 4",
         "plan train $P --given tensor=2,pipe=2,data=2,schedule=interleaved,interleave=4"),
        ("plan train $P --precision fp8", "plan train $P --given matmul_dtype=fp8"),
        ("plan serve --model llama-3-8b --hardware h100:8 --batch-size 64 --max-input-length 2000 "
         "--max-total-tokens 2500",
         "plan serve --model llama-3-8b --hardware h100:8 --phase generate --batch 64 --context 2500"),
        ("plan serve --model llama-3-8b --hardware h100:8 --batch 32 --ctx 8k",
         "plan serve --model llama-3-8b --hardware h100:8 --batch 32 --context 8k --phase generate"),
        ("launch -n 2 train plan.toml --data a", "launch local -n 2 -- mw train plan.toml --data a"),
        ("show hardware h100", "hardware h100"),
        ("carbon plan.toml", "compare plan.toml"),
        ("plan train --model llama-3-8b,--hardware h100:8,--batch-tokens 1M,--seq-len 8k", "plan train $P"),
        # the same option again
        ("plan train $P --given tensor=4 --given pipe=1", "plan train $P --given tensor=4,pipe=1"),
        ("plan train $P --remat full --remat full", "plan train $P --given remat=full"),
        # plans are files of -o, of mw audit a function of a script
        ("plan train $P --toml a.toml", "plan train $P -o a.toml"),
        ("plan train $P --emit a.toml", "plan train $P -o a.toml"),
        ("audit train.py --fn step --hardware v5e:4x4", "audit train.py:step --hardware v5e:4x4"),
        ("audit train.step --hardware v5e:4x4", "audit train.py:step --hardware v5e:4x4"),
        ("generate -m ckpt hi --temperature 0,7", "generate --checkpoint ckpt hi --temperature 0.7"),
        ("plan train $P --layout dp=2,tp=4,ga=8", "plan train $P --layout data=2,tensor=4,microbatches=8"),
        ("plan train $P --layout 'data=2 x tensor=4'", "plan train $P --layout data=2,tensor=4"),
        ("plan train $P --given 'tensor between 2 and 8'", "plan train $P --given 'tensor>=2,tensor<=8'"),
        ("plan train $P --max-memory 60GB", "plan train $P --given 'memory<=60GB'"),
        ("plan train $P --tokens 1T --finish-in '2 weeks'", "plan train $P --tokens 1T --smallest --days 14"),
        ("plan train $P --out-dir plans/", "plan train $P -o plans/plan.toml"),
        ("plan serve $S --rate 1000 per minute", "plan serve $S --rate 1000/minute"),
        ("plan serve --model llama-3-8b --hardware l4 a10 --prompt-tokens 1k --output-tokens 200",
         "plan serve --model llama-3-8b --hardware l4,a10 --prompt-tokens 1k --output-tokens 200"),
        ("plan serve llama-3-8b h100:8 1k 200", "plan serve $S"),
        ("please plan serving of llama-3-8b on h100:8 --prompt-tokens 1k --output-tokens 200",
         "plan serve $S"),
        ("find-layout $P", "plan train $P"),
        ("serve-plan $S", "plan serve $S"),
        ("plan train $P --stage 2", "plan train $P --given zero=2"),
        ("plan train $P --out out.json", "plan train $P -o out.toml"),
        ("plan serve $S --requests 1000/day", "plan serve $S --rate 1000/day"),
        ("hardware --gpu h100", "hardware h100"),
        ("plan train $P --context 2 --n-best 5", "plan train $P --given context=2 --top 5"),
        ("plan serve $S --slo-ttft 500ms", "plan serve $S --ttft 500ms"),
        ("best layout llama-3-8b h100:8 --batch-tokens 1M --seq-len 8k", "plan train $P"),
        ("audit plan.toml --target=TPU", "audit plan.toml --target tpu"),
        ("train plan.toml --data my.txt --save-dir a", "train plan.toml --data my.txt --run a"),
        ("how many tokens per second llama-3-8b on h100:8",
         "plan serve --model llama-3-8b --hardware h100:8 --prompt-tokens 8k --output-tokens 512"),
        ("which gpu for llama-3-8b", "fit llama-3-8b"),
        ("llama-3-8b rtx4090", "fit llama-3-8b --hardware rtx4090"),
        ("audit plan.toml on gpu", "audit plan.toml --target gpu"),
        ("audit my.txt --hardware v5p", "audit --hlo my.txt --hardware v5p"),
        # lengths that a plan of serving needs
        ("plan serve --model llama-3-8b --hardware h100:8 --qps 5",
         "plan serve --model llama-3-8b --hardware h100:8 --rate 5 --prompt-tokens 1k --output-tokens 256"),
        # bytes in place of an array
        ("collective all-gather --size 1GB --hardware v5p:4x4x4",
         "collective 'AllGather_X([B_X])' --mesh X=64 --dims B=500000000 --hardware v5p:4x4x4"),
        ("shard 'A[Ix, Jy] . B[Jy, K]' --mesh x=2,y=2 --dims i=8,j=8,k=8",
         "shard 'A[I_X, J_Y] . B[J_Y, K]' --mesh X=2,Y=2 --dims I=8,J=8,K=8"),
    ],
)  # fmt: skip
def test_lines_of_people_who_do_not_know_the_commands(
    typed: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    test_the_whole_line_is_named(typed, line, capsys)


@pytest.mark.parametrize(
    "typed",
    [
        "plan train --model --hardware",
        "collective psum --hardware",
        "it's.py \\",
        "shard 0 --mesh X=4,Y=2 --search -inf",  # whose examples are lines that go on after a backslash
        "help --json " + "a" * 300 + " plan",  # no file's name
        "plan serve --model llama-3.2-1b --hardware h100:1x8 --layout fsdp=0",
    ],
)
def test_lines_without_values_are_answered(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.startswith("mw: ")


def test_an_error_in_the_search_for_a_corrected_line_leaves_the_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("meshwright.cli.corrected_line.corrected_line", fails)
    assert main(["plan", "trian"]) == 2
    assert "trian" in capsys.readouterr().err


def test_a_word_of_white_space_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan serve --model llama-3.2-1b WHITE h100:1x8 --prompt-tokens 512 --output-tokens 128 --set h100"
    assert main([word.replace("WHITE", "\n") for word in line.split()]) == 2
    assert capsys.readouterr().err.startswith("mw: ")


@pytest.mark.parametrize(
    ("typed", "number"),
    [
        ("plan train $P --headroom 10GB", "10%"),
        ("plan train $P --layout 8x64", "fsdp=4"),
        ("plan train $P --layout 'Mesh((8,64))'", "fsdp=4"),
        ("fit llama-3-8b --hardware m2", "--hardware m2-ultra"),
        ("fit llama-3-8b --gpu a10g", "h100"),
        ("plan train --model llama-3-8b --hardware runpod --batch-tokens 1M --seq-len 8k", "ironwood"),
        ("serve ckpt:8000", "runs/demo"),
    ],
)
def test_no_line_has_another_number_or_chip(
    typed: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert number not in _answer(typed, capsys).partition("type mw ")[2]


@pytest.mark.parametrize(
    "typed",
    [
        "plan train $P --top 1,2,4",  # several numbers
        "serve --checkpoint a --slots all",  # no number
        "plan train --model llama-3-8b --hardware v5e:300 --batch-tokens 1M --seq-len 8k",
        "shard 'A[I_X, J] . B[J, K_X] -> C[I_X, K_X]' --mesh X=4 --dims I=8,J=8,K=8",
        "finetune",
        "fit llama-3-8b --hardware rtx4090:two",
        "plan train --model llama-3-8b --hardware h100:12 --batch-tokens 1M --seq-len 8k",
        "plan train --model llama-3-8b --hardware tpu --batch-tokens 1M --seq-len 8k",
        "plan train $P --given tensor=4 --given tensor=8",  # two values, of which one would be dropped
        "plan train $P --remat none --remat full",
        "model gemma --heads",  # one of several models
        "train --config none.toml",  # without its only value the line is no answer
    ],
)
def test_no_line_is_guessed(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that nobody typed, such as the example of a message, is in no line."""
    assert "type mw " not in _answer(typed, capsys).replace("type mw train --from DIR --lora 16", "")


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        (
            "train --model gpt2 --data my.txt --lr 3e-4 --bs 64",
            "mw plan train --model gpt2 --batch-tokens 65536 --hardware cpu:8 --seq-len 1024 -o plan.toml && "
            "mw train plan.toml --data my.txt --learning-rate 3e-4",
        ),
        (
            "serve org/name --tensor-parallel-size 4",
            "hf download org/name --local-dir name && mw serve --checkpoint name --tensor 4",
        ),
        (
            "train my.txt --n_layer 6 --n_head 8 --n_embd 512 --block_size 256",
            "mw plan train --set num_layers=6,num_heads=8,d_model=512,max_seq_len=256,num_kv_heads=8 "
            "--seq-len 256 --model tiny --hardware cpu:8 --batch-tokens 4096 -o plan.toml && "
            "mw train plan.toml --data my.txt",
        ),
        ("plan train $P --html", "mw plan train $P -o plan.toml && mw report plan.toml -o report.html"),
        ("plan train $P --report a.html", "mw plan train $P -o plan.toml && mw report plan.toml -o a.html"),
        (
            "train my.txt --model gpt2 --epochs 3",
            "mw plan train --model gpt2 --hardware cpu:8 --seq-len 1024 --batch-tokens 16384 -o plan.toml && "
            "mw train plan.toml --data my.txt --epochs 3",
        ),
    ],
)
def test_work_of_two_commands_is_two_lines(
    typed: str, lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _answer(typed, capsys).endswith(f"type {lines.replace('$P', TRAIN)}")


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("memory llama-3-70b --batch-size 1 --hardware h100:8", "--batch-size: it shows LoRA, QLoRA and"),
        ("roofline v5e --dtype bf16", "--dtype bf16 has no counterpart in mw plot roofline"),
        ("is 24GB enough for llama-3-8b", "24GB: a10 has that memory"),
        ("fit a 13b on a 3090", "llama-2-13b is a model of that size"),
        (
            "cost of training llama-3-8b for $500,000",
            "$500,000: of a run of 1T tokens, which --tokens changes",
        ),
        ("fit llama-3-8b on a 4090 for $500,000", "$500,000: mw plan train --tokens 1T --budget 50k bounds"),
        ("how many gpus to serve llama-3-8b to 900 users", "900 users: at a request a minute of each"),
        ("plan serve --model llama-3-8b --users 1000 --hardware h100", "are --rate 1000/min"),
        ("logs ckpt", "tail -f ckpt/metrics.jsonl"),
    ],
)
def test_what_a_line_leaves_out_is_named(typed: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reason in _answer(typed, capsys)


@pytest.mark.parametrize(
    ("typed", "template", "line"),
    [
        (
            "fit gpt2 --gpu 'NVIDIA GeForce RTX 4070 Ti'",
            "rtx4090 > rtx-4070-ti",
            "fit gpt2 --hardware rtx-4070-ti.toml:1",
        ),
        ("fit gpt2 on 2x rtx 3080", "rtx3090 > rtx-3080", "fit gpt2 --hardware rtx-3080.toml:2"),
        (
            "plan train --model gpt2 --hardware a6000:4 --gbs 8 --seq 1024",
            "a10 > a6000",
            "plan train --model gpt2 --hardware a6000.toml:4 --batch-tokens 8192 --seq-len 1024",
        ),
    ],
)
def test_a_chip_that_the_catalog_lacks_gets_a_file(
    typed: str, template: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = _answer(typed, capsys)
    assert answer.endswith(
        f"type mw hardware --template {template}.toml, edit its figures, then type mw {line}"
    )


def test_a_number_of_hosts_is_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            shlex.split(f"plan train {TRAIN} -o plan.toml --layout fsdp=16,remat=full".replace(":8", ":2x8"))
        )
        < 2
    )
    for typed in ("launch --nodes 2 train plan.toml", "launch slurm --nnodes 2 train plan.toml"):
        assert _answer(typed, capsys).endswith("type mw launch slurm -- mw train plan.toml")
    torchrun = "train plan.toml --nproc_per_node 8 --nnodes 2 --master_addr a --master_port 1 --steps 5"
    assert _answer(torchrun, capsys).endswith("type mw launch slurm -- mw train plan.toml --steps 5")
    other = _answer("launch --nodes 3 train plan.toml", capsys)
    assert "--hardware h100:3x8 -o plan.toml plans for 3 hosts" in other
    assert not other.endswith("mw train plan.toml")


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("run.sbatch", "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun pretrain_gpt.py "
         "--tensor-model-parallel-size 8 --seq-length 4096 --global-batch-size 512 --num-layers 32\n",
         "a script for SLURM; mw launch slurm -- mw train plan.toml writes one; type mw plan train "
         "--hardware h100:4x8 --given tensor=8 --seq-len 4096 --batch-tokens 2097152 --set num_layers=32"),
        ("base.yml", "model_name: llama2-70b\nper_device_batch_size: 4\nici_tensor_parallelism: 4\n",
         "MaxText's settings; type mw plan train --model llama-2-70b --given tensor=4"),
        ("axolotl.yml", "base_model: meta/x\nsequence_len: 64\nlora_r: 8\ndatasets:\n  - path: a/b\n",
         "axolotl's settings; type hf download meta/x --local-dir x && hf download a/b --repo-type dataset "
         "--local-dir b && mw train --from x --lora 8 --data b"),
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "DeepSpeed's settings; type mw plan train"),
        ("titan.toml", "[parallelism]\ntensor_parallel_degree = 2\n",
         "torchtitan's settings; type mw plan train --given tensor=2"),
        ("job.yaml", "apiVersion: batch/v1\nkind: Job\n", "a Kubernetes manifest, which kubectl apply -f"),
        ("trace.json", '{"traceEvents": []}', "a profiler's trace; to audit a program"),
    ],
)  # fmt: skip
def test_files_of_other_programs_are_named(
    name: str, text: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the line that says the same here, from their settings."""
    path = tmp_path / name
    path.write_text(text)
    assert answer in _answer(f"train {path}", capsys)


def test_a_script_is_audited_by_its_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("def loss(w): ...\n\ndef train_step(w): ...\n")
    assert f"type mw audit {path}:train_step" in _answer(f"audit {path}", capsys)
    assert _answer(f"audit {path}::loss", capsys).endswith(f"type mw audit {path}:loss")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        # models, machines and amounts in several words
        ("fit mistral 7b --hardware 2x3090 --lora", "fit mistral-7b --hardware 2x3090"),
        ("model llama3.1:8b", "model llama-3.1-8b"),
        ("hardware tpu v5e", "hardware v5e"),
        (
            "plan train --model llama-3-8b --hardware h100:8 --batch 4e6 tokens --seq-len 8k",
            "plan train --model llama-3-8b --hardware h100:8 --batch-tokens 4e6 --seq-len 8k",
        ),
        (
            "plan train --model llama-3-70b --hardware h100 --deadline 2 weeks --tokens 1T --seq-len 8k "
            "--batch 64 seqs",
            "plan train --model llama-3-70b --hardware h100 --smallest --days 14 --tokens 1T --seq-len 8k "
            "--batch-tokens 524288",
        ),
        # everyday names of machines
        ("fit llama-3-8b macbook", "fit llama-3-8b --hardware m4-max"),
        ("fit llama-3-8b --vram 48GB", "fit llama-3-8b --hardware l40"),
        (
            "compare gpu tpu",
            "plan train --hardware h100:32,v5p:32 --model llama-3-70b --batch-tokens 4M --seq-len 4096",
        ),
        (
            "compare 'H100 8' 'MI300X 8' --for llama-3-70b",
            "plan train --hardware h100:8,mi300x:8 --model llama-3-70b --batch-tokens 4M --seq-len 4096",
        ),
        ("compare llama-3-8b qwen2.5-7b --hardware h100:8",
         "compare llama-3-8b@h100:8 qwen2.5-7b@h100:8 --batch-tokens 4M --seq-len 8k"),
        # another program's name in place of a model
        ("serve vllm", "plan serve --engine vllm --model llama-3-70b --hardware h100:4 --prompt-tokens 8k "
         "--output-tokens 512"),
        ("plan serve trtllm $S", "plan serve --engine trtllm $S"),
        ("megatron --tp 8 $P", "plan train --for megatron --given tensor=8 $P"),
        # layouts with other axes
        ("plan train $P --layout X=4,Y=2", "plan train $P --layout fsdp=4,tensor=2"),
        ("plan train $P --layout DATA=4,TP=2", "plan train $P --layout data=4,tensor=2"),
        ("plan train $P --mesh data=4,model=2", "plan train $P --layout data=4,tensor=2"),
        ("plan train $P --ici_fsdp_parallelism=-1", "plan train $P --given fsdp=8"),
        # settings without dashes
        (
            "plan train model_name=llama3-8b hardware=h100:8 ici_fsdp_parallelism=8 per_device_batch_size=4 "
            "max_target_length=8192",
            "plan train --model llama-3-8b --hardware h100:8 --given fsdp=8 --batch-tokens 262144 "
            "--seq-len 8192",
        ),
        # a range, and hours
        (
            "plan serve --model llama-2-13b --hardware v5e:4x4 --context 8192 --batch 1:16",
            "plot decode --model llama-2-13b --hardware v5e:4x4 --context 8192 --batches 1,2,4,8,16",
        ),
        ("plan train $P --hours 36 --tokens 1T", "plan train $P --smallest --days 1.5 --tokens 1T"),
        ("bench serve --url a:80 --rps 5 --duration 2m", "bench serve --url a:80 --rate 5 --duration 2min"),
        ("bench serve --url a:80 --minutes 5", "bench serve --url a:80 --duration 5min"),
        # one matmul, and collectives of bytes
        ("roofline 512x4096x1024 v5e:8",
         "shard 'A[I, J] . B[J, K] -> C[I, K]' --mesh X=1 --dims I=512,J=1024,K=4096 --hardware v5e:1"),
        ("gemm --m 512 --n 4096 --k 1024 --dtype fp8",
         "shard 'A[I, J] . B[J, K] -> C[I, K]' --mesh X=1 --dims I=512,J=1024,K=4096 --dtype fp8"),
        ("allreduce --size 512MB --gpus 16",
         "collective 'AllReduce_X([B]{U_X})' --mesh X=16 --dims B=256000000 --hardware h100:16"),
        ("collective all-gather 1GB v5e 8",
         "collective 'AllGather_X([B_X])' --mesh X=8 --dims B=500000000 --hardware v5e:8"),
        ("plan train $P --tokens 1T --budget '50k per hour'",
         "plan train $P --tokens 1T --max-price-per-hour 50k"),
        ("plan train $P -o json", "plan train $P --json"),
        # sizes of the notation
        ("shard 'A[I_X, J] . B[J, K]' X=8 I=8,J=8,K=8",
         "shard 'A[I_X, J] . B[J, K]' --mesh X=8 --dims I=8,J=8,K=8"),
        ("shard 'In[B, D_Y] *D W[D_Y, F]' --mesh Y=2 --dims B=8,D=8,F=8",
         "shard 'In[B, D_Y] . W[D_Y, F]' --mesh Y=2 --dims B=8,D=8,F=8"),
        ("collective all-reduce --bytes 2*1024*8192 --hardware v5e:4x4",
         "collective 'AllReduce_X([B]{U_X})' --mesh X=16 --dims B=8388608 --hardware v5e:4x4"),
        # number types, phases, and values that were typed before inferred ones
        ("collective 'AllGather_X([A_X])' --mesh X=4 --dims A=1M --hardware v5e:4 --fp32",
         "collective 'AllGather_X([A_X])' --mesh X=4 --dims A=1M --hardware v5e:4 --dtype f32"),
        ("plan serve --model llama-2-13b --hardware v5e:4x2 --mode decode --batch 16 --seq 8192 --int8-kv",
         "plan serve --model llama-2-13b --hardware v5e:4x2 --phase generate --batch 16 --context 8192 "
         "--kv-dtype int8"),
        ("plan train $P --software torchtitan --compile", "plan train $P --software torchtitan"),
        ("plan train --model llama-3-8b --gpu h100 --count 8 --batch-tokens 1M --seq-len 8k",
         "plan train $P"),
        ("fit llama-3-405b --hardware h100:8 --int4", "fit llama-3.1-405b --hardware h100:8"),
        ("fit llama-3-70b 2x 4090 --int4", "fit llama-3-70b --hardware 2x4090"),
        ("cost of serving llama-3-70b on 8 h100",
         "plan serve --model llama-3-70b --hardware h100:8 --prompt-tokens 8k --output-tokens 512"),
        # servers without stages, plans that do not exist, and an example of a machine for the model
        ("serve --checkpoint a --pipeline-parallel-size 2 --tensor-parallel-size 2",
         "serve --checkpoint a --tensor 4"),
        ("plan train --model mistral-7b --batch-tokens 4M --seq-len 4k --tokens 300B",
         "plan train --model mistral-7b --batch-tokens 4M --seq-len 4k --tokens 300B --hardware h100:16"),
        ("plan train --model gpt2 --hardware colab-l4 --batch-tokens 12k --seq-len 1k",
         "plan train --model gpt2 --hardware l4:1 --batch-tokens 12k --seq-len 1k"),
        ("plan train --model gpt2 --gpu colab --batch-tokens 12k --seq-len 1k",
         "plan train --model gpt2 --hardware t4:1 --batch-tokens 12k --seq-len 1k"),
        # terms
        ("what does FSDP mean?", "help fsdp"),
        ("explain tensor parallelism", "help tensor-parallelism"),
        # a command of mw after --
        ("launch slurm --partition gpu -- train plan.toml",
         "launch slurm --partition gpu -- mw train plan.toml"),
    ],
)  # fmt: skip
def test_names_and_amounts_as_people_say_them(
    typed: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = shlex.join(["mw", *shlex.split(line.replace("$P", TRAIN).replace("$S", SERVE))])
    assert _answer(typed, capsys).partition(" (--")[0].endswith(f"type {wanted}")


def test_a_number_of_hosts_without_a_plan_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = _answer("launch plan.toml --nodes 4", capsys).partition("type ")[2]
    planned, launched = line.partition(" (--")[0].split(" && ")
    assert planned.startswith("mw plan train --hardware h100:4x8 -o plan.toml --model ")
    assert launched == "mw launch slurm -- mw train plan.toml"


def test_a_vocabulary_of_a_text_is_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("Some words.\n")
    answer = _answer("train my.txt --vocab-size 2000 --n-layer 4", capsys)
    assert "mw plan train --set vocab_size=2000,num_layers=4 --model tiny" in answer
    assert answer.endswith("&& mw train plan.toml --data my.txt")


def test_devices_are_chosen_by_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    answer = _answer("train my.txt --gpus 2 --lr 3e-4", capsys)
    assert answer.endswith("type CUDA_VISIBLE_DEVICES=0,1 mw train my.txt --learning-rate 3e-4")


def test_quoted_patterns_are_the_files_they_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    answer = _answer("train p.toml --data '*.txt' --lr 3e-4", capsys)
    assert answer.endswith("type mw train p.toml --data a.txt --data b.txt --learning-rate 3e-4")
