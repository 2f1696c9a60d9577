"""What a run is trained with, kept in its folder as settings.json, so that a resumed run needs no options."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from meshwright.errors import DataError, MeshwrightError
from meshwright.files import parse_json, read_text, write_whole
from meshwright.models.config import ModelConfig
from meshwright.train.documents import BadData

SETTINGS = "settings.json"
# What decides the parameters and the data a run began with: another value would be another run.
_FIXED = ("data", "eval", "tokenizer", "from_", "mask_documents", "seed", "optimizer")
OptimizerName = Literal["adamw", "adafactor", "lion", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]
OnSpike = Literal["skip", "stop"]
_KNOWN = {
    name: get_args(kind)
    for name, kind in {
        "on_spike": OnSpike,
        "bad_data": BadData,
        "schedule": ScheduleName,
        "optimizer": OptimizerName,
    }.items()
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    data, bad_data: as for `read_documents`; several, PATH:WEIGHT, are a mixture. eval: further evaluation
    sets, NAME=PATH. tokenizer: a tokenizer.json, or a folder with one, to use in
    place of one trained on the data. from_: a Hugging Face checkpoint's folder whose weights training starts
    from, and whose tokenizer it takes. mask_documents: attention stays within a document. steps: train up
    to this one; None is one epoch, and is a number once the corpus is packed. schedule_steps: updates until
    the learning rate has decayed; None is `steps` as the run began, so that more steps later do not change
    the rate of earlier ones. learning_rate: at its peak; schedule: its course from there. optimizer: that of
    the plan unless another is asked for. weight_decay: of matrices, times the learning rate. clip_norm: bound
    of the gradients' global norm. z_loss: weight of the squared log of the softmax' sum in the loss.
    balance_loss, router_z_loss: weights of what each layer's router adds where its experts have unequal
    loads, and for the squared log of its own softmax' sum.
    checkpoint_every: steps between checkpoints, 0 for none but those by time, by validation and at the end.
    checkpoint_minutes: minutes between checkpoints. keep: how many of the last are kept. on_spike: what is
    done about a loss that is not finite or far above its trend. tensorboard: whether it gets metrics, too.
    """

    data: str | tuple[str, ...]
    eval: tuple[str, ...] = ()
    tokenizer: str | None = None
    from_: str | None = None
    mask_documents: bool = False
    bad_data: BadData = "stop"
    steps: int | None = None
    schedule_steps: int | None = None
    learning_rate: float = 1e-3
    schedule: ScheduleName = "cosine"
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    z_loss: float = 0.0
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    seed: int = 0
    checkpoint_every: int = 0
    checkpoint_minutes: float = 10.0
    keep: int = 2
    on_spike: OnSpike = "skip"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "eval"):  # JSON has lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        for name, least in (("steps", 1), ("schedule_steps", 1), ("checkpoint_every", 0), ("keep", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise MeshwrightError(f"{option(name)} {value} is below {least}")
        for name in ("weight_decay", "z_loss", "balance_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < inf:
                raise MeshwrightError(f"{option(name)} {getattr(self, name):g} is not a number from 0 up")
        for name in ("learning_rate", "checkpoint_minutes", "clip_norm"):
            value = getattr(self, name)
            if not 0 < value < inf:
                finite = " and finite" if value > 0 else ""
                raise MeshwrightError(f"{option(name)} {value:g} is not above 0{finite}")
        for name, known in _KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                raise MeshwrightError(f"{option(name)} {value!r} is unknown; known: {', '.join(known)}")


def check_has_routers(model: ModelConfig, balance_loss: float, router_z_loss: float) -> None:
    """Raises MeshwrightError where losses of routers have weights, and the model has no router."""
    for name, weight in (("balance_loss", balance_loss), ("router_z_loss", router_z_loss)):
        if weight and model.moe is None:
            raise MeshwrightError(f"{option(name)} {weight:g}: {model.name} has no experts; fits: 0")


def option(name: str) -> str:
    """The command line's name of a setting."""
    return "--" + name.rstrip("_").replace("_", "-")


def new_settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a run that begins. Raises DataError where no data is given."""
    if given.get("data") is None:
        raise DataError("no data: give --data, a folder, a .txt, .py, .jsonl or .parquet file, or stdlib")
    return Settings(**{name: value for name, value in given.items() if value is not None})


def changed_settings(run: Path, stored: Settings, given: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings of a run that is resumed, and a sentence on each that the caller asks to change.

    Raises MeshwrightError for a setting that is fixed when a run begins.
    """
    asked = {
        name: value
        for name, value in given.items()
        if value is not None and not _same(name, getattr(stored, name), value)
    }
    for name in _FIXED:
        if name in asked:
            raise MeshwrightError(
                f"run {run}: began with {option(name)} {_written(getattr(stored, name))},"
                f" not {_written(asked[name])};"
                " leave the option out, or name another run"
            )
    changes = [
        f"{option(name)}: {getattr(stored, name)} until now, {value} from here on"
        for name, value in asked.items()
    ]
    return replace(stored, **asked), changes


def _written(value: Any) -> Any:
    return " ".join(value) if isinstance(value, tuple) else value


def evaluation_sets(written: Sequence[str]) -> dict[str, str]:
    """Sources by name of `NAME=PATH`. Raises DataError for what is none, or a name given twice."""
    found: dict[str, str] = {}
    for one in written:
        name, equals, path = one.partition("=")
        if not equals or not path or not re.fullmatch(r"[\w-]+", name):
            raise DataError(f"--eval {one}: write NAME=PATH, a name of letters, digits, - and _")
        if name in found:
            raise DataError(f"--eval {one}: {name} is given twice")
        found[name] = path
    return found


def _same(name: str, stored: Any, given: Any) -> bool:
    if name in ("data", "tokenizer", "from_") and isinstance(stored, str) and isinstance(given, str):
        return stored == given or Path(stored).resolve() == Path(given).resolve()
    return stored == given


def load_settings(run: Path) -> Settings | None:
    """The settings of the run in the folder `run`, None where none has begun there."""
    path = run / SETTINGS
    if not path.is_file():
        return None
    try:
        values = parse_json(read_text(path, MeshwrightError))
        known = {field.name for field in fields(Settings)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"{unknown[0]!r} is unknown")
        return Settings(**values)
    except (OSError, ValueError, TypeError, AttributeError, MeshwrightError) as error:
        raise MeshwrightError(
            f"{path}: cannot be read ({error}); delete it and give the options anew"
        ) from None


def save_settings(settings: Settings, run: Path) -> None:
    """Writes settings.json whole or not at all."""
    write_whole(run / SETTINGS, json.dumps(asdict(settings), indent=1) + "\n")
