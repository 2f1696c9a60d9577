"""The observatory's differences between releases, in words."""

import pytest

observatory = pytest.importorskip("benchmarks.observatory")

ROW = "llama-3.2-1b train v5e:4x4 data=16,zero=1"
FIGURES = {
    "verdict": "match",
    "findings": [],
    "sent_bytes": 4_000_000_000,
    "exposed_seconds": 0.01,
    "step_seconds": 0.5,
    "memory_bytes": 10_000_000_000,
    "program_bytes": 20_000_000,
    "compile_seconds": 60.0,
}


def of_release(jax: str, op: str = "reduce_scatter", **figures: object) -> dict:
    """A row with two weights whose gradients are summed by `op`."""
    collectives = [
        {"tensor": name, "direction": "backward", "op": op, "axes": ["data"], "bytes": 1_000_000, "count": 16}
        for name in ("w_in", "w_out")
    ]
    versions = {"jax": jax, "jaxlib": jax, "libtpu": "0.0.42", "jax-cuda12-plugin": jax}
    named = {"row": ROW, "release": jax, "versions": versions, "collectives": collectives}
    return named | FIGURES | figures


def test_equal_figures_are_no_change() -> None:
    assert observatory.changes(of_release("0.11.2"), of_release("0.12.0")) == []


def test_the_time_of_a_compile_counts_from_twice() -> None:
    before = of_release("0.11.2")
    assert observatory.changes(before, of_release("0.12.0", compile_seconds=100.0)) == []
    (line,) = observatory.changes(before, of_release("0.12.0", compile_seconds=130.0))
    assert line == "compile 130 s, before 60 s (+116.7%)"


def test_changes_are_listed_in_words() -> None:
    after = of_release("0.12.0", "all_reduce", step_seconds=0.52, verdict="differs", program_bytes=25_000_000)
    assert observatory.changes(of_release("0.11.2"), after) == [
        "the verdict is differs, before match",
        "w_in backward, w_out backward: all-reduce over data, before reduce-scatter over data",
        "step 520 ms, before 500 ms (+4.0%)",
        "program 25 MB, before 20 MB (+25.0%)",
    ]


def test_a_collective_that_only_one_release_has_is_listed() -> None:
    before, after = of_release("0.11.2"), of_release("0.12.0")
    after["collectives"] = after["collectives"][1:]
    assert observatory.changes(before, after) == ["w_in backward: no longer reduce-scatter over data"]
    assert observatory.changes(after, before) == ["w_in backward: new reduce-scatter over data"]


def test_a_row_that_does_not_compile_is_a_change_once() -> None:
    versions = {"row": ROW, "release": "0.12.0", "versions": of_release("0.12.0")["versions"]}
    failed = versions | {"error": "out of memory"}
    assert observatory.changes(of_release("0.11.2"), failed) == ["does not compile: out of memory"]
    assert observatory.changes(failed, of_release("0.12.0")) == ["compiles again"]
    assert observatory.changes(failed, failed) == []


def test_a_changed_row_is_reproduced_by_one_line() -> None:
    rows = [of_release("0.11.2"), of_release("0.12.0", step_seconds=0.6)]
    lines = observatory.lines_of(rows)
    assert lines[2].startswith("| `llama-3.2-1b train v5e:4x4 data=16, zero=1` | 0.11.2 | libtpu 0.0.42 |")
    assert lines[-2].startswith(f"- jax 0.12.0, `{ROW}`: step 600 ms, before 500 ms (+20.0%)")
    reproduced = f"make observatory ARGS='--only \"{ROW}\" --releases 0.11.2 0.12.0'"
    assert lines[-1] == f"  `{reproduced}`"


def test_the_sample_is_of_the_matrix() -> None:
    texts = [case.text for case in observatory.CASES]
    assert len(observatory.SAMPLE) == 12
    assert all(texts.count(text) == 1 for text in observatory.SAMPLE)


def test_rows_are_chosen_by_their_whole_text_or_a_part() -> None:
    assert len(observatory.chosen(None)) == 12
    (whole,) = observatory.chosen("llama-3.2-1b train h100:1x8 data=8,zero=1")
    assert whole.layout == "data=8,zero=1"
    assert len(observatory.chosen("mixtral-8x22b")) == 1
    assert observatory.chosen("no such row") == []
