"""Prices of a chip-hour: list prices from the catalog, or the user's own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.errors import HardwareError, MeshwrightError
from meshwright.hardware import catalog
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware
from meshwright.options import option
from meshwright.units import decimal_comma

# Signs and names of currencies, as people write them in a price.
_CURRENCIES = {
    "$": "USD",
    "dollars": "USD",
    "€": "EUR",
    "euro": "EUR",
    "euros": "EUR",
    "£": "GBP",
    "pounds": "GBP",
}
# The end of a price of an hour: /h, per GPU-hour, an hour. The group `chip` is the chip that it names.
AN_HOUR = (
    r"(?:/|\b(?:per|an|a)\b)\s?(?:(?P<chip>gpu|chip|card|tpu|device)[-\s/]?)?(?:an?\s)?(?:hours?|hr|h)\b"
)
# A price of a chip-hour as people write it: 2.5, $2.50/h, 2.5 USD per GPU-hour.
_PRICE = re.compile(
    r"\s*([$€£])?\s*(\d+\.?\d*|\.\d+)\s*([a-z]{3}|dollars|euros?|pounds|[$€£])?\s*"
    rf"(?:{AN_HOUR})?\s*",
    re.I,
)
# An amount of money as people write it: 500, $50k, 1.5M USD, 500/hour. Other currencies than these have three
# capital letters, since three small ones may be a number (50 mil).
_MONEY = re.compile(
    r"\s*[$€£]?\s*((?:\d{1,3}(?:,\d{3})+|\d[\d_]*)\.?\d*)\s*(k|m|b|thousand|million|billion)?\s*"
    rf"(?:(?-i:[A-Z]{{3}})|usd|eur|gbp|dollars|euros?|pounds|[$€£])?\s*(?P<hourly>{AN_HOUR})?\s*",
    re.I,
)
_FACTORS = {"": 1.0, "k": 1e3, "t": 1e3, "m": 1e6, "b": 1e9}


def per_hour(chip: Chip, num_chips: int) -> float | None:
    """The price of an hour of `num_chips` chips; None if the price of one is unknown."""
    return None if chip.price_per_chip_hour is None else chip.price_per_chip_hour * num_chips


def per_million_tokens(hourly: float | None, tokens_per_second: float) -> float | None:
    """The price of a million tokens at a price of an hour; None if that is unknown or there are no tokens.

    >>> per_million_tokens(36.0, 1000.0)
    10.0
    """
    return 1e6 * hourly / (3600 * tokens_per_second) if hourly is not None and tokens_per_second else None


def parse_money(text: str | float) -> float:
    """An amount of money without its currency. Raises MeshwrightError for other text.

    >>> parse_money("$50k"), parse_money("1.5 million USD"), parse_money("500/hour"), parse_money("50_000")
    (50000.0, 1500000.0, 500.0, 50000.0)
    """
    match = _MONEY.fullmatch(str(text))
    factor = _FACTORS[(match[2] or "")[:1].lower()] if match else 0.0
    value = float(re.sub("[,_]", "", match[1])) * factor if match else 0.0
    if not 0 < value < float("inf"):
        example = decimal_comma(str(text)) or "500, 50k or 1.5M"
        raise MeshwrightError(f"{text!r} is not an amount of money; write {example}")
    return value


def price_of_an_hour(text: str) -> str:
    """The amount in a price of an hour, as --max-price-per-hour takes it; empty for other text.

    >>> price_of_an_hour("$50k per hour"), price_of_an_hour("50k")
    ('50k', '')
    """
    match = _MONEY.fullmatch(text)
    return f"{match[1]}{match[2] or ''}" if match and match["hourly"] else ""


def without_price(chip: str, flag: str) -> str:
    """The message about an option that needs the price of a chip, which the catalog lacks."""
    return f"{chip} has no price, which {flag} needs; add --price {chip}=2.5, the price of a chip-hour"


@dataclass(frozen=True)
class ChipPrices:
    """The user's prices of a chip-hour and their currency."""

    price: str | None = option(
        None, help="Price of a chip-hour: 2.5, or v5p=4.2,h100=2.5.", unset="the catalog's"
    )
    currency: str | None = option(None, help="Currency of --price.", unset="USD")

    def of(self, machines: Sequence[Hardware]) -> list[Hardware]:
        """The machines with these prices.

        Raises HardwareError for a price of another chip, and if no machine has a price in the currency.
        """
        chips = [machine.chip.name for machine in machines]
        known = parse_prices(self.price or "", chips)
        currency = self._currency()
        if others := [chip for chip in known if chip not in chips]:
            fits = ", ".join(dict.fromkeys(chips))
            raise HardwareError(f"--price {others[0]}: no machine here has this chip; fits: {fits}")
        priced_machines = [priced(machine, known, currency) for machine in machines]
        if currency and all(each.chip.price_per_chip_hour is None for each in priced_machines):
            raise HardwareError(
                f"--currency {currency}: no price is known in it; add --price {chips[0]}=X, "
                "of an hour of a chip"
            )
        return priced_machines

    def _currency(self) -> str | None:
        """The currency of --currency, otherwise the one in --price; None if neither names any.

        Raises HardwareError if they name several.
        """
        named = [_CURRENCIES.get(self.currency.lower(), self.currency.upper())] if self.currency else []
        if named and not re.fullmatch(r"[A-Z]{3}", named[0]):
            raise HardwareError(f"--currency {self.currency}: write three letters, such as USD or EUR")
        for item in (self.price or "").split(","):
            if match := _PRICE.fullmatch(item.rpartition("=")[2]):
                word = match[1] or match[3] or ""
                named += [_CURRENCIES.get(word.lower(), word.upper())] if word else []
        if len({name.upper() for name in named}) > 1:
            both = " and ".join(dict.fromkeys(named))
            raise HardwareError(f"--price {self.price!r} is in {both}; write the price in one currency")
        return named[0] if named else None


