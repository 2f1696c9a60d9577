import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench import calibration, matmul, serving_steps, timing, train_step
from meshwright.bench.all_devices import local_hardware
from meshwright.bench.regression import fit_line
from meshwright.errors import DeviceError
from meshwright.hardware.catalog import dump_toml, load
from meshwright.hardware.chip import COLLECTIVES, LinearCost, SharedMemory, Switch
from meshwright.hardware.description import read_chip
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.programs.efficiency import StepEfficiency

NO_TIME = timing.Timing(0.0, 0.0)
SIZES = [4096, 65_536, 1_048_576, 8_388_608] * 3
QUICK = calibration.Sizes(
    collectives=(4096, 65_536),
    matmuls=(matmul.MatmulShape(64, 64, 64),),
    arrays=(65_536,),
    model=replace(load_model("tiny"), max_seq_len=32),
    served=serving_steps.no_model(),
)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11))
def test_exact_points_give_their_line(latency: float, bandwidth: float) -> None:
    line = LinearCost(latency, bandwidth)
    fitted = fit_line(SIZES, [line.seconds(size) for size in SIZES])
    for size in SIZES:
        assert fitted.seconds(size) == pytest.approx(line.seconds(size), rel=1e-3)


def test_noise_and_two_spoilt_points_leave_the_line() -> None:
    line, noise = LinearCost(50e-6, 2e9), np.random.default_rng(0).normal(1, 0.05, len(SIZES))
    seconds = [line.seconds(size) * factor for size, factor in zip(SIZES, noise, strict=True)]
    seconds[1] *= 20
    seconds[7] *= 5
    fitted = fit_line(SIZES, seconds)
    # Twelve points of 5% noise: each figure is known to a few percent.
    assert fitted.latency_seconds == pytest.approx(50e-6, rel=0.15)
    assert fitted.bytes_per_second == pytest.approx(2e9, rel=0.1)


def test_a_negative_intercept_is_no_latency() -> None:
    fitted = fit_line([1000, 2000, 3000], [1e-6, 3e-6, 5e-6])
    assert fitted.latency_seconds == 0
    assert fitted.bytes_per_second > 0


def test_times_that_do_not_grow_are_all_latency() -> None:
    fitted = fit_line([1000, 2000, 4000], [3e-6, 2e-6, 1.5e-6])
    assert fitted.latency_seconds == pytest.approx(2e-6)
    assert fitted.bytes_per_second == pytest.approx(4000 / 1.5e-6)


def test_the_median_ignores_one_slow_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 11.0, 20.0, 29.0, 30.0, 31.0, 40.0, 41.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    (measured,) = timing.time_interleaved([lambda: None], rounds=5)
    assert measured == timing.Timing(seconds=1.0, spread=0.0)


def _with_memory(bandwidth: float, **shares: float) -> Hardware:
    hardware = load("cpu:8")
    efficiency = replace(hardware.chip.step, memory_by_dtype=shares)
    chip = replace(hardware.chip, hbm_bytes_per_second=bandwidth, step=efficiency)
    return replace(hardware, chip=chip)


def _step_in(dtype: str, hardware: Hardware) -> train_step.MeasuredStep:
    """The step as it would be measured on `hardware`."""
    layout = Layout.of(data=8, compute_dtype=dtype)
    asked = train_step.MeasuredStep(load_model("demo"), layout, Workload(8, 64), NO_TIME)
    return replace(asked, timing=timing.Timing(asked.price(hardware), 0.0))


@pytest.mark.parametrize("bandwidth", [1e8, 3e9])
def test_the_bandwidth_of_a_step_is_found_again(bandwidth: float) -> None:
    true = _with_memory(bandwidth, bf16=0.5)
    steps = [_step_in("f32", true), _step_in("bf16", true)]
    chip = train_step.with_effective_memory(steps, _with_memory(1e10)).chip
    assert chip.hbm_bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert chip.step.memory_by_dtype == {"bf16": pytest.approx(0.5, rel=1e-6)}


