"""The audited layer, drawn: which bars there are, how long, and what is left out."""

import re

import pytest
from tests.report.sample_run import audit_document

from meshwright.report.audit_tables import memory_rows, remarks
from meshwright.report.pictures.layer import layer_figure


def _row(
    tensor: str, direction: str, planned: float | None, emitted: float | None, status: str = "match"
) -> dict:
    sides = {"planned": planned, "emitted": emitted}
    one = {"op": "all_gather", "axes": ["fsdp"], "bytes": 4096, "count": 2}
    return {
        "tensor": tensor,
        "direction": direction,
        "status": status,
        **{side: one | {"seconds": seconds} if seconds else None for side, seconds in sides.items()},
    }


ROWS = [
    _row("loss", "forward", 1e-6, 1e-6),
    _row("wq", "forward", 2e-3, 4e-3),
    _row("wq", "backward", 1e-3, 1e-3),
    _row("embed", "forward", None, 1e-3, "unplanned"),
    _row("wk", "forward", 1e-3, None, "missing"),
    _row("grad_norm", "update", 9.0, 9.0, "negligible"),
]


def drawn(audit: dict) -> list[str]:
    """The body at each width, the widest first."""
    figure = layer_figure(audit)
    assert figure
    (panel,) = figure.frames[0].panels
    return [str(one.body) for one in (panel, *panel.narrower)]


def test_each_side_has_its_bar_as_long_as_its_time() -> None:
    for svg in drawn({"rows": ROWS}):
        bars = re.findall(r'width="([^"]+)" height="11.0" [^>]*><title>(planned|emitted)', svg)
        widths = {side: [float(width) for width, of in bars if of == side] for side in ("planned", "emitted")}
        longest = max(widths["emitted"])
        # In the order of the forward pass, forward before backward: embed, wq (twice), wk, loss.
        assert widths == {
            "planned": pytest.approx([longest / 2, longest / 4, longest / 4, 2], abs=0.02),
            "emitted": pytest.approx([longest / 4, longest, longest / 4, 2], abs=0.02),
        }
    svg = drawn({"rows": ROWS})[0]
    assert "4 ms" in svg and "grad_norm" not in svg


def test_nodes_stand_in_the_order_of_the_forward_pass() -> None:
    for svg in drawn({"rows": ROWS}):
        assert re.findall(r'font-weight="600"[^>]*>([^<]+)<', svg) == ["embed", "wq", "wk", "loss"]
    assert "each layer" in drawn({"rows": ROWS})[0]


def test_without_times_there_is_no_drawing() -> None:
    assert layer_figure(audit_document()) is None
    assert layer_figure({"rows": []}) is None


def test_a_time_that_is_not_known_is_unavailable() -> None:
    row = _row("wq", "forward", 1e-3, 1e-3)
    row["emitted"]["seconds"] = None
    assert "time unavailable" in drawn({"rows": [row]})[0]


def test_memory_is_shown_by_cause_and_what_a_compiler_does_not_say_is_unavailable() -> None:
    planned = {"weights": 10, "gradients": 20, "optimizer": 40, "activations": 100, "buffers": 200, "host": 0}
    compiled = {"arguments": 55, "outputs": 1, "temporaries": 300, "total": 356}
    audit = {"memory": {"planned_by_cause": planned, "compiled_by_cause": compiled}}
    assert memory_rows(audit) == [
        ("arguments: weights 10 B, optimizer 40 B", "50 B", "55 B"),
        ("temporaries: gradients 20 B, activations 100 B, buffers 200 B", "320 B", "300 B"),
        ("other outputs", "0 B", "1 B"),
    ]
    unsaid = {"memory": {"planned_by_cause": planned, "compiled_by_cause": None}}
    assert {compiled for *_, compiled in memory_rows(unsaid)} == {"unavailable"}


def test_findings_and_the_compilers_warnings_are_remarks() -> None:
    finding = {
        "tensor": "wq",
        "direction": "backward",
        "what": "summed whole",
        "where": "step",
        "change": "split it",
    }
    said = {"what": "replicated", "where": "mlp", "change": "constrain it"}
    audit = {
        "findings": [finding | {"extra_bytes": 2000, "extra_seconds": -0.001}],
        "compiler_warnings": [said],
    }
    assert remarks(audit) == [
        ("wq backward", "summed whole (each device sends +2 kB per step, -1 ms)", "step", "split it"),
        ("the compiler", "replicated", "mlp", "constrain it"),
    ]
    audit["findings"][0]["extra_seconds"] = None
    assert "time unavailable" in remarks(audit)[0][1]
