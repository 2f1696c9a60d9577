"""The things that the chapters describe, for test_book."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One thing of a chapter.

    number: A sharding, B Transformers, C training, D inference, E tensor parallelism. command: a line of the
    page, or of a page that it links to, that prints `figure`. code: `file#name` that the page links to. says:
    words of the page. slow: the command takes seconds. test: `file#name` of the test in tests/ that proves it, if
    no command shows it.
    """

    number: str
    page: str
    thing: str
    command: str = ""
    figure: str = ""
    code: str = ""
    says: str = ""
    slow: bool = False
    test: str = ""


_A, _B, _C, _D, _E = "sharding", "transformers", "training", "inference", "tensor-parallelism"

_BYTES = 'mw shard "A[I_XY, J]" --mesh X=8,Y=2 --dims I=1024,J=4096 --dtype f32 --hardware h100:2x8'
_INT8 = 'mw shard "A[I_XY, J]" --mesh X=2,Y=8,Z=2 --dims I=128,J=2048 --dtype int8'
_FIVE = (
    'mw shard "A[B_X, D] . W[D, F_YZ] -> C[B_X, F_YZ]" --mesh X=4,Y=4,Z=4 --dims B=1024,D=8192,F=32768 '
    "--hardware v5p:4x4x4"
)
_FOUR = (
    'mw shard "X[B, D] . Y[D_X, F] -> Z[B, F]" --mesh X=4 --dims B=1024,D=8192,F=32768 --hardware v5p:2x2x1'
)
_SIX = (
    'mw shard "A[I_X, J_Y] . B[J_Y, K] -> C[I_X, K]" --mesh X=4,Y=4 --dims I=1024,J=4096,K=4096 '
    "--hardware v5e:4x4"
)
_SEVEN = (
    'mw shard "x[B, D] . w[D, F] -> h; h . v[F, D] -> y[B, D]" --search x,w,v,y --memory-limit 300M --mesh X=4 '
    "--dims B=128,D=8192,F=32768 --hardware v5e:2x2"
)
_NINE = (
    'mw shard "A[I, J_X] . B[J, K] -> C[I, K_X]" --mesh X=4 --dims I=4096,J=4096,K=1024 --hardware v5e:2x2'
)
_GATHER = 'mw collective "AllGather_X([B_X, D])" --mesh X=16,Y=16 --dims B=16384,D=16384 --hardware v5e:16x16'
_ONE_WAY = (
    'mw collective "AllGather_X([B_X, D])" --one-way --mesh X=16,Y=16 --dims B=16384,D=16384 '
    "--hardware v5e:16x16"
)
_ALL_TO_ALL = (
    'mw collective "AllToAll_X([B_X, D] -> [B, D_X])" --mesh X=16,Y=16 --dims B=16384,D=16384 '
    "--hardware v5e:16x16"
)
_V4P = "--mesh X=4,Y=4,Z=4 --dims B=1024,D=4096 --hardware v4p:4x4x4"
_TWO_X = f'mw collective "AllGather_X([B_X, D_Y])" {_V4P}'
_TWO_XY = f'mw collective "AllGather_XY([B_X, D_Y])" {_V4P}'
_TWO_Z = f'mw collective "AllReduce_Z([B_X, D_Y]{{U_Z}})" {_V4P}'
_SMALL = 'mw collective "AllGather_X([B_X])" --mesh X=4,Y=4,Z=4 --dims B=128 --hardware v4p:4x4x4'
_LINE = 'mw collective "AllGather_Y([E_Y, F])" --mesh X=8,Y=4 --dims E=2048,F=8192 --hardware v5e:8x4'
_BANDWIDTH = "mw plot bandwidth --hardware v5e:16x16"
_SUBSCRIPT = 'mw shard "A[I_XY, J] -> A[I_Y, J]" --mesh X=4,Y=4 --dims I=1024,J=4096 --hardware v5p:4x4x1'
_DIMS = "--dims B=48k,D=8k,F=32k"
_DP = (
    'mw shard "In[B_X, D] . Win[D, F] -> Tmp; Tmp . Wout[F, D] -> Out[B_X, D]" --backward '
    f"--mesh X=64 {_DIMS} --hardware v5p:4x4x4"
)
_FSDP = (
    'mw shard "In[B_X, D] . Win[D_X, F] -> Tmp; Tmp . Wout[F, D_X] -> Out[B_X, D]" --backward '
    f"--mesh X=64 {_DIMS} --hardware v5p:4x4x4"
)
_TP = (
    'mw shard "In[B, D_Y] . Win[D, F_Y] -> Tmp; Tmp . Wout[F_Y, D] -> Out[B, D_Y]" --backward '
    f"--mesh Y=4 {_DIMS} --hardware v5p:4x1x1"
)
_BOTH = (
    'mw shard "In[B_X, D_Y] . Win[D_X, F_Y] -> Tmp; Tmp . Wout[F_Y, D_X] -> Out[B_X, D_Y]" --backward '
    f"--mesh X=16,Y=4 {_DIMS} --hardware v5p:4x4x4"
)
_16B = "mw model docs/book/dense-16b.toml --kv-dtype int8"
_LONG = "mw model docs/book/dense-16b.toml --seq-len 16384"
_8B = "mw model llama-3-8b --seq-len 8192"
_13B = "mw model llama-2-13b"
_V3 = "mw model deepseek-v3"
_REMAT = (
    "mw plan train --model llama-2-13b --hardware v5p:16x16x16 --batch-tokens 4Mi --seq-len 4096 "
    "--layout fsdp=1024,tensor=4,remat={} --ideal"
)
_ATTENTION = "mw plot attention --model llama-3-8b"
_V5E = "mw hardware v5e:4x4"
_THREE = (
    "mw plan train --model llama-2-13b --hardware v5p:16x16x16 --batch-tokens 3Mi --seq-len 1024 "
    "--layout fsdp=1024,tensor=4,remat=matmuls --ideal --explain"
)
_PIPE = (
    "mw plan train --model llama-2-13b --hardware v5p:2x2x2 --batch-tokens 256Ki --seq-len 4096 "
    "--layout pipe=8,microbatches={},schedule={},remat=full --ideal"
)
_SLICES = "mw hardware 2*v5p:16x16x16"
_TWO_SLICES = (
    "mw plan train --model llama-2-13b --hardware 2*v5p:16x16x16 --batch-tokens 6Mi --seq-len 1024 "
    "--layout data=2,fsdp=1024,tensor=4,remat=matmuls --ideal"
)
_STRATEGIES = "mw plot strategies --model llama-2-13b --set d_ff=30000 --hardware v5p:4x4x4"
_DEGREE = "mw plot fsdp --model llama-2-13b --hardware v5p:16x16x16 --batch-tokens 3M"
_QUIZ = (
    "mw plot decode --model docs/book/quiz-30b.toml --hardware v5e:4x4 --weights-dtype int8 --context 8192 "
    "--batches 4,256"
)
_TABLE = "mw plot decode --model llama-2-13b --set max_seq_len=8192 --hardware v5e:8 --context 8192"
_GQA = (
    "mw plot decode --model llama-2-13b --set max_seq_len=8192,num_kv_heads=8 --hardware v5e:8 --context 8192"
)
_PARTS = (
    "mw plan serve --phase generate --model llama-2-13b --set max_seq_len=8192 --hardware v5e:8 --batch 16 "
    "--context 8192 --ideal"
)
_18B = "mw model docs/book/served-18b.toml --kv-dtype int8"
_ONE_LONG = (
    "mw plan serve --phase generate --model docs/book/served-18b.toml --hardware v5e:4x4 --weights-dtype int8 "
    "--kv-dtype int8 --batch 1 --context 128k --ideal"
)
_BATCHED = (
    "mw plan serve --phase generate --model docs/book/served-18b.toml --hardware v5e:4x4 --weights-dtype int8 "
    "--kv-dtype int8 --matmul-dtype int8 --batch 64 --context 8k --layout tensor=8,kv_replicas=2,cache=batch "
    "--ideal"
)
_MOE = "mw model docs/book/served-moe.toml"
_MOE_128 = (
    "mw plan serve --phase generate --model docs/book/served-moe.toml --hardware v5e:8x16 --weights-dtype int8 "
    "--kv-dtype int8 --batch 16 --context 8k --layout data=16,expert=16,tensor=8 --ideal"
)
_2D = (
    'mw shard "In[B, D_XYZ] . Win[D_X, F_YZ] -> Tmp; Tmp . Wout[F_YZ, D_X] -> Out[B, D_XYZ]" '
    "--mesh X=4,Y=4,Z=8 --dims B=2048,D=8192,F=32768 --hardware v5p:4x4x8"
)
_12 = (
    'mw shard "X[B, D] . Wq[D, N_YZ, H] -> Q[B, N, H]; Qg[B, K, G, H] = split(Q); '
    "L[B, K, G, S] = Qg . Kc[B_Z, S, K_Y, H]; M[B, K, G] = max_S(L); E[B, K, G, S] = exp(L, M); "
    "Sum[B, K, G] = sum_S(E); A[B, K, G, H] = E . Vc[B_Z, S, K_Y, H]; O[B, K, G, H] = divide(A, Sum); "
    'Om[B, N, H] = merge(O); Y[B, D] = Om . Wo[N_YZ, H, D]" --mesh Y=8,Z=2 '
    "--dims B=64,D=4096,N=32,K=8,G=4,H=256,S=8192 --hardware v5e:4x4"
)
_ENGINES = "mw bench serve --plan docs/book/served-13b-plan.toml --rate 4 --requests 200 --mode all --ideal"
_FSDP_SERVED = (
    "mw plan serve --phase generate --model llama-2-13b --hardware v5e:8 --batch 16 --context 2k --layout fsdp=8 "
    "--ideal"
)
_AHEAD = "mw plot lookahead --acceptance 0.6,0.8,0.9 --draft-cost 0.06"
_LAYER = (
    'mw shard "x[B, D] . w[D, F_X] -> h; h . v[F_X, D] -> y[B, D]{{U_X}}" --mesh X=4 '
    "--dims B={},D=8192,F=32768 --hardware v5e:2x2"
)
_BLOCK = (
    'mw shard "x[B, D] . w[D, F_Y] -> h; a[B, F] = gelu(h); a . v[F_Y, D] -> y[B, D]" --mesh Y=8 '
    "--dims B=8192,D=8192,F=32768 --hardware h100:1x8 --backward"
)
_ROW_FIRST = (
    'mw shard "x[B, D_Y] . w[D_Y, F] -> h[B, F]; a[B, F] = gelu(h); a . v[F, D_Y] -> y[B, D_Y]" --mesh Y=8 '
    "--dims B=8192,D=8192,F=32768 --hardware h100:1x8"
)
_LOSS = (
    'mw shard "x[B, T, D] . u[D, V_Y] -> logits; peak[B, T] = max_V(logits); e[B, T, V] = exp(logits, peak); '
    "total[B, T] = sum_V(e); hit[B, T] = logits . targets[B, T, V_Y]; "
    'loss[B, T] = nll(hit, peak, total)" --mesh Y=8 --dims B=8,T=4096,D=8192,V=128k --hardware h100:1x8'
)
_256 = (
    "mw plan train --model llama-3-70b --hardware h100:32x8 --batch-tokens 1Mi --seq-len 4096 "
    "--layout data=32,tensor=8,zero=1,remat=full --ideal"
)
_1024 = (
    "mw plan train --model megatron-gpt-145b --hardware a100-80gb:128x8 --batch-tokens 4Mi --seq-len 2048 "
    "--layout data=64,tensor=16,zero=1,microbatches=16,remat=full --ideal"
)
_LATENCY = "mw plot latency h100 --bytes 1Ki"
_3D = (
    "mw plan train --model megatron-gpt-18b --hardware a100-80gb:4x8 --batch-tokens 1Mi --seq-len 2048 "
    "--layout data=2,tensor=4,pipe=4,microbatches=16,remat=full --ideal"
)
_KV_HEADS = "mw plan train --model llama-3-70b --hardware h100:2x8 --batch-tokens 64Ki --seq-len 4096 --layout tensor=16"

