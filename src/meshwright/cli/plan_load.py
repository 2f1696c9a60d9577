"""mw plan serve --rate: the cheapest servers of an engine for a load."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.api.serving import write_serve_plan
from meshwright.cli.console import emit, note, show, waiting
from meshwright.engines.serving_engine import ServingEngine
from meshwright.hardware.catalog import names
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.load.rated import RatedLoad, cheapest_servers
from meshwright.load.rated_verdict import asked_words, counted_words, servers_words
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.search import serving_machines
from meshwright.report.launching import boot_lines, launch_lines
from meshwright.report.serving_points import ranges_text
from meshwright.units import format_number_of

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
    verdict = document["verdict"]
    show(
        asked_words(document),
        f"Best: {verdict['best']}",
        *([f"Price: {verdict['price']}"] if verdict["price"] else []),
        f"Range: {ranges_text(document['best']['ranges'])}.",
        *(f"Cheaper, but {each['missed']}: {servers_words(each)}." for each in document["cheaper"]),
        *([f"Another chip: at least {counted_words(other)}."] if (other := document["other"]) else []),
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
