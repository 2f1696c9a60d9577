"""Addresses of servers as people type them."""

import re

from meshwright.errors import DeviceError


def base_of(url: str, option: str) -> str:
    """The base of a server's address, without /v1. Without a scheme, HOST:PORT is http.

    option: names the address in DeviceError, which is raised for other texts.

    >>> base_of("localhost:8000", "--url"), base_of("https://host/v1/", "--url")
    ('http://localhost:8000', 'https://host')
    """
    if re.match(r"[\w.-]+:\d+(/|$)", url):
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise DeviceError(f"{option} {url}: write http://HOST:PORT or https://HOST")
    return url.rstrip("/").removesuffix("/v1")
