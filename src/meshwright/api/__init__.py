"""meshwright as a library: `import meshwright as mw`. The command line is a client of it.

    model      a Transformer, by name or from a file
    hardware   a machine, as on the command line
    Train      the tokens of a training step
    Serve      the requests to a server
    plan       its layouts, ranked; or the ways to serve
    price      one layout
    smallest   the fewest chips that suffice
    audit      the collectives of your own jitted function

Models, machines and numbers may be given as on the command line. Mistakes raise subclasses of
`errors.MeshwrightError`, with a line that names the values that fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, overload

from meshwright.api.inputs import Conditions, SearchOptions, Serve, ServedDtypes, Train
from meshwright.api.machine import anchored_by
from meshwright.api.results import Plans, PricedLayout
from meshwright.api.serving import ServedLayout, ServedLayouts
from meshwright.hardware import catalog
from meshwright.hardware.prices import CATALOG_PRICES, ChipPrices
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.layout_checks import layout_for, with_microbatches
from meshwright.models.config import ModelConfig
from meshwright.models.model_files import model_from_dict
from meshwright.models.presets import load_model
from meshwright.plan.given import memory_limit, parse_conditions
from meshwright.plan.smallest import longest_step
from meshwright.plan.smallest import smallest_machines as find_smallest
from meshwright.plan.train import NUM_RANKED, price_layout, search
from meshwright.programs.launcher import LAUNCHERS
from meshwright.progress import Progress
from meshwright.units import parse_count

__all__ = [
    "Plans",
    "PricedLayout",
    "Serve",
    "ServedLayout",
    "ServedLayouts",
    "Train",
    "audit",
    "hardware",
    "model",
    "plan",
    "price",
    "smallest",
]


def model(spec: str | Path | ModelConfig, **overrides: Any) -> ModelConfig:
    """The model of a preset, a config.json, a checkpoint folder, or a TOML.

    overrides: fields of ModelConfig to change. Raises ModelError for an unknown preset or field.

    >>> model("llama-3-8b", num_layers=4)
    ModelConfig(llama-3-8b: L=4, D=4096, F=14336, N=32, K=8, H=128, V=128256)
    """
    config = _config(spec)
    if not overrides:
        return config
    return model_from_dict({f.name: getattr(config, f.name) for f in fields(config)} | overrides, config.name)


def hardware(
    spec: str | Path | Hardware,
    *,
    software: str | None = None,
    network: str | None = None,
    anchors: Sequence[str | Path] = (),
) -> Hardware:
    """The machine of a spec with chips and topology, or of your own TOML.

    software: the training software to price, by default xla. network: between nodes of GPUs, by default the
    usual one of the chip. anchors: measured runs that correct its figures;
    each is a metrics.jsonl with plan.toml next to it, or a CSV. Raises HardwareError for an unknown chip,
    topology, software or network, PlanError for a run on other chips.

    >>> hardware("v5p:16x16x16")
    Hardware(v5p:16x16x16: 4,096 v5p of 96 GB)
    """
    machine = _machine(spec)
    machine = machine.over(network) if network else machine
    return anchored_by(machine.running(software) if software else machine, anchors)[0]


@overload
def plan(
    model: str | Path | ModelConfig,
    hardware: str | Path | Hardware,
    work: Train,
    *,
    given: str = ...,
    top: int = ...,
    runnable: bool | None = ...,
    weights_dtype: str | None = ...,
    compute_dtype: str | None = ...,
    kv_dtype: str | None = ...,
    launcher: str | None = ...,
    progress: Callable[[int], None] | None = ...,
) -> Plans: ...
@overload
def plan(
    model: str | Path | ModelConfig,
    hardware: str | Path | Hardware,
    work: Serve,
    *,
    given: str = ...,
    top: int = ...,
    runnable: bool | None = ...,
    weights_dtype: str | None = ...,
    compute_dtype: str | None = ...,
    kv_dtype: str | None = ...,
    progress: Callable[[int], None] | None = ...,
) -> ServedLayouts: ...
def plan(
    model: str | Path | ModelConfig,
    hardware: str | Path | Hardware,
    work: Train | Serve,
    *,
    given: str = SearchOptions.given,
    top: int = SearchOptions.top,
    runnable: bool | None = None,
    weights_dtype: str | None = None,
    compute_dtype: str | None = None,
    kv_dtype: str | None = None,
    launcher: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plans | ServedLayouts:
    """The layouts for `work`, ranked by step time; printed, the first `top` of them as a table.

    To serve, hardware may name several machines and chips (`v5e,h100:8`), and weights_dtype and kv_dtype
    several dtypes; the result is a frontier, and given, top and progress have no effect. runnable=False also
    splits prompts by position, which `mw serve` does not run yet.

    given: conditions for every layout, as in `mw plan train --given`. runnable: rank the layouts that
    run, or all layouts; by default the former, if any run. weights_dtype, compute_dtype: by default bf16;
    on CPUs f32 and the faster of both. launcher: training software (megatron, torchtitan, maxtext,
    deepspeed, nemo) whose layouts are ranked, as its steps are priced, with its settings. progress:
    called with the number of layouts considered. Raises PlanError if no layout divides.

    >>> plans = plan("llama-3-8b", "v5e:4x4", Train("1Mi", "4k"), given="tensor=1")
    >>> plans.best.layout.tensor
    1
    """
    if isinstance(work, Serve):
        dtypes = ServedDtypes(weights_dtype, kv_dtype, compute_dtype=compute_dtype)
        return _plan_serving(_config(model), hardware, work, dtypes, runnable=runnable is not False)
    config, machine = _config(model), _machine(hardware)
    of_layouts, limit = memory_limit(given)
    if limit is not None:
        spared = max(0, machine.chip.program_bytes - limit)
        machine = replace(machine, chip=machine.chip.leaving(spared))
    conditions = parse_conditions(of_layouts)
    starts = None
    if launcher:
        machine = Conditions(software=machine.software.name, launcher=launcher).of(machine)
        starts = LAUNCHERS[launcher]
        base = dict(starts.base)
        weights_dtype = weights_dtype or base.pop("weights_dtype", None)
        named = {condition.field for condition in conditions}
        fields_of_base = ",".join(f"{name}={value}" for name, value in base.items() if name not in named)
        conditions = parse_conditions(fields_of_base) + conditions
    options = SearchOptions(weights_dtype, compute_dtype, given, runnable, top)
    weights, computes = options.dtypes(machine.chip)
    result = search(
        config,
        machine,
        work.workload(config),
        weights_dtype=weights,
        compute_dtypes=computes,
        given=conditions,
        runnable=runnable,
        on_progress=progress,
        launcher=starts,
        num_ranked=max(top, NUM_RANKED),
    )
    return Plans(config, machine, work, replace(result, given=given), top)


def _plan_serving(
    model: ModelConfig, hardware: str | Path | Hardware, work: Serve, dtypes: ServedDtypes, *, runnable: bool
) -> ServedLayouts:
    """`plan` of a Serve. Raises Infeasible, a PlanError, if nothing fits or meets the targets."""
    from meshwright.plan.serve.search import search_serving, serving_machines

    machines = (
        [hardware] if isinstance(hardware, Hardware) else serving_machines(catalog.specs(str(hardware)))
    )
    result = search_serving(
        model,
        machines,
        work.requests,
        work.targets,
        precisions=dtypes.precisions(machines, model),
        runnable=runnable,
    )
    return ServedLayouts(model, work, result)


def smallest(
    model: str | Path | ModelConfig,
    chip: str,
    work: Train,
    *,
    given: str = SearchOptions.given,
    top: int = SearchOptions.top,
    runnable: bool | None = None,
    weights_dtype: str | None = None,
    compute_dtype: str | None = None,
    max_seconds: float | None = None,
    days: float | None = None,
    tokens: int | str | None = None,
    prices: ChipPrices = CATALOG_PRICES,
    progress: Progress | None = None,
) -> Plans:
    """The layouts of the smallest machine that trains the model, or trains it fast enough.

    chip: `v5p`, or a machine (`v5p:16x20x28`) that bounds the sizes to try. max_seconds: the longest step
    allowed. days: the longest run allowed, of `tokens` tokens. prices: of the machines. given, top, runnable,
    weights_dtype, compute_dtype: as in `plan`. Raises NothingFits, a PlanError, if no size suffices.

    >>> plans = smallest("llama-3-8b", "h100", Train("1Mi", "8k"), given="remat=full,pipe=1")
    >>> plans.hardware.spec
    'h100:1x2'
    """
    config = _config(model)
    workload = work.workload(config)
    options = SearchOptions(weights_dtype, compute_dtype, given, runnable, top)
    weights, computes = options.dtypes(catalog.load(chip).chip if ":" in chip else catalog.chip_of(chip))
    num_tokens = None if tokens is None else parse_count(tokens)
    sizing = find_smallest(
        config,
        chip,
        workload,
        weights_dtype=weights,
        compute_dtypes=computes,
        given=parse_conditions(given),
        runnable=runnable,
        max_seconds=longest_step(workload, max_seconds, days, num_tokens),
        prices=prices,
        on_progress=(lambda spec: progress(f"trying {spec}", None)) if progress else None,
    )
    return Plans(config, sizing.hardware, work, replace(sizing.search, given=given), top, sizing)


def price(
    model: str | Path | ModelConfig,
    hardware: str | Path | Hardware,
    work: Train,
    layout: str | Layout,
    *,
    weights_dtype: str | None = None,
    compute_dtype: str | None = None,
) -> PricedLayout:
    """One layout with its price; dtypes that its text does not give are as in `plan`.

    A text with a pipeline but without microbatches gets their fastest number that fits. Raises LayoutError if
    the layout does not divide, or if its devices and the machine's chips differ in number.

    >>> price("llama-3-8b", "v5e:4x4", Train("1Mi", "4k"), "fsdp=16,remat=full,microbatches=8")
    PricedLayout(fsdp=16,microbatches=8,remat=full: ...)
    """
    config, machine = _config(model), _machine(hardware)
    workload = work.workload(config)
    if isinstance(layout, Layout):
        layouts = [[layout]]
    else:
        weights, computes = SearchOptions(weights_dtype, compute_dtype).dtypes(machine.chip)
        layouts = [
            [layout_for(config, text, weights_dtype=weights, compute_dtype=compute) for compute in computes]
            for text in with_microbatches(layout, workload)
        ]
    priced = [price_layout(config, machine, workload, of_one) for of_one in layouts]
    best = min(priced, key=lambda search: (not search.best.fits, search.best.step_seconds))
    return PricedLayout(config, machine, work, best)


def audit(
    jitted: Callable[..., object],
    *args: Any,
    hardware: str | None = None,
    ahead_of_time: bool = False,
    **kwargs: Any,
) -> dict:
    """The audit of `jitted(*args, **kwargs)`, your own function, which is compiled and not run.

    args: arrays, or jax.ShapeDtypeStruct with a sharding; their mesh names the axes. hardware: prices the
    collectives. ahead_of_time: compile for that hardware without its chips. The document has the keys of `mw
    audit --hlo --json`. `PricedLayout.audit` audits a plan. Raises AuditError with the compiler's message if
    it refuses.
    """
    from meshwright.audit.foreign import audit as audit_jitted

    return audit_jitted(jitted, *args, hardware=hardware, ahead_of_time=ahead_of_time, **kwargs)


def _config(spec: str | Path | ModelConfig) -> ModelConfig:
    return spec if isinstance(spec, ModelConfig) else load_model(str(spec))


def _machine(spec: str | Path | Hardware) -> Hardware:
    return spec if isinstance(spec, Hardware) else catalog.load(str(spec))
