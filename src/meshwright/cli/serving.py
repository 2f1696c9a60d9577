"""A checkpoint behind a running engine, for `mw serve` and `mw generate`. Imports JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from meshwright.cli.common import Progress
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.nn.mesh import device_mesh
from meshwright.plan_file import Plan
from meshwright.serve.batch import DEFAULT_PAGE
from meshwright.serve.engine import Engine
from meshwright.serve.load import ModelFolder, load_model_folder
from meshwright.serve.runner import JaxRunner, check_serves
from meshwright.serve.scheduler import Mode
from meshwright.serve.speculate import NgramDrafter
from meshwright.serve.tokenizer import Tokenizer

# A longer context is there for the asking: the cache of every slot is as long.
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Service:
    """A running engine, its tokenizer, and the name that the model is served by."""

    engine: Engine
    tokenizer: Tokenizer
    name: str


@dataclass(frozen=True)
class Serving:
    """How a checkpoint is served: what `mw serve` is asked beside its address.

    plan: whose layout, dtypes, sequences and context are taken. dtype: of weights and products; None takes
    f32 on CPUs, bf16 elsewhere. num_drafts: most guessed tokens of a sequence a step; 0 guesses none.
    """

    tensor: int = 1
    num_slots: int = 8
    context: int | None = None
    plan: Plan | None = None
    dtype: str | None = None
    mode: Mode = "interleaved"
    prefix_cache: bool = True
    cache_tokens: int | None = None
    num_drafts: int = 0


@contextmanager
def open_service(checkpoint: Path, asked: Serving, report: Progress) -> Iterator[Service]:
    """The engine of the model in `checkpoint`, compiled and running until the block ends.

    Raises CheckpointError for a folder that holds no whole model, LayoutError where it does not divide over
    the devices, PlanError where the context is longer than the model's or the plan is another model's.
    """
    report("reading the checkpoint", None)
    folder = load_model_folder(checkpoint)
    tokenizer = folder.tokenizer()
    runner = _runner(folder, asked)
    report("compiling prefill and generate", None)
    runner.warm_up()
    drafter = NgramDrafter(asked.num_drafts, runner.cost_ratio) if asked.num_drafts else None
    with Engine(runner, mode=asked.mode, prefix_cache=asked.prefix_cache, drafter=drafter) as engine:
        yield Service(engine, tokenizer, folder.config.name)


def _runner(folder: ModelFolder, asked: Serving) -> JaxRunner:
    config, plan = folder.config, asked.plan
    # XLA on CPU multiplies a bf16 matrix by a vector twenty times slower than an f32 one.
    dtype = asked.dtype or ("f32" if jax.default_backend() == "cpu" else "bf16")
    if plan is None:
        layout = Layout.of(tensor=asked.tensor, weights_dtype=dtype, compute_dtype=dtype)
        num_slots, context = asked.num_slots, asked.context or min(config.max_seq_len, _DEFAULT_CONTEXT)
    else:
        _check_model(plan, config)
        layout = plan.layout.at("generate")
        if asked.dtype:
            layout = layout.replace(weights_dtype=dtype, compute_dtype=dtype)
        num_slots, context = plan.workload.num_sequences, asked.context or plan.workload.seq_len
    check_serves(config, layout, num_slots, context)
    mesh = device_mesh(layout)
    page = min(DEFAULT_PAGE, context)
    return JaxRunner(
        folder.load_params(layout, mesh),
        config,
        layout,
        mesh,
        num_slots=num_slots,
        context=context,
        page_size=page,
        num_pages=None if asked.cache_tokens is None else asked.cache_tokens // page,
        num_drafts=asked.num_drafts,
    )


def _check_model(plan: Plan, config: ModelConfig) -> None:
    """Raises PlanError where the plan is for a model of other sizes than the checkpoint's."""
    planned, found = dimensions(plan.model), dimensions(config)
    for letter in planned.keys() | found.keys():
        if planned.get(letter) != found.get(letter):
            raise PlanError(
                f"the plan is for {plan.model!r}, the checkpoint holds {config!r}: {letter} = "
                f"{planned.get(letter, 0)} and {found.get(letter, 0)}"
            )
