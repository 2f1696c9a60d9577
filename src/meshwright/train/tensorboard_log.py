"""A run's metrics for TensorBoard."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:  # it imports JAX, and `check_board` is called before that
    from meshwright.train.metrics_log import Line

FOLDER = "tensorboard"


def check_board() -> None:
    """Raise MeshwrightError if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise MeshwrightError("--tensorboard needs tensorboardX; pip install 'meshwright[tensorboard]'")


class Board:
    """The numbers of metrics lines as scalars in run/tensorboard/.

    step: the step from which the run continues; earlier scalars of later steps are dropped.
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