CATALOG_PRICES = ChipPrices(None, None)


def parse_prices(text: str, chips: Sequence[str] = ()) -> dict[str, float]:
    """The prices written `v5p=4.2,h100=2.5`, by the catalog's name of the chip; a single `2.5` is of `chips`.

    Raises HardwareError for an unknown chip and for text that is not a price.

    >>> parse_prices("v5p=4.2,h100=2.5"), parse_prices("2.5", ["h100"])
    ({'v5p': 4.2, 'h100': 2.5}, {'h100': 2.5})
    >>> parse_prices("$2.50/h", ["h100"]), parse_prices("h100:2.5")
    ({'h100': 2.5}, {'h100': 2.5})
    """
    prices: dict[str, float] = {}
    if chips and (match := _PRICE.fullmatch(text)):
        text = ",".join(f"{chip}={match[2]}" for chip in dict.fromkeys(chips))
    if decimal := decimal_comma(text):
        raise HardwareError(f"--price {text.strip()!r} has a comma; write {decimal}")
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, price = item.replace(":", "=", 1).partition("=")
        match = _PRICE.fullmatch(price)
        value = float(match[2]) if match else 0.0
        if not equals or not 0 < value < float("inf"):
            shell = " (a shell takes $2 for a variable; leave out the sign)" if re.match("[./]", item) else ""
            raise HardwareError(
                f"--price {item!r} is not a price of a chip-hour{shell}; write 2.5, or v5p=4.2,h100=2.5"
            )
        prices[name if name in chips else catalog.chip(name).name] = value
    return prices


def priced(machine: Hardware, prices: Mapping[str, float], currency: str | None = None) -> Hardware:
    """The machine with the price of its chip-hour from `prices`, in `currency` (by default USD).

    A list price in another currency is removed.
    """
    chip = machine.chip
    if chip.name in prices:
        sources = {key: text for key, text in chip.sources.items() if key != "price_per_chip_hour"}
        chip = replace(
            chip, price_per_chip_hour=prices[chip.name], currency=currency or "USD", sources=sources
        )
    elif currency not in (None, chip.currency):
        chip = replace(chip, price_per_chip_hour=None, currency=currency or chip.currency)
    return replace(machine, chip=chip)
