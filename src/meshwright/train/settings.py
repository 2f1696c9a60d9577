"""The settings of a training run, stored in settings.json of its folder for --resume."""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from meshwright.errors import DataError, MeshwrightError, nearest
from meshwright.files import parse_json, read_text, write_whole
from meshwright.models.config import DRAFT_WEIGHT, ModelConfig
from meshwright.optimizers import OPTIMIZERS
from meshwright.options import REQUIRED, check_options, flag_of, option
from meshwright.train.documents import BadData
from meshwright.units import parse_count

SETTINGS = "settings.json"
# A resumed run cannot change these, since they determine its parameters or its data.
_FIXED = ("data", "eval", "tokenizer", "from_", "mask_documents", "seed", "optimizer")
ScheduleName = Literal["cosine", "wsd", "constant"]
OnSpike = Literal["skip", "stop"]


@dataclass(frozen=True)
class Settings:
    """The settings of a run. A resumed run may change any that is not in `_FIXED`.

    steps: None until the corpus is packed. epochs: None for one, or if `steps` is given. schedule_steps: None
    for the `steps` at the start of the run, so that a later increase of `steps` does not change the learning
    rate of earlier steps. checkpoint_every: 0 for checkpoints only by time, after the best validation, and at
    the end.
    """

    data: str | tuple[str, ...] = option(
        REQUIRED,
        metavar="PATH[:WEIGHT]",
        help="A folder, a .txt, .py, .jsonl or .parquet file, stories, or stdlib; repeat to mix.",
    )
    eval: tuple[str, ...] = option((), metavar="NAME=PATH", help="Another evaluation set; repeatable.")
    tokenizer: str | None = option(
        None, help="A tokenizer.json or a folder with one.", unset="trained on the data"
    )
    from_: str | None = option(
        None, metavar="DIR", help="Fine-tune this Hugging Face checkpoint.", unset="fresh weights"
    )
    mask_documents: bool = option(False, help="Keep attention within each document (chats always do).")
    bad_data: BadData = option("stop", help="What to do with a damaged file or line.")
    steps: int | None = option(
        None, parser=parse_count, least=1, help="Train up to this step.", unset="one epoch"
    )
    epochs: float | None = option(
        None, above=0, help="Read the data this number of times, in place of --steps.", unset="1"
    )
    learning_rate: float = option(1e-3, above=0, help="Peak learning rate after the warm-up.", unset="1e-3")
    schedule_steps: int | None = option(
        None, parser=parse_count, least=1, help="Last step of the decay.", unset="--steps"
    )
    schedule: ScheduleName = option("cosine", help="Learning-rate schedule after the warm-up.")
    optimizer: str = option("adamw", help="The optimizer.", unset="the plan's", names=tuple(OPTIMIZERS))
    weight_decay: float = option(0.1, least=0, help="Weight decay of matrices, times the learning rate.")
    clip_norm: float = option(1.0, above=0, help="Clip gradients to this global norm.")
    z_loss: float = option(0.0, least=0, help="Weight of log(sum exp(logits))^2 in the loss.")
    balance_loss: float = option(0.0, least=0, help="Weight of the load-balancing loss of each router.")
    router_z_loss: float = option(0.0, least=0, help="Weight of the z-loss of each router.")
    draft_weight: float = option(DRAFT_WEIGHT, least=0, help="Weight of the loss of --draft-head joint.")
    seed: int = option(
        0, least=0, most=2**32 - 1, help="Seed of the parameters and of the order of the data."
    )
    checkpoint_every: int = option(
        0, parser=parse_count, least=0, help="Steps between checkpoints.", unset="only by time"
    )
    checkpoint_minutes: float = option(10.0, above=0, metavar="MINUTES", help="Minutes between checkpoints.")
    keep: int = option(2, least=1, help="How many of the last checkpoints to keep; the best one stays too.")
    on_spike: OnSpike = option("skip", help="When the loss spikes: skip the batch, or stop.")
    tensorboard: bool = option(False, help="Also write the metrics for TensorBoard.")

    def __post_init__(self) -> None:
        for name in ("data", "eval"):  # JSON has lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        check_options(self)


def check_has_routers(model: ModelConfig, balance_loss: float, router_z_loss: float) -> None:
    """Raise MeshwrightError if a loss of routers has a weight and the model has no experts."""
    for name, weight in (("balance_loss", balance_loss), ("router_z_loss", router_z_loss)):
        if weight and model.moe is None:
            raise MeshwrightError(f"{flag_of(name)} {weight:g}: {model.name} has no experts; fits: 0")


