"""Terminal tables: the figures are there, and text from documents is never markup."""

from io import StringIO

import pytest
from rich.console import Console
from tests.report.sample_run import audit_document, plan_document, write_run

from meshwright.report.audit_tables import memory_rows
from meshwright.report.run_documents import read_run
from meshwright.report.terminal.audits import audit_table, schedule_tables
from meshwright.report.terminal.tables import breakdown_line, breakdown_table, plan_table, summary_panel


def printed(renderable, width=110) -> list[str]:
    """Lines with runs of blanks made one."""
    output = StringIO()
    Console(file=output, width=width, color_system=None).print(renderable)
    return [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_candidates_in_rank_order_with_the_chosen_one_marked():
    lines = printed(plan_table(plan_document()))
    assert "1 * fsdp=4,tensor=2 412 ms 62.0% 185 MB yes compute" in lines
    assert "8 data=8 634 ms 40.0% 1.08 GB no ici" in lines


def test_a_narrow_table_breaks_a_layout_at_its_commas_and_cuts_nothing():
    plan = plan_document()
    long = "pipe=4,data=2,fsdp=16,tensor=8,sequence_parallel=true,microbatches=64,remat=full"
    plan["candidates"][1]["layout"] = long
    lines = printed(plan_table(plan), width=80)
    start = next(n for n, line in enumerate(lines) if "pipe=4," in line)
    end = lines.index("remat=full", start)
    folded = [word for line in lines[start : end + 1] for word in line.split() if "=" in word]
    assert "".join(folded) == long
    assert len(folded) > 2 and all(word.endswith(",") for word in folded[:-1])


def test_the_longest_operation_comes_first():
    rows = [
        line
        for line in printed(breakdown_table(plan_document()["best"]))
        if line.endswith(("compute", "ici"))
    ]
    assert rows[0] == "mlp matmuls 148 ms 36.0% compute"


def test_an_audit_lines_up_planned_and_emitted():
    lines = printed(audit_table(audit_document()))
    assert "wq backward ReduceScatter_fsdp ×4 131 kB AllReduce_fsdp ×4 131 kB equivalent" in lines
    assert "logits backward – – AllGather_tensor 32.8 kB unplanned" in lines
    assert "memory per device 173 MB 188 MB 1.09×" in lines
    assert lines[0] == "verdict: differs (9 match, 7 equivalent, 1 unplanned)"


def test_a_finding_says_what_it_costs_where_it_is_and_what_to_change():
    finding = {
        "tensor": "w_in", "direction": "backward", "what": "summed whole", "where": "mlp/w_in",
        "change": "split D", "extra_bytes": 1500, "extra_seconds": 2e-3,
    }  # fmt: skip
    lines = printed(audit_table(audit_document() | {"findings": [finding], "compiler": "XLA for CPU"}))
    assert lines[-3:] == [
        "w_in backward: summed whole (each device sends +1.5 kB per step, +2 ms)",
        "where: mlp/w_in",
        "change: split D",
    ]
    assert lines[0] == "verdict: differs (9 match, 7 equivalent, 1 unplanned), compiled by XLA for CPU"
    unknown = finding | {"where": "", "change": "", "extra_bytes": -4, "extra_seconds": None}
    lines = printed(audit_table(audit_document() | {"findings": [unknown]}))
    assert lines[-1] == "w_in backward: summed whole (each device sends -4 B per step, time unavailable)"


def test_what_runs_at_once_and_what_makes_the_peak_is_shown():
    sent = {"tensor": "wq", "direction": "forward", "op": "all_gather", "bytes": 1000, "count": 4}
    alone = sent | {"tensor": "embed", "bytes": 500, "overlaps": []}
    small = alone | {"tensor": "loss", "bytes": 1}
    hidden = sent | {"overlaps": ["layers/wk", "layers/wv", "layers/wo"]}
    buffers = [
        {"bytes": 6000, "tensor": "layers/w_in", "instruction": "fusion.1", "shape": "bf16[3,1000]"},
        {"bytes": 3000, "tensor": "", "instruction": "copy.2", "shape": "bf16[1500]"},
        {"bytes": 4, "tensor": "loss", "instruction": "add.3", "shape": "f32[]"},
    ]
    memory = {"compiled_by_cause": {"temporaries": 10000}, "peak": {"bytes": 9004, "buffers": buffers}}
    audit = {"emitted": [alone, small, hidden], "memory": memory}
    lines = [line for table in schedule_tables(audit) for line in printed(table)]
    assert lines[4:6] == [
        "wq forward all_gather layers/wk, layers/wv and 1 more",
        "embed forward all_gather nothing",
    ]
    assert "layers/w_in bf16[3,1000] 6 kB" in lines
    assert "copy.2 bf16[1500] 3 kB" in lines
    assert "all others 4 B" in lines
    told = " ".join(lines[-3:])
    assert "9 kB of temporaries by the order of the schedule, out of 10 kB that the compiler counts" in told


def test_what_a_program_does_not_tell_is_unavailable():
    sent = {"tensor": "wq", "direction": "forward", "op": "all_gather", "bytes": 1000, "count": 4}
    audit = {"emitted": [sent | {"overlaps": None}], "memory": {"peak": None}}
    assert [str(line).partition(",")[0] for line in schedule_tables(audit)] == [
        "overlap with collectives: unavailable",
        "buffers at the peak: unavailable",
    ]


def test_brackets_are_not_markup():
    plan = plan_document()
    plan["best"]["breakdown"] = [
        {"name": "gather w[D_fsdp] [/]", "seconds": 1.0, "share": 1.0, "bound": "[bold]"}
    ]
    assert "gather w[D_fsdp] [/] 1 s 100.0% [bold]" in printed(breakdown_table(plan["best"]))


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_says_the_headlines_and_the_places(tmp_path, width):
    run = read_run(write_run(tmp_path / "demo"))
    text = " ".join(printed(summary_panel(run, {"report": "runs/demo/report.html"}), width))
    for expected in (
        "456 ms",
        "unigram entropy 6.718",
        "differs",
        "def __init__(self",
        "runs/demo/report.html",
    ):
        assert expected in text


def test_memory_of_a_step_that_generates_has_a_cache_and_no_optimizer() -> None:
    planned = {"weights": 1000, "cache": 2000, "buffers": 3000}
    rows = memory_rows({"memory": {"planned_by_cause": planned, "compiled_by_cause": None}})
    assert rows[0] == ("arguments: weights 1 kB, cache 2 kB", "3 kB", "unavailable")
    assert rows[1][:2] == ("temporaries: buffers 3 kB", "3 kB")


def test_a_kernel_that_was_not_checked_is_named():
    numerics = {
        "agrees": True,
        "checks": [],
        "layout": "fsdp=2",
        "not_run": "the chips' attention kernel: no rule",
    }
    lines = printed(audit_table(audit_document() | {"numerics": numerics}))
    assert "numerics: not run: the chips' attention kernel: no rule" in lines


def test_operations_of_one_name_are_told_apart_by_their_bounds() -> None:
    parts = [("matmul", 0.5, "compute"), ("matmul", 0.3, "hbm"), ("elementwise", 0.2, "hbm")]
    rows = [{"name": n, "seconds": share, "share": share, "bound_name": bound} for n, share, bound in parts]
    assert breakdown_line({"breakdown": rows}) == (
        "The step: matmul bound by compute 50.0%, matmul bound by hbm 30.0%, elementwise 20.0%."
    )
