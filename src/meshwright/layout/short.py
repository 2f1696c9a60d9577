"""The short form of a Layout, `data=2,fsdp=64,tensor=8,remat=full`, and its mesh and rules."""

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from math import lcm, prod
from typing import Any

from meshwright.dtypes import KNOWN, named
from meshwright.errors import LayoutError, nearest, plain_name
from meshwright.layout.axes import (
    AXES,
    DATA,
    DEGREES,
    FSDP,
    MULTIPLIED,
    OPTIONS,
    PIPE,
    Composition,
    ShortForm,
)
from meshwright.layout.axes.expert import expert_cut, experts_over
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.precision import Precision
from meshwright.layout.rules import Rules
from meshwright.layout.schedule import REMAT_ALSO, REMATS, Schedule, check_positive
from meshwright.notation.mesh import Mesh
from meshwright.optimizers import OPTIMIZERS
from meshwright.units import divisors

# Words that need the same degree of others, to be words of any layout.
COMPANY = {axis.name: axis.needs for axis in AXES if axis.needs} | {"interleave": (PIPE.name,)}
FIELD_OF_WORD = {"schedule" if f.name == "pipeline" else f.name: f.name for f in fields(Schedule)}
WORD_OF_FIELD = {field: word for word, field in FIELD_OF_WORD.items()}
_PRECISION = [f.name for f in fields(Precision)]
# Every word of the short form.
WORDS = (*DEGREES, *OPTIONS, *FIELD_OF_WORD, *_PRECISION)
# Names in other programs, with the word and, if the name implies one, its value.
_ALSO: dict[str, str] = {
    **{name: axis.name for axis in AXES for name in axis.also},
    **dict.fromkeys(("sp", "seq_parallel"), "sequence_parallel=true"),
    **dict.fromkeys(
        ("ga", "gas", "mb", "gradient_accumulation", "gradient_accumulation_steps", "grad_accum"),
        "microbatches",
    ),
    **dict.fromkeys(("vpp", "vp", "virtual_pipeline_model_parallel_size"), "interleave"),
    **dict.fromkeys(("recompute", "checkpoint", "activation_checkpointing", "ac"), "remat"),
    **dict.fromkeys(("zero_stage", "zero_optimization"), "zero"),
    **dict.fromkeys(("dtype", "precision", "params_dtype"), "weights_dtype"),
}
# Options of the commands, which people also write among the words of a layout.
_NOT_IN_LAYOUTS = ("model", "hardware", "seq-len", "batch-tokens", "software", "network", "price", "for")
# How a flag may be written; True and 1 are the same key.
_FLAGS: dict[object, bool] = {
    True: True,
    "true": True,
    "on": True,
    False: False,
    "false": False,
    "off": False,
}
_IS_FLAG = {name for name, option in OPTIONS.items() if option.fits == (False, True)} | {
    "offload",
    "offload_optimizer",
    "grouped",
    "master_weights",
}
DEFAULTS: ShortForm = {
    **dict.fromkeys(DEGREES, 1),
    **{name: option.default for name, option in OPTIONS.items()},
}

_MOST_CHARS = 2000


