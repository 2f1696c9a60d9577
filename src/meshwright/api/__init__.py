"""meshwright as a library: `import meshwright as mw`. The command line is a client of it.

    model      a Transformer, by name or from a file
    hardware   a machine, as on the command line
    Train      the tokens of a training step
    Serve      the requests to answer
    plan       its layouts, ranked; or the ways to serve
    price      one layout
    smallest   the fewest chips that do
    audit      a jitted function of one's own, beside what moves in it

Where an argument is a model, a machine or a number, the text that the command line takes will do. Mistakes
raise subclasses of `errors.MeshwrightError`, in one line that says what would fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, overload

from meshwright.api.inputs import Serve, Train
from meshwright.api.machine import anchored_by, default_dtypes
from meshwright.api.results import Plans, PricedLayout
from meshwright.api.serving import ServedLayout, ServedLayouts
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.precision import Precision, matmul_dtype_of
from meshwright.models.config import ModelConfig
from meshwright.models.files import model_from_dict
from meshwright.models.presets import load_model
from meshwright.plan.given import parse_conditions
from meshwright.plan.smallest import longest_step
from meshwright.plan.smallest import smallest as find_smallest
from meshwright.plan.train import price_alone, search
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
    """The model that `spec` names: a preset, a config.json, a checkpoint folder, or a TOML.

    overrides: fields of ModelConfig to change. Raises ModelError for an unknown preset or field.

    >>> model("llama-3-8b", num_layers=4)
    ModelConfig(llama-3-8b: L=4, D=4096, F=14336, N=32, K=8, H=128, V=128256)
    """
    config = _config(spec)
    if not overrides:
        return config
    return model_from_dict({f.name: getattr(config, f.name) for f in fields(config)} | overrides, config.name)


def hardware(
    spec: str | Path | Hardware, *, software: str | None = None, anchors: Sequence[str | Path] = ()
) -> Hardware:
    """The machine that `spec` names: chips and topology, or the TOML of one's own.

    software: what trains on it, by default xla. anchors: runs of one's own that its figures are to follow,
    each a metrics.jsonl with plan.toml beside it, or a CSV. Raises HardwareError for an unknown chip,
    topology or software, PlanError for a run that says nothing of these chips.

    >>> hardware("v5p:16x16x16")
    Hardware(v5p:16x16x16: 4,096 v5p of 96 GB)
    """
    machine = _machine(spec)
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
    given: str = "",
    top: int = 10,
    runnable: bool | None = None,
    weights_dtype: str | None = None,
    compute_dtype: str | None = None,
    kv_dtype: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plans | ServedLayouts:
    """The layouts to do `work` with, ranked by the time of a step; printed, the `top` ones as a table.

    To serve, hardware may name several machines and chips (`v5e,h100:8`), weights_dtype and kv_dtype
    several types; the answer is a frontier, and given, top and progress are not asked. runnable=False also
    splits prompts by position, which `mw serve` does not run yet.

    given: what every layout must meet, as `mw plan train --given` takes it. runnable: rank what runs, or
    whatever can be planned; by default what runs, if anything does. weights_dtype, compute_dtype: bf16, but
    on CPUs f32 and what is faster. progress: called with the number of layouts looked at. Raises PlanError
    where no layout divides.

    >>> plans = plan("llama-3-8b", "v5e:4x4", Train("1Mi", "4k"), given="tensor=1")
    >>> plans.best.layout.tensor
    1
    """
    if isinstance(work, Serve):
        return plan_serving(
            _config(model),
            hardware,
            work,
            weights_dtype,
            kv_dtype,
            compute_dtype,
            runnable=runnable is not False,
        )
    config, machine = _config(model), _machine(hardware)
    workload = work.workload(config)
    weights, computes = default_dtypes(machine.chip, weights_dtype, compute_dtype)
    found = search(
        config,
        machine,
        workload,
        weights_dtype=weights,
        compute_dtypes=computes,
        given=parse_conditions(given),
        runnable=runnable,
        on_progress=progress,
    )
    return Plans(config, machine, work, found, top)


def smallest(
    model: str | Path | ModelConfig,
    chip: str,
    work: Train,
    *,
    given: str = "",
    top: int = 10,
    runnable: bool | None = None,
    weights_dtype: str | None = None,
    compute_dtype: str | None = None,
    max_seconds: float | None = None,
    days: float | None = None,
    tokens: int | str | None = None,
    progress: Progress | None = None,
) -> Plans:
    """The layouts of the fewest chips on which the model trains, or trains fast enough.

    chip: `v5p`, or a machine (`v5p:16x20x28`) that bounds the sizes tried. max_seconds: of the longest step
    allowed. days: of the longest run allowed, of `tokens`. given, top, runnable, weights_dtype,
    compute_dtype: as `plan` has them. Raises NothingFits, a PlanError, where no size does.

    >>> found = smallest("llama-3-8b", "h100", Train("1Mi", "8k"), given="remat=full,pipe=1")
    >>> found.hardware.spec
    'h100:1x2'
    """
    config = _config(model)
    workload = work.workload(config)
    num_tokens = None if tokens is None else parse_count(tokens)
    one = catalog.load(chip).chip if ":" in chip else catalog.chip_of(chip)
    weights, computes = default_dtypes(one, weights_dtype, compute_dtype)
    sizing = find_smallest(
        config,
        chip,
        workload,
        weights_dtype=weights,
        compute_dtypes=computes,
        given=parse_conditions(given),
        runnable=runnable,
        max_seconds=longest_step(workload, max_seconds, days, num_tokens),
        on_progress=(lambda spec: progress(f"trying {spec}", None)) if progress else None,
    )
    return Plans(config, sizing.hardware, work, sizing.found, top, sizing)


def plan_serving(
    model: ModelConfig,
    hardware: str | Path | Hardware,
    work: Serve,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    compute_dtype: str | None = None,
    *,
    runnable: bool = True,
) -> ServedLayouts:
    """`plan` of a Serve. Raises Infeasible, a PlanError, where nothing fits or meets the targets."""
    from meshwright.plan.serve.search import search_serving as search_serving
    from meshwright.plan.serve.search import serving_machines

    machines = [hardware] if isinstance(hardware, Hardware) else serving_machines(str(hardware).split(","))
    precisions = serving_precisions(machines, weights_dtype, kv_dtype, compute_dtype)
    found = search_serving(
        model, machines, work.requests, work.targets, precisions=precisions, runnable=runnable
    )
    return ServedLayouts(model, work, found)


def serving_precisions(
    machines: Sequence[Hardware],
    weights_dtype: str | None,
    kv_dtype: str | None,
    compute_dtype: str | None = None,
    matmul_dtype: str | None = None,
) -> list[dict[str, object]]:
    """Words of layouts for every type of the weights and the cache named (`bf16,int8`).

    By default the type to compute in: bf16, but on CPUs f32. matmul_dtype: by default what is served. Raises
    LayoutError for a type that is none.
    """
    on_cpu = all(machine.chip.kind == "cpu" for machine in machines)
    compute, kind = compute_dtype or ("f32" if on_cpu else "bf16"), "cpu" if on_cpu else ""
    found: list[dict[str, Any]] = [
        {
            "weights_dtype": weights,
            "compute_dtype": compute,
            "kv_dtype": kv,
            "matmul_dtype": matmul_dtype or matmul_dtype_of(weights, kind),
        }
        for weights in (weights_dtype or compute).split(",")
        for kv in (kv_dtype or compute).split(",")
    ]
    for words in found:
        Precision(**words)
    return found


def price(
    model: str | Path | ModelConfig,
    hardware: str | Path | Hardware,
    work: Train,
    layout: str | Layout,
    *,
    weights_dtype: str | None = None,
    compute_dtype: str | None = None,
) -> PricedLayout:
    """One layout with its price; the dtypes that its text leaves open are those of `plan`.

    Raises LayoutError where it does not divide or is not of as many devices as the machine has chips.

    >>> price("llama-3-8b", "v5e:4x4", Train("1Mi", "4k"), "fsdp=16,remat=full,microbatches=8")
    PricedLayout(fsdp=16,microbatches=8,remat=full: ...)
    """
    config, machine = _config(model), _machine(hardware)
    workload = work.workload(config)
    if isinstance(layout, Layout):
        layouts = [layout]
    else:
        weights, computes = default_dtypes(machine.chip, weights_dtype, compute_dtype)
        layouts = [Layout.parse(layout, weights_dtype=weights, compute_dtype=compute) for compute in computes]
    return PricedLayout(config, machine, work, price_alone(config, machine, workload, layouts))


def audit(
    jitted: Callable[..., Any],
    *args: Any,
    hardware: str | None = None,
    ahead_of_time: bool = False,
    **kwargs: Any,
) -> dict:
    """The audit of `jitted(*args, **kwargs)`, a function of one's own, which is compiled and not run.

    args: arrays, or jax.ShapeDtypeStruct with a sharding; their mesh names the axes. hardware: prices the
    collectives. ahead_of_time: compile for that hardware, without a chip of it. The document has the keys of
    `mw audit --hlo --json`. A plan is audited by `PricedLayout.audit`. Raises AuditError with the compiler's
    message where it refuses.
    """
    from meshwright.audit.foreign import audit as audit_jitted

    return audit_jitted(jitted, *args, hardware=hardware, ahead_of_time=ahead_of_time, **kwargs)


def _config(spec: str | Path | ModelConfig) -> ModelConfig:
    return spec if isinstance(spec, ModelConfig) else load_model(str(spec))


def _machine(spec: str | Path | Hardware) -> Hardware:
    return spec if isinstance(spec, Hardware) else catalog.load(str(spec))
