"""Names that a shell completes: models, chips, training programs and engines."""

from collections.abc import Callable, Iterable

_MOST = 60


def models(incomplete: str) -> list[str]:
    """The presets that begin with a text."""
    from meshwright.models.presets import PRESETS

    return _beginning(incomplete, PRESETS)


def chips(incomplete: str) -> list[str]:
    """The chips of the catalog that begin with a text, also after `2*`; topologies are not completed."""
    from meshwright.hardware.catalog import names

    slices, times, begun = incomplete.rpartition("*")
    return [f"{slices}{times}{name}" for name in _beginning(begun, names())]


def _launchers(incomplete: str) -> list[str]:
    from meshwright.programs.launcher import LAUNCHERS

    return _beginning(incomplete, LAUNCHERS.names)


def _engines(incomplete: str) -> list[str]:
    from meshwright.engines.serving_engine import ENGINES

    return _beginning(incomplete, ENGINES.names)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete.lower())][:_MOST]


# By the option's flag.
OF_OPTIONS: dict[str, Callable[[str], list[str]]] = {
    "--model": models,
    "--hardware": chips,
    "--for": _launchers,
    "--engine": _engines,
}
