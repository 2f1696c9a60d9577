"""mw plan serve --rate: the cheapest servers of an engine for a load."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.api.serving import write_serve_plan
from meshwright.cli.console import emit, note, show, waiting
from meshwright.engines.serving_engine import ServingEngine
from meshwright.hardware.catalog import names
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.load.rated import RatedLoad, cheapest_servers
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.search import serving_machines
from meshwright.plan.verdict import no_price, price_words
from meshwright.report.serving_points import ranges_text
from meshwright.units import format_bytes, format_number_of, format_seconds

# The largest server that is tried, in chips.
_MOST_CHIPS = 16


def plan_for_load(
    config: ModelConfig,
    machines: Sequence[Hardware],
    engine: ServingEngine,
    load: RatedLoad,
    precisions: Sequence[Mapping[str, object]],
    layout: Layout | None,
    as_json: bool,
    output: Path | None = None,
) -> None:
    """Print the cheapest servers that meet the targets, cheaper ones that do not, and the launch line.

    output: the file for the plan of one of the cheapest servers; the figures are written next to it as JSON.
    """
    with waiting("simulating servers"):
        servers = machines if layout else _of_one_server(machines)
        plan = cheapest_servers(config, servers, engine, load, precisions, layout)
    document = plan.to_dict(load)
    if output:
        note(f"wrote {write_serve_plan(output, plan.plan(load), document)}")
    if as_json:
        emit(document)
        return
    show(
        f"{config.name} on {engine.name}, {load.rate:g} requests/s{_targets(load)}",
        f"Best: {_servers(document['best'])}.",
        *([f"Price: {price}"] if (price := _price(document, plan.best.server.hardware.chip)) else []),
        f"Range: {ranges_text(document['best']['ranges'])}.",
        *(f"Cheaper, but {each['missed']}: {_servers(each)}." for each in document["cheaper"]),
        *([f"Another chip: at least {_counted(other)}."] if (other := document["other"]) else []),
        *launch_lines(document["launch"]),
        *boot_lines(document["boot"]),
        f"{format_number_of(document['simulated'], 'choice')} simulated, of "
        f"{format_number_of(document['considered'], 'layout')}",
    )


def _of_one_server(machines: Sequence[Hardware]) -> list[Hardware]:
    """The machines of at most `_MOST_CHIPS` chips; if there are none, the smaller machines of their chips.

    Chips from a file, which the catalog does not list, keep their machines.
    """
    small = [machine for machine in machines if machine.num_chips <= _MOST_CHIPS]
    if small:
        return small
    listed = [machine.chip for machine in machines if machine.chip.name in names()]
    parts = [
        replace(part, chip=chip)  # with the price that was given
        for chip in listed
        for part in serving_machines([chip.name])
        if part.num_chips <= _MOST_CHIPS
    ]
    return parts or [*machines]


def _targets(load: RatedLoad) -> str:
    asked = [
        f"95% of {name} in {format_seconds(target)}"
        for name, target in (("first tokens", load.ttft_p95), ("times per token", load.tpot_p95))
        if isfinite(target)
    ]
    return f"; {', '.join(asked)}" if asked else ""


def _price(document: Mapping[str, Any], chip: Chip) -> str | None:
    hourly = document["best"]["price_per_hour"]
    if hourly is None:
        return no_price(chip)
    return (
        f"{price_words(chip)}: {hourly:,.2f} an hour, {document['price_per_day']:,.0f} a day, "
        f"{document['price_per_million_tokens']:.3g} per million generated tokens."
    )


def _servers(servers: Mapping[str, Any]) -> str:
    return (
        f"{_counted(servers)}; p95 of the first token {format_seconds(servers['ttft_p95_seconds'])}, "
        f"per token {format_seconds(servers['tpot_p95_seconds'])}"
    )


def _counted(servers: Mapping[str, Any]) -> str:
    """Servers with their layout, chips and price, in a phrase."""
    pools = format_number_of(servers["replicas"], "server")
    if servers.get("prefill_replicas"):
        pools = f"{servers['prefill_replicas']} to prefill and {pools} to decode"
    price = servers["price_per_hour"]
    return (
        f"{pools} of {servers['hardware']}, {servers['layout'].removesuffix(',remat=none')}, "
        f"{servers['weights_dtype']}: {format_number_of(servers['chips'], 'chip')}"
        + (f", {price:,.2f} an hour" if price is not None else "")
    )


def launch_lines(line: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a LaunchLine's document."""
    yield f"Start each with: {line['command']}"
    yield "  its model is the checkpoint's folder or its name on the hub"
    if line["file"]:
        yield f"  its settings: {'; '.join(line['file'])}"
    for need in line["needs"]:
        yield f"  it needs {need}"
    if line["defaults"]:
        yield f"  at their defaults: {', '.join(line['defaults'])}"


def boot_lines(boot: Mapping[str, Any] | None) -> Iterator[str]:
    """The lines of a Boot's document."""
    if boot is None:
        return
    parts = ", ".join(
        f"{name} {format_bytes(boot[key])}"
        for name, key in (
            ("weights", "weights"),
            ("the largest step", "activations"),
            ("caches", "caches"),
            ("graphs and libraries", "outside"),
        )
    )
    verdict = "It starts" if boot["boots"] else "It does not start"
    yield (
        f"{verdict}: {parts} of {format_bytes(boot['device'])} a chip; "
        f"caches of {boot['positions']:,} positions; about {format_seconds(boot['load_seconds'])} to load "
        f"and {format_seconds(boot['compile_seconds'])} to compile and capture graphs"
    )
