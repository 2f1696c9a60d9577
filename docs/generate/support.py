"""For reference/support.md: which models run under which axes, in training and in inference."""

from collections.abc import Iterator

from meshwright.layout.examples import LAYOUTS, PHASES, phases_of
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.models.families import families
from meshwright.models.presets import presets_of
from meshwright.units import format_count


def layouts() -> str:
    """Which layouts run in which phase."""
    head = f"| layout | {' | '.join(PHASES.values())} |"
    rows = [
        f"| {_name(feature)} | {' | '.join(_cell(lacks) for lacks in phases_of(feature).values())} |"
        for feature in LAYOUTS
    ]
    return "\n".join([head, f"|---|{'---|' * len(PHASES)}", *rows])


def models() -> str:
    """The presets, family by family: all of them run."""
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {sizes} |" for names, sizes in _families()]
    return "\n".join(["| presets | parameters |", "|---|---|", *rows])


def read() -> str:
    """The families whose files are read, with their model types."""
    rows = [
        f"| {family.title} | {', '.join(f'`{name}`' for name in (*family.model_types, *family.wrappers))} |"
        for family in families()
    ]
    return "\n".join(["| family | `model_type` |", "|---|---|", *rows])


def _name(feature: str) -> str:
    axis, comma, rest = feature.partition(",")
    return feature if " " in axis else f"`{axis}`{comma}{rest}"


def _cell(lacks: str | None) -> str:
    return "planned only" if lacks else "runs"


def _families() -> Iterator[tuple[list[str], str]]:
    """The presets of each family, and their parameters, from the smallest to the largest."""
    for family in families():
        if configs := list(presets_of(family).values()):
            yield [config.name for config in configs], _sizes(configs)


def _sizes(configs: list[ModelConfig]) -> str:
    totals = sorted(count_params(config).total for config in configs)
    ends = dict.fromkeys([format_count(totals[0]), format_count(totals[-1])])
    return " to ".join(ends)
