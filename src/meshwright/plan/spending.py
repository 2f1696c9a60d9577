"""Limits on the money of a training run: the machine that an hour's price pays, and plans over a limit."""

import re
from dataclasses import dataclass, replace

from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware.prices import ChipPrices, per_hour
from meshwright.hardware.topology import Hardware
from meshwright.options import option
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.batches import budget
from meshwright.plan.smallest import sizes

# An amount of money as people write it: 500, $50k, 1.5M USD, 500/hour.
_MONEY = re.compile(
    r"\s*[$€£]?\s*(\d[\d,_]*\.?\d*)\s*([kmb])?\s*(?:[a-z]{3}|dollars|euros?|pounds|[$€£])?\s*"
    r"(?P<hourly>(?:/|per\s)\s*(?:h|hr|hour))?\s*",
    re.I,
)
_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9}


def parse_money(text: str | float) -> float:
    """An amount of money without its currency: `$50k`, `50_000` and `50k USD` are the same.

    >>> parse_money("$50k"), parse_money("1.5M USD"), parse_money("500/hour")
    (50000.0, 1500000.0, 500.0)
    """
    match = _MONEY.fullmatch(str(text))
    value = float(re.sub("[,_]", "", match[1])) * _FACTORS.get((match[2] or "").lower(), 1) if match else 0.0
    if not 0 < value < float("inf"):
        raise MeshwrightError(f"{text!r} is not an amount of money; write 500, 50k or 1.5M")
    return value


def parse_whole_budget(text: str | float) -> float:
    """An amount of money for a whole run. Raises MeshwrightError for a price of an hour."""
    if (match := _MONEY.fullmatch(str(text))) and match["hourly"]:
        raise MeshwrightError(f"{text!r} is a price of an hour; write --max-price-per-hour {match[1]}")
    return parse_money(text)


@dataclass(frozen=True)
class SpendingLimits:
    """The most money that a plan may cost, in the currency of the chip's price."""

    max_price_per_hour: float | None = option(
        None,
        metavar="PRICE",
        parser=parse_money,
        help="Highest price per hour of all chips; for --hardware h100 it finds the most chips.",
    )
    budget: float | None = option(
        None, metavar="MONEY", parser=parse_whole_budget, help="With --tokens: highest price of the run: 50k."
    )

    def largest_machine(self, spec: str, prices: ChipPrices) -> str:
        """The largest machine of a chip that the price of an hour pays; `spec` if that names a machine.

        Raises PlanError if it pays no machine.
        """
        if self.max_price_per_hour is None or ":" in spec:
            return spec
        machines = prices.of(sizes(spec))
        paid = [each for each in machines if self._pays(each)]
        if not paid:
            least = per_hour(machines[0].chip, machines[0].num_chips)
            raise PlanError(
                f"--max-price-per-hour {self.max_price_per_hour:g}: {machines[0].spec} costs {least:,.2f} "
                f"{machines[0].chip.currency} an hour; fits: --max-price-per-hour {least:.2f}"
            )
        return max(paid, key=lambda machine: machine.num_chips).spec

    def faults(self, best: Candidate, num_tokens: int | None) -> list[str]:
        """The limits that a plan exceeds, each with what the money pays; [] if it keeps them.

        num_tokens: of the whole run. Raises PlanError for a budget without it.
        """
        machine, found = best.hardware, list[str]()
        if self.max_price_per_hour is not None and not self._pays(machine):
            hourly = per_hour(machine.chip, machine.num_chips)
            smaller = (replace(each, chip=machine.chip) for each in sizes(machine.spec))
            paid = [each for each in smaller if self._pays(each)]
            fits = f"; fits: --hardware {paid[-1].spec}" if paid else ""
            found.append(
                f"{machine.spec} costs {hourly:,.2f} {machine.chip.currency} an hour, more than "
                f"--max-price-per-hour {self.max_price_per_hour:g}{fits}"
            )
        if self.budget is not None:
            if num_tokens is None:
                raise PlanError("--budget needs the length of the run; add --tokens 1T")
            found += self._over_budget(best, num_tokens)
        return found

    def _over_budget(self, best: Candidate, num_tokens: int) -> list[str]:
        run, limit = budget(best, num_tokens), self.budget
        if run.price is None:
            raise PlanError(_without_price(best.hardware, "--budget"))
        assert limit is not None, "the caller checks it"
        if run.price <= limit:
            return []
        paid = int(limit / run.price * num_tokens)
        fits = f"; it pays {_rounded_down(paid)} tokens" if paid else ""
        return [f"the run costs {run.price:,.0f} {run.currency}, more than --budget {limit:,.0f}{fits}"]

    def _pays(self, machine: Hardware) -> bool:
        hourly = per_hour(machine.chip, machine.num_chips)
        if hourly is None:
            raise PlanError(_without_price(machine, "--max-price-per-hour"))
        assert self.max_price_per_hour is not None, "the callers check it"
        return hourly <= self.max_price_per_hour


def _without_price(machine: Hardware, flag: str) -> str:
    return f"{machine.chip.name} has no price, which {flag} needs; add --price 2.5"


def _rounded_down(tokens: int) -> str:
    """A number of tokens as --tokens takes it, rounded down to three digits.

    >>> _rounded_down(806_912_345_678), _rounded_down(1_234_567_890_123)
    ('806B', '1230B')
    """
    unit = 10 ** max(0, len(str(tokens)) - 3)
    rounded = tokens // unit * unit
    suffixes = {"B": 10**9, "M": 10**6, "k": 1000}
    suffix = next((suffix for suffix, size in suffixes.items() if rounded % size == 0), "")
    return f"{rounded // suffixes.get(suffix, 1)}{suffix}"
