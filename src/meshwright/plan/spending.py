"""Limits on the money of a training run: the machine that an hour's price pays, and plans over a limit."""

from dataclasses import dataclass, replace
from math import ceil

from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware.chip import SharedMemory
from meshwright.hardware.prices import ChipPrices, parse_money, per_hour, price_of_an_hour, without_price
from meshwright.hardware.topology import Hardware
from meshwright.options import option
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.batches import budget
from meshwright.plan.smallest import sizes


def parse_whole_budget(text: str | float) -> float:
    """An amount of money for a whole run. Raises MeshwrightError for a price of an hour."""
    if hourly := price_of_an_hour(str(text)):
        raise MeshwrightError(f"{text!r} is a price of an hour; write --max-price-per-hour {hourly}")
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

    def check(self, num_tokens: int | None) -> None:
        """Raise PlanError for a budget without the number of tokens of the whole run."""
        if self.budget is not None and num_tokens is None:
            raise PlanError("--budget needs the length of the run; add --tokens 1T")

    def check_price(self, machine: Hardware) -> None:
        """Raise PlanError for a limit on money if the chip has no price."""
        limits = {"--max-price-per-hour": self.max_price_per_hour, "--budget": self.budget}
        flag = next((flag for flag, limit in limits.items() if limit is not None), "")
        if flag and machine.chip.price_per_chip_hour is None:
            raise PlanError(without_price(machine.chip.name, flag))

    def largest_machine(self, spec: str, prices: ChipPrices) -> str:
        """The largest machine of a chip that the price of an hour pays; `spec` if that names a machine.

        Raises PlanError if it pays no machine, and for a chip without a price.
        """
        limit = self.max_price_per_hour
        if limit is None or ":" in spec:
            return spec
        machines = prices.of(sizes(spec))
        paid = [each for each in machines if _hourly(each) <= limit]
        if not paid:
            fits = f"--max-price-per-hour {ceil(100 * _hourly(machines[0])) / 100:.2f}"
            raise PlanError(f"--max-price-per-hour {limit:g}: {_costs(machines[0])}; fits: {fits}")
        return paid[-1].spec

    def faults(self, best: Candidate, num_tokens: int | None) -> list[str]:
        """The limits that a plan exceeds, each with what the money pays; [] if it keeps them.

        num_tokens: of the whole run. Raises PlanError for a budget without it and for a chip without a price.
        """
        self.check(num_tokens)
        faults = list[str]()
        if self.max_price_per_hour is not None and _hourly(best.hardware) > self.max_price_per_hour:
            faults.append(_over_price(best.hardware, self.max_price_per_hour))
        if self.budget is not None and num_tokens is not None:
            faults += _over_budget(best, num_tokens, self.budget)
        return faults


def _over_price(machine: Hardware, limit: float) -> str:
    smaller = [] if isinstance(machine.chip.network, SharedMemory) else sizes(machine.spec)
    paid = [each for each in smaller if _hourly(replace(each, chip=machine.chip)) <= limit]
    fits = f"; fits: --hardware {paid[-1].spec}" if paid else ""
    return f"{_costs(machine)}, more than --max-price-per-hour {limit:g}{fits}"


def _over_budget(best: Candidate, num_tokens: int, limit: float) -> list[str]:
    run = budget(best, num_tokens)
    if run.price is None:
        raise PlanError(without_price(best.hardware.chip.name, "--budget"))
    if run.price <= limit:
        return []
    paid = int(limit / run.price * num_tokens)
    fits = f"; it pays {_rounded_down(paid)} tokens" if paid else ""
    return [f"the run costs {run.price:,.0f} {run.currency}, more than --budget {limit:,.0f}{fits}"]


def _costs(machine: Hardware) -> str:
    return f"{machine.spec} costs {_hourly(machine):,.2f} {machine.chip.currency} an hour"


def _hourly(machine: Hardware) -> float:
    """The price of an hour of a machine. Raises PlanError for a chip without a price."""
    hourly = per_hour(machine.chip, machine.num_chips)
    if hourly is None:
        raise PlanError(without_price(machine.chip.name, "--max-price-per-hour"))
    return hourly


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
