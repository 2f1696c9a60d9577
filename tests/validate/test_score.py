"""mw validate: rows become what the planner prices, and errors are counted as the contract says."""

import csv
import json
import re
from dataclasses import MISSING, fields, replace
from math import exp, log
from pathlib import Path

import pytest

from meshwright.cli.validate import validation_document
from meshwright.cost.serving_step import pass_cost
from meshwright.errors import PlanError
from meshwright.models.count import count_params
from meshwright.validate import out_of_sample as out_of_sample_module
from meshwright.validate.alike import TRUST
from meshwright.validate.load_test_row import MAX_BATCH
from meshwright.validate.out_of_sample import out_of_sample
from meshwright.validate.published import (
    MEMORY,
    PER_CHIP,
    STEP,
    THROUGHPUT,
    InferenceRow,
    PublishedRow,
    UnreadRow,
    read_rows,
)
from meshwright.validate.reproduce import reproduce
from meshwright.validate.score import (
    SERVED_TRUST,
    Prediction,
    anchored_by_source,
    grouped,
    inference_rows,
    kendall_tau,
    memory_verdicts,
    predict,
    quantile,
    rankings,
    score_predictions,
    step_rows,
)
from meshwright.validate.shape_guess import model_of
from meshwright.validate.static_batches import reproduce_inference

COLUMNS = [field.name for field in fields(PublishedRow) if field.default is MISSING]
LLAMA = PublishedRow(
    id="A1",
    source="ours",
    mlp="gated",
    n_layers=32,
    d_model=4096,
    d_ff=14336,
    n_heads=32,
    n_kv_heads=8,
    d_head=128,
    vocab=128256,
    experts=None,
    experts_per_token=None,
    params_total=8.03e9,
    params_active=None,
    seq_len=8192,
    global_batch_sequences=64,
    micro_batch=2.0,
    hardware="h100:2x8",
    chips=16,
    nic_gbit_per_gpu=None,
    hbm_bytes_per_second=None,
    power_watts=None,
    dtype="bf16",
    data=2,
    fsdp=8,
    tensor=1,
    pipe=1,
    interleave=1,
    context=1,
    expert=1,
    zero=3,
    zero_group=None,
    sequence_parallel=0,
    remat="full",
    metric=THROUGHPUT,
    value=5000.0,
)


