"""mw plan serve: chips, layouts and batches to serve a model with, against latency."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.api.inputs import Serve
from meshwright.cli.common import (
    Json,
    ModelOption,
    SetOption,
    emit,
    length_option,
    load_model_with,
    note,
    refuse_beside,
    show,
    waiting,
    warn_of_long_context,
    whole_option,
)
from meshwright.errors import PlanError
from meshwright.hardware.prices import priced_machines
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.paged import chunk_of
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.units import format_bytes, format_number_of, format_seconds

if TYPE_CHECKING:
    from meshwright.plan.serve.explain import ServeExplanation

_DOES_NOT_FIT = 1
_DRAWN = 4096  # requests of a distribution


class _Phase(StrEnum):
    prefill = "prefill"
    generate = "generate"


def serve(
    model: ModelOption,
    hardware: Annotated[
        list[str],
        typer.Option(
            "--hardware", help="v5e:4x4, or v5e for all sizes up to 256 chips; several: v5e:4x4,h100."
        ),
    ],
    prompt_tokens: Annotated[
        int | None,
        length_option("--prompt-tokens", help="Tokens per prompt: 8192, 8k (8192); with --lengths the mean."),
    ] = None,
    output_tokens: Annotated[int | None, length_option("--output-tokens", help="Tokens per answer.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Requests of a distribution of lengths: sharegpt, alpaca. [default: all alike]",
            metavar="NAME",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests of these lengths: JSON lines of prompt_tokens, output_tokens, arrival_seconds."
        ),
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(help="Longest allowed time to first token, in seconds.", metavar="S")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(help="Longest allowed time per output token, in seconds.", metavar="S")
    ] = None,
    max_price_per_hour: Annotated[
        float | None, typer.Option(help="Highest allowed price per hour of all chips.", metavar="PRICE")
    ] = None,
    weights_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtypes of the weights to try: bf16,fp8,int8,int4. [default: bf16; f32 on cpu]",
            metavar="DTYPE,...",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtypes of the KV cache to try: bf16,int8. [default: as computed]", metavar="DTYPE,..."
        ),
    ] = None,
    matmul_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of matmul operands, if activations are quantised: int8, fp8. [default: as computed]",
            metavar="DTYPE",
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Price only this layout: tensor=8,kv_replicas=2,cache=batch.")
    ] = None,
    phase: Annotated[
        _Phase | None, typer.Option(help="Price one step of this phase instead of the frontier.")
    ] = None,
    batch: Annotated[int | None, whole_option("--batch", help="With --phase: sequences per step.")] = None,
    context: Annotated[
        int | None, length_option("--context", help="With --phase generate: positions in the cache.")
    ] = None,
    prefix_hit: Annotated[
        float, typer.Option(help="Share of a prompt found in a prefix cache.", metavar="X")
    ] = 0.0,
    drafts: Annotated[
        int, typer.Option(help="Draft tokens per step (speculative decoding).", metavar="N")
    ] = 0,
    acceptance: Annotated[
        float, typer.Option(help="Probability that a draft token is accepted.", metavar="X")
    ] = 0.0,
    paged: Annotated[
        bool,
        typer.Option("--paged", help="Count the cache at the mean length of sequences, not the longest."),
    ] = False,
    chunk: Annotated[
        int | None,
        length_option(
            "--chunk",
            help="Prefill in chunks of this many tokens, as mw serve does. [default: whole prompts]",
        ),
    ] = None,
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable/--any",
            help="Prefill prompts as mw serve does, or also by position over devices that share weights.",
        ),
    ] = True,
    price: Annotated[
        str | None, typer.Option(help="Price of a chip-hour: v5p=4.2,h100=2.5. [default: the catalog's]")
    ] = None,
    currency: Annotated[str | None, typer.Option(help="Currency of --price. [default: USD]")] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="Price at the chips' rated peaks: a pure roofline.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain what limits the step and what would change that.")
    ] = False,
    changes: SetOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the best plan here, and its .json beside it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank chips, layouts and batches for serving a model.

    Prints the frontier of throughput per chip against time per token. Exits 1 if nothing fits, or if nothing
    meets --ttft, --tpot and --max-price-per-hour.

    \b
    mw plan serve --model llama-3-70b --hardware v5e,h100 --prompt-tokens 8k --output-tokens 512 --tpot 0.03
    mw plan serve --model llama-3-8b --hardware h100:1x8 --lengths sharegpt --paged
    mw plan serve --model llama-2-13b --hardware v5e:2x4 --phase generate --batch 32 --context 8k
    """
    from meshwright.api import serving_precisions
    from meshwright.api.document import check_output
    from meshwright.plan.serve.search import serving_machines

    if output:
        check_output(output)
    config = load_model_with(model, changes)
    machines = serving_machines(spec for text in hardware for spec in text.split(","))
    machines = priced_machines(machines, price, currency)
    if ideal:
        machines = [replace(machine, chip=machine.chip.ideal()) for machine in machines]
    precisions = serving_precisions(machines, weights_dtype, kv_dtype, matmul_dtype=matmul_dtype)
    alone = Layout.parse(layout) if layout else None
    if phase:
        of_requests = {
            "--lengths": lengths,
            "--trace": trace,
            "--ttft": ttft,
            "--tpot": tpot,
            "--max-price-per-hour": max_price_per_hour,
            "--prefix-hit": prefix_hit != 0,
            "--drafts": drafts != 0,
            "--acceptance": acceptance != 0,
            "--paged": paged,
            "--chunk": chunk,
            "--explain": explain,
        }
        refuse_beside(of_requests, "--phase prices one step and no requests")
        if len(machines) > 1 or len(precisions) > 1:
            raise PlanError("--phase prices one step; name one machine and one dtype")
        length = _phase_length(config, phase, prompt_tokens, context)
        workload = Workload(batch or 1, length, phase.value)
        layouts = _layouts(config, machines[0], precisions[0], alone)
        _one_step(config, machines[0], workload, layouts, output, as_json)
        return
    for option, value in (("--batch", batch), ("--context", context)):
        if value is not None:
            raise PlanError(f"{option} describes one step; add --phase generate or --phase prefill")
    sample = _sample(config, lengths, trace, prompt_tokens, output_tokens)
    if sample:
        prompt_tokens = output_tokens = None
    elif prompt_tokens is None or output_tokens is None:
        raise PlanError(
            "the frontier needs the lengths of requests; add --prompt-tokens 8k --output-tokens 512, "
            "--lengths sharegpt or --trace requests.jsonl"
        )
    work = Serve(
        prompt_tokens,
        output_tokens,
        ttft,
        tpot,
        lengths=sample,
        max_price_per_hour=max_price_per_hour,
        prefix_hit=prefix_hit,
        drafts=drafts,
        acceptance=acceptance,
        paged=paged,
        chunk=chunk,
    )
    warn_of_long_context(config, work.requests.context)
    if alone:
        chunk_of(alone, work.requests.context, chunk)
    _frontier(config, machines, work, precisions, alone, runnable, explain, output, as_json)


