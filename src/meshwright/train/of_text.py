"""The plan of a small model for a text and a machine: for `mw train my.txt`, without a plan of the user's."""

from pathlib import Path

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan_file import Plan
from meshwright.train.documents import check_source

# Time of training, by the planned step time, and bounds of the steps.
TRAIN_SECONDS, MIN_STEPS, MAX_STEPS = 180.0, 200, 4000
LEARNING_RATE = 3e-3
_SEQ_LEN, _NUM_SEQUENCES = 128, 16
# (bytes of text, size of its vocabulary): each entry needs some hundred occurrences.
_VOCABULARIES = ((20_000_000, 4096), (2_000_000, 2048), (300_000, 1024), (0, 512))
# A larger model learns a shorter text by heart.
_LARGE_TEXT = 20_000_000
_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")


def is_text(path: Path) -> bool:
    """Whether a path is data rather than a plan."""
    return path.suffix.lower() in _SUFFIXES or (path.is_dir() and not (path / "plan.toml").is_file())


def small_model(source: Path) -> ModelConfig:
    """A model for the size of a text: some 1M parameters, or 6M for a large one."""
    check_source(str(source))
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    vocabulary = next(size for least, size in _VOCABULARIES if num_bytes >= least)
    is_large = num_bytes >= _LARGE_TEXT
    width, heads = (256, 8) if is_large else (128, 4)
    return ModelConfig(
        name=source.stem or "text",
        num_layers=6 if is_large else 4,
        d_model=width,
        d_ff=3 * width,
        num_heads=heads,
        num_kv_heads=heads,
        d_head=width // heads,
        vocab_size=vocabulary,
        max_seq_len=4 * _SEQ_LEN,
        tied_embeddings=True,
    )


def plan_for_text(source: Path, spec: str) -> Plan:
    """The plan to train `small_model` on copies of a batch over a machine's chips."""
    model, machine = small_model(source), catalog.load(spec)
    layout = Layout.of(
        data=machine.num_chips,
        weights_dtype="f32",
        compute_dtype="f32" if machine.chip.kind == "cpu" else "bf16",
    )
    return Plan(model, machine.spec, Workload(_NUM_SEQUENCES * machine.num_chips, _SEQ_LEN), layout)


def steps_in(seconds: float, step_seconds: float) -> int:
    """The steps that fill a time, within bounds, in tens.

    >>> steps_in(180.0, 0.1), steps_in(180.0, 1e-6)
    (1800, 4000)
    """
    return min(max(round(seconds / step_seconds / 10) * 10, MIN_STEPS), MAX_STEPS)
