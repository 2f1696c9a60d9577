"""One checkpoint written and waited for."""

from contextlib import closing
from pathlib import Path
from typing import Any

from meshwright.nn.files.checkpoint import Saver


def save(directory: Path, step: int, state: Any, position: dict[str, Any], keep: int = 2) -> None:
    with closing(Saver(directory, keep)) as saver:
        saver.save(step, state, position)
