"""The first section of each report: the question, the recommendation, its price and certainty, the runner-up.

Each function takes a report's document and returns (name, sentence) pairs, without sentences that lack a key.
"""

from collections.abc import Sequence

from meshwright.report.run_documents import JsonDocument
from meshwright.report.serving_points import ranges_text
from meshwright.units import format_number_of, format_seconds

ASKED, RECOMMENDED, PRICE, SURE, NEXT = "Asked", "Recommended", "Price", "How sure", "Runner-up"
Sentences = list[tuple[str, str]]
# A server holds a load if at least this share of requests is within the targets.
_HELD = 0.95


def answer_of_plan(plan: JsonDocument) -> Sentences:
    """A plan of `mw plan train` or `mw plan serve`."""
    names = {
        "asked": ASKED,
        "best": RECOMMENDED,
        "memory": "Memory",
        "price": PRICE,
        "range": SURE,
        "next": NEXT,
        "evidence": "Evidence",
    }
    verdict = dict(plan.get("verdict") or {})
    if plan.get("ranges"):
        verdict["range"] = f"{ranges_text(plan['ranges'])}."
    return [(name, str(verdict[key])) for key, name in names.items() if verdict.get(key)]


def answer_of_audit(audit: JsonDocument) -> Sentences:
    """A plan's compiled step next to the plan; [] without an audit."""
    verdict = audit.get("verdict")
    if not verdict:
        return []
    parts = {"missing": "planned and not emitted", "unplanned": "emitted and not planned"}
    counts = [f"{len(audit[key])} {words}" for key, words in parts.items() if key in audit]
    means = "the compiled step is the planned one" if verdict == "match" else "the compiled step differs"
    return [("Audit", f"{means}{': ' + ', '.join(counts) if counts else ''}.")]


def answer_of_script(document: JsonDocument) -> Sentences:
    """A script's step: the first change to make, and the seconds that all findings cost."""
    findings, seconds, extra = document["warnings"], document["seconds"], document["extra_seconds"]
    on = document["hardware"] or "no priced machine"
    sentences = [
        (
            ASKED,
            f"The step of {document['script']} on {format_number_of(document['devices'], 'device')}, {on}.",
        )
    ]
    if findings:
        number = format_number_of(len(findings), "finding")
        sentences.append(
            (RECOMMENDED, f"{findings[0]['change']} ({findings[0]['where']}): {number}, the dearest first.")
        )
    else:
        sentences.append((RECOMMENDED, "No change: no mistake was found."))
    if extra and seconds:
        cost = f"{format_seconds(extra)} of {format_seconds(seconds)} communicated in a step"
        sentences.append((PRICE, f"{cost} ({extra / seconds:.0%}) is not needed."))
    sentences += [(SURE, str(note)) for note in document["notes"][:1]]
    sentences += [(NEXT, f"{finding['change']} ({finding['where']}).") for finding in findings[1:2]]
    return sentences


def answer_of_load(document: JsonDocument) -> Sentences:
    """A load test: whether the server held its targets, at what rate, and how sure that is."""
    targets = {"ttft_seconds": "first token", "tpot_seconds": "time per token"}
    limits = [
        f"{words} within {format_seconds(document['targets'][key])}"
        for key, words in targets.items()
        if document["targets"].get(key) is not None
    ]
    rate, good = document["requests_per_second"], document["goodput"]
    errors = document["errors"]
    share = good / rate if rate else 0.0
    asked = f"{document['requests']:,} requests to {document['model']}"
    sent = (document.get("traffic") or {}).get("rate_per_second")
    asked += f", sent at {sent:g}/s" if sent else ""
    if not limits:
        held = f"Give a target to judge it by: {rate:.2f} requests/s are answered"
    else:
        what = "This server holds" if share >= _HELD else "Add replicas, or send fewer requests"
        held = f"{what}: {share:.0%} of {rate:.2f} requests/s are answered in time"
    sentences = [
        (ASKED, f"{asked}{', with ' + ' and '.join(limits) if limits else ', without a target'}."),
        (
            RECOMMENDED,
            f"{held}, {document['new_tokens_per_second']:,.1f} new tokens/s, "
            f"{format_number_of(errors, 'error')}.",
        ),
    ]
    cost = price_of_load(document)
    if cost and "simulated" not in document:
        sentences.append((PRICE, f"{cost}; on the chips of the plan."))
    if "simulated" in document:
        load = document["simulated"]
        chips = format_number_of(load["chips"], "chip")
        used = f"{chips} of {load['hardware']}, busy {load['busy_share']:.0%} of the time."
        sentences.append((PRICE, f"{cost}; {used}" if cost else used))
        sentences.append(
            (SURE, "Simulated with planned step times; measure a server with mw bench serve --url.")
        )
    elif (ratio := document["results"][0].get("ratio")) is not None:
        sentences.append((SURE, f"Measured; a step takes {ratio:.2f} times the planned time."))
    else:
        sentences.append((SURE, "Measured; this server has no plan to compare with."))
    return sentences


