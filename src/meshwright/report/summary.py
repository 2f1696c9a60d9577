"""The summary cards and the single figures of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.report.audit_view import STATUS_TONE, status_counts
from meshwright.report.figures import ABSENT, percent_text
from meshwright.report.run_files import (
    Run,
    bound_text,
    bytes_total,
    last_value,
    layout_degrees,
    measured_step_seconds,
    step_seconds_of_plan,
    winner,
)
from meshwright.units import format_bytes, format_count, format_seconds

# Differences below this share are written as none.
_SAME = 5e-4


@dataclass(frozen=True)
class Card:
    """One summary card: a label, the value in large, a line below, and a tone for its colour."""

    label: str
    value: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class StepBar:
    """One side of planned against measured: its width in percent of the longer side."""

    name: str
    kind: str
    text: str
    percent: float


def cards(run: Run) -> list[Card]:
    """The summary, one card for each thing the run has something to say about."""
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
    """What the training log says in single figures."""
    last = run.metrics[-1]
    facts = [("steps", str(last.get("step", ABSENT)))]
    writers = {"tokens_per_second": ("tokens/s", format_count), "mfu": ("MFU", percent_text)}
    writers |= {
        "loss": ("training loss", "{:.3f}".format),
        "validation_loss": ("validation loss", "{:.3f}".format),
    }
    for key, (label, write) in writers.items():
        value = last_value(run.metrics, key)
        if value is not None:
            facts.append((label, write(value)))
    corpus = run.corpus or {}
    if corpus.get("num_train_tokens"):
        facts.append(("training tokens", format_count(corpus["num_train_tokens"])))
    return facts


def step_comparison(run: Run) -> list[StepBar]:
    """Planned and measured step time as bars to one scale, the longer one full; [] unless both are known."""
    planned, measured = step_seconds_of_plan(run), measured_step_seconds(run.metrics)
    if not planned or not measured:
        return []
    sides = (("planned", "planned", planned), ("measured, median", "measured", measured))
    longest = max(planned, measured)
    return [StepBar(name, kind, format_seconds(value), 100 * value / longest) for name, kind, value in sides]


def _model_card(run: Run) -> Card | None:
    model = (run.plan or {}).get("model")
    if not model:
        return None
    parts = (("num_layers", "layers"), ("d_model", "wide"), ("num_heads", "heads"))
    shape = " · ".join(f"{model[key]} {word}" for key, word in parts if model.get(key))
    params = model.get("params")
    # `mw model` writes params by component; a plan may carry either form.
    total = params.get("total") if isinstance(params, Mapping) else params
    detail = [f"{format_count(total)} parameters"] if total else []
    return Card("Model", str(model.get("name", ABSENT)), " · ".join([*detail, *([shape] if shape else [])]))


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
    degrees = layout_degrees(best.get("layout", ""))
    mesh = [f"{axis} {n}" for axis, n in degrees.items() if axis in best.get("mesh", {}) and n != "1"]
    plan = run.plan or {}
    considered = (plan.get("search") or {}).get("considered")
    detail = [f"bound by {bound_text(best)}"] if best.get("bound") else []
    fitting = [c["step_seconds"] for c in plan.get("candidates") or [] if c.get("fits")]
    least = min([*fitting, best["step_seconds"]])
    slower = best["step_seconds"] / least - 1
    rank = "fastest" if slower < _SAME else f"{slower:.1%} slower than the fastest"
    detail += [f"{rank} of {considered:,} considered"] if considered else []
    return Card("Layout", " × ".join(mesh) or "one device", " · ".join(detail))


def _step_card(run: Run) -> Card | None:
    measured, planned = measured_step_seconds(run.metrics), step_seconds_of_plan(run)
    if measured is None:
        return Card("Step time, planned", format_seconds(planned), "not run yet") if planned else None
    if not planned:
        return Card("Step time", format_seconds(measured), "measured, no plan to compare")
    ratio = measured / planned
    detail = f"planned {format_seconds(planned)} · measured / planned {ratio:.2f}"
    return Card("Step time", format_seconds(measured), detail, "good" if 0.8 <= ratio <= 1.25 else "warn")


def _speed_card(run: Run) -> Card | None:
    """MFU and tokens per second: measured where there is a run, else planned."""
    mfu, speed = last_value(run.metrics, "mfu"), last_value(run.metrics, "tokens_per_second")
    best, which = winner(run.plan) if run.plan else None, "measured"
    if best and speed is None:
        chips = ((run.plan or {}).get("hardware") or {}).get("num_chips") or 1
        each = best.get("tokens_per_second_per_chip")
        mfu, speed, which = best.get("mfu"), each and each * chips, "planned"
    if mfu is None or speed is None:
        return None
    return Card("MFU", percent_text(mfu), f"{format_count(speed)} tokens/s, {which}")


def _memory_card(run: Run) -> Card | None:
    """What the fullest chip holds, and what is left of what a program can have."""
    best = winner(run.plan) if run.plan else None
    needed = bytes_total(best) if best else None
    hardware = (run.plan or {}).get("hardware") or {}
    usable = hardware.get("usable_bytes") or hardware.get("hbm_bytes")
    if needed is None or not usable:
        return None
    left = usable - needed
    room = f"{format_bytes(left)} ({left / usable:.0%}) free of {format_bytes(usable)}"
    if left < 0:
        room = f"{format_bytes(-left)} more than the {format_bytes(usable)} there are"
    tone = "bad" if left < 0 else "warn" if left < 0.05 * usable else "good"
    return Card("Memory per chip", format_bytes(needed), room, tone)


def _budget_card(run: Run) -> Card | None:
    """The whole training run, where its tokens were given."""
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
