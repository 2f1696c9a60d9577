"""A running engine for a checkpoint, for `mw serve` and `mw generate`. Imports JAX."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshwright.cli.forecast import StepForecast
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_one_cache
from meshwright.layout.page_sizes import DEFAULT_PAGE
from meshwright.layout.runnable import emulated
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.native import kernels
from meshwright.native.processor import multiplies_bf16
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.compiled_cache import keep_compiled
from meshwright.nn.start.device_mesh import default_platform, device_mesh
from meshwright.plan_file import Plan
from meshwright.progress import Progress
from meshwright.serve.device.loading import ModelFolder, draft_head_of, load_model_folder
from meshwright.serve.device.runner import JaxRunner, check_serves
from meshwright.serve.engine.draft_head import HeadDrafter
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.policy import DISAGGREGATED, mode_of
from meshwright.serve.engine.speculate import Drafter, ModelDrafter, NgramDrafter
from meshwright.serve.settings import EngineSettings, Server
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.workers.pool import WorkerPool

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from meshwright.serve.device.prefill_pool import PrefilledElsewhere

# A longer context is an option: the cache of every slot has this length.
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Service:
    """A running engine, its tokenizer, and the model's name.

    page_types: the types and shardings of a number of pages that are handed over.
    """

    engine: Engine
    tokenizer: Tokenizer
    name: str
    page_types: Callable[[int], Any]


@contextmanager
def open_service(checkpoint: Path, settings: EngineSettings, report: Progress) -> Iterator[Service]:
    """The engine of the model in `checkpoint`, compiled and running until the block ends.

    Raises CheckpointError for a folder without a whole model, LayoutError if it does not divide over the
    devices, PlanError if the context exceeds the model's or the plan is for another model.
    """
    keep_compiled()
    report("reading the checkpoint", None)
    folder = load_model_folder(checkpoint)
    tokenizer = folder.tokenizer()
    tokenizer.chat.check()  # before the model compiles
    runner, layout = _runner(folder, settings)
    report("pricing the steps", None)
    forecast = StepForecast(folder.config, layout, runner.limits, settings.num_drafts, settings.plan)
    report("compiling prefill and generate", None)
    runner.warm_up()
    drafter = _drafter(folder, runner, settings, report) if settings.num_drafts else None
    if settings.mode == DISAGGREGATED:
        generator = Engine(runner, prefix_cache=settings.prefix_cache, drafter=drafter)
        report("compiling prefill on its own devices", None)
        prefill, _ = _runner(folder, replace(settings, num_drafts=0), layout.mesh.num_devices)
        prefill.warm_up()
        made = Engine(prefill, prefix_cache=settings.prefix_cache, forecast=forecast, generator=generator)
    else:
        made = Engine(
            runner,
            mode=mode_of(settings.mode),
            prefix_cache=settings.prefix_cache,
            drafter=drafter,
            forecast=forecast,
        )
    with made as engine:
        planned = None if settings.plan is None else settings.plan.planned_step_seconds
        engine.metrics.planned_step.set(math.nan if planned is None else planned)
        yield Service(engine, tokenizer, folder.config.name, runner.exported)


@contextmanager
def open_app(
    server: Server, report: Progress, prefilled: "Callable[[Service], PrefilledElsewhere] | None" = None
) -> Iterator[tuple["Starlette", str]]:
    """The application and the name of its model, compiled and running until the block ends.

    prefilled: gives the service its connection to the servers that prefill for it. Raises the errors of
    `open_service`.
    """
    # Only `mw serve` needs the extra [serve].
    from meshwright.serve.http.app import create_app, reader_of
    from meshwright.serve.http.log import log_as_json

    with ExitStack() as stack:
        service = stack.enter_context(open_service(server.checkpoint, server.engine, report))
        tracing = None
        if server.otlp_endpoint:
            from meshwright.serve.http.tracing import Tracing

            tracing = stack.enter_context(Tracing(server.otlp_endpoint, service.name))
        if server.log_json:
            log_as_json()
        parts = (service.engine, service.tokenizer, service.name, server.limits)
        workers = stack.enter_context(WorkerPool(reader_of(*parts)))
        workers.check()
        app = create_app(*parts, tracing, prefilled(service) if prefilled else None, workers)
        yield app, service.name


def context_of(settings: EngineSettings, config: ModelConfig) -> int:
    """Maximum tokens per sequence, prompt plus answer: the option's, the plan's, or the model's."""
    if settings.context:
        return settings.context
    return (
        min(config.max_seq_len, _DEFAULT_CONTEXT) if settings.plan is None else settings.plan.workload.seq_len
    )


