"""A file is written whole or not at all."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import OutputError, PlanError
from meshwright.files import check_writable, held, well_formed, write_whole


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    assert write_whole(path, "α = 2550") == path
    assert path.read_text(encoding="utf-8") == "α = 2550"
    write_whole(path, "")
    assert path.read_bytes() == b""
    assert _names(path.parent) == ["figures.json"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    assert write_whole(tmp_path / "whole", "").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_whole(tmp_path / "figures.json", "old")
    whole = Path.write_text

    def half(self: Path, text: str, **options: str) -> None:
        whole(self, text[:1], **options)
        raise failure

    monkeypatch.setattr(Path, "write_text", half)
    expected = OutputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["figures.json"]
    if expected is OutputError:
        assert str(caught.value) == f"{path}: cannot be written: No space left on device"


def test_what_cannot_be_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError, match=r"taken: cannot be written: Is a directory$"):
        write_whole(tmp_path / "taken", "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot be written: (Not a directory|File exists)$"):
        write_whole(tmp_path / "file" / "inside", "x")
    assert _names(tmp_path) == ["file", "taken"]


def test_a_folder_is_held_by_one_process(tmp_path: Path):
    folder = tmp_path / "run"
    program = "import sys, time; from pathlib import Path; from meshwright.files import held\n"
    program += "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(OutputError, match=rf"run: is in use by process {other.pid} on .*; wait"),
            held(folder),
        ):
            pass
        other.kill()
        other.wait()
    with held(folder):  # a process that is killed holds nothing
        pass


def test_values_of_another_form_are_a_user_s_mistake_and_failed_assertions_are_not() -> None:
    for value in (None, "x", {}):
        with (
            pytest.raises(PlanError, match=r"f\.json: a value has the wrong form"),
            well_formed("f.json", PlanError),
        ):
            _ = 1 + value  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(PlanError, match="too long"), well_formed("f.json", PlanError):
        raise PlanError("too long")
    with pytest.raises(AssertionError), well_formed("f.json", PlanError):
        raise AssertionError("ours")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    check_writable(pipe)
    with pytest.raises(OutputError, match=r"pipe: cannot be written: No such device or address$"):
        write_whole(pipe, "text")  # it has no reader
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert write_whole(pipe, "text") == pipe
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


def test_a_socket_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path := tmp_path / "socket"))
        with pytest.raises(OutputError, match="cannot be written"):
            write_whole(path, "text")
        assert path.is_socket()
