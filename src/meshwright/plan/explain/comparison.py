"""One priced layout beside the chosen one, in words: by how much it does not fit or is slower, and why."""

from dataclasses import asdict, dataclass

from meshwright.hardware.topology import Hardware
from meshwright.plan.candidate import Candidate
from meshwright.units import format_bytes, format_seconds

# What waits on each resource, as people say it.
RESOURCES = {
    "compute": "computing",
    "hbm": "memory traffic",
    "ici": "links between chips",
    "dcn": "links between slices",
    "host_link": "the link to the host's memory",
    "bubble": "idle pipeline stages",
    "launch": "launches",
}
_OF_KIND = {
    "gpu": RESOURCES | {"ici": "NVLink", "dcn": "the network"},
    "cpu": RESOURCES | {"ici": "copies between devices"},
}
# Steps that differ by less take as long.
_SAME = 0.0005


@dataclass(frozen=True)
class Rejected:
    """A layout that was not chosen.

    name: what people call it. reason: "memory", "slower", "divides" or "batch"; beside a layout that was
    asked for also "faster", and "fits" where that one does not. text: what is said of it, to follow its
    name. numbers: what that rests on. nearest: a layout or an option that would work, None where this does.
    """

    name: str
    layout: str
    reason: str
    text: str
    numbers: dict[str, float | str]
    nearest: str | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def resource_name(bound: str, hardware: Hardware) -> str:
    """`bound` in words that suit the machine."""
    return _OF_KIND.get(hardware.chip.kind, RESOURCES).get(bound, bound)


def rejection(name: str, candidate: Candidate, best: Candidate) -> Rejected:
    """`candidate` beside the chosen one: by how much it does not fit, or is slower, and through what."""
    if not candidate.fits:
        return too_large_layout(name, candidate)
    extra = bound_seconds(candidate)
    for bound, seconds in bound_seconds(best).items():
        extra[bound] = extra.get(bound, 0.0) - seconds
    slower = candidate.step_seconds / best.step_seconds - 1
    bound = (max if slower >= 0 else min)(extra, key=extra.__getitem__)
    numbers: dict[str, float | str] = {
        "step_seconds": candidate.step_seconds,
        "slower": slower,
        "bound": bound,
        "extra_seconds": extra[bound],
        "bytes_per_chip": candidate.memory.total,
    }
    text = f"takes {format_seconds(candidate.step_seconds)}"
    if not best.fits:
        return Rejected(name, str(candidate.layout), "fits", f"{text} and fits", numbers)
    if abs(slower) < _SAME:
        return Rejected(name, str(candidate.layout), "slower", f"{text}, equally long", numbers)
    text += f", {ratio_words(slower)}: {_difference(extra, bound, candidate, best)}"
    return Rejected(name, str(candidate.layout), "slower" if slower > 0 else "faster", text, numbers)


def ratio_words(slower: float) -> str:
    """`12% longer`, `3.2% less`, `2.1 times as long`; slower: seconds over the other's, less 1."""
    if slower >= 1:
        return f"{1 + slower:.2g} times as long"
    return f"{percent(abs(slower))} {'longer' if slower > 0 else 'less'}"


def _difference(extra: dict[str, float], bound: str, candidate: Candidate, best: Candidate) -> str:
    """What one resource takes more or less, and if that is a good part of it, what another gives back."""
    culprit = _culprit(candidate, best, bound) if extra[bound] > 0 else ""
    text = f"{_more_or_less(extra, bound, candidate)}{culprit}"
    other = (min if extra[bound] > 0 else max)(extra, key=extra.__getitem__)
    opposite = extra[other] * extra[bound] < 0 and abs(extra[other]) > 0.1 * abs(extra[bound])
    return f"{text}, {_more_or_less(extra, other, candidate)}" if opposite else text


def _more_or_less(extra: dict[str, float], bound: str, candidate: Candidate) -> str:
    more = "more" if extra[bound] > 0 else "less"
    return f"{format_seconds(abs(extra[bound]))} {more} for {resource_name(bound, candidate.hardware)}"


def percent(share: float) -> str:
    """`share` in two digits or so: 4.3%, 12%."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def bound_seconds(candidate: Candidate) -> dict[str, float]:
    """Seconds of a step by what they wait for."""
    totals: dict[str, float] = {}
    for term in candidate.cost.terms:
        totals[term.bound] = totals.get(term.bound, 0.0) + term.seconds
    return totals


def _culprit(candidate: Candidate, best: Candidate, bound: str) -> str:
    """The term of a link or of memory that is longest beside the best one's, in brackets.

    That compute computes is clear.
    """
    if bound in ("compute", "bubble", "launch"):
        return ""
    before = {term.name: term.seconds for term in best.cost.terms if term.bound == bound}
    extra = {t.name: t.seconds - before.get(t.name, 0.0) for t in candidate.cost.terms if t.bound == bound}
    return f" ({max(extra, key=extra.__getitem__)})" if extra else ""


def too_large_layout(name: str, candidate: Candidate) -> Rejected:
    """`candidate`, which does not fit: by how much, and what takes most."""
    lack, (largest, num_bytes) = candidate.shortage, candidate.memory.largest
    text = (
        f"does not fit: it needs {format_bytes(lack.needed_bytes)} {lack.where}, "
        f"{format_bytes(lack.over_bytes)} more than the {format_bytes(lack.usable_bytes)} available; "
        f"{format_bytes(num_bytes)} are {largest}"
    )
    numbers: dict[str, float | str] = {
        "bytes_per_chip": candidate.memory.total,
        "over_bytes": lack.over_bytes,
        "usable_bytes": lack.usable_bytes,
        "largest": largest,
    }
    return Rejected(name, str(candidate.layout), "memory", text, numbers)