def test_a_step_faster_than_its_price_streams() -> None:
    fast = train_step.MeasuredStep(
        load_model("demo"), Layout.of(data=8, compute_dtype="f32"), Workload(8, 64), NO_TIME
    )
    chip = train_step.with_effective_memory([fast], _with_memory(1e10)).chip
    assert chip.hbm_bytes_per_second == pytest.approx(1e10)


def _with_inference(
    launch: float = 0.0,
    kernel: float = 0.0,
    memory: float = 1.0,
    matmul: float = 1.0,
    packed: float = 1.0,
    cache: float = 1.0,
    elementwise: float = 1.0,
) -> Hardware:
    """A host whose steps of a server reach these figures, and whose products in training 20 GFLOP/s."""
    hardware = load("cpu:1")
    rates = {"f32": ((1e6, 2e10), (1e9, 2e10))}
    reached = StepEfficiency(
        matmul={"f32": matmul},
        attention=matmul,
        overlap=0.0,
        roofline=0.0,
        packed={"f32": packed},
        launch_seconds=launch,
        kernel_seconds=kernel,
        memory=memory,
        cache=cache,
        elementwise=elementwise,
    )
    flops = {"f32": 5e10, "bf16": 5e10}
    chip = replace(
        hardware.chip,
        flops_per_second=flops,
        hbm_bytes_per_second=1e10,
        matmul_rates=rates,
        inference=reached,
    )
    return replace(hardware, chip=chip)


@pytest.mark.parametrize(
    ("launch", "kernel", "memory", "matmul", "packed", "cache", "elementwise", "padded"),
    [
        (1e-4, 3e-5, 0.9, 0.8, 1.0, 0.8, 1.0, True),
        (5e-3, 1e-4, 0.2, 0.1, 0.3, 0.05, 0.5, False),
        (4e-3, 2e-6, 0.5, 0.9, 0.5, 0.5, 0.1, True),
        (4e-3, 2e-6, 0.5, 1.8, 0.5, 0.5, 0.3, False),  # prompts' products are faster than those of training
    ],
)
def test_what_steps_of_a_server_reach_is_found_again(
    launch: float,
    kernel: float,
    memory: float,
    matmul: float,
    packed: float,
    cache: float,
    elementwise: float,
    padded: bool,
) -> None:
    """Prices of a machine stand for times: the fitted one has the same, and trains as before.

    Beside a prompt of 256 tokens, and one of 64, are the rows of 8 slots, if padding takes time.
    """
    true = _with_inference(launch, kernel, memory, matmul, packed, cache, elementwise)
    config, layout = serving_steps.served_model(), Layout.of(weights_dtype="f32", compute_dtype="f32")
    asked = serving_steps.MeasuredSteps(
        config, layout, launch, 0.0, 0.0, 0.0, 0.0, 0.0, multiplies_padding=padded
    )
    prompt = 264 if padded else 256
    points = {
        "one_sequence": (1, 1, 16),
        "prompt": (1, prompt, prompt),
        "many": (8, 1, 16),
        "long": (8, 1, 448),
    }
    deep = replace(asked, config=serving_steps.deep_model())
    little = 72 if padded else 64
    asked = replace(asked, deep=deep.price(true, 1, 1, 16), deep_prompt=deep.price(true, 1, little, little))
    timed = replace(asked, **{name: asked.price(true, *point) for name, point in points.items()})
    held, filled = (asked.price(true, 1, count, count) for count in (144, prompt))
    timed = replace(timed, ragged=held + 0.25 * (filled - held))
    found = serving_steps.with_inference(timed, _with_inference())
    for name, point in points.items():
        assert timed.price(found, *point) == pytest.approx(getattr(timed, name), rel=0.01)
    reaches = found.chip.hbm_bytes_per_second * found.chip.step.memory
    assert reaches == pytest.approx(1e10)
    assert found.chip.matmul_rates == true.chip.matmul_rates
    figures = found.chip.inference
    assert figures is not None
    assert figures.padding == pytest.approx(1.0 if padded else 0.25, rel=0.02)
    assert figures.kernel_seconds == pytest.approx(kernel, rel=0.02)
    rate = figures.matmul["f32"] * found.chip.flops("f32")
    assert rate == pytest.approx(matmul * true.chip.flops("f32"), rel=0.02)
    assert figures.attention == figures.matmul["f32"] <= 1
    trains = found.chip.step.attention * found.chip.flops("f32")
    assert trains == pytest.approx(true.chip.step.attention * true.chip.flops("f32"))
    assert figures.packed["f32"] == pytest.approx(packed, rel=0.02)
    assert figures.elementwise == pytest.approx(elementwise, rel=0.02)


