"""What the benchmarks of the training loop share: the demo model's step and data, and runs of the loop.

Nothing here loads JAX before it is called: a benchmark fixes the number of its devices first.
"""

import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model

if TYPE_CHECKING:
    from meshwright.train.corpus import Corpus
    from meshwright.train.step import CompiledStep


def use_cpu_devices(number: int) -> None:
    """Gives this process so many CPU devices; before JAX is loaded."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={number}"
    os.environ["JAX_PLATFORMS"] = "cpu"


@contextmanager
def demo(layout: Layout, num_sequences: int) -> Iterator[tuple["CompiledStep", "Corpus"]]:
    """The demo model's step for so many sequences of 256 tokens, and the standard library's source."""
    from meshwright.train.corpus import prepare_corpus
    from meshwright.train.optimizers import OptimizerConfig
    from meshwright.train.step import CompiledStep

    config, workload = load_model("demo"), Workload(num_sequences, seq_len=256)
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=2, total_steps=1000)
    step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1e11)
    with tempfile.TemporaryDirectory() as folder:
        yield step, prepare_corpus("stdlib", Path(folder), vocab_size=config.vocab_size, seq_len=256)


def reports(step: "CompiledStep", corpus: "Corpus", num_steps: int, **options: Any) -> dict[int, float]:
    """When the loop reported each step of a run from the start, on the process's clock, in seconds."""
    from meshwright.train.loop import begin, train

    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as run:
        start = begin(Path(run), step, corpus)
        told = lambda line: found.__setitem__(line["step"], time.perf_counter())  # noqa: E731
        train(Path(run), step, corpus, start, num_steps=num_steps, on_step=told, **options)
    return found


def machine() -> str:
    """The processor, its cores and the versions that a result holds for."""
    import jax

    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, {versions}"
