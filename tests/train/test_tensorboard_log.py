"""What is written for TensorBoard."""

import struct
from pathlib import Path

import pytest

from meshwright.train.tensorboard_log import Board

pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")


def test_numbers_are_scalars_by_step(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]

    board = Board(tmp_path, 0)
    board.write({"step": 10, "loss": 2.5, "mfu": None, "evaluation_losses": {"code": 1.5}})
    board.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, found = file.read_bytes(), {}
    while content:  # a length and its checksum, the event and its checksum
        (length,) = struct.unpack("<Q", content[:8])
        event, content = Event.FromString(content[12 : 12 + length]), content[16 + length :]
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    assert found == {("loss", 10): 2.5, ("evaluation/code", 10): 1.5}