def _drafter(folder: ModelFolder, runner: JaxRunner, settings: EngineSettings, report: Progress) -> Drafter:
    if settings.draft_head:
        return _head_drafter(folder, runner, settings, report)
    if settings.draft_checkpoint is None:
        return NgramDrafter(settings.num_drafts, runner.cost_ratio)
    report("reading the draft model's checkpoint", None)
    folder = load_model_folder(settings.draft_checkpoint)
    if folder.config.vocab_size != runner.vocab_size:
        raise PlanError(
            f"checkpoint {settings.draft_checkpoint}: {folder.config.vocab_size:,} tokens in the vocabulary, "
            f"and the model that it guesses for has {runner.vocab_size:,}; fits: the same tokenizer"
        )
    if folder.config.state_mixer:
        raise PlanError(
            f"checkpoint {settings.draft_checkpoint}: wrong drafts cannot be taken out of the states of the "
            f"{folder.config.state_mixer.title}; fits: a draft model whose layers have attention only"
        )
    small_settings = replace(_settings_of_drafts(runner, settings), plan=None, num_drafts=0)
    # The drafter allocates its own pages, for a whole context in every slot.
    small, _ = _runner(folder, small_settings, keeps_windows=False, keeps_logits=settings.ratio_test)
    report("compiling the draft model", None)
    small.warm_up()
    draft_seconds = small.step_seconds()

    def cost_ratio(num_sequences: int) -> float:
        draft = num_sequences * settings.num_drafts * draft_seconds
        return runner.cost_ratio(num_sequences) + draft / runner.generate_seconds(num_sequences)

    return ModelDrafter(small, settings.num_drafts, cost_ratio, by_ratio=settings.ratio_test)


def _head_drafter(
    folder: ModelFolder, runner: JaxRunner, settings: EngineSettings, report: Progress
) -> HeadDrafter:
    """The drafter of the model's own head, which reads the model's table and output projection."""
    report("compiling the draft head", None)
    drafts = _settings_of_drafts(runner, settings)
    small, _ = _runner(draft_head_of(folder), drafts, keeps_windows=False, keeps_logits=settings.ratio_test)
    small.share_tables(runner)
    small.warm_up()

    def cost_ratio(num_sequences: int) -> float:
        draft = settings.num_drafts * small.generate_seconds(num_sequences)
        return runner.cost_ratio(num_sequences) + draft / runner.generate_seconds(num_sequences)

    return HeadDrafter(small, settings.num_drafts, cost_ratio, by_ratio=settings.ratio_test)


def _settings_of_drafts(runner: JaxRunner, settings: EngineSettings) -> EngineSettings:
    """The settings of a runner that makes drafts for `runner`."""
    limits = runner.limits
    return replace(
        settings,
        num_slots=limits.num_slots,
        context=limits.context,
        cache_tokens=None,
        ratio_test=False,
        host_cache_bytes=None,
    )


