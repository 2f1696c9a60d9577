"""A checkpoint behind a running engine, for `mw serve` and `mw generate`. Imports JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from meshwright.cli.common import Progress
from meshwright.layout import Layout
from meshwright.nn.mesh import device_mesh
from meshwright.serve.engine import Engine
from meshwright.serve.load import ModelFolder, load_model_folder
from meshwright.serve.runner import JaxRunner
from meshwright.serve.tokenizer import Tokenizer

# A longer context is there for the asking: the cache of every slot is as long.
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Service:
    """A running engine, its tokenizer, and the name that the model is served by."""

    engine: Engine
    tokenizer: Tokenizer
    name: str


@contextmanager
def open_service(
    checkpoint: Path, *, tensor: int, num_slots: int, context: int | None, report: Progress
) -> Iterator[Service]:
    """The engine of the model in `checkpoint`, compiled and running until the block ends.

    Raises CheckpointError for a folder that holds no whole model, LayoutError where it does not
    divide over `tensor` devices, PlanError where the context is longer than the model's.
    """
    report("reading the checkpoint", None)
    folder = load_model_folder(checkpoint)
    tokenizer = folder.tokenizer()
    runner = _runner(folder, tensor, num_slots, context)
    report("compiling prefill and generate", None)
    runner.warm_up()
    with Engine(runner) as engine:
        yield Service(engine, tokenizer, folder.config.name)


def _runner(folder: ModelFolder, tensor: int, num_slots: int, context: int | None) -> JaxRunner:
    # XLA on CPU multiplies a bf16 matrix by a vector twenty times slower than an f32 one.
    dtype = "f32" if jax.default_backend() == "cpu" else "bf16"
    layout = Layout.of(tensor=tensor, weights_dtype=dtype, compute_dtype=dtype)
    layout.check(folder.config)
    mesh = device_mesh(layout)
    return JaxRunner(
        folder.load_params(layout, mesh),
        folder.config,
        layout,
        mesh,
        num_slots=num_slots,
        context=context or min(folder.config.max_seq_len, _DEFAULT_CONTEXT),
    )
