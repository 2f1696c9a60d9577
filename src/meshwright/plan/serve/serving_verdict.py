"""The answer to a request for a serving plan, in one sentence each."""

from meshwright.layout.precision import published_precision
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.point import Point
from meshwright.plan.serve.requests import Requests, Targets
from meshwright.plan.serve.search import ServePlan
from meshwright.plan.verdict import no_price, price_words
from meshwright.units import format_bytes, format_number_of, format_seconds


def serving_verdict(
    config: ModelConfig, requests: Requests, targets: Targets, searched: ServePlan
) -> dict[str, str | None]:
    """The sentences of a serving plan; None for an unknown figure."""
    best = searched.best
    limits = [
        f"{name} of at most {format_seconds(limit)}"
        for name, limit in (("first token", targets.ttft), ("time per token", targets.tpot))
        if limit < float("inf")
    ]
    precisions = [point.layout.precision for point in (best, *searched.frontier)]
    several = len({(each.weights_dtype, each.cache_dtype) for each in precisions}) > 1
    return {
        "asked": (
            f"{config.name}, prompts of {requests.prompt_tokens:,} tokens, answers of "
            f"{requests.output_tokens:,}{', with a ' if limits else ''}{' and a '.join(limits)}."
        ),
        "best": f"{_words(best, several)}, {format_bytes(best.memory.total)} a chip.",
        "price": _price(best),
        "next": _next(searched, targets, several),
    }


def _published(point: Point) -> str:
    """Words for weights in the narrow type of the model's published files; "" for other weights."""
    words = published_precision(point.config, by_engine=True)
    if any(getattr(point.layout.precision, name) != dtype for name, dtype in words.items()) or not words:
        return ""
    part = "experts" if "experts_dtype" in words else "weights"
    return f", {part} in {point.config.stored_dtype} as its files have them"


def _words(point: Point, several: bool) -> str:
    """A point in a phrase. several: whether points differ in number types."""
    layout, precision = str(point.layout).removesuffix(",remat=none"), point.layout.precision
    if several:
        layout += f", weights {precision.weights_dtype}, cache {precision.cache_dtype}"
    else:
        layout += _published(point)
    return (
        f"{point.hardware.spec}, {layout}, {format_number_of(point.batch, 'sequence')} at once: "
        f"{point.tokens_per_second:,.0f} tokens/s, {format_seconds(point.tpot_seconds)} per token, first "
        f"token after {format_seconds(point.ttft_seconds)}"
    )


def _price(point: Point) -> str | None:
    words, each = price_words(point.hardware.chip), point.price_per_million_tokens
    if words is None or each is None:
        return no_price(point.hardware.chip)
    chips = format_number_of(point.hardware.num_chips, "chip")
    return f"{chips} at {words}: {point.price_per_hour:,.2f} an hour, {each:,.3g} per million tokens."


def _next(searched: ServePlan, targets: Targets, several: bool) -> str | None:
    best = searched.best
    others = [
        point
        for point in searched.frontier
        if (point.hardware.spec, point.layout) != (best.hardware.spec, best.layout)
        and point.ttft_seconds <= targets.ttft
        and point.tpot_seconds <= targets.tpot
    ]
    if not others:
        return None
    other = min(
        others, key=lambda point: (point.price_per_million_tokens or 0.0, -point.tokens_per_second_per_chip)
    )
    return f"{_words(other, several)}."
