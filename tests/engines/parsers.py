"""What the engines' own parsers take, to hold the lines that are printed for them against."""

# Their options, read off the releases that `flags` in each record's sources names.
PARSERS = {
    "vllm": (
        "0.33.0",
        "--tensor-parallel-size --data-parallel-size --enable-expert-parallel --max-num-seqs "
        "--max-num-batched-tokens --max-model-len --gpu-memory-utilization --kv-cache-dtype",
    ),
    "sglang": (
        "0.5.23",
        "--model-path --tp-size --dp-size --attn-dp-size --ep-size --max-running-requests "
        "--chunked-prefill-size --context-length --mem-fraction-static --kv-cache-dtype",
    ),
    "tensorrt-llm": (
        "00209af1",
        "--tp_size --ep_size --max_batch_size --max_num_tokens --max_seq_len "
        "--kv_cache_free_gpu_memory_fraction --extra_llm_api_options",
    ),
    "sglang-jax": (
        "cddbf6f1",
        "--model-path --tp-size --dp-size --ep-size --max-running-requests --chunked-prefill-size "
        "--context-length --mem-fraction-static",
    ),
    "vllm-tpu": (
        "b8692ff0",
        "--tensor-parallel-size --data-parallel-size --enable-expert-parallel --max-num-seqs "
        "--max-num-batched-tokens --max-model-len --gpu-memory-utilization --kv-cache-dtype "
        "--additional-config",
    ),
}
# Values of --kv-cache-dtype that the parsers take.
CACHES = {
    "vllm": {"auto", "fp8"},
    "vllm-tpu": {"auto", "fp8"},
    "sglang": {"auto", "fp8_e4m3"},
    "tensorrt-llm": {"auto", "fp8"},
}
