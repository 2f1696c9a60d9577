"""The summary cards and the single figures of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.report.audit_view import STATUS_TONE, status_counts
from meshwright.report.documents import (
    Document,
    Run,
    bound_text,
    last_value,
    layout_degrees,
    measured_step_seconds,
    planned_step_seconds,
    winner,
)
from meshwright.report.figures import ABSENT, percent_text
from meshwright.units import format_bytes, format_count, format_seconds


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
    makers = (_model_card, _hardware_card, _layout_card, _step_card, _loss_card, _audit_card)
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
    planned, measured = planned_step_seconds(run), measured_step_seconds(run.metrics)
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
    chips, memory = hardware.get("num_chips"), hardware.get("hbm_bytes")
    detail = ([f"{chips:,} devices"] if chips else []) + ([f"{format_bytes(memory)} each"] if memory else [])
    return Card("Hardware", str(hardware.get("spec", ABSENT)), " · ".join(detail))


def _layout_card(run: Run) -> Card | None:
    best = winner(run.plan) if run.plan else None
    if not best:
        return None
    degrees = layout_degrees(best.get("layout", ""))
    mesh = [f"{axis} {n}" for axis, n in degrees.items() if axis in best.get("mesh", {}) and n != "1"]
    plan = run.plan or {}
    considered = (plan.get("search") or {}).get("considered")
    faster = [c for c in plan.get("candidates") or [] if _is_faster(c, best)]
    detail = [f"bound by {bound_text(best)}"] if best.get("bound") else []
    rank = "slower than the best" if faster else "best"
    detail += [f"{rank} of {considered:,} considered"] if considered else []
    return Card("Layout", " × ".join(mesh) or "one device", " · ".join(detail))


def _is_faster(candidate: Document, best: Document) -> bool:
    """Whether a candidate that fits beats the one that the plan names."""
    return bool(candidate.get("fits")) and candidate["step_seconds"] < best["step_seconds"] * (1 - 1e-9)


def _step_card(run: Run) -> Card | None:
    measured, planned = measured_step_seconds(run.metrics), planned_step_seconds(run)
    if measured is None:
        return Card("Step time, planned", format_seconds(planned), "not run yet") if planned else None
    if not planned:
        return Card("Step time", format_seconds(measured), "measured, no plan to compare")
    ratio = measured / planned
    detail = f"planned {format_seconds(planned)} · measured / planned {ratio:.2f}"
    return Card("Step time", format_seconds(measured), detail, "good" if 0.8 <= ratio <= 1.25 else "warn")


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
