"""The templates of pages, as they are filled in."""

from jinja2 import Environment, PackageLoader, StrictUndefined


def environment() -> Environment:
    """A new one, to which a page adds its filters: text is escaped, an unknown name is an error."""
    return Environment(
        loader=PackageLoader("meshwright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
