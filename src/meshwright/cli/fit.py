"""mw fit: which uses of a model fit this machine, or another."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.completions import models
from meshwright.cli.console import JSON, emit, load_hardware, load_model_with, show
from meshwright.hardware.catalog import specs, usual
from meshwright.hardware.here import this_machine
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.options import option
from meshwright.plan.what_fits import SERVING, TRAINING, fitting_ways, verdicts
from meshwright.units import format_bytes, format_count, parse_length

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DEFAULT_SEQ_LEN = 4096
_DOES_NOT_FIT = 1
_LARGER = "h100:8"  # the machine to try if nothing fits
# Presets of several sizes, for a line without a model.
MODELS = (
    "llama-3.2-1b", "llama-3.2-3b", "qwen3-4b", "llama-3.1-8b", "qwen3-14b", "mistral-small-24b",
    "qwen3-30b-a3b", "qwen3-32b", "llama-3.3-70b", "gpt-oss-120b", "qwen3-235b-a22b", "llama-3.1-405b",
    "deepseek-v3",
)  # fmt: skip


@command(app)
def fit(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a config.json, a checkpoint folder or a TOML. [default: models of several sizes]",
            autocompletion=models,
        ),
    ] = None,
    hardware: str | None = option(
        None, help="A machine: rtx4090, h100:8, my.toml; several: rtx4090,h100.", unset="this machine"
    ),
    seq_len: int | None = option(None, parser=parse_length, help="Tokens of a sequence.", unset="4096"),
    as_json: bool = JSON,
) -> None:
    """Show which ways to train and serve a model fit a machine, with the largest batch and the speed.

    Training splits weights over all chips; serving splits heads, and has replicas on the chips that are left.
    Without a model it shows which models fit. Exits 1 if nothing fits on any machine.

    \b
    mw fit llama-3-8b
    mw fit qwen3-32b --hardware rtx4090:2 --seq-len 8k
    mw fit --hardware rtx4090:2
    """
    machines = [_machine(spec) for spec in specs(hardware or this_machine())]
    if model is None:
        _show_models(machines, seq_len or _DEFAULT_SEQ_LEN, as_json=as_json)
        return
    config = load_model_with(model, None)
    length = seq_len or min(_DEFAULT_SEQ_LEN, config.max_seq_len)
    documents = [_document(config, machine, model, length) for machine in machines]
    if as_json:
        emit(documents[0] if len(documents) == 1 else {"model": config.name, "machines": documents})
    else:
        for document in documents:
            show(_heading(document, is_this_machine=hardware is None), _table(document))
            print("\nNext:", *document["next"], sep="\n  ", end="\n" if document is documents[-1] else "\n\n")
    if not any(way["fits"] for document in documents for way in document["ways"]):
        raise typer.Exit(_DOES_NOT_FIT)


def _show_models(machines: Sequence[Hardware], seq_len: int, *, as_json: bool) -> None:
    """Print which of MODELS fit each machine, and in which ways. Exits 1 if none does."""
    configs = [load_model_with(name, None) for name in MODELS]
    documents = [
        {
            "hardware": machine.spec,
            "seq_len": seq_len,
            "models": [
                {
                    "model": config.name,
                    "params": count_params(config).total,
                    "ways": fitting_ways(config, machine, min(seq_len, config.max_seq_len)),
                }
                for config in configs
            ],
        }
        for machine in machines
    ]
    if as_json:
        emit(documents[0] if len(documents) == 1 else {"machines": documents})
    else:
        for document in documents:
            title = f"Models on {document['hardware']}, sequences of {seq_len:,} tokens"
            show(f"{title}: training, then serving by the type of weights\n", _models_table(document))
            more = f"mw fit MODEL --hardware {document['hardware']} shows batches and speeds"
            print("\nNext:", more, sep="\n  ")
    if not any(each["ways"] for document in documents for each in document["models"]):
        raise typer.Exit(_DOES_NOT_FIT)


def _models_table(document: dict) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    table.add_column("parameters", justify="right")
    for way in TRAINING:
        table.add_column(way.removeprefix("train all weights, ").removeprefix("train "), no_wrap=True)
    for dtype in SERVING.values():
        table.add_column(dtype, no_wrap=True)
    for each in document["models"]:
        fits = ["yes" if way in each["ways"] else "no" for way in (*TRAINING, *SERVING)]
        table.add_row(each["model"], format_count(each["params"]), *fits)
    return table


def _machine(spec: str) -> Hardware:
    """A machine by its name, of one chip if the name has no number."""
    named = usual(spec)
    return load_hardware(named if ":" in named or named.endswith(".toml") else f"{named}:1")


def _document(config: ModelConfig, machine: Hardware, model: str, seq_len: int) -> dict:
    """The verdicts of one machine. model: as typed, for the next commands."""
    ways = [asdict(verdict) for verdict in verdicts(config, machine, seq_len)]
    document = {"model": config.name, "hardware": machine.spec, "seq_len": seq_len, "ways": ways}
    return document | {"next": _next(ways, model, machine.spec, seq_len)}


def _next(ways: list[dict], model: str, spec: str, seq_len: int) -> list[str]:
    """The commands that plan the first ways to train and to serve that fit, or try another machine."""
    fitting = [way for way in ways if way["fits"]]
    trained = next((way for way in fitting if way["way"] in TRAINING), None)
    served = next((way for way in fitting if way["way"] not in TRAINING), None)
    planned = f"--model {shlex.quote(model)} --hardware {shlex.quote(spec)}"
    commands = []
    if trained:
        numbers, changes = TRAINING[trained["way"]]
        weights = [f"--weights-dtype {dtype}" for name, dtype in numbers.items() if name == "weights_dtype"]
        given = [f"--given {name}={value}" for name, value in numbers.items() if name != "weights_dtype"]
        changed = [f"--set {name}={value}" for name, value in changes.items()]
        batch = f"--batch-tokens {trained['max_batch'] * seq_len} --seq-len {seq_len}"
        commands.append(" ".join([f"mw plan train {planned} {batch}", *weights, *given, *changed]))
    if served:
        dtype = SERVING.get(served["way"])  # None as published
        weights = f" --weights-dtype {dtype}" if dtype else ""
        lengths = f"--prompt-tokens {seq_len * 3 // 4} --output-tokens {seq_len // 4}"
        commands.append(f"mw plan serve {planned}{weights} {lengths}")
    return commands or [
        f"mw fit {shlex.quote(model)} --hardware {_LARGER}",
        f"mw plan train --model {shlex.quote(model)} --hardware {_LARGER.partition(':')[0]} "
        f"--batch-tokens 1Mi --seq-len {seq_len} --smallest",
    ]


def _heading(document: dict, *, is_this_machine: bool) -> str:
    machine = f"this machine ({document['hardware']})" if is_this_machine else document["hardware"]
    return f"{document['model']} on {machine}, sequences of {document['seq_len']:,} tokens\n"


def _table(document: dict) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("", "fits", "per chip", "at once", "longest", "tokens/s", "one stream", ""):
        table.add_column(name, justify="left" if name in ("", "fits") else "right")
    for way in document["ways"]:
        speeds = [format_count(way[key]) if way[key] else "" for key in ("tokens_per_second", "one_stream")]
        table.add_row(
            way["way"],
            "yes" if way["fits"] else "no",
            format_bytes(way["needed_bytes"]) if way["needed_bytes"] else "",
            f"{way['max_batch']:,}" if way["fits"] else "",
            f"{way['max_context']:,}" if way["max_context"] else "",
            *speeds,
            way["why_not"] or (f"planned; does not run yet: {way['not_run']}" if way["not_run"] else ""),
        )
    return table