def write(path: Path, *rows: dict[str, str], columns: list[str] = COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def cells(**changes: str) -> dict[str, str]:
    values = {name: getattr(LLAMA, name) for name in COLUMNS}
    return {name: "" if value is None else str(value) for name, value in values.items()} | changes


def only(row: PublishedRow):
    return reproduce(row).layouts[0][0]


# Reading


def test_a_row_reads_back_as_it_was_written(tmp_path: Path):
    assert read_rows(write(tmp_path / "rows.csv", cells())) == [LLAMA]


def test_other_columns_are_not_looked_at(tmp_path: Path):
    path = write(tmp_path / "rows.csv", cells() | {"notes": "MFU 99%"}, columns=[*COLUMNS, "notes"])
    assert read_rows(path) == [LLAMA]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": "many"}, "line 2 (A1): n_layers = 'many' is not a number"),
        ({"n_layers": "2.5"}, "line 2 (A1): n_layers = '2.5' must be a whole number above 0"),
        ({"value": "-1"}, "line 2 (A1): value = '-1' must be a finite number above 0"),
        ({"value": "nan"}, "line 2 (A1): value = 'nan' must be a finite number above 0"),
        ({"value": ""}, "line 2 (A1): value is empty"),
        ({"metric": "speed"}, "metric = 'speed' is unknown; fits: step_seconds"),
        ({"mlp": "round"}, "mlp = 'round' is unknown; fits: gated, plain"),
        ({"experts": "8"}, "experts and experts_per_token go together"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, changes: dict[str, str], message: str):
    (row,) = read_rows(write(tmp_path / "rows.csv", cells(**changes)))
    assert isinstance(row, UnreadRow) and (row.id, row.source) == ("A1", "ours")
    assert message in row.reason


def test_a_table_never_stops_at_one_row(tmp_path: Path):
    rows = [
        cells(id="A2", micro_batch="max"),
        cells(id="A3", seq_len="0"),
        cells(id="A4", dtype="posit16"),
        cells(id="A5", hardware="h100", chips="8", data="1"),
        cells(),
    ]
    found = predict(read_rows(write(tmp_path / "rows.csv", *rows)))  # pyright: ignore[reportArgumentType]
    assert [p.row.id for p in found] == ["A2", "A3", "A4", "A5", "A1"]
    assert [p.predicted is None for p in found] == [True, True, True, False, False]
    assert "line 2 (A2): micro_batch = 'max' is not a number" in str(found[0].skipped)
    assert "line 3 (A3): seq_len = '0'" in str(found[1].skipped)
    assert "rows.csv: line 4 (A4): dtype = 'posit16' is unknown" in str(found[2].skipped)


def test_rows_in_several_processes_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = read_rows(
        write(tmp_path / "rows.csv", cells(dtype="posit16"), *(cells(id=f"A{n}") for n in range(24)))
    )
    monkeypatch.setattr("meshwright.validate.score._LEAST_FOR_PROCESSES", 1)
    shares: list[float] = []
    found = predict(rows, shares.append, in_processes=True)  # pyright: ignore[reportArgumentType]
    assert found == predict(rows)  # pyright: ignore[reportArgumentType]
    assert len(found) == 25 and found[0].skipped and found[24].predicted
    assert shares == [0.8, 1.0]


def test_a_missing_column_is_named(tmp_path: Path):
    path = write(tmp_path / "rows.csv", cells(), columns=[c for c in COLUMNS if c != "d_model"])
    with pytest.raises(PlanError, match=r"lacks the column d_model"):
        read_rows(path)


def test_a_line_that_is_no_csv_is_skipped(tmp_path: Path):
    """A quote without its end, one in the middle of a cell, and a byte that is not UTF-8."""
    path = write(tmp_path / "rows.csv", cells(), cells(id="A2"), cells(id="A3"))
    head, first, second, third = path.read_text().splitlines()
    lines = [head, '"' + first, first, '"A5"x' + first, second.replace("A2", "A\xb2"), third, 'A6,"']
    path.write_text("\n".join(lines), encoding="latin-1")
    found = read_rows(path)
    assert [row.id for row in found] == ["no id", "A1", "no id", "A\ufffd", "A3", "no id"]
    unread = [row for row in found if isinstance(row, UnreadRow)]
    assert [re.findall(r"line (\d+) .* is not CSV", row.reason) for row in unread] == [["2"], ["4"], ["7"]]


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_spreadsheets_delimiters_are_read(tmp_path: Path, delimiter: str):
    path = write(tmp_path / "rows.csv", cells())
    path.write_text(path.read_text().replace(",", delimiter))
    assert read_rows(path) == [LLAMA]


def test_what_is_no_csv_is_refused(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(PlanError, match="is not UTF-8"):
        read_rows(path)
    with pytest.raises(PlanError, match=r"absent.csv: cannot be read: No such file"):
        read_rows(tmp_path / "absent.csv")
    path.write_text(",".join(COLUMNS) + "\nonly,three,cells\n")
    (row,) = read_rows(path)
    assert isinstance(row, UnreadRow) and re.search(r"line 2 .* does not have one cell for each", row.reason)


SERVED = {
    "id": "I1", "source": "s", "mlp": "gated", "n_layers": "32", "d_model": "4096", "d_ff": "11008",
    "n_heads": "32", "n_kv_heads": "32", "d_head": "128", "vocab": "32000", "params_total": "6.738e9",
    "hardware": "a100-80gb:2", "chips": "2", "weight_dtype": "int4 (group 32)", "kv_dtype": "fp16",
    "tensor": "2", "batch": "4", "prompt_len": "128", "output_len": "64", "value": "0.01", "unit": "s",
}  # fmt: skip


def served(tmp_path: Path, **cells: str) -> InferenceRow:
    columns = [field.name for field in fields(InferenceRow)]
    (row,) = read_rows(write(tmp_path / "rows.csv", {**SERVED, **cells}, columns=columns))
    assert isinstance(row, InferenceRow)
    return row


def test_a_served_row_is_a_step_a_prefill_or_both(tmp_path: Path):
    """Of one batch: latency is a prefill and 64 steps, throughput 4 x 64 tokens over it, of 2 chips."""
    figures = {}
    for metric, unit in (
        ("tpot_s", "s"), ("ttft_s", "s"), ("request_latency_s", "s"), ("tokens_per_s", PER_CHIP)
    ):  # fmt: skip
        (found,) = predict([served(tmp_path, metric=metric, unit=unit)])
        assert found.skipped is None and found.layout == "tensor=2,remat=none"
        figures[metric] = found.predicted
    assert figures["request_latency_s"] == pytest.approx(figures["ttft_s"] + 64 * figures["tpot_s"])
    assert figures["tokens_per_s"] == pytest.approx(4 * 64 / figures["request_latency_s"] / 2)
    case = reproduce_inference(served(tmp_path, metric="tpot_s"))
    assert (
        case.layouts[0].precision.weights_dtype == "int4" and case.layouts[0].precision.cache_dtype == "bf16"
    )


def test_a_served_figure_is_a_time_and_its_cost(tmp_path: Path):
    """4 sequences of 64 tokens at 20 a second and chip of 2 take 6.4 s: 0.05 chip-seconds a token."""
    rate = served(tmp_path, metric="tokens_per_s", unit=PER_CHIP, value="20")
    assert rate.seconds() == pytest.approx(6.4) and rate.in_unit(6.4) == pytest.approx(20)
    assert rate.chip_seconds_per_token() == pytest.approx(0.05)
    assert rate.chip_seconds_per_token(40) == pytest.approx(0.025)
    step, prompt = (served(tmp_path, metric=metric, value="0.64") for metric in ("tpot_s", "ttft_s"))
    assert step.seconds(0.3) == step.in_unit(0.3) == 0.3
    assert step.chip_seconds_per_token() == pytest.approx(0.64 * 2 / 4)
    assert prompt.chip_seconds_per_token() == pytest.approx(0.64 * 2 / (4 * 128))


def test_served_rows_are_anchored_by_the_first_of_their_metric(tmp_path: Path):
    rate = served(tmp_path, metric="tokens_per_s", unit=PER_CHIP, value="20")
    rows = [rate, replace(rate, id="I2", value=30.0), served(tmp_path, metric="tpot_s")]
    found = anchored_by_source([Prediction(row, 2 * row.value, layout="tensor=2") for row in rows])
    assert [p.is_anchor for p in found] == [True, False, True]
    assert found[1].predicted == pytest.approx(60 / 2**SERVED_TRUST)  # in time twice as long
    assert [p.row.id for p in inference_rows(found)] == ["I2"] and found[1].baseline is None


def test_served_batches_and_degrees_are_ranked_by_what_a_token_costs(tmp_path: Path):
    """Steps of 10, 12 and 30 ms of 4, 8 and 16 sequences: the second costs least, the third is chosen."""
    step = served(tmp_path, metric="tpot_s")
    sizes = ((4, 0.010), (8, 0.012), (16, 0.030))
    rows = [replace(step, id=f"I{batch}", batch=batch, value=seconds) for batch, seconds in sizes]
    found = [
        Prediction(row, seconds, layout="tensor=2")
        for row, seconds in zip(rows, (0.010, 0.014, 0.024), strict=True)
    ]
    (one,) = rankings(found)
    assert (one.best_id, one.chosen_id) == ("I8", "I16")
    assert one.regret == one.rule_regret == pytest.approx((0.030 / 16) / (0.012 / 8) - 1)
    assert one.best_of_five == 0 and one.tau == pytest.approx(1 / 3)
    assert rankings([found[0], replace(found[1], row=replace(rows[1], prompt_len=1))]) == []


def test_out_of_sample_figures_of_serving_are_those_without_their_source(monkeypatch, tmp_path: Path):
    rate = served(tmp_path, metric="tokens_per_s", unit=PER_CHIP, value="20")
    monkeypatch.setattr(out_of_sample_module, "_of_serving", lambda: {("I1", 20.0): log(1.25)})
    given = [Prediction(rate, 19.0), Prediction(replace(rate, id="I2"), 19.0)]
    assert [p.predicted for p in out_of_sample(given)] == [pytest.approx(16.0), 19.0]


def test_generate_steps_follow_each_other_through_the_stages(tmp_path: Path):
    """Two stages, each with half of the batch: a step is one pass of a half, a prefill fills and empties."""
    found = {}
    for metric, phase, queries, context in (
        ("tpot_s", "generate", 1, 128 + 32),
        ("ttft_s", "prefill", 128, 128),
    ):
        case = reproduce_inference(served(tmp_path, metric=metric, tensor="1", pipe="2", batch="4"))
        layout, found[metric] = case.choice
        one, _ = pass_cost(case.config, layout.at(phase), case.hardware, 2, queries, context)
        times = 1.0 if phase == "generate" else 3 / 2
        assert found[metric] == pytest.approx(times * one.seconds)


def test_a_served_row_that_cannot_be_is_skipped_with_why(tmp_path: Path):
    (found,) = predict([served(tmp_path, metric="tpot_s", tensor="3", chips="3", hardware="a100-80gb:3")])
    assert found.predicted is None and "divides neither the heads" in str(found.skipped)
    columns = [field.name for field in fields(InferenceRow)]
    (row,) = read_rows(write(tmp_path / "rows.csv", {**SERVED, "metric": "itl_s"}, columns=columns))
    assert isinstance(row, UnreadRow) and "metric = 'itl_s' is unknown; fits: tpot_s" in row.reason


# What a row means


def test_units_are_the_rows_own():
    assert LLAMA.num_tokens == 64 * 8192
    assert LLAMA.seconds() == pytest.approx(64 * 8192 / 16 / 5000)
    assert LLAMA.in_unit(LLAMA.seconds()) == pytest.approx(5000)
    timed = replace(LLAMA, metric=STEP, value=3.5)
    assert (timed.seconds(), timed.in_unit(2.0)) == (3.5, 2.0)
    assert replace(LLAMA, hardware="2*v5e:16x16").chip == "v5e"


def test_degrees_and_microbatches():
    layout = only(LLAMA)
    assert (layout.data, layout.fsdp, layout.tensor, layout.schedule.microbatches) == (2, 8, 1, 2)
    assert (layout.schedule.remat, layout.precision.weights_dtype, layout.precision.compute_dtype) == (
        "full",
        "f32",
        "bf16",
    )


def test_zero_groups_are_fsdp_and_the_rest_data():
    layout = only(replace(LLAMA, data=16, fsdp=1, zero=1, zero_group=8))
    assert (layout.data, layout.fsdp, layout.word("zero")) == (2, 8, 1)


def test_an_empty_remat_is_the_least_that_fits():
    remats = [group[0].schedule.remat for group in reproduce(replace(LLAMA, remat=None)).layouts]
    assert list(dict.fromkeys(remats)) == ["none", "matmuls", "full"]
    dtypes = [
        group[0].precision.gradients_dtype for group in reproduce(replace(LLAMA, remat=None, zero=1)).layouts
    ]
    assert dtypes[:4] == ["f32", "bf16", "f32", "bf16"]
    eager = reproduce(replace(LLAMA, remat=None, zero=1, software="nanotron")).layouts
    assert {group[0].precision.gradients_dtype for group in eager} == {
        "f32"
    }  # nanotron sums so whatever room is left
    assert only(replace(LLAMA, remat="selective+offload")).schedule.offload


def test_selective_is_what_the_software_means_by_it_whatever_was_measured():
    for metric in (THROUGHPUT, MEMORY):
        row = replace(LLAMA, remat="selective", metric=metric)
        named = {"xla": "matmuls", "pytorch-compiled": "alternate", "megatron": "attention", None: "matmuls"}
        for software, remat in named.items():
            assert only(replace(row, software=software)).schedule.remat == remat


def test_an_empty_micro_batch_is_the_fastest_size_that_fits():
    silent = replace(LLAMA, data=1, fsdp=2, pipe=8, micro_batch=None, interleave=None)
    counts = [layout.schedule.microbatches for layout in reproduce(silent).layouts[0]]
    assert counts == [32, 16, 8, 4]
    assert [
        layout.schedule.microbatches for layout in reproduce(replace(LLAMA, micro_batch=None)).layouts[0]
    ] == [
        4,
        2,
        1,
    ]


def test_one_microbatch_of_all_chips_is_a_habit_of_programs_for_tpus():
    """`micro_batch x chips = batch` where two chips share a sequence."""
    shared = replace(LLAMA, data=1, fsdp=8, tensor=2, micro_batch=4.0)
    assert only(shared).schedule.microbatches == 2
    assert only(replace(shared, hardware="v5e:4x4")).schedule.microbatches == 1


def test_microbatches_that_do_not_divide_over_the_stages_do_not_interleave():
    pipelined = replace(LLAMA, data=1, fsdp=2, pipe=8, micro_batch=1.0, interleave=2)
    assert only(pipelined).schedule.interleave == 2
    assert only(replace(pipelined, global_batch_sequences=62)).schedule.interleave == 1


def test_chips_without_a_sequence_of_their_own_share_one():
    silent = replace(LLAMA, data=None, fsdp=None, tensor=None, pipe=None, context=None, micro_batch=None)
    assert [only(replace(silent, global_batch_sequences=n)).tensor for n in (16, 8, 5)] == [1, 2, 4]
    assert only(replace(silent, hardware="h100:3x8", chips=24, global_batch_sequences=2)).tensor == 1


def test_a_width_that_does_not_divide_is_priced_and_kv_heads_are_replicated():
    odd = replace(LLAMA, hardware="h100:3x8", chips=24, data=1, fsdp=24, global_batch_sequences=48)
    narrow = replace(odd, d_model=1000, params_total=1e9)
    wide = replace(LLAMA, data=1, fsdp=1, tensor=16, zero=1)
    assert reproduce(wide).config.num_kv_heads == 16
    assert [found.skipped for found in predict([odd, narrow, wide])] == [None, None, None]


def test_a_long_pipeline_without_accumulation_cuts_its_local_batch():
    pipelined = replace(LLAMA, data=1, fsdp=2, pipe=8, micro_batch=32.0)
    assert (only(pipelined).schedule.microbatches, only(pipelined).rules.zero_stage) == (8, 1)
    assert only(replace(pipelined, micro_batch=2.0)).schedule.microbatches == 16
    short = replace(LLAMA, data=1, fsdp=8, pipe=2, micro_batch=8.0)
    assert only(short).schedule.microbatches == 1


def test_zero_2_with_stages_sums_gradients_once_a_step():
    staged = replace(LLAMA, data=8, fsdp=1, pipe=2, zero=2)
    assert only(staged).rules.zero_stage == 1
    assert only(replace(staged, data=16, pipe=1)).rules.zero_stage == 2


def test_software_is_what_the_row_names():
    machine = reproduce(replace(LLAMA, software="pytorch-eager")).hardware
    assert machine.software.name == "pytorch-eager" and machine.chip.step.host_seconds > 0
    assert reproduce(LLAMA).hardware.software.name == "xla"
    old = reproduce(replace(LLAMA, software="megatron", year=2021)).hardware
    assert not old.software.flash
    (found,) = predict([replace(LLAMA, software="pascal")])
    assert found.skipped is not None and "'pascal' is unknown" in found.skipped


@pytest.mark.parametrize(("software", "name"), [("deepspeed", "deepspeed-2021"), ("megatron", "megatron")])
def test_a_tables_record_is_of_its_rows_of_that_software(software: str, name: str):
    """A table of two programs has a record of one of them."""
    row = replace(LLAMA, source="Megatron-LM SC21 (Narayanan et al.) Table 2", software=software)
    assert reproduce(row).hardware.software.name == name


def test_a_fraction_of_a_sequence_is_a_chips_share_of_it():
    split = replace(LLAMA, data=1, fsdp=4, context=4, micro_batch=0.25, global_batch_sequences=4)
    assert only(split).schedule.microbatches == 1


def test_an_empty_interleave_is_the_usual_two():
    pipelined = replace(LLAMA, data=1, fsdp=4, pipe=4, interleave=None)
    assert only(pipelined).schedule.interleave == 2


def test_degrees_that_are_not_the_chips_skip_the_row():
    (found,) = predict([replace(LLAMA, data=3)])
    assert found.skipped == "data·fsdp·tensor·pipe·context = 3·8·1·1·1 = 24 is not the row's 16 chips"


def test_a_preset_is_found_by_its_dimensions():
    assert model_of(LLAMA).rope_theta == 500_000  # LLaMA 3's
    assert model_of(replace(LLAMA, seq_len=262_144)).max_seq_len == 262_144
    other = model_of(replace(LLAMA, d_ff=14000, params_total=7.9e9))
    assert (other.d_ff, other.gated, other.tied_embeddings) == (14000, True, False)


def test_parameters_tell_tied_embeddings():
    gpt = replace(LLAMA, mlp="plain", d_ff=16384, n_kv_heads=32, vocab=50368, seq_len=2048)
    tied = model_of(replace(gpt, params_total=6.659e9))
    assert tied.tied_embeddings and tied.norm == "layer" and tied.positions == "learned"
    assert count_params(tied).total == pytest.approx(6.659e9, rel=0.002)
    assert not model_of(replace(gpt, params_total=6.865e9)).tied_embeddings


def test_parameters_tell_shared_experts():
    """LLaMA 4 Scout: 16 experts of which a token takes one, and one that all share."""
    scout = replace(LLAMA, n_layers=48, d_model=5120, d_ff=8192, n_heads=40, vocab=202_048)
    guessed = model_of(
        replace(scout, experts=16, experts_per_token=1, params_total=1.09e11, params_active=1.7e10)
    )
    assert guessed.moe is not None and guessed.moe.num_shared_experts == 1
    assert guessed.mla is None and guessed.moe.num_dense_layers == 0


# Scores


def predicted(row: PublishedRow, seconds: float, layout: str = "data=1", mfu: float = 0.5) -> Prediction:
    return Prediction(row, row.in_unit(seconds), layout=layout, mfu=mfu)


def test_errors_are_in_the_rows_unit():
    slow = predicted(LLAMA, 2 * LLAMA.seconds())
    assert slow.error == pytest.approx(-0.5)  # half the throughput
    timed = replace(LLAMA, metric=STEP, value=3.0)
    assert predicted(timed, 6.0).error == pytest.approx(1.0)


def test_quantiles_interpolate():
    values = [float(v) for v in range(11)]
    assert (quantile(values, 0.5), quantile(values, 0.9), quantile([], 0.5)) == (5, 9, None)
    found = score_predictions(
        [predicted(replace(LLAMA, metric=STEP, value=1.0), 1 + e) for e in (0.05, 0.15, 0.3)]
    )
    assert found.median_abs_error == pytest.approx(0.15)
    assert found.p90_abs_error == pytest.approx(0.27)
    assert (found.within_10_percent, found.within_20_percent) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_two_anchors_correct_the_rows_that_are_like_them():
    timed = replace(LLAMA, metric=STEP, value=4.0)
    first = predicted(timed, 2.0, mfu=0.4)
    second = predicted(replace(timed, id="A2", chips=64 * timed.chips), 4.0)
    like = predicted(replace(timed, id="A3", value=7.0), 3.0, mfu=0.3)
    other = predicted(replace(timed, id="A4", dtype="fp8", remat="selective"), 5.0)
    found = anchored_by_source([first, second, like, other])
    assert [p.is_anchor for p in found] == [True, True, False, False]
    assert found[2].predicted == pytest.approx(3.0 * 2**TRUST, rel=1e-3)
    assert found[3].predicted == pytest.approx(5.0 * 2 ** (TRUST * exp(-2)), rel=1e-3)
    # The anchor's MFU of 0.4 instead of its own 0.3.
    assert found[2].baseline == pytest.approx(7.0 * 0.3 / 0.4)
    assert [p.row.id for p in step_rows(found)] == ["A3", "A4"]


def test_rows_of_memory_say_which_figure_is_predicted():
    """The row's unit names it; otherwise it is the program's."""
    row = replace(LLAMA, metric=MEMORY, value=4e10, software="megatron")
    rows = [row, replace(row, unit="GiB reserved"), replace(row, unit="nvidia-smi"), LLAMA]
    found = predict(rows)
    assert [one.memory_figure for one in found] == ["allocated", "reserved", "device", None]
    document = validation_document(found, anchor=False)
    assert document["memory"]["figures"] == {"allocated": 1, "reserved": 1, "device": 1}


def test_memory_is_not_scaled_by_an_anchor():
    stored = Prediction(replace(LLAMA, metric=MEMORY, value=8e10), 7e10, layout="data=1")
    assert anchored_by_source([predicted(LLAMA, 1.0), stored])[1] == stored


def test_a_ranking_is_held_against_the_rule_of_thumb_and_chance():
    timed = replace(LLAMA, metric=STEP)
    rows = [replace(timed, id=f"A{i}", value=value) for i, value in enumerate((4.0, 5.0, 6.0))]
    rows = [replace(row, tensor=tensor) for row, tensor in zip(rows, (8, 4, 2), strict=True)]
    found = [predicted(row, s, str(s)) for row, s in zip(rows, (3.0, 2.0, 4.0), strict=True)]
    (one,) = rankings(found)
    assert (one.best_id, one.chosen_id, one.regret) == ("A0", "A1", pytest.approx(0.25))
    assert one.best_of_five == 0 and one.tau == pytest.approx(1 / 3)
    assert (one.rule_regret, one.random_regret) == (pytest.approx(0.5), pytest.approx(0.25))
    assert rankings(found[:1]) == []


def test_tau_of_ties():
    """scipy.stats.kendalltau([1, 2, 2, 3], [1, 2, 3, 3]) is 0.8."""
    assert kendall_tau([(1, 1), (2, 2), (2, 3), (3, 3)]) == pytest.approx(0.8)
    assert kendall_tau([(1, 1), (1, 2)]) == 0


def test_verdicts_count_what_ran_and_what_ran_out():
    ran = replace(predicted(LLAMA, 1.0), fits=False)
    larger = replace(LLAMA, id="A2", metric=MEMORY, unit="bytes (ran out)", micro_batch=4.0, value=8e10)
    out = Prediction(larger, 7e10, layout="data=1", fits=True)
    found = memory_verdicts([ran, out])
    assert (found.num_ran, found.false_does_not_fit, found.num_ran_out, found.false_fits) == (1, 1.0, 1, 1.0)
    smaller = replace(out, row=replace(larger, micro_batch=1.0))  # nothing smaller is known to have run
    assert memory_verdicts([ran, smaller]).num_ran_out == 0


def test_one_mfu_is_that_of_other_sources():
    rows = [replace(LLAMA, id=f"A{i}", source=source) for i, source in enumerate(("ours", "theirs"))]
    slow = replace(rows[1], value=LLAMA.value / 2)
    ours, theirs = predict([rows[0], slow])
    assert ours.baseline == pytest.approx(LLAMA.value / 2) and theirs.baseline == pytest.approx(LLAMA.value)


def test_groups_keep_their_order():
    assert grouped([3, 1, 2, 5], lambda n: n % 2) == {1: [3, 1, 5], 0: [2]}


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    from meshwright.cli.main import main

    code = main(["validate", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_has_the_keys_of_the_contract(capsys, tmp_path: Path):
    path = write(tmp_path / "rows.csv", cells(), cells(id="A2", n_layers="40", params_total="9.8e9"))
    code, document = run(capsys, str(path), "--median-bar", "10", "--p90-bar", "10")
    assert code == 0 and document["missed"] == []
    keys = {"id", "source", "predicted", "published", "error", "skipped"}
    assert all(row.keys() >= keys for row in document["rows"])
    for key in ("median_abs_error", "p90_abs_error", "within_10_percent", "within_20_percent"):
        assert document[key] is not None
    assert document["verdicts"]["num_ran"] == 2 and document["out_of_sample"]["num_rows"] == 2


def test_a_missed_bar_exits_1(capsys, tmp_path: Path):
    path = write(tmp_path / "rows.csv", cells(value="1"))
    code, document = run(capsys, str(path))
    assert code == 1 and document["missed"][0].startswith("median error is ")


def test_nothing_to_predict_exits_1(capsys, tmp_path: Path):
    path = write(tmp_path / "rows.csv", cells(hardware="abacus:4"))
    code, document = run(capsys, str(path))
    assert code == 1 and "'abacus' is unknown" in document["missed"][0]


def test_bad_input_exits_2(capsys, tmp_path: Path):
    from meshwright.cli.main import main

    assert main(["validate", str(tmp_path / "absent.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_batch_called_max_is_as_many_as_the_engine_takes(tmp_path):
    row = served(tmp_path, metric="tokens_per_s", batch="max")
    assert isinstance(row, InferenceRow) and row.batch == MAX_BATCH
    case = reproduce_inference(row)
    layout = case.layouts[0]
    assert 1 < case.capacity(layout) < MAX_BATCH
    small = reproduce_inference(replace(row, batch=1))
    assert case.choice[1] > small.choice[1]


def test_prompts_without_answers_count_their_own_tokens(tmp_path):
    row = served(tmp_path, metric="tokens_per_s", output_len="0", batch="4")
    assert isinstance(row, InferenceRow)
    first = reproduce_inference(replace(row, metric="ttft_s"))
    seconds = first.choice[1]
    assert reproduce_inference(row).choice[1] == pytest.approx(
        4 * row.prompt_len / seconds / (row.chips if row.unit == PER_CHIP else 1)
    )
