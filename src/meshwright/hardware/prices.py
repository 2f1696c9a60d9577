"""The price of a chip-hour: the catalog's list price, or the user's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.errors import HardwareError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware


def parse_prices(text: str) -> dict[str, float]:
    """The prices written `v5p=4.2,h100=2.5`, by the catalog's name of the chip.

    Raises HardwareError for an unknown chip or an invalid price.

    >>> parse_prices("v5p=4.2,h100=2.5")
    {'v5p': 4.2, 'h100': 2.5}
    """
    prices: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, price = item.partition("=")
        try:
            value = float(price)
        except ValueError:
            value = -1.0
        if not equals or not 0 < value < float("inf"):
            raise HardwareError(f"--price {item!r} is not a price of a chip-hour; write v5p=4.2,h100=2.5")
        prices[catalog.chip(name).name] = value
    return prices


def priced(machine: Hardware, prices: Mapping[str, float], currency: str | None = None) -> Hardware:
    """`machine` with the price of its chip-hour out of `prices`, in `currency` (None: USD).

    A list price in another currency is left out.
    """
    chip = machine.chip
    if chip.name in prices:
        chip = replace(chip, price_per_chip_hour=prices[chip.name], currency=currency or "USD")
    elif currency not in (None, chip.currency):
        chip = replace(chip, price_per_chip_hour=None, currency=currency or chip.currency)
    return replace(machine, chip=chip)


def priced_machines(machines: Sequence[Hardware], prices: str | None, currency: str | None) -> list[Hardware]:
    """`machines` with the prices that `--price` and `--currency` name.

    Raises HardwareError for a price of another chip, or if no chip has a price in the currency.
    """
    known, chips = parse_prices(prices or ""), [machine.chip.name for machine in machines]
    if others := [chip for chip in known if chip not in chips]:
        fits = ", ".join(dict.fromkeys(chips))
        raise HardwareError(f"--price {others[0]}: no machine here has this chip; fits: {fits}")
    priced_now = [priced(machine, known, currency) for machine in machines]
    if currency and all(machine.chip.price_per_chip_hour is None for machine in priced_now):
        raise HardwareError(
            f"--currency {currency}: no price is known in it; add --price {chips[0]}=X, of an hour of a chip"
        )
    return priced_now
