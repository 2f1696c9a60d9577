"""mw plan serve: chips, layouts and batches to serve a model with, against latency."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.api.inputs import Serve, ServedDtypes
from meshwright.cli.command_options import OptionsOf
from meshwright.cli.console import (
    CHANGES,
    JSON,
    MODEL,
    OUTPUT,
    emit,
    load_model_with,
    note,
    refuse_with,
    show,
    waiting,
    warn_of_long_context,
)
from meshwright.engines.serving_engine import ENGINES, ServingEngine
from meshwright.errors import PlanError
from meshwright.hardware.catalog import specs
from meshwright.hardware.prices import ChipPrices
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits, layout_for
from meshwright.layout.page_sizes import chunk_of
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.options import REQUIRED, changed_options, option
from meshwright.plan.serve.launch_line import has_settings_for, launch_line
from meshwright.programs.program import PROGRAMS
from meshwright.units import (
    format_bytes,
    format_number_of,
    format_seconds,
    parse_length,
    parse_rate,
    parse_seconds_per_token,
    parse_seconds_to_first_token,
)

if TYPE_CHECKING:
    from meshwright.load.rated import RatedLoad
    from meshwright.plan.serve.explain import ServeExplanation

_DOES_NOT_FIT = 1
_DRAWN = 4096  # requests of a distribution
# Tokens of a prompt and of an answer if a line gives no lengths; published benchmarks of servers have them.
_ASSUMED_TOKENS = 1024


class _Phase(StrEnum):
    prefill = "prefill"
    generate = "generate"


@dataclass(frozen=True)
class _StepOptions:
    """One step to price instead of the frontier."""

    phase: _Phase | None = option(None, help="Price one step of this phase instead of the frontier.")
    batch: int | None = option(None, least=1, help="With --phase: sequences per step.")
    context: int | None = option(
        None, parser=parse_length, help="With --phase generate: positions in the cache."
    )

    def workload(self, config: ModelConfig, prompt_tokens: int | None) -> Workload:
        """The sequences of the step, and their positions. Raises PlanError if an option is missing."""
        assert self.phase is not None
        if self.phase is _Phase.prefill and self.context is not None:
            raise PlanError(
                "--phase prefill is of whole prompts of --prompt-tokens tokens; leave out --context"
            )
        missing, value = (
            ("--context 8k", self.context)
            if self.phase is _Phase.generate
            else ("--prompt-tokens 8k", prompt_tokens)
        )
        if value is None:
            raise PlanError(f"--phase {self.phase} needs the length of its sequences; add {missing}")
        warn_of_long_context(config, value)
        return Workload(self.batch or 1, value, self.phase.value)

    def check_unset(self) -> None:
        """Raise PlanError for an option that needs --phase."""
        for flag, value in (("--batch", self.batch), ("--context", self.context)):
            if value is not None:
                raise PlanError(f"{flag} describes one step; add --phase generate or --phase prefill")


@dataclass(frozen=True)
class _EngineOptions:
    """The engine that serves, and the load that its servers must bear."""

    engine: str | None = option(
        None,
        help="Price the steps of this engine, and print the line that starts it: vllm, sglang, ...",
        unset="none; with --rate vllm, on TPUs vllm-tpu",
    )
    rate: float | None = option(
        None, parser=parse_rate, help="Requests per second; finds the cheapest servers by simulation."
    )
    ttft_p95: float | None = option(
        None,
        flag="--ttft-p95",
        parser=parse_seconds_to_first_token,
        help="With --rate: 95% of first tokens come in this time: 1s.",
    )
    tpot_p95: float | None = option(
        None,
        flag="--tpot-p95",
        parser=parse_seconds_per_token,
        help="With --rate: 95% of answers take this time a token: 30ms.",
    )

    def engine_for(self, machines: Sequence[Hardware]) -> ServingEngine | None:
        """The record of the named engine, or, with a rate, of the first machine's usual one; otherwise None.

        Raises PlanError for targets without a rate, and for an engine that is unknown or whose command line
        is unknown.
        """
        of_rate = {"--rate": self.rate, "--ttft-p95": self.ttft_p95, "--tpot-p95": self.tpot_p95}
        given = [flag for flag, value in of_rate.items() if value is not None]
        if given and not self.rate:
            raise PlanError(f"{given[0]} needs --rate; add --rate 20")
        name = self.engine or (machines[0].chip.platform.engine if given else None)
        if name is None:
            return None
        if name not in ENGINES and name in PROGRAMS:
            raise PlanError(f"--engine {name}: it trains; type mw plan train --software {name}")
        if not ENGINES[name].command:
            known = ", ".join(known for known in ENGINES.names if ENGINES[known].command)
            raise PlanError(f"--engine {name}: its command line is not known; fits: {known}")
        return ENGINES[name]

    def load(self, work: Serve) -> "RatedLoad":
        """The requests at the rate, with the targets that are given.

        The targets of every answer, --ttft and --tpot, count for 95% of the answers of a load.
        """
        from meshwright.load.rated import RatedLoad

        assert self.rate is not None
        turns = work.lengths or [(work.requests.prompt_tokens, work.requests.output_tokens)]
        first, each = self.ttft_p95 or work.ttft, self.tpot_p95 or work.tpot
        if first != self.ttft_p95 or each != self.tpot_p95:
            note("mw: with --rate, --ttft and --tpot bound 95% of the answers, as --ttft-p95 and --tpot-p95")
        return RatedLoad(self.rate, turns, first or inf, each or inf, work.max_price_per_hour or inf)


def serve(
    *,
    model: str = MODEL,
    hardware: tuple[str, ...] = option(
        REQUIRED, help="v5e:4x4, or v5e for all sizes up to 256 chips; several: v5e:4x4,h100."
    ),
    requests: Annotated[dict[str, Any], OptionsOf(Serve)],
    lengths: str | None = option(
        None,
        metavar="NAME",
        help="Requests of a distribution of lengths: sharegpt, alpaca.",
        unset="all alike",
    ),
    trace: Path | None = option(
        None, help="Lengths from a file: JSON lines of prompt_tokens, output_tokens, arrival_seconds."
    ),
    dtypes: ServedDtypes,
    layout: str | None = option(None, help="Price only this layout: tensor=8,kv_replicas=2,cache=batch."),
    step: _StepOptions,
    runnable: bool = option(
        True,
        flag="--runnable/--any",
        help="Prefill prompts as mw serve does, or also by position over devices that share weights.",
    ),
    by: _EngineOptions,
    prices: ChipPrices,
    ideal: bool = option(False, help="Price a roofline: the longer of products and links, at rated peaks."),
    explain: bool = option(False, help="Explain the limit of the step, and changes that lift it."),
    changes: str | None = CHANGES,
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Rank chips, layouts and batches for serving a model.

    Prints the frontier of throughput per chip against time per token. Exits 1 if nothing fits, or if nothing
    meets --ttft, --tpot and --max-price-per-hour.

    \b
    mw plan serve --model llama-3-70b --hardware v5e,h100 --prompt-tokens 8k --output-tokens 512 --tpot 0.03
    mw plan serve --model llama-3-8b --hardware h100:1x8 --lengths sharegpt --paged
    mw plan serve --model llama-2-13b --hardware v5e:2x4 --phase generate --batch 32 --context 8k
    """
    from meshwright.api.document import check_output
    from meshwright.plan.serve.search import serving_machines

    if output:
        check_output(output)
    config = load_model_with(model, changes)
    machines = prices.of(serving_machines(spec for text in hardware for spec in specs(text)))
    if ideal:
        machines = [replace(machine, chip=machine.chip.roofline()) for machine in machines]
    software = by.engine_for(machines)
    precisions = dtypes.precisions(machines, config, by_engine=software is not None)
    _note_published(config, precisions)
    precisions = [words | _tables_of(words, software) for words in precisions]
    asked = _Asked(config, machines, precisions, layout_for(config, layout) if layout else None, software)
    if step.phase:
        prompt_tokens, _ = requests.pop("prompt_tokens"), requests.pop("output_tokens")
        unread = {"--lengths": lengths, "--trace": trace, **changed_options(Serve, requests)}
        unread |= {"--explain": explain, "--rate": by.rate}
        refuse_with(unread, "--phase prices one step and no requests")
        _price_step(asked, step.workload(config, prompt_tokens), output, as_json)
        return
    step.check_unset()
    work = _work(config, lengths, trace, **requests)
    if asked.layout:
        chunk_of(asked.layout, work.requests.context, work.chunk)
    if software and by.rate:
        from meshwright.cli.plan_load import plan_for_load

        refuse_with({"--explain": explain}, "--rate simulates servers, without a frontier to explain")
        refuse_with(_unread_by_load(requests), "--rate simulates the engine at its own settings")
        load = by.load(work)
        with _refused_as_answer(config, as_json):
            plan_for_load(config, machines, software, load, precisions, asked.layout, as_json, output)
    else:
        with _refused_as_answer(config, as_json):
            _search(asked, work, runnable, explain, output, as_json)


