"""mw plan: the layouts of a machine, ranked."""

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import (
    HardwareOption,
    Json,
    ModelOption,
    SeqLenOption,
    count_option,
    dtype_option,
    emit,
    note,
    show,
)
from meshwright.cli.plan_document import plan_document
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import DTYPES, Layout
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model
from meshwright.plan.train import Candidate, Search, assumptions, price, search, usable_bytes
from meshwright.plan_file import Plan, Workload, save_plan
from meshwright.units import format_bytes, format_count, format_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


@app.callback()
def plan() -> None:
    """Rank the layouts to train a model on a machine."""


@app.command()
def train(
    model: ModelOption,
    hardware: HardwareOption,
    batch_tokens: Annotated[int, count_option("--batch-tokens", help="Tokens of one step: 4M, 4Mi.")],
    seq_len: SeqLenOption,
    layout: Annotated[
        str | None,
        typer.Option(help="Price this one alone: data=2,fsdp=64,tensor=8,remat=full."),
    ] = None,
    weights_dtype: Annotated[
        str | None, dtype_option("--weights-dtype", help="Of stored weights. [bf16; f32 on cpu]")
    ] = None,
    compute_dtype: Annotated[
        str | None, dtype_option("--compute-dtype", help="Of matmuls. [bf16; on cpu the faster]")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many candidates to list.")] = 10,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan here, and its .json beside it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank the layouts to train a model on a machine, and say what binds each.

    Exits 1 where none fits the memory.

    \b
    mw plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens 4M --seq-len 4096
    """
    config, machine = load_model(model), catalog.load(hardware)
    workload = make_workload(config, batch_tokens, seq_len)
    dtypes = _dtypes(machine, weights_dtype, compute_dtype)
    found = _price_one(config, machine, workload, layout, *dtypes) if layout else None
    found = found or search(config, machine, workload, weights_dtype=dtypes[0], compute_dtypes=dtypes[1])
    document = plan_document(config, machine, workload, found, top)
    if output and found.best.fits:
        _write(output, _runnable(config, machine, workload, found.best), workload, document)
    if as_json:
        emit(document)
    else:
        _show(document, found, workload)
    if not found.best.fits:
        note(f"mw: {config.name} on {hardware}: {_misses(found)}")
        raise typer.Exit(_DOES_NOT_FIT)


def make_workload(config: ModelConfig, batch_tokens: int, seq_len: int) -> Workload:
    """The nearest number of whole sequences. Raises PlanError where one is too long or too much."""
    if seq_len > config.max_seq_len:
        raise PlanError(
            f"--seq-len {seq_len} is longer than {config.name}'s context of {config.max_seq_len}; "
            f"fits: --seq-len {config.max_seq_len}"
        )
    if batch_tokens < seq_len:
        raise PlanError(
            f"--batch-tokens {batch_tokens} is less than one sequence of {seq_len} tokens; "
            f"fits: --batch-tokens {seq_len}"
        )
    return Workload(round(batch_tokens / seq_len), seq_len)


def _dtypes(
    hardware: Hardware, weights_dtype: str | None, compute_dtype: str | None
) -> tuple[str, tuple[str, ...]]:
    """The type of the weights, and those to compute in. What a CPU is fast in only its figures know."""
    on_cpu = hardware.chip.kind == "cpu"
    weights = weights_dtype or ("f32" if on_cpu else "bf16")
    if compute_dtype:
        return weights, (compute_dtype,)
    if not on_cpu:
        return weights, ("bf16",)
    return weights, tuple(dtype for dtype in DTYPES if dtype in hardware.chip.flops_per_second)


def _price_one(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    text: str,
    weights_dtype: str,
    compute_dtypes: tuple[str, ...],
) -> Search:
    """The one layout that `text` names, in the fastest of the types that it leaves open."""
    layouts = {
        Layout.parse(f"weights_dtype={weights_dtype},compute_dtype={compute_dtype},{text}")
        for compute_dtype in compute_dtypes
    }
    started = time.perf_counter()
    priced = [price(config, hardware, workload, layout) for layout in layouts]
    best = min(priced, key=lambda candidate: candidate.step_seconds)
    seconds = time.perf_counter() - started
    return Search((best,), 1, seconds, tuple(assumptions(hardware, workload, best)))


def _runnable(config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate) -> Plan:
    """The plan of the best layout, its batch rounded to what the batch shards divide."""
    shards = best.layout.num_batch_shards * best.layout.microbatches
    whole = Workload(max(1, round(workload.num_sequences / shards)) * shards, workload.seq_len)
    run = best if whole == workload else price(config, hardware, whole, best.layout)
    planned = {"step_seconds": run.step_seconds, "mfu": run.mfu, "bytes_per_chip": run.memory.total}
    return Plan(config, hardware.spec, whole, best.layout, planned)


def _write(path: Path, written: Plan, asked: Workload, document: dict) -> None:
    """plan.toml and, whole or not at all, its plan.json."""
    beside = path.with_suffix(".json")
    if beside == path:
        raise PlanError(
            f"-o {path}: the plan is TOML, and the .json beside it holds its figures; name a .toml"
        )
    save_plan(written, path)
    partial = beside.with_name(f".{beside.name}.{os.getpid()}")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(beside)
    if written.workload != asked:
        note(
            f"{asked.num_sequences} sequences do not divide over the batch shards of {written.layout}; "
            f"the plan takes {written.workload.num_sequences} ({written.workload.num_tokens:,} tokens)"
        )
    note(f"wrote {path} and {beside}")


def _misses(found: Search) -> str:
    best, needed = found.best, found.best.memory.total
    usable = usable_bytes(best.hardware)
    which = "nothing fits; nearest comes" if found.considered > 1 else "does not fit:"
    return (
        f"{which} {best.layout}, which needs {format_bytes(needed)} a chip, {format_bytes(needed - usable)} "
        f"more than the {format_bytes(usable)} that there are; take more chips or fewer --batch-tokens"
    )


def _show(document: dict, found: Search, workload: Workload) -> None:
    from meshwright.report.tables import breakdown_table, plan_table

    best, layout = document["best"], found.best.layout
    dtypes = f"weights {layout.weights_dtype}, compute {layout.compute_dtype}"
    show(
        f"{document['model']['name']} ({format_count(document['model']['params'])} parameters) on "
        f"{document['hardware']['spec']} ({document['hardware']['num_chips']:,} devices), "
        f"{workload.num_sequences:,} sequences of {workload.seq_len:,} tokens, {dtypes}",
        "",
        plan_table(document),
        breakdown_table(best),
        *(f"- {line}" for line in document["assumptions"]),
        f"{found.considered:,} layouts priced in {format_seconds(found.seconds)}",
    )
