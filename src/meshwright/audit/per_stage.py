"""The audit of a pipeline with one program per stage: each stage against its part of the plan.

Transfers between stages belong to the loop and not to a program. They are compared with the plan's list of
hops.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.audit.against_plan import against_plan
from meshwright.audit.compare.rewrites import TOLERANCE
from meshwright.audit.compile.compile import STAGES_APART, StagePrograms
from meshwright.audit.compile.planned_program import planned_step
from meshwright.audit.compile.target import Target
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES
from meshwright.audit.hlo.link import Sent, linked
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.remarks import Remark
from meshwright.cost.priced import PricedCollective
from meshwright.hardware.catalog import load
from meshwright.layout.rules import STAGES
from meshwright.notation.collective import gathered_of_block
from meshwright.plan_file import Plan
from meshwright.platforms import PLATFORMS
from meshwright.units import format_bytes

# Keys with lists. The audit of all stages concatenates the lists of each stage, and adds the stage to each
# entry.
_LISTS = ("findings", "planned", "emitted", "unplanned", "missing", "rows")
_TOTALS = ("bytes", "sent", "flops")
_PIPE = (STAGES,)


def stages_against_plan(plan: Plan, target: Target, text: str, stages: StagePrograms) -> dict:
    """The keys of `mw audit` with both sides; `stages` has the totals of each stage.

    `bytes`, `sent` and `flops` of all stages are the mean device's, `memory` is the largest stage's.
    """
    hardware, layout = load(plan.hardware), plan.layout
    programs = [parse_hlo(one) for one in text.split(STAGES_APART)]
    documents = []
    for stage in range(layout.pipe):
        planned = planned_step(plan, hardware, compared_on=PLATFORMS[target.name], stage=stage)
        hops = [one for one in planned.collectives if (one.op, one.axes) == ("permute", _PIPE)]
        # A stage's program sums over the other axes; the loop then adds the stages' sums, such as a norm's.
        without_pipe = [
            replace(priced, axes=tuple(axis for axis in priced.axes if axis != STAGES))
            for priced in planned.collectives
        ]
        within = tuple(one for one in without_pipe if one.axes)
        program = linked(programs, stages.calls, stages.results[stage], stage)
        document = against_plan(
            plan,
            target,
            replace(planned, collectives=within),
            program,
            layout.of_stage.mesh,
            stages.memory_bytes[stage],
        )
        sent = Counter({one: count for one, count in stages.sent if one.stage == stage})
        _add_transfers(document, hops, sent, layout.pipe)
        documents.append(document)
    return _of_all(documents)


def _add_transfers(
    document: dict, hops: Sequence[PricedCollective], sent: Mapping[Sent, int], pipe: int
) -> None:
    """Adds the loop's transfers from a stage to its audit, with the planned hops."""
    planned: dict[tuple[str, str], list[PricedCollective]] = defaultdict(list)
    for hop in hops:
        planned[hop.what, hop.direction].append(hop)
    emitted: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for transfer, count in sent.items():
        if transfer.num_bytes > NEGLIGIBLE_BYTES and transfer.what in _PLANNED_AS:
            emitted[_PLANNED_AS[transfer.what]][transfer.num_bytes] += count
    for key in {**planned, **emitted}:
        _add_row(document, key, planned.get(key, ()), emitted.get(key, {}), pipe)


# The tensor and the direction of a transfer in plans, by its name in the loop. Plans leave out the loop's
# "sums", which send a few numbers for each weight.
_PLANNED_AS = {
    "activations": ("activations between stages", "forward"),
    "cotangents": ("activations between stages", "backward"),
    "weights": ("weights between stages", "update"),
    "gradients": ("gradients between stages", "update"),
}


def _add_row(
    document: dict,
    key: tuple[str, str],
    planned: Sequence[PricedCollective],
    sent: Mapping[int, int],
    pipe: int,
) -> None:
    """Adds the row of one kind of transfer. sent: number of blocks sent, by their bytes."""
    what, direction = key
    wanted = round(sum(one.step_bytes for one in planned))
    blocks = sum(size * count for size, count in sent.items())
    gathered = gathered_of_block("permute", blocks, pipe)
    agrees = abs(gathered - wanted) <= TOLERANCE * max(gathered, wanted)
    status = "match" if agrees else "unplanned" if not wanted else "differs" if gathered else "missing"
    seconds = sum(one.step_seconds for one in planned)
    excess = seconds * (gathered / wanted - 1) if wanted else None
    common = {"op": "permute", "axes": list(_PIPE)}

    def side(
        num_bytes: int, count: float, step_seconds: float | None, exposed: float | None, stage_bytes: int
    ) -> dict:
        times = {"seconds": step_seconds, "exposed_seconds": exposed}
        return common | {"bytes": num_bytes, "count": count} | times | {"sent": stage_bytes}

    exposed = sum(one.exposed_seconds for one in planned)
    with_excess = None if excess is None else seconds + excess
    sent_as_planned = round(wanted / pipe)
    document["rows"].append(
        {
            "tensor": what,
            "direction": direction,
            "planned": side(wanted, sum(one.count for one in planned), seconds, exposed, sent_as_planned)
            if planned
            else None,
            "emitted": side(gathered, sum(sent.values()), with_excess, None, blocks) if sent else None,
            "status": status,
            "note": "sent by the loop over the table",
        }
    )
    document["planned"] += [p.to_dict() for p in planned]
    entries = [
        common
        | {
            "tensor": what,
            "direction": direction,
            "bytes": gathered_of_block("permute", size, pipe),
            "dtype": "",
            "count": count,
            "instruction": "",
            "source": "",
            "overlaps": None,
            "exposed_seconds": None,
        }
        for size, count in sent.items()
    ]
    document["emitted"] += entries
    document["unplanned"] += entries if status == "unplanned" else []
    document["missing"] += [p.to_dict() for p in planned] if status == "missing" else []
    for total, sides in (("bytes", (wanted, gathered)), ("sent", (round(wanted / pipe), blocks))):
        document[total]["planned"] += sides[0]
        document[total]["compiled"] += sides[1]
    if status != "match":
        sides = f"planned {format_bytes(wanted // pipe)}, sent {format_bytes(blocks)}"
        text = f"{what}: {sides} a step by this stage"
        document["findings"].append(
            Remark("collective", what, text, "", "", blocks - wanted // pipe, excess, direction).of_plan()
        )


def _of_all(stages: Sequence[dict]) -> dict:
    """The audit of all stages from the audits of each."""
    gaps = dict.fromkeys(gap for document in stages for gap in document["not_understood"])
    named = [
        {key: [one | {"stage": stage} for one in document[key]] for key in _LISTS}
        for stage, document in enumerate(stages)
    ]
    largest = max(stages, key=lambda by_stage: by_stage["memory"]["compiled"] or 0)
    return {
        **{key: [one for document in named for one in document[key]] for key in _LISTS},
        "not_understood": list(gaps),
        **{key: _mean([document[key] for document in stages]) for key in _TOTALS},
        "step_seconds": stages[0]["step_seconds"],
        "memory": largest["memory"],
        "stages": [
            {"stage": stage, **{key: document[key] for key in (*_TOTALS, "memory")}}
            for stage, document in enumerate(stages)
        ],
    }


def _mean(sides: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over stages of the planned and of the compiled figure."""
    return {side: round(sum(one[side] for one in sides) / len(sides)) for side in sides[0]}