def read_words(text: str) -> dict[str, object]:
    """KEY=VALUE, ... as a dictionary; numbers as such."""
    if len(text) > _MOST_CHARS:  # some regular expressions take quadratic time
        raise LayoutError(f"layout: has {len(text)} characters; write KEY=VALUE pairs, such as data=2,fsdp=4")
    joined = re.sub(r"\s*[;|\n]\s*", ",", text).strip(",")
    if joined != text and re.search(r"=[^,]*[;|\n]", text):
        raise LayoutError(f"layout: pairs are joined by commas; write {joined}")
    if text.strip().lower() in ("auto", "best", "any", "default"):
        raise LayoutError(
            f"layout: {text.strip()!r} is not a layout; leave it out, and all layouts are searched"
        )
    if text.strip().endswith(".toml"):
        raise LayoutError(
            f"layout: {text.strip()} is a file; mw compare {text.strip()} prices its plan, or write words "
            "such as data=2,fsdp=4"
        )
    if "==" in text:
        raise LayoutError(f"layout: pairs have one =; write {text.strip().replace('==', '=')}")
    bare = re.sub(r"[\[\]{}()'\"\s]", "", text).replace(":", "=")
    if re.search(r"[\[\]{}()'\"]", text) and re.fullmatch(r"\w+=[\w.-]+(,\w+=[\w.-]+)*", bare):
        raise LayoutError(f"layout: pairs have no brackets or quotes; write {bare}")
    values: dict[str, object] = {}
    items = [part.strip() for part in text.split(",") if part.strip()]
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            known = [each if "=" in each else _paired(each) for each in items]
            words = ",".join(known) if len(items) > 1 and all(known) else _as_words(item)
            raise LayoutError(f"layout: {item!r} is not KEY=VALUE; write {words}")
        if key.strip() in values:
            raise LayoutError(
                f"layout: {key.strip()} is given twice, as {values[key.strip()]} and {value.strip()}"
            )
        values[key.strip()] = _number(value.strip())
    return values


# Layouts of eight chips, suggested for a strategy's name.
_STRATEGIES = {
    **dict.fromkeys(("ddp", "dp", "data", "zero0", "no_shard"), "data=8"),
    **dict.fromkeys(("zero1", "zero_1", "zero-1", "optim"), "data=8,zero=1"),
    **dict.fromkeys(("zero2", "zero_2", "zero-2", "shard_grad_op", "optim_grads"), "data=8,zero=2"),
    **dict.fromkeys(
        ("zero3", "zero_3", "zero-3", "fsdp", "fsdp2", "full_shard", "optim_grads_params"), "fsdp=8"
    ),
    **dict.fromkeys(("hsdp", "hybrid_shard"), "data=2,fsdp=4"),
    **dict.fromkeys(("tp", "tensor", "megatron", "mp"), "tensor=8"),
    **dict.fromkeys(("pp", "pipe", "gpipe"), "data=2,pipe=4"),
    "1f1b": "data=2,pipe=4,schedule=1f1b",
    "zb-v": "data=2,pipe=4,schedule=zb-v",
    **dict.fromkeys(("cp", "context", "ring"), "data=4,context=2"),
}


def _as_words(item: str) -> str:
    """The words to suggest for text without `=`: a strategy's name, or keys next to their numbers.

    Other text gets an example of a layout.

    >>> _as_words("zero3"), _as_words("tp8"), _as_words("dp4-tp2"), _as_words("{'tensor': 8}")
    ('fsdp=8', 'tensor=8', 'data=4,tensor=2', 'tensor=8')
    >>> _as_words("zb-v")
    'data=2,pipe=4,schedule=zb-v'
    """
    plain = item.lower()
    return _STRATEGIES.get(plain) or _paired(plain) or "data=2,fsdp=4"


def _paired(item: str) -> str:
    """Words with a number attached, as KEY=VALUE, ...; empty if a word is unknown.

    >>> _paired("dp4-tp2"), _paired("8dp"), _paired("other")
    ('data=4,tensor=2', 'data=8', '')
    """
    plain = item.lower()
    if match := re.fullmatch(r"(\d+)([a-z_]+)", plain):
        pairs = [(match[2], match[1])]
    else:
        pairs = re.findall(r"([a-z_]+)['\"]?\s*[:-]?\s*(\d+)", plain)
    words = [_written(word_here(key.strip("_")), number) for key, number in pairs]
    return ",".join(words) if all(word.partition("=")[0] in WORDS for word in words) else ""


def strategy_here(name: str) -> str:
    """A layout of eight chips for a strategy's name in other programs; empty if it is unknown.

    >>> strategy_here("ddp"), strategy_here("FULL_SHARD auto_wrap"), strategy_here("other")
    ('data=8', 'fsdp=8', '')
    """
    first_word, *_ = name.lower().split() or [""]
    return _STRATEGIES.get(first_word, "")


