"""The plan of a small model for a text and a machine: for `mw train my.txt`, without a plan of the user's."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan_file import Plan
from meshwright.train.documents import check_source, read_documents

# Time of training, and bounds of the number of steps.
TRAIN_SECONDS, MIN_STEPS, MAX_STEPS = 180.0, 200, 4000
LEARNING_RATE = 3e-3
# A text that is read several times needs more decay than one that is read once: with 420 KB, read nine times,
# the validation loss ended at 3.17 nats per token, and at 3.60 with the usual 0.1.
WEIGHT_DECAY = 1.0
# A text is read at most this number of times: the validation loss rises after about eight. A token of these
# small vocabularies has about three bytes.
_MAX_EPOCHS, _BYTES_PER_TOKEN = 8, 3
# Samples are shorter than these sequences: the model is not trained at later positions.
_SEQ_LEN, _NUM_SEQUENCES = 128, 8
# Sizes of vocabularies, and the bytes of text that each entry needs. A large vocabulary has whole words, but
# entries that are rare in the text are not learned well. On 420 KB, 1,024 to 4,096 entries all reach 1.81
# bits per byte, but with fewer entries samples contain words that do not exist.
_VOCABULARIES, _BYTES_PER_ENTRY = (4096, 2048, 1024, 512), 64
# (width, layers), smallest first. A larger model is taken only if there is time for this number of steps, and
# if the text has this number of bytes for each parameter.
_SHAPES = ((128, 4), (256, 6), (384, 8), (512, 10))
_STEPS_OF_LARGER, _BYTES_PER_PARAMETER = 2500, 2
_WIDTH_OF_HEAD = 32
# Models trained on 42 KB of text write no sentences with any setting (docs/log.md), those on 420 KB some.
_LEAST_FOR_SENTENCES = 200_000
_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")


def is_text(path: Path) -> bool:
    """Whether a path is data rather than a plan."""
    return path.suffix.lower() in _SUFFIXES or (path.is_dir() and not (path / "plan.toml").is_file())


def _num_bytes(source: Path) -> int:
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def is_short(source: Path) -> bool:
    """Whether a text is too short for a model to learn sentences from it."""
    return _num_bytes(source) < _LEAST_FOR_SENTENCES


def small_models(source: Path) -> list[ModelConfig]:
    """Models for the size of a text, smallest (1M parameters) first; larger ones would overfit."""
    check_source(str(source))
    num_bytes = _num_bytes(source)
    fitting = [size for size in _VOCABULARIES if num_bytes >= size * _BYTES_PER_ENTRY]
    vocabulary = (fitting or _VOCABULARIES[-1:])[0]
    models = [_model(source.stem or "text", *shape, vocabulary) for shape in _SHAPES]
    most = num_bytes / _BYTES_PER_PARAMETER
    return models[:1] + [model for model in models[1:] if count_params(model).total <= most]


def _model(name: str, width: int, num_layers: int, vocabulary: int) -> ModelConfig:
    heads = width // _WIDTH_OF_HEAD
    return ModelConfig(
        name=name,
        num_layers=num_layers,
        d_model=width,
        d_ff=3 * width,
        num_heads=heads,
        num_kv_heads=heads,
        d_head=_WIDTH_OF_HEAD,
        vocab_size=vocabulary,
        max_seq_len=4 * _SEQ_LEN,
        tied_embeddings=True,
    )


def plans_for_text(source: Path, spec: str) -> list[Plan]:
    """The plans to train `small_models` here, data-parallel, smallest model first."""
    machine = catalog.load(spec)
    layout = Layout.of(
        data=machine.num_chips,
        weights_dtype="f32",
        compute_dtype="f32" if machine.chip.kind == "cpu" else "bf16",
    )
    work = Workload(_NUM_SEQUENCES * machine.num_chips, _SEQ_LEN)
    return [Plan(model, machine.spec, work, layout) for model in small_models(source)]


def largest_trainable(step_seconds: Sequence[float], seconds: float = TRAIN_SECONDS) -> int:
    """The index of the largest plan with time for enough steps; 0, the smallest, if none has.

    step_seconds: of each plan, smallest model first. seconds: time to train.

    >>> largest_trainable([0.08, 0.3]), largest_trainable([0.001, 0.01, 0.3])
    (0, 1)
    >>> largest_trainable([0.1, 0.3], 3600)
    1
    """
    quick = [n for n, each in enumerate(step_seconds) if n and seconds / each >= _STEPS_OF_LARGER]
    return max(quick, default=0)


# A sentence's first three words: a capital, then words without one. Four to sixty words follow, perhaps on
# several lines, and a full stop: this is no heading and no row of a table.
_OPENING = re.compile(
    r"(?:\A|(?<=[.!?]\s)|(?<=\n))([A-Z][a-z']*(?: [a-z']+){2})(?=(?:[ \n][\w'`(),:;/-]+){0,60}[.!?](?:\s|\Z))"
)
_LONGEST_SAMPLE = 2_000_000
# The beginning of a line of a table, a list, a heading or code.
_NO_PROSE = re.compile(r"\n\s*(?:[|#>+]|```|[-*] |\d+\. )")
_LEAST_PROSE = 40  # characters of a sample before such a line


def openings(source: Path, number: int) -> list[str]:
    """The most frequent first three words of sentences, at most `number`; ["The"] without sentences.

    The model saw these words often in training, so it continues them best.
    """
    counts: Counter[str] = Counter()
    length = 0
    for document in read_documents(str(source)):
        counts.update(_OPENING.findall(document.text))
        length += len(document.text)
        if length > _LONGEST_SAMPLE:
            break
    return [words for words, _ in counts.most_common(number)] or ["The"]


def whole_sentences(text: str) -> str:
    """A text up to the end of its last sentence, or all of it if it has none.

    It also ends before a table, a list, a heading or code, if there are 40 characters before this.

    >>> whole_sentences("He ran. She sang! And th"), whole_sentences("He ran")
    ('He ran. She sang!', 'He ran')
    >>> whole_sentences("The first table has a row for each chip.\\n| 1 | 2 |\\nHe ran. She")
    'The first table has a row for each chip.'
    """
    if other := _NO_PROSE.search(text, _LEAST_PROSE):
        text = text[: other.start() + 1]
    ends = [match.end() for match in re.finditer(r"[.!?][\"')]*(?=\s)", text)]
    return text[: ends[-1]] if ends else text


def most_steps(source: Path, tokens_per_step: int) -> int:
    """The steps that read a text `_MAX_EPOCHS` times, within bounds, in tens."""
    steps = _MAX_EPOCHS * _num_bytes(source) / _BYTES_PER_TOKEN / tokens_per_step
    return _in_tens(steps, MAX_STEPS)


def steps_in(seconds: float, step_seconds: float, most: int = MAX_STEPS) -> int:
    """The steps that fill a time, at most `most`, in tens.

    >>> steps_in(180.0, 0.1), steps_in(180.0, 1e-6), steps_in(180.0, 0.1, most=600)
    (1800, 4000, 600)
    """
    return _in_tens(seconds / step_seconds, most)


def _in_tens(steps: float, most: int) -> int:
    """`steps` rounded to tens, at least MIN_STEPS and at most `most`."""
    return min(max(round(steps / 10) * 10, MIN_STEPS), most)
