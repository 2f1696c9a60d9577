"""A checkpoint behind a running engine, for `mw serve` and `mw generate`. Imports JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from meshwright.cli.common import Progress
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.nn.compiled import keep_compiled
from meshwright.nn.cpu import multiplies_bf16
from meshwright.nn.mesh import device_mesh
from meshwright.nn.quantised import as_read
from meshwright.plan_file import Plan
from meshwright.serve.batch import DEFAULT_PAGE
from meshwright.serve.engine import Engine
from meshwright.serve.load import ModelFolder, load_model_folder
from meshwright.serve.runner import JaxRunner, check_serves
from meshwright.serve.scheduler import Drafter, Mode
from meshwright.serve.speculate import ModelDrafter, NgramDrafter
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
    bf16, f32 on CPUs that do not multiply it. weights_dtype: of stored weights alone;
    kv_dtype: of the cache. num_drafts: most
    guessed tokens of a sequence a step; 0 guesses none.
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
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    strict: bool = False
    draft_checkpoint: Path | None = None


@contextmanager
def open_service(checkpoint: Path, asked: Serving, report: Progress) -> Iterator[Service]:
    """The engine of the model in `checkpoint`, compiled and running until the block ends.

    Raises CheckpointError for a folder that holds no whole model, LayoutError where it does not divide over
    the devices, PlanError where the context is longer than the model's or the plan is another model's.
    """
    keep_compiled()
    report("reading the checkpoint", None)
    folder = load_model_folder(checkpoint)
    tokenizer = folder.tokenizer()
    runner = _runner(folder, asked)
    report("compiling prefill and generate", None)
    runner.warm_up()
    drafter = _drafter(runner, asked, report) if asked.num_drafts else None
    with Engine(runner, mode=asked.mode, prefix_cache=asked.prefix_cache, drafter=drafter) as engine:
        yield Service(engine, tokenizer, folder.config.name)


def _drafter(runner: JaxRunner, asked: Serving, report: Progress) -> Drafter:
    if asked.draft_checkpoint is None:
        return NgramDrafter(asked.num_drafts, runner.cost_ratio)
    report("reading the draft model's checkpoint", None)
    folder = load_model_folder(asked.draft_checkpoint)
    if folder.config.vocab_size != runner.vocab_size:
        raise PlanError(
            f"checkpoint {asked.draft_checkpoint}: {folder.config.vocab_size:,} tokens in the vocabulary, "
            f"and {runner.vocab_size:,} in that of the model that it guesses for; fits: the same tokenizer"
        )
    limits = runner.limits
    own = replace(asked, plan=None, num_slots=limits.num_slots, context=limits.context, num_drafts=0)
    # It places its pages itself, as many as a context has for every slot.
    small = _runner(folder, own, keeps_windows=False)
    report("compiling the draft model", None)
    small.warm_up()
    draft_seconds = small.step_seconds()

    def cost_ratio(num_sequences: int) -> float:
        guessing = num_sequences * asked.num_drafts * draft_seconds
        return runner.cost_ratio(num_sequences) + guessing / runner.generate_seconds(num_sequences)

    return ModelDrafter(small, asked.num_drafts, cost_ratio)


def _runner(folder: ModelFolder, asked: Serving, *, keeps_windows: bool = True) -> JaxRunner:
    config, plan = folder.config, asked.plan
    is_slow = jax.default_backend() == "cpu" and not multiplies_bf16()
    dtype = asked.dtype or ("f32" if is_slow else "bf16")
    if plan is None:
        layout = Layout.of(tensor=asked.tensor, weights_dtype=dtype, compute_dtype=dtype)
        num_slots, context = asked.num_slots, asked.context or min(config.max_seq_len, _DEFAULT_CONTEXT)
    else:
        _check_model(plan, config)
        layout = plan.layout.at("generate")
        if asked.dtype:
            layout = layout.replace(weights_dtype=dtype, compute_dtype=dtype)
        num_slots, context = plan.workload.num_sequences, asked.context or plan.workload.seq_len
    if asked.weights_dtype:
        layout = layout.replace(weights_dtype=asked.weights_dtype)
    if asked.kv_dtype:
        layout = layout.replace(kv_dtype=asked.kv_dtype)
    layout = _with_products(layout)
    check_serves(config, layout, num_slots, context)
    mesh = device_mesh(layout)
    page = min(DEFAULT_PAGE, context)
    return JaxRunner(
        folder.load_params(as_read(layout), mesh),
        config,
        layout,
        mesh,
        num_slots=num_slots,
        context=context,
        page_size=page,
        num_pages=None if asked.cache_tokens is None else asked.cache_tokens // page,
        num_drafts=asked.num_drafts,
        strict=asked.strict,
        keeps_windows=keeps_windows,
    )


def _with_products(layout: Layout) -> Layout:
    """The layout with products that the device is fast at.

    XLA for CPU takes twenty times as long to widen int8 weights as to multiply them by int8 activations.
    """
    is_open = layout.weights_dtype == "int8" and layout.matmul_dtype is None
    return layout.replace(matmul_dtype="int8") if is_open and jax.default_backend() == "cpu" else layout


def _check_model(plan: Plan, config: ModelConfig) -> None:
    """Raises PlanError where the plan is for a model of other sizes than the checkpoint's."""
    planned, found = dimensions(plan.model), dimensions(config)
    for letter in planned.keys() | found.keys():
        if planned.get(letter) != found.get(letter):
            raise PlanError(
                f"the plan is for {plan.model!r}, the checkpoint holds {config!r}: {letter} = "
                f"{planned.get(letter, 0)} and {found.get(letter, 0)}"
            )
