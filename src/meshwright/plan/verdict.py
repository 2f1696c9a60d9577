"""The answer to a request for a plan in one sentence each: asked, best, price, range, next, evidence."""

from collections.abc import Mapping

from meshwright.hardware import catalog
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.assumptions import spread_of
from meshwright.plan.candidate import Candidate
from meshwright.plan.evidence import evidence_of
from meshwright.plan.rank import TIE
from meshwright.plan.train import Search
from meshwright.programs.program import DEFAULT
from meshwright.units import format_bytes, format_count, format_number_of, format_seconds

# Largest excess of a compiled step's memory over its plan, for models without and with experts, among the
# planner's first choices in benchmarks/first_choices.py.
DENSE_OVER, EXPERTS_OVER = 0.03, 0.08


def asked_of(search: Search, hardware: Hardware) -> dict[str, str]:
    """The conditions, the software and the launcher that a search was asked for, if any."""
    launcher = search.launcher.name if search.launcher else None
    software = hardware.software.name
    if software == DEFAULT or launcher:
        software = None
    asked = {"given": search.given, "software": software, "for": launcher}
    return {key: value for key, value in asked.items() if value}


def verdict_of(
    config: ModelConfig, hardware: Hardware, batch_tokens: int, search: Search
) -> dict[str, str | None]:
    """The sentences of a plan for training; None for an unknown figure. No run reaches a roofline.

    batch_tokens: the requested tokens of a step.
    """
    best = search.best
    is_roofline = hardware.chip.step.is_roofline
    return {
        "asked": _asked(config, hardware, batch_tokens, search),
        "best": _best(best, search),
        "memory": _memory(search),
        "price": _price(best),
        "range": None if is_roofline else _range(best),
        "next": _next(search),
        "evidence": None if is_roofline else f"{evidence_of(config, best, search.workload.seq_len)}.",
    }


def _asked(config: ModelConfig, hardware: Hardware, batch_tokens: int, search: Search) -> str:
    words = {"given": "if {}", "software": "as {} runs it", "for": "with {}"}
    conditions = [words[key].format(value) for key, value in asked_of(search, hardware).items()]
    return (
        f"{config.name} ({format_count(count_params(config).total)} parameters) on {hardware.spec}, "
        f"{batch_tokens:,} tokens a step in sequences of {search.workload.seq_len:,}"
        + "".join(f", {condition}" for condition in conditions)
        + "."
    )


def _best(best: Candidate, search: Search) -> str:
    usable = best.hardware.chip.program_bytes
    figures = (
        f"{format_seconds(best.step_seconds)} a step, {best.mfu:.1%} MFU, "
        f"{format_bytes(best.needed_bytes)} of {format_bytes(usable)} a chip"
    )
    if not best.fits:
        return f"Nothing fits; the nearest is {best.layout}: {figures}."
    if search.considered == 1:
        return f"{best.layout}: {figures}."
    fastest = min(each.step_seconds for each in search.candidates if each.fits)
    is_fastest = format_seconds(fastest) == format_seconds(best.step_seconds)
    which = "the best" if is_fastest else f"the simplest within {TIE:.0%} of the fastest"
    among = f", {which} of {search.considered:,}"
    return f"{best.layout}: {figures}{among}."


def _memory(search: Search) -> str | None:
    """A warning if the compiled step may need more than a chip's memory; None if there is room.

    None, too, for a plan that does not fit, for virtual devices, which share the host's memory, and for
    other software, whose steps were not compiled.
    """
    best, chip = search.best, search.best.hardware.chip
    share = best.needed_bytes / (chip.program_bytes + chip.spared_bytes)
    over = EXPERTS_OVER if search.config.moe else DENSE_OVER
    if search.launcher or chip.platform.virtual or not best.fits or share * (1 + over) <= 1:
        return None
    return (
        f"{share:.1%} of a chip is planned, and compiled steps took up to {over:.0%} more; "
        f"--headroom {over:.0%} leaves room, mw audit compiles the step."
    )


def price_words(chip: Chip) -> str | None:
    """The price of a chip-hour with its source and date; None if it is not known."""
    if chip.price_per_chip_hour is None:
        return None
    source = chip.sources.get("price_per_chip_hour", "").rpartition(": ")[2]
    return f"{chip.price_per_chip_hour:,.2f} {chip.currency} a chip-hour" + (f" ({source})" if source else "")


def no_price(chip: Chip) -> str | None:
    """The sentence for a catalog's chip without a price; None for a host and for a user's own chip."""
    if chip.platform.virtual or chip.name not in catalog.names():
        return None
    reason = f": {chip.no_price}" if chip.no_price else ""
    return f"none is known for {chip.name}{reason}; --price 2.5 sets the price of a chip-hour."


def _price(best: Candidate) -> str | None:
    machine, hourly, million = best.hardware, best.price_per_hour, best.price_per_million_tokens
    if hourly is None or million is None:
        return no_price(machine.chip)
    return (
        f"{format_number_of(machine.num_chips, 'chip')} at {price_words(machine.chip)}: {hourly:,.2f} an "
        f"hour, {million:,.3g} per million tokens."
    )


def _range(best: Candidate) -> str | None:
    known, memory = spread_of(best), spread_of(best, "memory")
    if known is None:
        return None
    least, most = map(format_seconds, known.interval(best.step_seconds))
    text = f"{least} to {most} a step for 8 of 10 new sources, by {known.num_sources} published ones"
    if memory is not None:
        text += "; memory {} to {}".format(*map(format_bytes, memory.interval(best.memory.total)))
    return f"{text}{'; ' + known.unknown if known.unknown else ''}."


def _next(search: Search) -> str | None:
    if len(search.candidates) < 2:
        return None
    best, other = search.candidates[:2]
    ratio = other.step_seconds / best.step_seconds - 1
    longer = "as fast" if abs(ratio) <= TIE else f"{abs(ratio):.0%} {'longer' if ratio > 0 else 'shorter'}"
    fits = "" if other.fits else ", does not fit"
    return (
        f"{other.layout}: {format_seconds(other.step_seconds)} ({longer}), "
        f"{format_bytes(other.needed_bytes)} a chip{fits}."
    )


NAMES: Mapping[str, str] = {
    "asked": "Asked",
    "best": "Best",
    "memory": "Memory",
    "price": "Price",
    "range": "Range",
    "next": "Next",
    "evidence": "Evidence",
}


def verdict_lines(verdict: Mapping[str, str | None]) -> list[str]:
    """The sentences after their names, as terminals and pages show them."""
    return [f"{name}: {verdict[key]}" for key, name in NAMES.items() if verdict.get(key)]
