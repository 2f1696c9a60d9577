"""The headlines of a run: summary cards and single figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.report.audit_tables import STATUS_TONE, status_counts
from meshwright.report.run_documents import (
    Run,
    bound_text,
    bytes_total,
    last_value,
    layout_degrees,
    measured_step_seconds,
    step_seconds_of_plan,
    winner,
)
from meshwright.report.text import ABSENT, percent_text
from meshwright.units import format_bytes, format_count, format_seconds

# Differences below this share are written as none.
_SAME = 5e-4


@dataclass(frozen=True)
class Card:
    """A label, the value in large, a line below, and a tone for the colour of the value."""

    label: str
    value: str
    detail: str
    tone: str = ""


def cards(run: Run) -> list[Card]:
    """The summary: a card for each fact that the run's documents give."""
    makers = (
        _layout_card,
        _step_card,
        _speed_card,
        _memory_card,
        _budget_card,
        _loss_card,
        _audit_card,
        _model_card,
        _hardware_card,
    )
    return [card for card in (make(run) for make in makers) if card]


def run_facts(run: Run) -> list[tuple[str, str]]:
    """Single figures from the training log; [] if there is none."""
    if not run.metrics:
        return []
    writers: dict[str, tuple[str, Callable[[float], str]]] = {
        "step": ("steps", str),
        "tokens_per_second": ("tokens/s", format_count),
        "mfu": ("MFU", percent_text),
        "loss": ("training loss", "{:.3f}".format),
        "validation_loss": ("validation loss", "{:.3f}".format),
    }
    values = ((last_value(run.metrics, key), *writer) for key, writer in writers.items())
    facts = [(label, write(value)) for value, label, write in values if value is not None]
    if tokens := (run.corpus or {}).get("num_train_tokens"):
        facts.append(("training tokens", format_count(tokens)))
    return facts


def _model_card(run: Run) -> Card | None:
    model = (run.plan or {}).get("model")
    if not model:
        return None
    parts = (("num_layers", "layers"), ("d_model", "wide"), ("num_heads", "heads"))
    shape = [f"{model[key]} {word}" for key, word in parts if model.get(key)]
    params = model.get("params")
    # `mw model` writes params by component; a plan may have either form.
    total = params.get("total") if isinstance(params, Mapping) else params
    detail = [f"{format_count(total)} parameters"] if total else []
    return Card("Model", str(model.get("name", ABSENT)), " · ".join(detail + shape))


def _hardware_card(run: Run) -> Card | None:
    hardware = (run.plan or {}).get("hardware")
    if not hardware:
        return None
    chips, memory = hardware.get("num_chips"), hardware.get("usable_bytes") or hardware.get("hbm_bytes")
    detail = ([f"{chips:,} devices"] if chips else []) + ([f"{format_bytes(memory)} each"] if memory else [])
    return Card("Hardware", Path(str(hardware.get("spec", ABSENT))).name, " · ".join(detail))


def _layout_card(run: Run) -> Card | None:
    best = winner(run.plan) if run.plan else None
    if not best:
        return None
    degrees, plan = layout_degrees(best.get("layout", "")), run.plan or {}
    mesh = [f"{axis} {n}" for axis, n in degrees.items() if axis in best.get("mesh", {}) and n != "1"]
    considered = (plan.get("search") or {}).get("considered")
    detail = [f"bound by {bound_text(best)}"] if best.get("bound") else []
    fitting = [one["step_seconds"] for one in plan.get("candidates") or [] if one.get("fits")]
    slower = best["step_seconds"] / min([*fitting, best["step_seconds"]]) - 1
    rank = "fastest" if slower < _SAME else f"{slower:.1%} slower than the fastest"
    detail += [f"{rank} of {considered:,} considered"] if considered else []
    return Card("Layout", " × ".join(mesh) or "one device", " · ".join(detail))