def test_what_http_takes_is_left_beside_its_steps() -> None:
    """A request of 3 ms, a step of 0.5 and tokens of 0.2 are found in times of them; none in shorter ones."""
    one, many = 5e-3, 8e-3
    http = serving_steps.MeasuredHttp(
        alone=one + 3e-3,
        together=0.05,
        alone_streamed=one + 3e-3 + 63 * (one + 5e-4 + 2e-4),
        streamed=0.05 + 63 * (many + 5e-4 + 8 * 2e-4),
    )
    assert http.request_seconds(one) == pytest.approx(3e-3)
    assert http.step_seconds(one, many) == pytest.approx(5e-4)
    assert http.token_seconds(one, many) == pytest.approx(2e-4)
    assert http.request_seconds(1.0) == http.token_seconds(1.0, 1.0) == http.step_seconds(1.0, 1.0) == 0
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
    times = (1e-3, 2e-3, 5e-2, one, many, 1e-2)
    measured = serving_steps.MeasuredSteps(serving_steps.served_model(), layout, *times, http=http)
    found = load_again(serving_steps.with_inference(measured, _with_inference()))
    assert found.host_request_seconds == pytest.approx(3e-3)
    assert found.host_step_seconds == pytest.approx(5e-4)
    assert found.host_token_seconds == pytest.approx(2e-4)
    bare = load_again(serving_steps.with_inference(replace(measured, http=None), _with_inference()))
    of_http = {"host_request_seconds", "host_step_seconds", "host_token_seconds"}
    assert {getattr(bare, name) for name in of_http} == {0.0}
    assert set(found.sources) - set(bare.sources) == of_http


def load_again(hardware: Hardware) -> StepEfficiency:
    """What a server reaches of the hardware as its file says it."""
    figures = read_chip(dump_toml(hardware), "machine.toml").chip.inference
    assert figures is not None
    return figures


@pytest.mark.slow  # compiles the steps of two servers
def test_of_one_device_the_steps_of_a_server_are_measured() -> None:
    chip = calibration.measure("cpu:1", QUICK).hardware.chip
    assert chip.inference is not None
    assert 0 < chip.inference.launch_seconds < 1
    assert 0 < chip.inference.memory <= 1
    assert set(chip.inference.sources) == {
        "memory",
        "matmul",
        "attention",
        "roofline",
        "kernel_seconds",
        "packed",
        "cache",
        "elementwise",
        "launch_seconds",
        "host_request_seconds",
        "host_step_seconds",
        "host_token_seconds",
        "padding",
    }


def test_programs_prepared_together_keep_their_own_timings() -> None:
    first = timing.Prepared([lambda: None], lambda timings: [len(timings)])
    second = timing.Prepared([lambda: None, lambda: None], lambda timings: [len(timings)])
    assert timing.run_together([first, second]) == [[1], [2]]


def test_programs_take_turns() -> None:
    calls: list[str] = []
    timing.time_interleaved([lambda: calls.append("a"), lambda: calls.append("b")], rounds=2)
    warm_up, *rounds = ("".join(calls[i : i + 2]) for i in range(0, 6, 2))
    assert warm_up == "ab"
    assert ["".join(sorted(one)) for one in rounds] == ["ab", "ab"]