ITEMS = (
    Item("A1", _A, "local shape", _BYTES, "a block [64, 4096]", "notation/array.py#ShardedArray"),
    Item("A2", _A, "named mesh axes, replicas", _INT8, "2 devices hold each block", "notation/mesh.py#Mesh"),
    Item("A3", _A, "quiz: bytes and load time", _BYTES, "1.05 MB", says="its 262 kB in the same sentence counts elements"),
    Item("A4", _A, "pictures of shardings", code="notation/roles.py#case_of", says="![Case 1: blocks of each device]", test="notation/test_roles.py#test_cases"),
    Item("A5", _A, "the order of axes", _SUBSCRIPT, "Permute_YX A[I_XY, J] -> A[I_YX, J]", says="X is the major axis"),
    Item("A6", _A, "an axis twice is an error", 'mw shard "A[I_X, J_X]" --mesh X=4 --dims I=8,J=8', "used twice", "notation/parse.py#parse_array"),
    Item("A7", _A, "quiz: int8 bytes", _INT8, "524 kB", says="The second has 16,384 bytes (16.4 kB) a device, and 512 KiB"),
    Item("A8", _A, "PartitionSpec", code="nn/start/device_mesh.py#partition_spec", test="nn/start/test_device_mesh.py#test_there_and_back"),
    Item("A9", _A, "gather or reduce, ranked", _FOUR, "3.43 ms 1.2 ms 2.24 ms 755 MB gather Y over X"),
    Item("A10", _A, "block matrices", code="cost/strategies.py#strategies", says="../images/matmul-case-2.svg", test="cost/test_strategies.py#test_a_strategy_costs_what_its_steps_cost"),
    Item("A11", _A, "case 1", _FIVE, "case 1, splits B of A"),
    Item("A12", _A, "case 2", _NINE, "case 2, splits only J of A"),
    Item("A13", _A, "case 3", _SIX, "case 3, splits J of A and J of B"),
    Item("A14", _A, "case 3 with ReduceScatter", _SIX, "ReduceScatter_Y C[I_X, K]{U_Y} -> C[I_XY, K]"),
    Item("A15", _A, "case 4", 'mw shard "A[I_X, J] . B[J, K_X] -> C[I_X, K_X]" --mesh X=4 --dims I=1024,J=1024,K=1024', "only a block of the diagonal", "notation/roles.py#case_of", "**Case 4.**"),
    Item("A16", _A, "one of two subscripts", _SUBSCRIPT, "AllGather_X A[I_YX, J] -> A[I_Y, J]", says="`A[I_XY] -> A[I_X]` is an AllGather over Y"),
    Item("A17", _A, "AllGather V / W", _GATHER, "5.97 ms"),
    Item("A18", _A, "a one-way ring", _ONE_WAY, "11.2 ms"),
    Item("A19", _A, "latency", _BANDWIDTH, "1.02 kB 128 MB/s", "cost/collectives.py#_hops"),
    Item("A20", _A, "several axes V / (n W)", _TWO_XY, "46.6 us", "cost/collectives.py#_geometry"),
    Item("A21", _A, "quiz: v5e 8x4", _LINE, "559 us", says="560 µs as a line, 377 µs with wraparound links"),
    Item("A22", _A, "bandwidth over size", _BANDWIDTH, "90 GB/s", says="--plot"),
    Item("A23", _A, "AllReduce is twice", _TWO_Z, "11.7 us", "cost/collectives.py#_parts"),
    Item("A24", _A, "ReduceScatter takes the time of AllGather", _BANDWIDTH, "268 MB 90 GB/s 90 GB/s 45 GB/s"),
    Item("A25", _A, "transposes", code="notation/derive.py#derive", says="are each other's", test="notation/test_derive.py#test_devices_together_compute_the_dense_results_and_gradients"),
    Item("A26", _A, "AllToAll is a quarter", _ALL_TO_ALL, "1.49 ms", says="its derivation and its table have an AllGather"),
    Item("A27", _A, "AllToAll over N dimensions", code="cost/collectives.py#_all_to_all_per_byte", says="V max(A, B, C) / (4 A B C W)", test="cost/test_collectives.py#test_all_to_all_against_a_count_of_every_link"),
    Item("A28", _A, "table of collectives", code="cost/collectives.py#_all_gather_per_byte", says="| AllReduce | twice an AllGather", test="cost/test_collectives.py#test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather"),
    Item("A29", _A, "exercise 1", code="notation/array.py#ShardedArray", says="16", test="notation/test_array.py#test_published_copies"),
    Item("A30", _A, "exercise 2", _TWO_X, "23.3 us"),
    Item("A31", _A, "exercise 3", _SMALL, "2 us, bound by latency"),
    Item("A32", _A, "exercise 4", _FOUR, "859 us", says="reducing wins if D > 2 B"),
    Item("A33", _A, "exercise 5", _FIVE, "18.7 us"),
    Item("A34", _A, "exercise 6", _SIX, "13.6 us"),
    Item("A35", _A, "exercise 7", _SEVEN, "359 us 275 MB x[B, D] w[D, F_X] v[F_X, D] y[B_X, D]"),
    Item("A36", _A, "exercise 8", "mw bench collectives --hardware cpu:8 --sizes 1Mi,16Mi --plot", "1.05 MB to 16.8 MB, gathered", slow=True),
    Item("A37", _A, "exercise 9: ratio J / K", _NINE, "326 us 46.6 us 280 us"),
    Item("A38", _A, "exercise 9: indices", 'mw shard "A[N, M_X]" --mesh X=4 --dims N=8,M=16', "X=0: A[0:8, 0:4]"),
    Item("A39", _A, "exercise 10", _ALL_TO_ALL, "1.49 ms", says="5.59 ms"),
    Item("A40", _A, "collective matmul", _FOUR, "634 us 299 us 559 us 268 MB contract over X, ReduceScatter into B (windowed)"),
    Item("A41", _A, "run the derived strategy", "mw shard \"A[I_X, J] . B[J_X, K] -> C[I_X, K]\" --mesh X=4,Y=2 --dims I=1024,J=4096,K=4096 --hardware v5e:4x2 --run", "largest difference from the dense result 0", slow=True),
    Item("B1", _B, "2 and 6 FLOPs a parameter", _8B, "51.5B", says="training 6"),
    Item("B2", _B, "gated MLP", _8B, "5.64B 70.2%"),
    Item("B3", _B, "plain MLP", code="models/count.py#count_params", says="| plain MLP | 2 D F | 12 B T D F |", test="models/test_count.py#test_an_ungated_feed_forward_takes_12df"),
    Item("B4", _B, "projections", _8B, "1.34B 16.7%"),
    Item("B5", _B, "scores and values", _16B, "2.15B", "models/count.py#seen_keys"),
    Item("B6", _B, "norms and vocabulary", _8B, "1.05B 13.1%"),
    Item("B7", _B, "6 x parameters x tokens", code="models/count.py#forward_flops", says="training 6", test="models/test_count.py#test_six_flops_a_parameter"),
    Item("B8", _B, "attention costs the matmuls at T = 8 D", _ATTENTION, "65,536"),
    Item("B9", _B, "GQA", _8B, "K = 8", "models/count.py#kv_bytes_per_token"),
    Item("B10", _B, "mixtures of experts", _V3, "37.6B", "models/count.py#ParamCount"),
    Item("B11", _B, "two AllToAlls", code="nn/experts/capacity.py#", says="and two AllToAlls", test="notation/test_known_algorithms.py#TestExperts.test_expert_parallelism_takes_two_all_to_alls_each_way"),
    Item("B12", _B, "20 arrays, 84 TB", _REMAT.format("none"), "12.3 GB", says="= 84 TB"),
    Item("B13", _B, "remat of blocks", _REMAT.format("full"), "2.36 GB", says="8 N D FLOPs"),
    Item("B14", _B, "remat of matmuls", _REMAT.format("matmuls"), "7.9 GB", says="leaves 7"),
    Item("B15", _B, "jax.checkpoint policies", code="nn/remat.py#policy", test="train/test_accumulation.py#test_every_policy_of_recomputing_agrees"),
    Item("B16", _B, "cache 2 S L K H", _8B, "1.07 GB"),
    Item("B17", _B, "exercise 1", _16B, "24.6%", says="16e9 is 16 · 2^30"),
    Item("B18", _B, "exercise 2", code="models/count.py#forward_flops", says="2 B D F / (X Y) FLOPs", test="notation/test_einsum.py#test_published_flops"),
    Item("B19", _B, "exercise 3", code="models/count.py#forward_flops", says="2 * 2**7", test="test_book.py#test_flops_of_a_contraction_of_seven_letters"),
    Item("B20", _B, "exercise 4: intensity", _8B, "6,553.6 4.0", "models/count.py#prefill_intensity"),
    Item("B21", _B, "exercise 4: plot", _ATTENTION, "65,536 53.4%"),
    Item("B22", _B, "exercise 5", _LONG, "19.9%", says="so here it is T = 4 D"),
    Item("B23", _B, "exercise 6", code="nn/remat.py#policy", says="costs 4 B T² N H FLOPs a layer", test="nn/attention/test_flash.py#test_what_a_kernel_keeps_is_not_computed_again"),
    Item("B24", _B, "exercise 7", _V3, "37.6B", says="0.216"),
    Item("B25", _B, "exercise 8", _V5E, "122 int8/bf16", says="3,840 for DeepSeek"),
    Item("B26", _B, "flash attention", code="nn/attention/blockwise.py#blockwise", says="running maximum m", test="nn/attention/test_blockwise.py#test_its_memory_is_linear_in_the_positions"),
    Item("B27", _B, "flash VJP", code="nn/attention/blockwise.py#_first_turn", says="sum_j S_ij dS_ij = sum_d dO_id O_id", test="nn/attention/test_blockwise.py#test_it_is_attention_with_its_gradients"),
    Item("B28", _B, "ring attention", code="nn/attention/blockwise.py#blockwise", says="(ring attention)", test="nn/attention/test_blockwise.py#test_shards_of_a_zigzag_have_equal_work"),
    Item("B29", _B, "table of components", _8B, "2.68B 15.6% 1,321.3 1.0"),
    Item("C1", _C, "a layer, 2 and 5 steps", _DP, "7. dIn[B_X, D]"),
    Item("C2", _C, "data parallelism", _DP, "dWin[D, F] = AllReduce_X(dWin[D, F]{U_X}) (can be deferred)"),
    Item("C3", _C, "FSDP", _FSDP, "9. dIn[B_X, D] = dTmp[B_X, F] ·_F Win[D, F]"),
    Item("C4", _C, "tensor parallelism", _TP, "5. In[B, D] = AllGather_Y(In[B, D_Y]) (ahead of time; or keep forward 1)"),
    Item("C5", _C, "FSDP with TP", _BOTH, "12. dIn[B_X, D_Y] = ReduceScatter_Y(dIn[B_X, D]{U_Y}) (on critical path)"),
    Item("C6", _C, "appendix A", code="notation/derive.py#derive", says="should read dTmp · In", test="notation/test_known_algorithms.py#TestTraining.test_without_parallelism"),
    Item("C7", _C, "memory of data parallelism", _THREE, "(P < HBM / 10: no)"),
    Item("C8", _C, "B / X > C / W", _SLICES, "850", "plan/explain/thresholds.py#data_parallel_tokens_per_chip", "(2550, 850, 7616000)"),
    Item("C9", _C, "ZeRO 1, 2, 3", _FSDP, "dWin[D_X, F] = ReduceScatter_X(dWin[D, F]{U_X}) (can be deferred) 512 MB", says="ZeRO-1 and ZeRO-2"),
    Item("C10", _C, "47,000 chips", code="plan/explain/thresholds.py#data_parallel_tokens_per_chip", says="(47000.0, 18823)", test="plan/explain/test_thresholds.py#TestFigures.test_seventy_billion_in_seventeen_days"),
    Item("C11", _C, "18,823 chips, 17 days", code="plan/explain/thresholds.py#data_parallel_tokens_per_chip", says="17 days", test="plan/explain/test_thresholds.py#TestFigures.test_seventy_billion_in_seventeen_days"),
    Item("C12", _C, "critical batch size", "mw plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens 16Mi --seq-len 8192 --critical-batch 4M --tokens 15T --explain", "the critical batch size of 4M tokens", slow=True),
    Item("C13", _C, "bound of TP", _THREE, "up to 5.42 chips", "plan/explain/thresholds.py#tensor_limit", "[5.4, 11.2, 12.9]"),
    Item("C14", _C, "precision does not matter", code="plan/explain/thresholds.py#tensor_limit", test="plan/explain/test_thresholds.py#test_tensor_limit_scales_with_its_axes"),
    Item("C15", _C, "X_opt = 13.7", code="plan/explain/thresholds.py#mixed_batch_shards", says="the chapter prints 13.9", test="plan/explain/test_thresholds.py#TestFigures.test_sixty_four_chips"),
    Item("C16", _C, "99 tokens a chip", code="plan/explain/thresholds.py#mixed_tokens_per_chip", says="(13.7, 99)", test="plan/explain/test_thresholds.py#TestFigures.test_the_mixed_threshold_of_the_text"),
    Item("C17", _C, "ratio over the batch", _STRATEGIES, "16.4k 0.301 0.551 1.54"),
    Item("C18", _C, "time over the batch", _STRATEGIES, "FSDP is compute-bound from 54,400 tokens, FSDP with TP from 6,936", says="4.4e5 tokens (the chapter: 4e5"),
    Item("C19", _C, "step over X, slider over the batch", _DEGREE, "1,024 54.2 ms 23.6 ms 40 ms 54.2 ms"),
    Item("C20", _C, "ideal price", _THREE, "132 ms 99.2%"),
    Item("C21", _C, "context parallelism", code="plan/explain/thresholds.py#mixed_batch_shards", says="splits each sequence over `context`", test="nn/test_layouts.py#test_loss_and_gradients_are_those_of_one_device"),
    Item("C22", _C, "pipelining", _PIPE.format(1, "1f1b"), "9.8% 88 GB yes bubble", says="never runs"),
    Item("C23", _C, "bubble", _PIPE.format(16, "1f1b"), "52.3%", "plan/explain/thresholds.py#pipeline_bubble"),
    Item("C24", _C, "zero bubble, DualPipe", _PIPE.format(16, "dualpipe"), "66.3%", "layout/pipelines/dualpipe.py#", "dualpipe.svg"),
    Item("C25", _C, "tokens per slice", _SLICES, "73,440", "plan/explain/thresholds.py#slice_tokens", "71,360 tokens per slice"),
    Item("C26", _C, "data over slices", _TWO_SLICES, "132 ms 99.2% 6.01 GB yes compute", says="puts `data` across them"),
    Item("C27", _C, "70B on pods", code="plan/explain/thresholds.py#mixed_batch_shards", says="The hint names a degree that runs", test="plan/explain/test_thresholds.py#TestCases.test_the_hint_names_a_degree_that_runs"),
    Item("C28", _C, "table of formulas", code="plan/explain/thresholds.py#mixed_tokens_per_chip", says="(4 B D / X + 4 D F / Y) + (8 B D / X + 8 D F / Y)", test="plan/explain/test_thresholds.py#TestTheDerivedAlgorithmTakesTheSameTime.test_x_opt_is_where_both_take_the_same_time"),
    Item("C29", _C, "exercise 1", _13B, "13,015,864,320"),
    Item("C30", _C, "exercise 2", _THREE, "130 GB", says="(130, 42)"),
    Item("C31", _C, "exercise 3.1", _THREE, "Even then it does not fit: it needs 157 GB per chip"),
    Item("C32", _C, "exercise 3.2", _THREE, "768 tokens per chip; DP or FSDP over all 4,096 chips needs 850"),
    Item("C33", _C, "exercise 3.3", _THREE, "(about fsdp=1024, tensor=4)"),
    Item("C34", _C, "misprint of X_opt", _THREE, "optimum 1,365", says="need B / F"),
    Item("C35", _C, "table of strategies", code="notation/derive.py#derive", says="| data parallel | 12 B D F / X | 8 D F |", test="plan/explain/test_thresholds.py#TestTheDerivedAlgorithmMovesTheSameBytes.test_data_parallelism"),
    Item("D1", _D, "sampling with a cache", code="serve/device/runner.py#run", says="`mw generate`: a prefill, then a token a step", test="serve/device/test_runner.py#test_requests_alone_get_the_tokens_of_transformers"),
    Item("D2", _D, "temperature, top-p, top-k", code="serve/device/sampling.py#", test="serve/device/test_sampling.py#test_top_k_and_then_top_p_keep_the_most_likely_tokens"),
    Item("D3", _D, "time to first token", _ENGINES, "batched 1.94 s 3.73 s"),
    Item("D4", _D, "B_crit", _V5E, "243 bf16/bf16, 122 int8/bf16, 243 int8/int8", "cli/hardware.py#critical_batches"),
    Item("D5", _D, "prefill is compute-bound", "mw plan serve --phase prefill --model llama-2-13b --hardware v5e:8 --batch 1 --prompt-tokens 2048 --layout tensor=8 --ideal", "34.5 ms per step, 59,321 tokens/s, bound by compute", "plan/serve/prefill.py#", "from C / W_hbm tokens"),
    Item("D6", _D, "intensity S T / (S + T)", _18B, "3,276.8 4.0", "models/count.py#prefill_intensity"),
    Item("D7", _D, "step time", _PARTS, "20.6 ms per step", "cost/serving_step.py#pass_cost"),
    Item("D8", _D, "quiz: 30B", _QUIZ, "4 2.57 ms 2.64 ms 256 21.1 ms 21.4 ms", says="2.5 ms at batch 4, 21 ms at 256"),
    Item("D9", _D, "Pareto front of cost and latency", "mw plan serve --model llama-2-13b --hardware v5e --prompt-tokens 2k --output-tokens 256", "smallest machine that holds the model", "plan/serve/search.py#", slow=True),
    Item("D10", _D, "throughput is flat", _TABLE, "64 910.42", "plan/curves.py#decode_batch"),
    Item("D11", _D, "soft rooflines", _PARTS, "16.6 ms", says="reaches half of the memory bandwidth"),
    Item("D12", _D, "LLaMA-2 13B", _TABLE, "1 6.71 GB 32.7 GB"),
    Item("D13", _D, "activations of a prefill", code="cost/serving_step.py#pass_cost", says="the text's 80 MB are one activation", test="test_book.py#test_one_activation_of_a_prefill_has_80_megabytes"),
    Item("D14", _D, "table 1", _TABLE, "240 253 ms 254 ms", says="4.98, 12.13, 20.30, 36.65, 69.33 and 249.09"),
    Item("D15", _D, "table 2", _GQA, "16.8 ms", says="4.17, 5.60, 7.23, 10.50, 17.04 and 52.99"),
    Item("D16", _D, "largest batch", _TABLE, "At most 16 sequences fit", says="At most 83 sequences fit"),
    Item("D17", _D, "GQA", _GQA, "1.34 GB"),
    Item("D18", _D, "local attention", "mw model gemma-3-27b --seq-len 128k", "11.2 GB", code="models/count.py#kv_bytes_per_token", says="layers with a window"),
    Item("D19", _D, "shared caches", "mw model llama-3-8b --set layers_per_cache=2", "65.5 kB", code="models/count.py#kv_bytes_per_token", says="layers that share a cache"),
    Item("D20", _D, "quantised weights and cache", _18B, "in int8", "serve/device/quantized_checkpoint.py#"),
    Item("D21", _D, "paged attention", code="nn/attention/paged.py#PagedCache", test="nn/attention/test_paged.py#test_a_query_reads_its_own_pages_up_to_its_position"),
    Item("D22", _D, "sharded prefill", code="plan/serve/prefill.py#", says="Prefill may use another layout", test="plan/serve/test_serve.py#test_a_prompt_split_by_position_is_prefilled_sooner_than_by_heads_alone"),
    Item("D23", _D, "no FSDP in generation", "mw plan serve --phase generate --model llama-2-13b --hardware v5e:8 --batch 16 --context 2k --layout fsdp=8 --ideal", "253 ms per step, 63 tokens/s, bound by ici", "plan/serve/search.py#", "Generation never uses FSDP"),
    Item("D24", _D, "replicas, no data parallelism", _FSDP_SERVED, "253 ms per step", "plan/serve/search.py#", says="hold the weights twice"),
    Item("D25", _D, "Y < F / (B beta)", code="plan/serve/search.py#", says="64 chips", test="test_book.py#test_links_bind_generation_beyond_57_chips"),
    Item("D26", _D, "KV[2, B_Z, S, K_Y, H]", _BATCHED, "tensor=8,kv_replicas=2,cache=batch"),
    Item("D27", _D, "attention in 12 steps", _12, "11. Om[B, N_YZ, H] = AllToAll_Z(Om[B_Z, N_Y, H]) (on critical path)"),
    Item("D28", _D, "batched engine", _ENGINES, "batched 1.94 s 3.73 s 4.35 ms 63.8 ms 997"),
    Item("D29", _D, "interleaved engine", _ENGINES, "interleaved 12.4 ms 17.8 ms 4.3 ms 9.58 ms 1,031", "serve/engine/scheduler.py#Scheduler"),
    Item("D30", _D, "disaggregated engine", _ENGINES, "disaggregated 5.67 ms 8.72 ms 4.31 ms 24.5 ms 1,031 51% 16", "serve/engine/handover.py#"),
    Item("D31", _D, "engines compared", _ENGINES, "first token, mean p95"),
    Item("D32", _D, "prefix cache", code="serve/engine/prefix.py#PrefixTree", says="in the memory of the host", test="serve/device/test_runner.py#test_a_conversation_finds_its_pages_again"),
    Item("D33", _D, "JetStream", code="serve/engine/batch.py#Runner", says="JetStream's transfer thread", test="serve/test_disaggregated.py#test_one_prefills_and_the_other_generates"),
    Item("D34", _D, "exercise 1", _18B, "18,385,735,680", says="we count both"),
    Item("D35", _D, "exercise 2", _ONE_LONG, "at most 7 sequences fit", says="at most 57 sequences fit"),
    Item("D36", _D, "exercise 3", _ONE_LONG, "1.51 ms"),
    Item("D37", _D, "exercise 4", _BATCHED, "12.7 ms per step"),
    Item("D38", _D, "exercise 5", _MOE, "211,663,458,304", says="= 1,920"),
    Item("D39", _D, "exercise 6", _MOE_128, "weights 2.31 GB", says="so 4x4 is the smallest slice"),
    Item("D40", _D, "exercise 7: five steps", _2D, "5. Out[B, D_XYZ] = ReduceScatter_YZ(Out[B, D_X]{U_YZ})"),
    Item("D41", _D, "exercise 7: 72 chips", _2D, "critical 93.2 us", code="layout/axes/tensor.py#Tensor2", says="is 72 chips for F = 4 D; the chapter prints 81"),
    Item("D42", _D, "appendix A", _LAYER.format(480), "local 654 us"),
    Item("D43", _D, "appendix C", 'mw collective "AllGather_X([B_X, D])" --mesh X=8,Y=16 --dims B=16,D=8192 --hardware v5e:8x16', "7 us, bound by latency on ici; V = 262 kB, 7 hops", "cost/collectives.py#collective_seconds"),
    Item("D44", _D, "greedy speculation", code="serve/engine/speculate.py#", says="verifies up to four drafted tokens", test="serve/engine/test_engine.py#test_a_draft_model_changes_no_answer"),
    Item("D45", _D, "sampled speculation", code="serve/device/sampling.py#_by_ratio", says="min(1, p(x) / q(x))", test="serve/device/test_sampling.py#test_the_ratio_test_keeps_the_distribution_and_accepts_as_the_paper_says"),
    Item("D46", _D, "draft heads", _AHEAD, "acceptance 0.8: best with k = 7, 2.93 times as fast", "serve/engine/draft_head.py#", says="Medusa", test="serve/test_ratio.py#test_drafts_of_a_head_leave_the_distribution_unchanged"),
    Item("D47", _D, "look-ahead", _AHEAD, "acceptance 0.6: best with k = 4"),
    Item("E1", _E, "columns, then rows", _BLOCK, "1. h[B, F_Y] = x[B, D] ·_D w[D, F_Y]"),
    Item("E2", _E, "GeLU of a sum", _ROW_FIRST, "h[B, F] = AllReduce_Y(h[B, F]{U_Y}) (on critical path) 537 MB"),
    Item("E3", _E, "f and g", _BLOCK, "dx[B, D] = AllReduce_Y(dx[B, D]{U_Y}) (on critical path) 134 MB", says="operator *f*"),
    Item("E4", _E, "attention by heads", code="layout/axes/tensor.py#TensorAxis", says="| heads | none |", test="notation/test_known_algorithms.py#TestMegatron.test_column_then_row_parallel"),
    Item("E5", _E, "beyond the KV heads", _KV_HEADS, "or tensor=8,kv_replicas=2"),
    Item("E6", _E, "embedding by vocabulary", code="nn/embedding.py#embed", says="ids outside a shard are masked", test="notation/test_known_algorithms.py#TestMegatron.test_the_vocabulary_embedding_sums_and_the_loss_reduces_small_arrays"),
    Item("E7", _E, "tied embeddings", code="models/transformer.py#", says="tied embedding and head", test="nn/test_layouts.py#test_a_tied_table_collects_both_gradients"),
    Item("E8", _E, "loss without [B, T, V]", _LOSS, "total[B, T] = AllReduce_Y(total[B, T]{U_Y}) (on critical path) 65.5 kB", "nn/loss.py#nats_of"),
    Item("E9", _E, "TP across nodes", _LATENCY, "16 19.5 us", says="crosses nodes"),
    Item("E10", _E, "sequence parallelism", 'mw shard "x[B_Y, D] . w[D, F_Y] -> h; a[B, F] = gelu(h); a . v[F_Y, D] -> y[B_Y, D]" --mesh Y=8 --dims B=8192,D=8192,F=32768 --hardware h100:1x8', "ReduceScatter_Y(y[B, D]{U_Y}) (on critical path) 134 MB", says="partitioned activations"),
    Item("E11", _E, "ZeRO-3 moves 1.5 times", code="notation/derive.py#derive", says="1.5 times the 8 D F", test="plan/explain/test_thresholds.py#TestTheDerivedAlgorithmMovesTheSameBytes.test_fsdp"),
    Item("E12", _E, "ring latency", _LATENCY, "1,024 889 us"),
    Item("E13", _E, "256 GPUs", _256, "2.37 s", says="2.25 s a step"),
    Item("E14", _E, "1,024 GPUs", _1024, "megatron-gpt-145b (146B parameters) on a100-80gb:128x8", says="data=64,tensor=16,zero=1"),
    Item("E15", _E, "three axes", _3D, "18 s 66.1% 34.9 GB yes compute"),
    Item("E16", _E, "stages by blocks", _3D, "pipe=4", says="pipeline 4"),
    Item("E17", _E, "interleaved microbatches", _3D, "microbatches=16", says="interleave"),
    Item("E18", _E, "layouts agree", code="layout/axes/tensor.py#TensorAxis", says="same loss", test="nn/test_layouts.py#test_the_other_pairs_of_options"),
)  # fmt: skip