def _step_card(run: Run) -> Card | None:
    measured, planned = measured_step_seconds(run.metrics), step_seconds_of_plan(run)
    if measured is None:
        detail = " · ".join(["not run yet", *_range(run, "step_seconds", format_seconds)])
        return Card("Step time, planned", format_seconds(planned), detail) if planned else None
    if not planned:
        return Card("Step time", format_seconds(measured), "measured, no plan to compare")
    ratio = measured / planned
    parts = [f"planned {format_seconds(planned)}", f"measured / planned {ratio:.2f}"]
    detail = " · ".join([*parts, *_range(run, "step_seconds", format_seconds)])
    return Card("Step time", format_seconds(measured), detail, "good" if 0.8 <= ratio <= 1.25 else "warn")


def _range(run: Run, figure: str, write: Callable[[float], str]) -> list[str]:
    """The range of a planned figure that holds for 8 of 10 new sources, if the plan states one."""
    best = winner(run.plan) if run.plan else None
    known = (best or {}).get(f"{figure}_interval")
    return [f"8 of 10 runs: {write(known[0])} to {write(known[1])}"] if known else []


def _speed_card(run: Run) -> Card | None:
    """MFU and tokens per second: measured if there is a run, otherwise planned."""
    mfu, speed = last_value(run.metrics, "mfu"), last_value(run.metrics, "tokens_per_second")
    best, source = winner(run.plan) if run.plan else None, "measured"
    if best and speed is None:
        chips = ((run.plan or {}).get("hardware") or {}).get("num_chips") or 1
        each = best.get("tokens_per_second_per_chip")
        mfu, speed, source = best.get("mfu"), each and each * chips, "planned"
    if mfu is None or speed is None:
        return None
    return Card("MFU", percent_text(mfu), f"{format_count(speed)} tokens/s, {source}")


def _memory_card(run: Run) -> Card | None:
    """The memory of the fullest chip, and the rest that a program could use."""
    best = winner(run.plan) if run.plan else None
    needed = bytes_total(best) if best else None
    hardware = (run.plan or {}).get("hardware") or {}
    usable = hardware.get("usable_bytes") or hardware.get("hbm_bytes")
    if needed is None or not usable:
        return None
    left = usable - needed
    detail = f"{format_bytes(left)} ({left / usable:.0%}) free of {format_bytes(usable)}"
    if left < 0:
        detail = f"{format_bytes(-left)} more than the {format_bytes(usable)} there are"
    detail = " · ".join([detail, *_range(run, "bytes_per_chip", format_bytes)])
    tone = "bad" if left < 0 else "warn" if left < 0.05 * usable else "good"
    return Card("Memory per chip", format_bytes(needed), detail, tone)


def _budget_card(run: Run) -> Card | None:
    """The whole training run, if its tokens were given."""
    budget = (run.plan or {}).get("budget")
    if not budget:
        return None
    known, currency = budget.get("price"), budget.get("currency", "")
    price = "" if known is None else f", {format_count(known)} {currency} at the chip's price"
    hours = f"{format_count(budget['tokens'])} tokens, {format_count(budget['chip_hours'])} chip-hours{price}"
    return Card("Whole run", format_seconds(budget["days"] * 86400), hours)


def _loss_card(run: Run) -> Card | None:
    loss = last_value(run.metrics, "validation_loss")
    if loss is None:
        return None
    entropy = (run.corpus or {}).get("unigram_entropy")
    if entropy is None:
        return Card("Validation loss", f"{loss:.3f}", "nats per token")
    detail = f"nats/token · unigram entropy {entropy:.3f}"
    return Card("Validation loss", f"{loss:.3f}", detail, "good" if loss < entropy else "bad")


def _audit_card(run: Run) -> Card | None:
    if not run.audit:
        return None
    verdict = str(run.audit.get("verdict", ABSENT))
    counts = " · ".join(f"{count} {status}" for status, count, _ in status_counts(run.audit))
    return Card("Audit", verdict, counts, STATUS_TONE.get(verdict, "warn"))
