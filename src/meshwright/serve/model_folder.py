"""Whether a folder holds a model to serve, found out without JAX."""

from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.nn.files.checkpoint_files import CHECKPOINTS


def check_model_folder(path: Path) -> None:
    """Raises CheckpointError where `path` is neither a run of meshwright nor a Hugging Face model."""
    if missing := _missing(path):
        raise CheckpointError(
            f"checkpoint {path}: {missing}; it takes config.json and either {CHECKPOINTS}/ (a run of"
            " meshwright) or *.safetensors (a Hugging Face model)"
        )


def _missing(path: Path) -> str | None:
    """Why `path` is not a model folder, as a clause; None if it is one."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / "config.json").is_file():
        return "has no config.json"
    if not (path / CHECKPOINTS).is_dir() and not any(path.glob("*.safetensors*")):
        return "has no weights"
    return None
