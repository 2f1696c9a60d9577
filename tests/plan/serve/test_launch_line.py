"""The lines that start other engines."""

import json
import shlex

import pytest
from tests.engines.parsers import PARSERS

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


def test_groups_of_attention_on_tpus():
    """Degrees of tensor parallelism count the groups: SGLang-JAX's cookbook, tpu-inference's sharding.py."""
    layout = Layout.of(data=4, tensor=2, expert=8)
    line = launch_line(ENGINES["sglang-jax"], MIXTURE, layout, sequences=64, context=4096)
    assert "--tp-size 8 --dp-size 4 --ep-size 8 --max-running-requests 64" in line.command
    line = launch_line(ENGINES["vllm-tpu"], MIXTURE, layout, sequences=64, context=4096)
    words = shlex.split(line.command)
    config = json.loads(words[words.index("--additional-config") + 1])
    assert config == {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 4}}}
    assert words[words.index("--tensor-parallel-size") + 1] == "8" and "--data-parallel-size" not in words
    assert words[words.index("--max-num-seqs") + 1] == "16" and "--enable-expert-parallel" in words
    assert "NEW_MODEL_DESIGN=1 in its environment" in line.needs
    dense = launch_line(ENGINES["vllm-tpu"], DENSE, Layout.of(data=2, tensor=4), sequences=64, context=4096)
    assert "--data-parallel-size 2" in dense.command and "--tensor-parallel-size 4" in dense.command
    assert not dense.needs and "  " not in dense.command


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm", "sglang-jax", "vllm-tpu"])
def test_settings_that_engines_lack_are_not_planned(name: str):
    engine = ENGINES[name]
    assert has_settings_for(engine, Layout.of(tensor=8))
    assert not has_settings_for(engine, Layout.of(tensor=8, kv_replicas=2, cache="batch"))
    assert engine.command and engine.defaults and {"step_tokens", "context"} <= set(engine.flags)


@pytest.mark.parametrize("name", PARSERS)
def test_lines_have_flags_that_the_engine_reads(name: str):
    for config, degrees in ((DENSE, {"tensor": 8}), (MIXTURE, {"data": 8, "expert": 8})):
        line = launch_line(ENGINES[name], config, Layout.of(**degrees), sequences=64, context=4096)
        words = shlex.split(line.command)
        assert {word for word in words if word.startswith("--")} <= {*PARSERS[name][1].split()}
