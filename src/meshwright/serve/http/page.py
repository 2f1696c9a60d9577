"""The chat page at `/`: one HTML file that loads nothing from elsewhere."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse

from meshwright.page_policy import content_security_policy


async def page(_: Request) -> HTMLResponse:
    """The page. It needs no key; its requests to the API do."""
    text = files("meshwright.serve.http").joinpath("chat.html").read_text(encoding="utf-8")
    return HTMLResponse(
        text, headers={"Content-Security-Policy": content_security_policy(text), "Cache-Control": "no-cache"}
    )