def _runner(
    folder: ModelFolder,
    settings: EngineSettings,
    first_device: int = 0,
    *,
    keeps_windows: bool = True,
    keeps_logits: bool = False,
) -> tuple[JaxRunner, Layout]:
    """The runner, not yet compiled, and its layout, on the devices from number `first_device`."""
    config, plan = folder.config, settings.plan
    if plan is None:
        weights, computed = (settings.dtype, settings.dtype) if settings.dtype else served_dtypes(config)
        layout = Layout.of(tensor=settings.tensor, weights_dtype=weights, compute_dtype=computed)
    else:
        _check_model(plan, config)
        layout = plan.layout.at("generate")
        if settings.dtype:
            layout = layout.replace(weights_dtype=settings.dtype, compute_dtype=settings.dtype)
    if settings.weights_dtype:
        layout = layout.replace(weights_dtype=settings.weights_dtype)
    platform = default_platform()
    if layout.precision.matmul_dtype is None and (plan is None or settings.weights_dtype):
        layout = layout.replace(matmul_dtype=platform.served_operands(layout.precision.weights_dtype))
    if settings.kv_dtype:
        layout = layout.replace(kv_dtype=settings.kv_dtype)
    context = context_of(settings, config)
    if sentence := emulated(layout, platform):
        warnings.warn(sentence, stacklevel=2)
    check_serves(config, layout, settings.slots, context, batch_invariant=settings.batch_invariant)
    settings.check_prefix_cache()
    _check_hands_over(config, settings, layout)
    mesh = device_mesh(layout, jax.devices()[first_device:])
    page = min(DEFAULT_PAGE, context)
    runner = JaxRunner(
        folder.load_params(as_read(layout), mesh),
        config,
        layout,
        mesh,
        num_slots=settings.slots,
        context=context,
        page_size=page,
        num_pages=None if settings.cache_tokens is None else settings.cache_tokens // page,
        chunk=settings.chunk,
        num_drafts=settings.num_drafts,
        strict=settings.strict,
        batch_invariant=settings.batch_invariant,
        by_ratio=settings.ratio_test,
        keeps_logits=keeps_logits,
        keeps_hidden=settings.draft_head and settings.num_drafts > 0,
        # Pages of all layers are handed over.
        keeps_windows=keeps_windows and not settings.hands_over,
        shares_pages=settings.hands_over,
        keeps_states=settings.prefix_cache,
        # Prefill and generation on separate devices have one half each.
        host_bytes=(settings.host_cache_bytes or 0) // (2 if settings.mode == DISAGGREGATED else 1),
    )
    return runner, layout


def served_dtypes(config: ModelConfig) -> tuple[str, str]:
    """The dtypes of weights and of products if neither an option nor a plan sets them.

    XLA for CPUs would widen the weights of experts in every step.
    """
    if default_platform().dtype == "bf16" or multiplies_bf16():
        return "bf16", "bf16"
    widens = config.moe is None and kernels.why_not_built() is None
    return "bf16" if widens else "f32", "f32"


def _check_hands_over(config: ModelConfig, settings: EngineSettings, layout: Layout) -> None:
    """Raise PlanError if prefill and generation cannot be on separate devices."""
    if not settings.hands_over:
        return
    option = settings.hands_over_by
    check_one_cache(layout, config, option)
    if settings.mode == DISAGGREGATED and len(jax.devices()) < 2 * layout.mesh.num_devices:
        raise PlanError(
            f"{option} runs {layout} twice, on {2 * layout.mesh.num_devices} devices, and JAX sees "
            f"{len(jax.devices())}; fits: a plan for half of them"
        )


def _check_model(plan: Plan, config: ModelConfig) -> None:
    """Raise PlanError if a size of the plan's model differs from the checkpoint's."""
    planned, stored = dimensions(plan.model.base), dimensions(config.base)
    others = [
        f"{letter} = {planned.get(letter, 'none')} and {stored.get(letter, 'none')}"
        for letter in dict.fromkeys((*planned, *stored))
        if planned.get(letter) != stored.get(letter)
    ]
    if others:
        raise PlanError(
            f"the plan is for {plan.model.name}, and the checkpoint holds {config.name}: {', '.join(others)}"
        )
