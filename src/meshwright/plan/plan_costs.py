"""Plans compared: their step times, chips, and costs per token."""

from meshwright.hardware.prices import per_hour, per_million_tokens
from meshwright.hardware.topology import Hardware
from meshwright.plan.assumptions import spread_of
from meshwright.plan.serve.phase import price_phase
from meshwright.plan.train import price, well_placed
from meshwright.plan_file import Plan


def plan_costs(plan: Plan, machine: Hardware) -> dict:
    """Price a plan again: the keys of its candidate or phase, then chips, price and energy.

    A layout is placed on the links as in a search. price: of a million tokens, at the chip-hour's price.
    joules: of a million tokens, at the chips' rated power. Both are None if the chip's file lacks the figure.
    step_seconds_range: of training, for 8 of 10 new sources; None if no published step is like it.
    """
    work, chip = plan.workload, machine.chip
    step_range = None
    if work.phase == "train":
        candidate = well_placed(price(plan.model, machine, work, plan.layout))
        differences, known = candidate.to_dict(), spread_of(candidate)
        step_range = list(known.interval(candidate.step_seconds)) if known else None
    else:
        differences = price_phase(plan.model, machine, work, [plan.layout]).to_dict()
    chips = machine.num_chips
    hourly, tokens_per_second = per_hour(chip, chips), differences["tokens_per_second_per_chip"] * chips
    return {
        **differences,
        "model": plan.model.name,
        "phase": work.phase,
        "hardware": machine.spec,
        "chips": chips,
        "weights_dtype": plan.layout.precision.weights_dtype,
        "num_sequences": work.num_sequences,
        "seq_len": work.seq_len,
        "price_per_hour": hourly,
        "price": per_million_tokens(hourly, tokens_per_second),
        "currency": chip.currency,
        "step_seconds_range": step_range,
        "joules": None if chip.power_watts is None else 1e6 * chip.power_watts * chips / tokens_per_second,
    }
