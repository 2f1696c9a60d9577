"""Training data that cannot be trusted: named and refused, or left out, in bounded time and memory."""

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest

from meshwright.errors import DataError
from meshwright.train import documents
from meshwright.train.documents import Document, read_documents

GOOD = json.dumps({"text": "good"}) + "\n"


def read(path: Path) -> list[Document]:
    return list(read_documents(str(path), "skip"))


def test_a_pipe_or_a_device_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(DataError, match="is not a regular file"):
            read(path)


def test_pipes_devices_and_loops_in_a_folder_are_passed_over(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "good.jsonl").write_text(GOOD)
    assert [document.text for document in read(tmp_path)] == ["good"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that cannot be read")
def test_a_file_that_fails_while_it_is_read_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"^corpus /proc/self/mem: cannot be read: Input/output error$"):
        read(Path("/proc/self/mem"))
    (tmp_path / "bad.txt").symlink_to("/proc/self/mem")
    (tmp_path / "good.jsonl").write_text(GOOD)
    with pytest.warns(UserWarning, match=r"bad\.txt: cannot be read: .*; it is left out"):
        assert [document.text for document in read(tmp_path)] == ["good"]


@pytest.mark.filterwarnings("ignore:.*it is left out")
def test_a_line_without_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "_LONGEST_LINE", 1_000_000)
    with (tmp_path / "long.jsonl").open("w") as file:
        file.write(GOOD)
        for _ in range(30):
            file.write("x" * 1_000_000)
        file.write("\n" + GOOD)
    tracemalloc.start()
    found = read(tmp_path / "long.jsonl")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [document.name for document in found] == ["long.jsonl:1", "long.jsonl:3"] and most_bytes < 10e6
    with pytest.raises(DataError, match=r"line 2: has more than 1,000,000 bytes"):
        list(read_documents(str(tmp_path / "long.jsonl")))


@pytest.mark.filterwarnings("ignore:.*it is left out")
@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"a":' * 50_000, '{"text": ' + "9" * 10_000 + "}", '{"messages": [[]]}', "\\u0000"],
)
def test_a_hostile_line_is_left_out(tmp_path: Path, line: str):
    (tmp_path / "a.jsonl").write_text(GOOD + line + "\n" + GOOD)
    assert [document.text for document in read(tmp_path / "a.jsonl")] == ["good"] * 2


def test_parquet_without_text_is_refused(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(DataError, match="it has the type int64"):
        list(read_documents(str(tmp_path / "numbers.parquet")))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "numbers.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="no column 'text' can be read"):
        list(read_documents(str(tmp_path / "cut.parquet")))


@pytest.mark.slow
def test_100_000_files_are_read(tmp_path: Path):
    for number in range(100_000):
        (tmp_path / f"{number}.txt").write_text("x")
    assert sum(1 for _ in read_documents(str(tmp_path))) == 100_000
