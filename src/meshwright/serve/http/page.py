"""The chat page at `/`: one HTML file that loads nothing from elsewhere."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse

# The page holds its own script and styles and talks only to this server.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:"
)


async def page(_: Request) -> HTMLResponse:
    """The page. It needs no key; its requests to the API do."""
    text = files("meshwright.serve.http").joinpath("chat.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})