def price_of_load(document: JsonDocument) -> str:
    """The price of a load test's tokens and chips; empty if it has none."""
    price = document.get("price") or {}
    if price.get("per_million_tokens") is None:
        return ""
    each = f"{price['per_million_tokens']:,.3g} {price['currency']} per million generated tokens"
    return f"{each}, {price['per_hour']:,.2f} an hour"


def answer_of_post_training(document: JsonDocument) -> Sentences:
    """A plan of post-training, whose reasons begin with the recommended form; the others follow in order."""
    why, best = document["why"], document["forms"][0]
    asked = f"the shortest step of {document['model']} on {document['hardware']}"
    sentences = [(ASKED, f"{asked} with {rollouts_words(document)}."), (RECOMMENDED, f"{why[0]}.")]
    if best["price"] is not None:
        chips = format_number_of(best["chips"], "chip")
        sentences.append((PRICE, f"{best['price']:,.2f} {best['currency']} a step, on {chips}."))
    sentences.append(
        (SURE, "Each phase is priced like a plan of its own; only on CPUs was a whole step measured.")
    )
    return sentences + [("Also" if place else NEXT, f"{form}.") for place, form in enumerate(why[1:])]


def rollouts_words(document: JsonDocument) -> str:
    """The number of rollouts with their lengths: mean asked for, maximum, and mean after cutting at it."""
    mean = document["tokens"] / document["rollouts"] - document["prompt_tokens"]
    return (
        f"{document['rollouts']:,} rollouts of {document['output_tokens']:,} tokens, at most "
        f"{document['longest_answer']:,} ({mean:,.0f} on average once cut)"
    )


def answer_of_comparison(plans: Sequence[JsonDocument]) -> Sentences:
    """Plans side by side, as `compared` prices them: the cheapest per token, or the fastest per chip."""
    fitting = [plan for plan in plans if plan["fits"]]
    priced = all(plan["price"] is not None for plan in fitting)
    asked = ", ".join(str(plan["plan"]) for plan in plans)
    sentences = [
        (ASKED, f"{asked}, compared by {'price per token' if priced else 'tokens a second per chip'}.")
    ]
    if not fitting:
        return [*sentences, (RECOMMENDED, "None of them fits the memory of its machine.")]
    order = sorted(fitting, key=lambda plan: plan["price"] if priced else -plan["tokens_per_second_per_chip"])
    best, others = order[0], order[1:]
    fastest = min(fitting, key=lambda plan: plan["step_seconds"] / (plan["num_sequences"] * plan["seq_len"]))
    also = " It is the fastest, too." if fastest is best and others else ""
    sentences.append((RECOMMENDED, f"{_compared(best)}.{also}"))
    if priced:
        each = f"{best['price']:,.3g} {best['currency']} per million tokens"
        sentences.append((PRICE, f"{each}, {best['price_per_hour']:,.2f} an hour."))
    if known := _ranges(order[:2], priced):
        sentences.append((SURE, known))
    for other in others[:1]:
        ratio = (
            other["price"] / best["price"]
            if priced
            else best["tokens_per_second_per_chip"] / other["tokens_per_second_per_chip"]
        )
        what = "the price" if priced else "the chips"
        sentences.append((NEXT, f"{_compared(other)}: {ratio:.2f} times {what} for the same tokens."))
    return sentences


def _ranges(plans: Sequence[JsonDocument], priced: bool) -> str:
    """The ranges of the first two plans' steps, and whether they leave the order open; "" without ranges."""
    ranges = [each for plan in plans if (each := plan.get("step_seconds_range"))]
    if len(ranges) < len(plans):
        return ""
    texts = [
        f"a step of {plan['plan']} takes {format_seconds(least)} to {format_seconds(most)}"
        for plan, (least, most) in zip(plans, ranges, strict=True)
    ]
    sentence = f"In 8 of 10 cases of new sources {' and '.join(texts)}"
    if len(plans) < 2:
        return f"{sentence}."
    key = "price" if priced else "tokens_per_second_per_chip"
    of_steps = [
        sorted(plan[key] * (end / plan["step_seconds"]) ** (1 if priced else -1) for end in each)
        for plan, each in zip(plans, ranges, strict=True)
    ]
    overlap = of_steps[0][0] <= of_steps[1][1] and of_steps[1][0] <= of_steps[0][1]
    what = "prices per token" if priced else "rates"
    return f"{sentence}; their {what} {'overlap, so the order may turn' if overlap else 'do not overlap'}."


def _compared(plan: JsonDocument) -> str:
    return (
        f"{plan['plan']}: {plan['layout']} on {plan['hardware']}, {format_seconds(plan['step_seconds'])} a "
        f"step, {plan['tokens_per_second_per_chip']:,.1f} tokens/s per chip"
    )


def answer_lines(sentences: Sentences) -> list[str]:
    """The sentences after their names, for terminals."""
    return [f"{name}: {sentence}" for name, sentence in sentences]