def _unread_by_load(requests: Mapping[str, Any]) -> dict[str, object]:
    """The changed options of requests that a simulated engine does not take, by their flags."""
    read = {"--prompt-tokens", "--output-tokens", "--ttft", "--tpot", "--max-price-per-hour"}
    changed = changed_options(Serve, requests)
    return {flag: value for flag, value in changed.items() if flag not in read}


def _note_published(config: ModelConfig, precisions: Sequence[Mapping[str, str]]) -> None:
    """Print the preset of a published file in a narrow type, which keeps some weights in wider ones."""
    from meshwright.models.presets import PRESETS

    for dtype in dict.fromkeys(words.get("weights_dtype", "") for words in precisions):
        if (published := f"{config.name}-{dtype}") in PRESETS:
            note(
                f"mw: all matrices are priced in {dtype}; the published {dtype} file keeps some wider, which "
                f"--model {published} prices"
            )


@dataclass(frozen=True)
class _Asked:
    """The choices to price. layout: the only one; None: all. engine: None for `mw serve`."""

    config: ModelConfig
    machines: list[Hardware]
    precisions: Sequence[Mapping[str, str]]
    layout: Layout | None
    engine: ServingEngine | None

    @property
    def on_engine(self) -> list[Hardware]:
        """The machines with the engine on them."""
        if self.engine is None:
            return self.machines
        from meshwright.plan.serve.with_engine import on_engine

        return [on_engine(machine, self.engine) for machine in self.machines]


