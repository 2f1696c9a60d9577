"""The lines that start other engines."""

import pytest

from meshwright.engines.serving_engine import ENGINES
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.plan.serve.launch_line import has_settings_for, launch_line

DENSE, MIXTURE = load_model("llama-3.1-70b"), load_model("deepseek-v3")


def test_ranks_of_a_mixture_share_experts():
    layout = Layout.of(data=8, expert=8, weights_dtype="fp8", kv_dtype="fp8")
    line = launch_line(ENGINES["sglang"], MIXTURE, layout, sequences=512, context=9216)
    assert line.command == (
        "python -m sglang.launch_server --model-path deepseek-v3 --tp-size 8 "
        "--attn-dp-size 8 --ep-size 8 --max-running-requests 512 --chunked-prefill-size 16384 "
        "--context-length 9216 --mem-fraction-static 0.85 --kv-cache-dtype fp8_e4m3"
    )
    assert line.needs == ("a checkpoint with weights in fp8",) and line.defaults
    line = launch_line(ENGINES["tensorrt-llm"], MIXTURE, layout, sequences=512, context=9216)
    assert line.file == ("enable_attention_dp: true", "kv_cache_config: {dtype: fp8}")


def test_ranks_of_a_dense_model_are_servers():
    layout = Layout.of(data=2, tensor=4)
    line = launch_line(ENGINES["vllm"], DENSE, layout, sequences=256, context=2560)
    assert "--tensor-parallel-size 4 --data-parallel-size 2 --max-num-seqs 128" in line.command
    line = launch_line(ENGINES["tensorrt-llm"], DENSE, layout, sequences=256, context=2560)
    assert "--tp_size 4 " in line.command and line.needs == ("2 such servers and a load balancer",)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm", "sglang-jax", "vllm-tpu"])
def test_settings_that_engines_lack_are_not_planned(name: str):
    engine = ENGINES[name]
    assert has_settings_for(engine, Layout.of(tensor=8))
    assert not has_settings_for(engine, Layout.of(tensor=8, kv_replicas=2, cache="batch"))
    assert engine.command and engine.defaults and {"step_tokens", "context"} <= set(engine.flags)


# Flags of `EngineArgs` in the wheel of vLLM 0.33.0, and of `ServerArgs` in SGLang-JAX of August 2026.
_KNOWN = {
    "vllm": {
        "--tensor-parallel-size", "--data-parallel-size", "--enable-expert-parallel", "--max-num-seqs",
        "--max-num-batched-tokens", "--max-model-len", "--gpu-memory-utilization", "--kv-cache-dtype",
    },
    "sglang-jax": {
        "--model-path", "--tp-size", "--ep-size", "--max-running-requests", "--chunked-prefill-size",
        "--context-length", "--mem-fraction-static",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _KNOWN)
def test_lines_have_flags_that_the_engine_reads(name: str):
    for config, words in ((DENSE, {"tensor": 8}), (MIXTURE, {"data": 8, "expert": 8})):
        line = launch_line(ENGINES[name], config, Layout.of(**words), sequences=64, context=4096)
        assert {word for word in line.command.split() if word.startswith("--")} <= _KNOWN[name]
