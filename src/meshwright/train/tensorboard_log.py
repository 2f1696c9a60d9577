"""A run's metrics for TensorBoard."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:  # which loads JAX, and `check_board` is asked before that
    from meshwright.train.metrics_log import Line

FOLDER = "tensorboard"


def check_board() -> None:
    """Raises MeshwrightError where what writes TensorBoard's files is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise MeshwrightError("--tensorboard needs tensorboardX; pip install 'meshwright[tensorboard]'")


class Board:
    """Writes the numbers of metrics lines as scalars into run/tensorboard/.

    step: that which the run goes on from; what was written of later ones before is dropped.
    """

    def __init__(self, run: Path, step: int) -> None:
        check_board()
        import tensorboardX  # pyright: ignore[reportMissingImports]

        self._writer: Any = tensorboardX.SummaryWriter(str(run / FOLDER), purge_step=step + 1)

    def write(self, line: "Line") -> None:
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        numbers |= {f"evaluation/{name}": value for name, value in line.get("evaluation_losses", {}).items()}
        for name, value in numbers.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()