def axes_of_strategies(names: str) -> str:
    """The conditions on a layout with several strategies, such as fsdp+tp; empty if one is unknown.

    The layouts of `_STRATEGIES` with `pipe` or `context` begin with `data=N`, which fills the eight chips of
    the example; a pipeline or a ring does not need it.

    >>> axes_of_strategies("FSDP + TP"), axes_of_strategies("dp,pp"), axes_of_strategies("fsdp+other")
    ('fsdp>1,tensor>1', 'data>1,pipe>1', '')
    """
    layouts = [_STRATEGIES.get(name, "") for name in re.split(r"[\s+,/&_|]+", names.lower().strip())]
    if len(layouts) < 2 or not all(layouts):
        return ""
    words: dict[str, None] = {}
    for layout in layouts:
        parts = layout.split(",")
        needed = parts[1:] if re.search("pipe|context", layout) else parts
        words |= dict.fromkeys(
            re.sub(r"^(data|fsdp|tensor|pipe|context)=\d+", r"\1>1", word) for word in needed
        )
    return ",".join(words)


# Names of schedules in other programs, such as ZBVZeroBubble, in lower case without punctuation.
_SCHEDULES_ALSO = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v", "looped": "interleaved"}


def value_here(word: str, value: str) -> str:
    """The words of a layout for a value of `word` in other programs; empty if it has no counterpart.

    >>> value_here("remat", "selective"), value_here("schedule", "ZBVZeroBubble")
    ('remat=attention', 'schedule=zb-v')
    >>> value_here("optimizer", "paged_adamw_8bit"), value_here("zero", "stage2")
    ('optimizer=adamw,optimizer_dtype=int8', 'zero=2')
    >>> value_here("remat", "minimal_offloaded"), value_here("remat", "core_attn")
    ('remat=matmuls,offload=true', 'remat=attention')
    """
    plain = plain_name(value)
    if word == "remat":
        also = {plain_name(name): ours for name, ours in REMAT_ALSO.items()}
        names: Mapping[str, str] = {**also, **{name: name for name in REMATS}}
    elif word == "schedule":
        names = {**_SCHEDULES_ALSO, **{re.sub(r"\W", "", name): name for name in SCHEDULES}}
    elif word == "optimizer":
        name = next((name for name in OPTIMIZERS if name.removesuffix("w") in plain), "")
        narrow = ",optimizer_dtype=int8" if "8bit" in plain else ""
        return f"optimizer={name}{narrow}" if name else ""
    elif word == "offload":
        return "offload_optimizer=true" if "optim" in plain else "offload=true"
    elif word.endswith("_dtype"):
        return f"{word}={named(value)}" if named(value) in KNOWN else ""
    else:
        number = re.sub(r"\D", "", value)
        return f"{word}={number}" if word == "zero" and len(number) == 1 else ""
    if word == "remat" and plain in ("offload", "offloaded"):
        return "offload=true"
    if word == "remat" and plain not in names and (kept := re.sub("offload(ed)?", "", plain)) in names:
        return f"remat={names[kept]},offload=true"  # MaxText's minimal_offloaded
    return f"{word}={names[plain]}" if plain in names else ""


def word_here(name: str) -> str:
    """The word of the short form for a name in other programs; any other name is returned unchanged.

    >>> word_here("tp"), word_here("sp"), word_here("pipe")
    ('tensor', 'sequence_parallel=true', 'pipe')
    """
    return _ALSO.get(name.lower(), name)


def _number(text: str) -> int | float | str:
    """The number that the text is, or the text.

    >>> _number("8"), _number("1.25"), _number("full")
    (8, 1.25, 'full')
    """
    if text.isdigit():
        return int(text)
    return float(text) if text.replace(".", "", 1).isdigit() else text


