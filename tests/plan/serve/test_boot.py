"""Whether engines start: the memory after start-up, and the time until then."""

import pytest

from meshwright.engines.serving_engine import ENGINES
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.presets import PRESETS
from meshwright.plan.serve.boot import boot_of, server_start
from meshwright.plan.serve.requests import Requests
from meshwright.plan.serve.search import Infeasible, search_serving

BF16 = Layout.of(tensor=1, weights_dtype="bf16", kv_dtype="bf16", cache="copies")


def test_caches_get_the_rest_of_the_engines_share():
    """LLaMA-3-8B in bf16 on an H100: 16 GB of weights, 72 GB for vLLM, 131,072 bytes a position."""
    boot = boot_of(PRESETS["llama-3-8b"], load("h100:1x1"), BF16, ENGINES["vllm"], 4096)
    assert boot is not None and boot.boots
    assert boot.weights == pytest.approx(16.06e9, rel=0.01)
    assert boot.weights + boot.activations + boot.caches == int(0.9 * boot.device)
    assert boot.positions == boot.caches // 131072
    assert boot.load_seconds == pytest.approx(boot.weights / ENGINES["vllm"].load_bytes_per_second)


def test_weights_that_leave_no_memory_do_not_start():
    boot = boot_of(PRESETS["llama-3-70b"], load("h100:1x1"), BF16, ENGINES["sglang"], 4096)
    assert boot is not None and not boot.boots and boot.caches == 0


def test_engines_without_figures_say_nothing():
    machine = load("v5e:1x1")
    assert boot_of(PRESETS["llama-3-8b"], machine, BF16, ENGINES["vllm-tpu"], 4096) is None
    assert boot_of(PRESETS["llama-3-8b"], load("h100:1x1"), BF16, ENGINES["fastertransformer"], 4096) is None


@pytest.mark.parametrize("machine", ["v5e:2x2", "v6e:1x1", "h100:2"])
def test_largest_batches_leave_memory_for_the_programs(machine):
    """Of our server. Other engines count their own."""
    config, types = PRESETS["llama-3-8b"], {"weights_dtype": "int8", "kv_dtype": "bf16"}

    def largest(*, programs):
        found = search_serving(
            config, [load(machine)], Requests(1000, 200), precisions=[types], programs=programs
        )
        return {point.layout: point for point in found.frontier if point.batch == point.max_batch}

    with_programs, without = largest(programs=True), largest(programs=False)
    for layout, point in with_programs.items():
        start = server_start(point)
        assert start["boots"] and start["bytes"] > 0.97 * start["usable_bytes"]
        if layout in without:
            assert point.batch <= without[layout].batch
    assert with_programs


def test_a_chip_that_lacks_memory_for_programs_is_refused():
    """Weights of 16.1 GB and one request fit 16.9 GB; dozens of programs do not."""
    arguments = PRESETS["llama-3-8b"], [load("v5e:1x1")], Requests(3000, 300)
    precisions = [{"weights_dtype": "bf16", "kv_dtype": "bf16"}]
    assert search_serving(*arguments, precisions=precisions, programs=False).best.batch
    with pytest.raises(Infeasible, match="one request of 3,300 tokens and the server's programs"):
        search_serving(*arguments, precisions=precisions)
