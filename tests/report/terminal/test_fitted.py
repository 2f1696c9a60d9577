"""Tables in narrow terminals: no word is cut, and no line is too long."""

from io import StringIO

import pytest
from rich.console import Console, Group
from rich.table import Table

from meshwright.cli.main import main
from meshwright.report.terminal.fitted import fitted

NAME, SOURCE = "hbm_bytes_per_second", "How to Scale Your Model, table of TPU specifications, one way"


def printed(width: int, *, grouped: bool = False) -> list[str]:
    table = Table("figure", "value", "source", title="Figures", caption="all of them")
    table.add_row(NAME, "810 GB/s", SOURCE)
    table.add_row("name", "v5e", "")
    output = StringIO()
    found = fitted(Group("before", table) if grouped else table, width)
    Console(file=output, width=width, color_system=None).print(found)
    return output.getvalue().splitlines()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_words_are_whole_and_lines_fit(width: int, grouped: bool):
    lines = printed(width, grouped=grouped)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace("│", " ").split()
    assert {NAME, "810", "GB/s", "v5e", *SOURCE.split()} <= set(words)


def test_too_narrow_a_terminal_gets_a_line_for_each_cell():
    assert [line.rstrip() for line in printed(38)][:3] == ["Figures", f"figure  {NAME}", "value   810 GB/s"]


def test_a_table_that_fits_is_as_it_was():
    assert sum(NAME in line and SOURCE in line for line in printed(120)) == 1


def test_columns_sets_the_width_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "62")
    assert main(["model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 62
    assert any("deepseek-v2-lite" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80])
def test_a_layout_in_a_sentence_breaks_after_its_commas(width: int):
    layout = "pipe=2,context=4,tensor=2,zero=1,zero_context=true,sequence_parallel=true,microbatches=244"
    output = StringIO()
    Console(file=output, width=width).print(fitted(f"use {layout} here", width))
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    assert max(map(len, lines)) <= width and "".join(lines) == f"use {layout} here".replace("4 h", "4 h")
    assert all(line.endswith(",") for line in lines[:-1])