def test_programs_do_not_always_take_the_same_turn() -> None:
    """A program that always follows one that fills the caches would seem slower than it is."""
    calls: list[int] = []
    timing.time_interleaved([lambda i=i: calls.append(i) for i in range(4)], rounds=8)
    orders = {tuple(calls[i : i + 4]) for i in range(4, len(calls), 4)}
    assert len(orders) > 1


def test_as_many_rounds_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def program() -> None:
        now[0] += 2.0

    prepared = timing.Prepared([program], lambda timings: timings)
    for seconds, rounds in [(0.0, 1), (7.0, 3), (1000.0, 7)]:
        now[0] = 0.0
        assert timing.run_within(prepared, seconds) == ([timing.Timing(2.0, 0.0)], 2.0)
        assert now[0] == 2.0 * (1 + rounds)


@pytest.mark.slow  # compiles two training steps
def test_the_figures_of_a_quick_run_are_positive_and_load_again(tmp_path: Path) -> None:
    messages: list[str] = []
    hardware = calibration.measure("cpu:8", QUICK, messages.append).hardware
    chip = hardware.chip
    assert isinstance(chip.network, SharedMemory)
    figures = [*chip.flops_per_second.values(), chip.hbm_bytes_per_second, chip.step.launch_seconds]
    figures += [chip.network.costs[op].bytes_per_second for op in COLLECTIVES]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert set(chip.flops_per_second) == {"f32", "bf16"}
    assert (chip.step.matmul, chip.overlap) == ({}, 0.0)
    assert messages[-1] == "timing 37 programs"

    assert {dtype: len(points) for dtype, points in chip.matmul_rates.items()} == {"f32": 1, "bf16": 1}
    assert set(chip.memory_rates) == {"f32", "bf16"}

    file = tmp_path / "machine.toml"
    file.write_text(dump_toml(hardware))
    read = load(str(file))
    assert replace(read, spec=hardware.spec) == hardware


def test_accelerators_keep_their_peaks_and_gain_shares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The eight devices here stand in for eight GPUs: what is measured is written, the rest stays."""
    monkeypatch.setattr(calibration, "local_hardware", load)
    measured = calibration.measure_accelerators("h100:8", QUICK)
    chip, sheet = measured.chip, load("h100:8").chip
    assert chip.flops_per_second == sheet.flops_per_second
    assert set(chip.step.matmul) == {"f32", "bf16"}
    assert all(0 < share < 1 for share in (*chip.step.matmul.values(), chip.step.memory))
    assert chip.hbm_bytes_per_second == sheet.hbm_bytes_per_second
    assert isinstance(chip.network, Switch)
    assert chip.network.collective_launch_seconds > 1e-5  # a host wakes its threads slower than NCCL starts
    file = tmp_path / "machine.toml"
    file.write_text(dump_toml(measured))
    assert load(str(file)).chip == chip


def test_bench_matmul_reports_every_dtype() -> None:
    results = matmul.bench_matmul("cpu:8", shapes=QUICK.matmuls)["results"]
    assert [r["dtype"] for r in results] == ["f32", "bf16"]
    # One shape a dtype: its rate is the dtype's.
    assert all(result["ratio"] == pytest.approx(1.0) for result in results)


def test_other_hardware_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"^v5e:4x4: JAX sees 8 cpu devices, not 16 tpu devices$"):
        local_hardware("v5e:4x4")


def test_one_device_is_measured_without_collectives() -> None:
    assert local_hardware("cpu:1").num_chips == 1
    assert calibration._exchanges(1, None, calibration.Sizes()) == []


def test_too_few_devices_name_the_cure() -> None:
    with pytest.raises(DeviceError) as error:
        local_hardware("cpu:64")
    assert str(error.value) == (
        f"cpu:64: JAX sees {len(jax.devices())} cpu devices, not 64 cpu devices; "
        "set JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=64"
    )
