"""The answer to a request for the servers of a load, in one sentence each.

The functions take documents of `mw plan serve --rate`, as docs/reference/json.md has them.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.hardware.chip import Chip
from meshwright.plan.verdict import no_price, price_words
from meshwright.units import format_number_of, format_seconds


def rated_verdict(document: Mapping[str, Any], chip: Chip) -> dict[str, str | None]:
    """The sentences of a plan for a load; None for an unknown figure.

    document: all keys but `verdict`. chip: of the best servers.
    """
    best, cheaper, other = document["best"], document["cheaper"], document["other"]
    following = None
    if cheaper:
        following = f"{servers_words(cheaper[0])}: cheaper, but {cheaper[0]['missed']}."
    elif other:
        following = f"at least {counted_words(other)}."
    return {
        "asked": f"{asked_words(document)}.",
        "best": f"{servers_words(best)}.",
        "price": _price(document, chip),
        "next": following,
    }


def asked_words(document: Mapping[str, Any]) -> str:
    """The model, the engine, the rate and the targets."""
    targets = [
        f"95% of {name} in {format_seconds(document[key])}"
        for name, key in (("first tokens", "ttft_p95_seconds"), ("times per token", "tpot_p95_seconds"))
        if document[key] is not None
    ]
    rate = f"{document['model']['name']} on {document['engine']}, {document['rate_per_second']:g} requests/s"
    return f"{rate}; {', '.join(targets)}" if targets else rate


def servers_words(servers: Mapping[str, Any]) -> str:
    """Servers with their layout, chips and price, and their simulated times."""
    return (
        f"{counted_words(servers)}; p95 of the first token {format_seconds(servers['ttft_p95_seconds'])}, "
        f"per token {format_seconds(servers['tpot_p95_seconds'])}"
    )


def counted_words(servers: Mapping[str, Any]) -> str:
    """Servers with their layout, chips and price, in a phrase."""
    price = servers["price_per_hour"]
    return (
        f"{pools_words(servers)} of {servers['hardware']}, {servers['layout'].removesuffix(',remat=none')}, "
        f"{servers['weights_dtype']}: {format_number_of(servers['chips'], 'chip')}"
        + (f", {price:,.2f} an hour" if price is not None else "")
    )


def pools_words(servers: Mapping[str, Any]) -> str:
    """The number of servers, of each pool if prefill has its own."""
    pools = format_number_of(servers["replicas"], "server")
    if servers.get("prefill_replicas"):
        return f"{servers['prefill_replicas']} to prefill and {pools} to decode"
    return pools


def _price(document: Mapping[str, Any], chip: Chip) -> str | None:
    hourly = document["best"]["price_per_hour"]
    if hourly is None:
        return no_price(chip)
    return (
        f"{price_words(chip)}: {hourly:,.2f} an hour, {document['price_per_day']:,.0f} a day, "
        f"{document['price_per_million_tokens']:.3g} per million generated tokens."
    )