def clean_words(values: Mapping[str, object]) -> dict[str, Any]:
    """`values` with flags as booleans; unknown words are refused with the nearest known."""
    clean = dict(values)
    for key, value in values.items():
        if word := _ALSO.get(key.lower()):
            fits = value_here(word, str(value)) or _written(word, value)
            raise LayoutError(f"layout: {key} is {word.partition('=')[0]} here; write {fits}")
        if (option := key.lower().replace("_", "-")) in _NOT_IN_LAYOUTS:
            raise LayoutError(f"layout: {key} is an option; write --{option} {value}")
        if key not in WORDS:
            raise LayoutError(f"layout: {key!r} is not supported; {nearest(key, list(WORDS))}")
        if key in _IS_FLAG:
            if not isinstance(value, str | bool | int) or value not in _FLAGS:
                raise LayoutError(f"layout: {key} = {value!r}; fits: true, false")
            clean[key] = _FLAGS[value]
    return clean


def _written(word: str, value: object) -> str:
    return word if "=" in word else f"{word}={value}"


def check_company(words: Mapping[str, object]) -> None:
    """Raises LayoutError for a word that changes nothing without a degree above 1 that these words lack."""
    for name, value in words.items():
        if not has_effect(name, value, {**DEFAULTS, **words}):
            first, *others = _needs(name)
            also = "".join(f" or {other}" for other in others)
            raise LayoutError(
                f"layout: {name} = {str(value).lower()} changes nothing with {first} = 1; fits: "
                f"{first}{also} above 1"
            )


def has_effect(name: str, value: object, form: ShortForm) -> bool:
    """Whether a word is its default, or has the degrees in a form without which it changes nothing."""
    needs = _needs(name)
    default = Schedule.pipeline if name == "schedule" else DEFAULTS.get(name)
    return not needs or value == default or any(form[degree] != 1 for degree in needs)


def _needs(name: str) -> tuple[str, ...]:
    return OPTIONS[name].needs if name in OPTIONS else (PIPE.name,) if name == "schedule" else ()


def are_words(values: Mapping[str, object]) -> bool:
    """Whether a plan's layout table is in the short form: it has neither a mesh nor rules."""
    return "mesh" not in values and "rules" not in values