def new_settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a new run. Raises DataError if `given` has no data."""
    if given.get("data") is None:
        raise DataError(
            "no data: give --data, a folder, a .txt, .py, .jsonl or .parquet file, stories or stdlib"
        )
    check_one_length(given)
    return Settings(**{name: value for name, value in given.items() if value is not None})


def check_one_length(given: Mapping[str, Any]) -> None:
    """Raise MeshwrightError if both --steps and --epochs are given."""
    if given.get("steps") is not None and given.get("epochs") is not None:
        raise MeshwrightError("--steps and --epochs both set the length of the run; leave one out")


def num_steps(settings: Settings, steps_of_epoch: int) -> int:
    """The steps of a run: as given, otherwise of its epochs, one by default."""
    return settings.steps or max(1, round((settings.epochs or 1) * steps_of_epoch))


def changed_settings(run: Path, stored: Settings, given: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings of a resumed run, and a sentence about each that `given` changes.

    Raises MeshwrightError for a setting that is fixed when a run begins.
    """
    check_one_length(given)
    changed = {
        name: value
        for name, value in given.items()
        if value is not None and not _same(name, getattr(stored, name), value)
    }
    for name in _FIXED:
        if name in changed:
            raise MeshwrightError(
                f"run {run}: began with {flag_of(name)} {_written(getattr(stored, name))},"
                f" not {_written(changed[name])};"
                " leave the option out, or name another run"
            )
    sentences = [
        f"{flag_of(name)}: {getattr(stored, name)} until now, {value} from here on"
        for name, value in changed.items()
    ]
    # A new number of steps replaces the run's epochs, and new epochs its number of steps.
    length = {"epochs": None} if "steps" in changed else {"steps": None} if "epochs" in changed else {}
    return replace(stored, **(length | changed)), sentences


def _written(value: object) -> object:
    return " ".join(value) if isinstance(value, tuple) else value


def evaluation_sets(written: Sequence[str]) -> dict[str, str]:
    """The paths of texts `NAME=PATH`, by name. Raises DataError for another form or a repeated name."""
    sources: dict[str, str] = {}
    for text in written:
        name, equals, path = text.partition("=")
        if not equals or not path or not re.fullmatch(r"[\w-]+", name):
            raise DataError(f"--eval {text}: write NAME=PATH, a name of letters, digits, - and _")
        if name in sources:
            raise DataError(f"--eval {text}: {name} is given twice")
        sources[name] = path
    return sources


def _same(name: str, stored: object, given: object) -> bool:
    if name in ("data", "tokenizer", "from_") and isinstance(stored, str) and isinstance(given, str):
        return stored == given or Path(stored).resolve() == Path(given).resolve()
    return stored == given


_Stored = TypeVar("_Stored")


def of_stored(kind: type[_Stored], values: Mapping[str, Any], path: Path) -> _Stored:
    """The dataclass of stored values by name. Raises ValueError for an unknown name, and for a missing one.

    A field with a default may be missing, since earlier versions did not store it: a warning names the file
    at `path` and these defaults.
    """
    known = {each.name: each for each in fields(cast(Any, kind))}
    for name in values:
        if name not in known:
            raise ValueError(f"{name!r} is unknown; {nearest(name, list(known))}")
    needed = (name for name, each in known.items() if each.default is each.default_factory is MISSING)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"it lacks {', '.join(map(repr, missing))}")
    stored = kind(**values)
    if taken := [f"{name} = {getattr(stored, name)!r}" for name in known if name not in values]:
        warnings.warn(f"{path} leaves out settings, whose defaults hold: {', '.join(taken)}", stacklevel=3)
    return stored


def load_settings(run: Path) -> Settings | None:
    """The settings of the run in the folder `run`; None if no run has begun there."""
    path = run / SETTINGS
    if not path.is_file():
        return None
    try:
        values = parse_json(read_text(path, MeshwrightError))
        return of_stored(Settings, values, path)
    except (OSError, ValueError, TypeError, MeshwrightError) as error:
        raise MeshwrightError(
            f"{path}: cannot be read ({error}); delete it and give the options again"
        ) from None


def save_settings(settings: Settings, run: Path) -> None:
    """Write settings.json atomically."""
    write_whole(run / SETTINGS, json.dumps(asdict(settings), indent=1) + "\n")