def _tables_of(words: Mapping[str, str], software: ServingEngine | None) -> dict[str, str]:
    """The dtype of the tables in an engine; empty for our server."""
    from meshwright.plan.serve.with_engine import engine_tables_dtype

    tables = engine_tables_dtype(words["weights_dtype"], words["compute_dtype"]) if software else None
    return {"tables_dtype": tables} if tables else {}


def _work(
    config: ModelConfig,
    lengths: str | None,
    trace: Path | None,
    *,
    prompt_tokens: int | None,
    output_tokens: int | None,
    **requests: Any,
) -> Serve:
    """The requests to serve. Raises PlanError if one of their two lengths is missing.

    If both are missing, prompts and answers have _ASSUMED_TOKENS, and a note names them.
    """
    sample = _sample(config, lengths, trace, prompt_tokens, output_tokens)
    if sample:
        prompt_tokens = output_tokens = None
    elif prompt_tokens is None and output_tokens is None:
        prompt_tokens = output_tokens = min(_ASSUMED_TOKENS, config.max_seq_len // 2)
        note(
            f"mw: no lengths of requests are given, so prompts and answers of {prompt_tokens:,} tokens are "
            "assumed; give --prompt-tokens 8k --output-tokens 512, --lengths or --trace"
        )
    elif prompt_tokens is None or output_tokens is None:
        raise PlanError(
            "the frontier needs the lengths of requests; add --prompt-tokens 8k --output-tokens 512, "
            "--lengths sharegpt or --trace requests.jsonl"
        )
    work = Serve(prompt_tokens, output_tokens, lengths=sample, **requests)
    warn_of_long_context(config, work.requests.context)
    return work


def _sample(
    config: ModelConfig,
    lengths: str | None,
    trace: Path | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
) -> list[tuple[int, int]]:
    """(prompt, output) tokens of requests from a distribution or a trace; [] without one.

    They are the requests of `mw bench serve`, cut to the model's context.
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


def _layouts(
    config: ModelConfig, machine: Hardware, precision: Mapping[str, object], only: Layout | None
) -> list[Layout]:
    from meshwright.plan.degrees import check_chips
    from meshwright.plan.serve.layouts import serving_layouts

    if only is None:
        return serving_layouts(config, machine, precision, replicas=True)
    check_chips(machine, only, config)
    check_fits(only, config, padded=True)
    return [only.replace(**precision)]


def _price_step(asked: _Asked, workload: Workload, output: Path | None, as_json: bool) -> None:
    """Print the price of one step. Exits 1 if it does not fit the memory."""
    from meshwright.api.serving import write_serve_plan
    from meshwright.plan.serve.phase import price_phase
    from meshwright.plan.serve.serving_plan import plan_of_phase

    config, [machine, *machines], [precision, *precisions] = asked.config, asked.on_engine, asked.precisions
    if machines or precisions:
        raise PlanError("--phase prices one step; name one machine and one dtype")
    point = price_phase(config, machine, workload, _layouts(config, machine, precision, asked.layout))
    is_roofline = machine.chip.step.is_roofline
    engine = None if is_roofline else asked.engine or ENGINES["meshwright"]
    document = point.to_dict() | {"engine": engine and engine.name}
    if output and point.fits:
        note(f"wrote {write_serve_plan(output, plan_of_phase(point), document)}")
    if as_json:
        emit(document)
    else:
        from meshwright.report.terminal.frontier_table import phase_lines
        from meshwright.report.terminal.tables import breakdown_table

        show(phase_lines(document, engine), breakdown_table(document))
    if not point.fits:
        over = point.memory.total - machine.chip.program_bytes
        most = format_number_of(point.max_batch, "sequence")
        what = f"at most {most} fit" if point.max_batch else "not even one sequence fits"
        note(
            f"mw: {config.name} on {machine.spec}: {point.layout} needs {format_bytes(over)} more "
            f"per chip than the {format_bytes(machine.chip.program_bytes)} available; {what}"
        )
        raise typer.Exit(_DOES_NOT_FIT)


@contextmanager
def _refused_as_answer(config: ModelConfig, as_json: bool) -> Iterator[None]:
    """Print why nothing fits or meets the targets inside the block, with the nearest point, and exit 1."""
    from meshwright.plan.serve.search import Infeasible

    try:
        yield
    except Infeasible as error:
        if as_json:
            nearest = error.nearest.to_dict() if error.nearest else None
            emit({"frontier": [], "best": None, "nearest": nearest, "reason": str(error)})
        named = str(error).startswith(config.name)
        note(f"mw: {error}" if named else f"mw: {config.name}: {error}")
        raise typer.Exit(_DOES_NOT_FIT) from error


def _search(
    asked: _Asked, work: Serve, runnable: bool, explain: bool, output: Path | None, as_json: bool
) -> None:
    """Print the frontier and the best point."""
    from meshwright.api.serving import serve_document, write_serve_plan
    from meshwright.plan.serve.explain import explain_serving
    from meshwright.plan.serve.search import search_serving
    from meshwright.plan.serve.serving_plan import plan_of_point

    config, software = asked.config, asked.engine
    with waiting("searching chips, layouts and batches"):
        result = search_serving(
            config,
            asked.on_engine,
            work.requests,
            work.targets,
            precisions=asked.precisions,
            layout=asked.layout,
            runnable=runnable,
            accepts=(lambda layout: has_settings_for(software, layout)) if software else None,
            programs=software is None,
        )
    document = serve_document(config, work, result, software)
    explanation = explain_serving(result.best) if explain or as_json or output else None
    document |= explanation.to_dict() if explanation else {}
    line = None
    if software:
        context = work.requests.context
        line = launch_line(software, config, result.best.layout, sequences=result.best.batch, context=context)
        document["launch"] = line.to_dict()
        from meshwright.plan.serve.boot import boot_of

        boot = boot_of(config, result.best.hardware, result.best.layout, software, context)
        document["boot"] = boot and boot.to_dict()
    else:
        from meshwright.plan.serve.boot import server_start

        document["server"] = server_start(result.best)
    if output:
        note(f"wrote {write_serve_plan(output, plan_of_point(result.best), document)}")
    if as_json:
        emit(document)
    else:
        _show(document, result.seconds, explanation if explain else None)
        if line:
            from meshwright.report.launching import boot_lines, launch_lines

            show(*launch_lines(line.to_dict()), *boot_lines(document["boot"]))
        else:
            from meshwright.report.terminal.audits import server_line

            show(server_line(document["server"]))


def _show(document: dict, seconds: float, explanation: "ServeExplanation | None") -> None:
    from meshwright.cli.plan_output import prose
    from meshwright.plan.verdict import verdict_lines
    from meshwright.report.serving_points import drafts_text, ranges_text, requests_text
    from meshwright.report.terminal.frontier_table import frontier_plot, frontier_table

    best, requests = document["best"], document["requests"]
    small = [
        f"{each['weights_dtype']} on {each['hardware'] or 'none of the sizes of ' + each['chip']}"
        for each in document["smallest"]
    ]
    show(
        f"{document['model']['name']}, {requests_text(requests)}",
        *verdict_lines(document["verdict"] | {"asked": None}),
        frontier_table(document, few=explanation is None),
        *([frontier_plot(document)] if explanation else []),
        f"best: {best['hardware']}, {best['layout'].removesuffix(',remat=none')}, {best['batch']} sequences "
        f"at once (at most {best['max_batch']}); {best['prefill_to_generate_ratio']:.2g} prefill chips per "
        "generate chip",
        *([f"mw serve does not run it yet: {best['why_not_run']}"] if best["why_not_run"] else []),
        *([drafts_text(best)] if "draft_step_ratio" in best else []),
        ranges_text(document["ranges"]),
        f"smallest machine that holds the model and one request: {'; '.join(small)}",
        *(
            prose(section.title, section.paragraphs)
            for section in (explanation.sections if explanation else ())
        ),
        f"{document['search']['considered']:,} points considered in {format_seconds(seconds)}"
        + ("" if explanation else "; --explain has the curve, more points and the reasons"),
    )