def parted(words: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Clean words split into fields of (axes, Schedule, Precision)."""
    form = {name: value for name, value in words.items() if name in DEFAULTS}
    schedule = {FIELD_OF_WORD[name]: value for name, value in words.items() if name in FIELD_OF_WORD}
    precision = {name: value for name, value in words.items() if name in _PRECISION}
    return form, schedule, precision


def whole_form(words: Mapping[str, object]) -> ShortForm:
    """All degrees and options, checked one by one and together; missing words have defaults."""
    form = {**DEFAULTS, **words}
    for name in DEGREES:
        check_positive(name, form[name])
    for name, option in OPTIONS.items():
        value = form[name]
        if not any(value is fit or (value == fit and not isinstance(value, bool)) for fit in option.fits):
            strings = all(isinstance(fit, str) for fit in option.fits)
            known = [str(fit) for fit in option.fits if fit is not None]
            fits = nearest(str(value), known) if strings else f"fits: {', '.join(known)}"
            raise LayoutError(f"layout: {name} = {value!r}; {fits}")
    for axis in AXES:
        axis.check(form)
    return form


def no_expert_owner(form: ShortForm, most: int) -> str:
    """The message for experts over more devices than either data axis gives.

    most: a number that the suggested degrees of experts divide.
    """
    fits = ", ".join(str(degree) for degree in divisors(most) if expert_cut(form, degree))
    wider = with_expert_owner(form)
    words = ",".join(f"{name}={degree}" for name, degree in wider.items())
    num_devices = prod(wider[name] for name in MULTIPLIED if name in wider)
    return (
        f"layout: expert = {form['expert']} divides neither data = {form['data']} nor fsdp = {form['fsdp']}; "
        f"fits: expert in {{{fits}}}, or {words} on {num_devices:,} devices"
    )


def with_expert_owner(form: ShortForm) -> dict[str, int]:
    """The degrees above 1 of `form`, with data ranks added until its experts divide them."""
    degrees = {axis: form[axis] for axis in MULTIPLIED}
    owner = FSDP.name if form[FSDP.name] > 1 else DATA.name
    degrees[owner] = lcm(degrees[owner], form["expert"])
    return {**{axis: degree for axis, degree in degrees.items() if degree > 1}, "expert": form["expert"]}


def expand(form: ShortForm, schedule: Schedule) -> tuple[Mesh, Rules]:
    """The mesh and the rules of a whole form under a schedule."""
    cut = expert_cut(form, form["expert"])
    if cut is None:
        raise LayoutError(no_expert_owner(form, prod(form[axis] for axis in MULTIPLIED)))
    owner, _ = cut
    sizes: dict[str, int] = {}
    for axis in AXES:
        axis.place(form, sizes)
    if form["inner"]:
        sizes[form["inner"]] = sizes.pop(form["inner"])
    always = {axis.name for axis in AXES if axis.always}
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1 or axis in always})
    # The rules depend on the set of axes, not on their numbers of devices.
    facts = {name: min(form[name], 2) for name in DEGREES} | {name: form[name] for name in OPTIONS}
    facts |= {"expert_owner": owner, "experts_over": experts_over(form)}
    facts |= {"spmd_stages": schedule.is_spmd}
    present = tuple(axis for axis, size in sizes.items() if size > 1)
    return mesh, _composed(tuple(facts.items()), present)


@lru_cache(maxsize=4096)
def _composed(facts: tuple[tuple[str, object], ...], present: tuple[str, ...]) -> Rules:
    tables = Composition(dict(facts), frozenset(present))
    for axis in AXES:
        axis.compose(tables)
    return tables.rules()


def short_form_of(mesh: Mesh, rules: Rules, schedule: Schedule) -> ShortForm | None:
    """The whole form that expands to this mesh and these rules; None if no form does.

    Each axis reads its words off the rules, inner axes first: outer ones gave them their devices.
    """
    form: dict[str, Any] = {**DEFAULTS, **mesh.sizes}
    if not form.keys() <= DEFAULTS.keys():
        return None
    for axis in reversed(AXES):
        form |= axis.read(rules, form, mesh)
    try:
        whole = whole_form(form)
        return whole if expand(whole, schedule) == (mesh, rules) else None
    except LayoutError:
        return None


def written(form: ShortForm, schedule: Schedule, precision: Precision) -> dict[str, object]:
    """The words of the short form that are not the defaults, and `remat`; dtypes are left out."""
    degrees = {name: form[name] for name in DEGREES if form[name] > 1} or {DATA.name: 1}
    options = {
        name: form[name]
        for name, option in OPTIONS.items()
        if form[name] != option.default and has_effect(name, form[name], form)
    }
    copies: dict[str, object] = {"master_weights": True} if precision.master_weights else {}
    copies |= {"optimizer": precision.optimizer} if precision.optimizer != Precision.optimizer else {}
    return degrees | options | copies | _written_schedule(schedule, form[PIPE.name])


def written_mesh(mesh: Mesh, schedule: Schedule) -> dict[str, object]:
    """The short form of rules that have none: the mesh as it is."""
    sizes: dict[str, object] = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    return sizes | {"rules": "own"} | _written_schedule(schedule, mesh.sizes.get(PIPE.name, 1))


def _written_schedule(schedule: Schedule, num_stages: int) -> dict[str, object]:
    words, plain = {}, Schedule()
    for name, field in FIELD_OF_WORD.items():
        value = getattr(schedule, field)
        is_written = (
            num_stages > 1 if name == "schedule" else name == "remat" or value != getattr(plain, field)
        )
        if is_written:
            words[name] = value
    return words | {"remat": words.pop("remat")}
