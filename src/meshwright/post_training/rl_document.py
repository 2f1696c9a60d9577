"""The document of `mw plan rl`, and its sentences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.layout.workload import Workload
from meshwright.plan.chosen import plan_of
from meshwright.plan.serve.phase import price_phase
from meshwright.plan.serve.serving_plan import plan_of_phase
from meshwright.plan_file import Plan
from meshwright.post_training.two_phases import Question, RLStep
from meshwright.units import format_bytes, format_seconds


def document_of(asked: Question, steps: Sequence[RLStep], rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Every form, fastest first; the best and the reasons; seconds by the length of rollouts."""
    work = asked.work
    return {
        "model": asked.config.name,
        "hardware": asked.machine.spec,
        "rollouts": work.num_rollouts,
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "longest_answer": work.longest_answer,
        "tokens": work.num_tokens,
        "updates": work.num_updates,
        "forms": [_form(step) for step in steps],
        "best": steps[0].form,
        "why": why(steps),
        "crossover": list(rows),
    }


def _form(step: RLStep) -> dict[str, Any]:
    generator, chip = step.rollouts.generator, step.trainer.hardware.chip
    return {
        "form": step.form,
        "step_seconds": step.seconds,
        "idle_share": step.idle_share,
        "staleness": step.staleness,
        "chips": step.num_chips,
        "price": step.price,
        "currency": chip.currency if step.price is not None else None,
        "trainer": {
            "hardware": step.trainer.hardware.spec,
            "layout": str(step.trainer.layout),
            "step_seconds": step.trainer.step_seconds,
            "mfu": step.trainer.mfu,
        },
        "generator": {
            "chips": generator.num_chips,
            "replicas": generator.replicas,
            "hardware": generator.machine.spec,
            "layout": str(generator.layout),
            "batch": generator.slots,
            "seconds": step.rollouts.seconds,
            "tail_idle_share": step.rollouts.idle_share,
            "tokens_per_second": step.rollouts.tokens_per_second,
        },
        "move": {
            "seconds": step.move.seconds,
            "sent_bytes": round(step.move.sent_bytes),
            "in_place_bytes": round(step.move.peak_bytes(in_place=True, by_layer=True)),
            "buffer_bytes": round(step.move.peak_bytes(in_place=False, by_layer=True)),
            "moves": step.move.rows(),
        },
        "bytes_per_chip": {pool: round(needed) for pool, needed in step.needed_bytes.items()},
        "phases": [
            {
                "pool": phase.pool,
                "what": phase.what,
                "start_seconds": phase.start_seconds,
                "seconds": phase.seconds,
            }
            for phase in step.phases
        ],
    }


def why(steps: Sequence[RLStep]) -> list[str]:
    """The best form in words, and the losses of the others."""
    best = steps[0]
    longest = max(best.phases, key=lambda phase: phase.seconds)
    lines = [
        f"{best.form} takes {format_seconds(best.seconds)} a step; {longest.what} takes "
        f"{longest.seconds / best.seconds:.0%} of it, and chips are idle for {best.idle_share:.0%}"
    ]
    for other in steps[1:]:
        more = other.seconds / best.seconds - 1
        reason = (
            f"its rollouts lag by one update, and its chips are idle for {other.idle_share:.0%}"
            if other.staleness
            else f"states {'wait in the host' if other.is_offloaded else 'take memory of the cache'}: a chip "
            f"has {format_bytes(other.resident_bytes)} of weights and states in rollouts"
        )
        lines.append(f"{other.form} takes {more:.1%} more: {reason}")
    return lines


def plans_of(asked: Question, step: RLStep) -> tuple[Plan, Plan]:
    """The plans of the trainer and of one server."""
    generator = step.rollouts.generator
    workload = Workload(generator.slots, min(asked.work.context, asked.config.max_seq_len), "generate")
    point = price_phase(asked.config, generator.machine, workload, [generator.layout])
    # The trainer masks attention between rollouts of a sequence, and a plan has whole sequences.
    packed = replace(step.workload, document_tokens=None)
    trainer = plan_of(asked.config, step.trainer.hardware, packed, step.trainer)
    return trainer, plan_of_phase(point)
