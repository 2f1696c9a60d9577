"""The templates of pages."""

from collections.abc import Callable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meshwright import __version__
from meshwright.page_policy import hash_source
from meshwright.report import palette
from meshwright.units import format_bytes, format_number_of, format_seconds


def render(template: str, **context: object) -> str:
    """The text of a template. Text is escaped, and an unknown name is an error."""
    return _environment().get_template(template).render(**context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("meshwright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., object]] = {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "number_of": format_number_of,
        "code_spans": _code_spans,
        "breakable": _breakable,
        "hash_source": _hash_source,
    }
    environment.filters |= filters
    environment.globals |= {"palette": palette, "version": __version__}
    return environment


def _hash_source(text: str) -> Markup:
    """The source of a Content-Security-Policy that permits the script or style of this text."""
    return Markup(hash_source(text))


def _code_spans(text: str) -> Markup:
    """Text with `this` as code."""
    pieces = [Markup("<code>{}</code>").format(p) if n % 2 else p for n, p in enumerate(text.split("`"))]
    return Markup().join(pieces)


def _breakable(layout: str) -> Markup:
    """A layout that may break after its commas."""
    return Markup(",<wbr>").join(layout.split(","))