def _sample(
    config: ModelConfig,
    lengths: str | None,
    trace: Path | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the requests that are described by more than two means; none where not.

    They are those that `mw bench serve` draws, cut to the model's context.
    """
    if lengths is None and trace is None:
        return []
    if trace and (lengths or prompt_tokens or output_tokens):
        raise PlanError("--trace has the lengths of its requests; leave out the other options of lengths")
    from meshwright.load import traffic

    if trace:
        chats = traffic.read_trace(trace)
    else:
        drawn = traffic.named_lengths(str(lengths), prompt_tokens, output_tokens)
        chats = traffic.chats(drawn, _DRAWN, 1, traffic.at_once(), seed=0)
    fitting = traffic.within(chats, config.max_seq_len, prefix_tokens=0)
    return [(turn.prompt_tokens, turn.output_tokens) for chat in fitting for turn in chat.turns]


def _phase_length(config: ModelConfig, phase: _Phase, prompt_tokens: int | None, context: int | None) -> int:
    """Positions of the step's sequences. Raises PlanError where the option that says them is not given."""
    if phase is _Phase.prefill and context is not None:
        raise PlanError(
            "--phase prefill is of whole prompts, as long as --prompt-tokens says; leave out --context"
        )
    option, value = (
        ("--context 8k", context) if phase is _Phase.generate else ("--prompt-tokens 8k", prompt_tokens)
    )
    if value is None:
        raise PlanError(f"--phase {phase} needs the length of its sequences; add {option}")
    warn_of_long_context(config, value)
    return value


def _layouts(
    config: ModelConfig, machine: Hardware, precision: Mapping[str, object], alone: Layout | None
) -> list[Layout]:
    from meshwright.plan.degrees import check_chips
    from meshwright.plan.serve.layouts import serving_layouts

    if alone is None:
        return serving_layouts(config, machine, precision, replicas=True)
    check_chips(machine, alone)
    alone.check(config, padded=True)
    return [alone.replace(**precision)]


def _one_step(
    config: ModelConfig,
    machine: Hardware,
    workload: Workload,
    layouts: list[Layout],
    output: Path | None,
    as_json: bool,
) -> None:
    from meshwright.api.serving import write_serve_plan
    from meshwright.plan.serve.phase import price_phase
    from meshwright.plan.serve.serving_plan import plan_of_phase

    point = price_phase(config, machine, workload, layouts)
    document = point.to_dict()
    if as_json:
        emit(document)
    else:
        from meshwright.report.terminal.serving import phase_lines
        from meshwright.report.terminal.tables import breakdown_table

        show(phase_lines(document), breakdown_table(document))
    if output and point.fits:
        note(f"wrote {write_serve_plan(output, plan_of_phase(point), document)}")
    if not point.fits:
        over = point.memory.total - machine.chip.program_bytes
        most = format_number_of(point.max_batch, "sequence")
        what = f"at most {most} fit" if point.max_batch else "not even one sequence fits"
        note(
            f"mw: {config.name} on {machine.spec}: {point.layout} needs {format_bytes(over)} more "
            f"per chip than the {format_bytes(machine.chip.program_bytes)} available; {what}"
        )
        raise typer.Exit(_DOES_NOT_FIT)


def _frontier(
    config: ModelConfig,
    machines: Sequence[Hardware],
    work: Serve,
    precisions: Sequence[Mapping[str, object]],
    alone: Layout | None,
    runnable: bool,
    explain: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    from meshwright.api.serving import serve_document, write_serve_plan
    from meshwright.plan.serve.explain import explain_serving as explain_point
    from meshwright.plan.serve.search import Infeasible, search_serving
    from meshwright.plan.serve.serving_plan import plan_of_point

    try:
        with waiting("searching chips, layouts and batches"):
            found = search_serving(
                config,
                machines,
                work.requests,
                work.targets,
                precisions=precisions,
                layout=alone,
                runnable=runnable,
            )
    except Infeasible as error:
        if as_json:
            nearest = error.nearest.to_dict() if error.nearest else None
            emit({"frontier": [], "best": None, "nearest": nearest, "reason": str(error)})
        named = str(error).startswith(config.name)
        note(f"mw: {error}" if named else f"mw: {config.name}: {error}")
        raise typer.Exit(_DOES_NOT_FIT) from error
    document = serve_document(config, work, found)
    said = explain_point(found.best) if explain or as_json or output else None
    document |= said.to_dict() if said else {}
    if as_json:
        emit(document)
    else:
        _show(document, found.seconds, said if explain else None)
    if output:
        note(f"wrote {write_serve_plan(output, plan_of_point(found.best), document)}")


def _show(document: dict, seconds: float, said: "ServeExplanation | None") -> None:
    from meshwright.cli.plan_output import prose
    from meshwright.report.serving_points import requests_text
    from meshwright.report.terminal.serving import frontier_plot, frontier_table

    best, requests = document["best"], document["requests"]
    small = [
        f"{one['weights_dtype']} on {one['hardware'] or 'none of the sizes of ' + one['chip']}"
        for one in document["smallest"]
    ]
    show(
        f"{document['model']['name']}, {requests_text(requests)}",
        frontier_table(document),
        frontier_plot(document),
        f"best: {best['hardware']}, {best['layout'].removesuffix(',remat=none')}, {best['batch']} sequences "
        f"at once (at most {best['max_batch']}); {best['prefill_to_generate_ratio']:.2g} prefill chips per "
        "generate chip",
        *([f"mw serve does not run it yet: {best['why_not_run']}"] if best["why_not_run"] else []),
        f"smallest machine that holds the model and one request: {'; '.join(small)}",
        *(prose(section.title, section.paragraphs) for section in (said.sections if said else ())),
        f"{document['search']['considered']:,} points considered in {format_seconds(seconds)}"
        + ("" if said else "; --explain says why in words"),
    )
