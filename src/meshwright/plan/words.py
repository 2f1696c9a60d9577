"""Texts as templates: all words of an explanation in one file, with its figures as arguments.

A template has a Jinja macro for each text. Lines that begin with % are statements, lines with ## comments. In
a text of several points, a line without indentation is a heading, a point begins with "- ", and the lines
after it are indented.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from meshwright.units import format_bytes, format_count, format_number_of, format_seconds

# Templates by their paths in this package.
ASSUMPTIONS = "assumptions.txt.jinja"
TRAINING = "explain/training.txt.jinja"
SERVING = "serve/serving.txt.jinja"


@dataclass(frozen=True)
class Section:
    """A heading and its points."""

    title: str
    paragraphs: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((self.title, *(f"- {paragraph}" for paragraph in self.paragraphs)))


def sentence(template: str, name: str, **figures: object) -> str:
    """A text of a template in one line."""
    return " ".join(getattr(_module(template), name)(**figures).split())


def sections(template: str, name: str, **figures: object) -> tuple[Section, ...]:
    """A text of a template by its headings, without headings that have no points."""
    groups: list[tuple[str, list[str]]] = []
    for line in getattr(_module(template), name)(**figures).splitlines():
        if line.startswith("- "):
            groups[-1][1].append(line[2:])
        elif line.startswith(" "):
            groups[-1][1][-1] += f" {line}"
        elif line:
            groups.append((line, []))
    return tuple(
        Section(title, tuple(" ".join(p.split()) for p in points)) for title, points in groups if points
    )


def percent(share: float, digits: int | None = None) -> str:
    """A share in percent, by default in about two digits: 4.3%, 12%."""
    return f"{share:.{int(share < 0.1) if digits is None else digits}%}"


def three_digits(value: float) -> str:
    """A count in three digits: 5.42, 768, 1,365, 3.48M."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else format_count(value)


@cache
def _module(template: str) -> object:
    # Imported here because a plan without an explanation need not wait for it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("meshwright.plan", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        line_statement_prefix="%",
        line_comment_prefix="##",
        autoescape=False,
    )
    filters: dict[str, Callable[..., str]] = {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "count": format_count,
        "number_of": format_number_of,
        "percent": percent,
        "rounded": three_digits,
        "commas": "{:,}".format,
        "digits": lambda value, number=3: f"{value:.{number}g}",
    }
    environment.filters |= filters
    return environment.get_template(template).module
