"""A checkpoint behind a running engine, for `mw serve` and `mw generate`. Imports JAX."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.cli.forecast import StepForecast
from meshwright.cli.served import Serving
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.fit import check_one_cache
from meshwright.layout.paged import DEFAULT_PAGE
from meshwright.layout.precision import matmul_dtype_of
from meshwright.layout.runnable import emulated
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.native import kernels
from meshwright.native.processor import multiplies_bf16
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.compiled_cache import keep_compiled
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import Plan
from meshwright.progress import Progress
from meshwright.serve.device.loading import ModelFolder, load_model_folder
from meshwright.serve.device.runner import JaxRunner, check_serves
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.policy import DISAGGREGATED, mode_of
from meshwright.serve.engine.speculate import Drafter, ModelDrafter, NgramDrafter
from meshwright.serve.text.tokenizer import Tokenizer

# A longer context is there for the asking: the cache of every slot is as long.
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Service:
    """A running engine, its tokenizer, and the name that the model is served by.

    page_types: the types and shardings of so many pages that are handed over.
    """

    engine: Engine
    tokenizer: Tokenizer
    name: str
    page_types: Callable[[int], Any]


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
    runner, layout = _runner(folder, asked)
    report("pricing the steps", None)
    forecast = StepForecast(folder.config, layout, runner.limits, asked.num_drafts, asked.plan)
    report("compiling prefill and generate", None)
    runner.warm_up()
    drafter = _drafter(runner, asked, report) if asked.num_drafts else None
    if asked.mode == DISAGGREGATED:
        generator = Engine(runner, prefix_cache=asked.prefix_cache, drafter=drafter)
        report("compiling prefill on its own devices", None)
        prefill, _ = _runner(folder, replace(asked, num_drafts=0), layout.num_chips)
        prefill.warm_up()
        made = Engine(prefill, prefix_cache=asked.prefix_cache, forecast=forecast, generator=generator)
    else:
        made = Engine(
            runner,
            mode=mode_of(asked.mode),
            prefix_cache=asked.prefix_cache,
            drafter=drafter,
            forecast=forecast,
        )
    with made as engine:
        planned = None if asked.plan is None else asked.plan.planned_step_seconds
        engine.metrics.planned_step.set(math.nan if planned is None else planned)
        yield Service(engine, tokenizer, folder.config.name, runner.exported)


def context_of(asked: Serving, config: ModelConfig) -> int:
    """Most tokens of a prompt and its answer: those asked for, the plan's, or what the model takes."""
    if asked.context:
        return asked.context
    return min(config.max_seq_len, _DEFAULT_CONTEXT) if asked.plan is None else asked.plan.workload.seq_len


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
    own = replace(own, host_cache_bytes=0)
    # It places its pages itself, as many as a context has for every slot.
    small, _ = _runner(folder, own, keeps_windows=False)
    report("compiling the draft model", None)
    small.warm_up()
    draft_seconds = small.step_seconds()

    def cost_ratio(num_sequences: int) -> float:
        guessing = num_sequences * asked.num_drafts * draft_seconds
        return runner.cost_ratio(num_sequences) + guessing / runner.generate_seconds(num_sequences)

    return ModelDrafter(small, asked.num_drafts, cost_ratio)


def _runner(
    folder: ModelFolder, asked: Serving, first_device: int = 0, *, keeps_windows: bool = True
) -> tuple[JaxRunner, Layout]:
    """The runner, not yet compiled, and its layout, on the devices from number `first_device` on."""
    config, plan = folder.config, asked.plan
    if plan is None:
        weights, computed = (asked.dtype, asked.dtype) if asked.dtype else served_dtypes(config)
        layout = Layout.of(tensor=asked.tensor, weights_dtype=weights, compute_dtype=computed)
    else:
        _check_model(plan, config)
        layout = plan.layout.at("generate")
        if asked.dtype:
            layout = layout.replace(weights_dtype=asked.dtype, compute_dtype=asked.dtype)
    if asked.weights_dtype:
        layout = layout.replace(weights_dtype=asked.weights_dtype)
    if layout.matmul_dtype is None and (plan is None or asked.weights_dtype):
        products = matmul_dtype_of(layout.weights_dtype, jax.default_backend())
        layout = layout.replace(matmul_dtype=products)
    if asked.kv_dtype:
        layout = layout.replace(kv_dtype=asked.kv_dtype)
    context = context_of(asked, config)
    if sentence := emulated(layout, jax.default_backend()):
        warnings.warn(sentence, stacklevel=2)
    check_serves(config, layout, asked.slots, context, batch_invariant=asked.batch_invariant)
    asked.check_prefix_cache()
    _check_hands_over(config, asked, layout)
    mesh = device_mesh(layout, jax.devices()[first_device:])
    page = min(DEFAULT_PAGE, context)
    runner = JaxRunner(
        folder.load_params(as_read(layout), mesh),
        config,
        layout,
        mesh,
        num_slots=asked.slots,
        context=context,
        page_size=page,
        num_pages=None if asked.cache_tokens is None else asked.cache_tokens // page,
        chunk=asked.chunk,
        num_drafts=asked.num_drafts,
        strict=asked.strict,
        batch_invariant=asked.batch_invariant,
        # Pages that are handed over are those of all layers.
        keeps_windows=keeps_windows and not asked.hands_over,
        shares_pages=asked.hands_over,
        # Prefill and generation on their own devices have a half each.
        host_bytes=asked.host_cache_bytes // (2 if asked.mode == DISAGGREGATED else 1),
    )
    return runner, layout


def served_dtypes(config: ModelConfig) -> tuple[str, str]:
    """The types of weights and of products, as `Serving` has them where no dtype is asked for.

    XLA for CPU would widen the weights of experts in every step.
    """
    if jax.default_backend() != "cpu" or multiplies_bf16():
        return "bf16", "bf16"
    widens = config.moe is None and kernels.why_not() is None
    return "bf16" if widens else "f32", "f32"


def _check_hands_over(config: ModelConfig, asked: Serving, layout: Layout) -> None:
    """Raises PlanError where prefill and generation cannot be apart."""
    if not asked.hands_over:
        return
    option = asked.hands_over_by
    check_one_cache(layout, config, option)
    if asked.mode == DISAGGREGATED and len(jax.devices()) < 2 * layout.num_chips:
        raise PlanError(
            f"{option} runs {layout} twice, on {2 * layout.num_chips} devices, and JAX sees "
            f"{len(jax.devices())}; fits: a plan for half of them"
        )


def _check_model(plan: Plan, config: ModelConfig) -> None:
    """Raises PlanError where the plan is for a model of other sizes than the checkpoint's."""
    planned, found = dimensions(plan.model), dimensions(config)
    others = [
        f"{letter} = {planned.get(letter, 'none')} and {found.get(letter, 'none')}"
        for letter in dict.fromkeys((*planned, *found))
        if planned.get(letter) != found.get(letter)
    ]
    if others:
        raise PlanError(
            f"the plan is for {plan.model.name}, and the checkpoint holds {config.name}: {', '.join(others)}"
        )
