"""The launch line of an engine and the memory of its start, in lines."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.units import format_bytes, format_seconds


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
