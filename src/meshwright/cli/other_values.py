"""The values of other programs' options, inserted into the words to type here."""

import json
import re
import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise

from meshwright.errors import MeshwrightError, plain_name

# Words that several tables offer in place of other programs' options. Their examples give way to values.
# The words for a machine, whose value may be a number of chips, a chip or a machine.
MACHINE = "--hardware h100:8"
SLICE = "v5p:4x4x4"  # the example of a machine in the words for a number of slices
SLICES = f"--hardware 2*{SLICE}, the number of slices before a machine,"
HOSTS_OF_8 = "--hardware h100:4x8, 4 hosts of 8,"
BATCH_TOKENS = "--batch-tokens, the sequences times --seq-len,"
STEPS = "--steps, the batches to train on,"
PERCENTILES = "--ttft-p95 1s --tpot-p95 30ms"
# The words for an option of requests, whose value may be a number a day.
LOAD = "--rate 20, or 1.7M/day for a number a day,"
RUN_TOKENS = "1T"  # an example: tokens of a run, for a line that does not give them
_LEAST_MILLISECONDS = 5  # latencies without a unit are milliseconds from this number on, below it seconds
_UNITS_OF_TIME = {"h": "h", "m": "min", "s": "s"}
_TIME = re.compile(r"[0-9.]+ ?(us|ms|s|min)")
_PAIRS = re.compile(r"([A-Za-z]+)\s*[=:<]+\s*([0-9][\w.]*)")  # ttft=1s,tpot=50ms
# Options whose values are names of strategies: --strategy ddp, --fsdp full_shard.
_STRATEGY_WORDS = {"strategy", "sharding", "fsdp", "parallelism", "distributed", "zero"}

# Words of other programs' commands that have no counterpart in ours: `mw model show llama-3-8b`.
VERBS = {"show", "info", "list", "get", "describe", "inspect", "print", "start", "run"}
KINDS_OF_CHIPS = {"gpu", "cuda", "rocm", "mps", "tpu", "cpu", "auto"}
_PERIODS_OF_NAMES = {"monthly": "month", "weekly": "week", "daily": "day"}  # by a word of an option's name
_TARGETS: dict[str, str] = dict.fromkeys(("cuda", "rocm", "nvidia"), "gpu")


def strategy(given: str, options: Collection[str], value: str) -> str:
    """The words to type for an option whose value names a strategy; empty if it names none.

    A name of several, such as fsdp+tp, needs each of their axes.

    >>> strategy("--strategy", ["--given"], "ddp"), strategy("--strategy", ["--layout"], "auto")
    ('--given data=8', '')
    >>> strategy("--parallelism", ["--given"], "fsdp+tp"), strategy("--strategy", ["--given"], "tp_pp_zero1")
    ("--given 'fsdp>1,tensor>1'", "--given 'tensor>1,pipe>1,data>1,zero=1'")
    """
    # Here, since most command lines are right.
    from meshwright.layout.short import axes_of_strategies, strategy_here

    if not _STRATEGY_WORDS & set(re.split(r"[-_.]", given.lower())):
        return ""
    option = next((name for name in ("--given", "--layout") if name in options), "")
    layout = strategy_here(value)
    if not layout and option == "--given" and (axes := axes_of_strategies(value)):
        return f"{option} {shlex.quote(axes)}"
    return f"{option} {layout}" if option and layout else ""


def with_value(words: str, value: str) -> str:
    """`words` with the given value in place of their example's, if it has a counterpart.

    >>> with_value("--given tensor=8", "4"), with_value("--given remat=full", "selective")
    ('--given tensor=4', '--given remat=attention')
    >>> with_value("--headroom 10%, the share to leave free,", "0.85")
    '--headroom 15%, the share to leave free,'
    >>> with_value("--ttft-p95 1s --tpot-p95 30ms", "ttft=2s,tpot=50ms")
    '--ttft-p95 2s --tpot-p95 50ms'
    >>> with_value("--engine NAME", "sglang"), with_value("--tpot-p95 30ms, the percentile,", "20ms")
    ('--engine sglang', '--tpot-p95 20ms, the percentile,')
    """
    is_flag = value.lower() == "true" and "=true" in words
    if not value or is_flag or "--base-dtype" in words:  # QLoRA's words have the type that it needs
        return words
    if words.startswith("--lengths") and (lengths := _lengths(value)) is not None:
        return lengths
    if words.startswith("--hardware"):
        return _machine(words, value)
    if special := _special(words, value) or _of_counts(words, value):
        return special
    if words.startswith("--headroom 10%"):
        return words.replace("10%", _rest(value))
    if match := re.fullmatch(r"(--engine|--for) NAME", words):
        return f"{match[1]} {_program(match[1], value)}"
    if match := re.fullmatch(r"(--(?:given|layout)) (\w+)=[a-z]+(.*)", words):
        from meshwright.layout.short import value_here

        ours = value_here(match[2], value)
        if ours:
            return f"{match[1]} {ours}"
        return words if value[:1].isdigit() else ""  # an unknown name is not the example's value
    if re.search(r" \d+m?s\b", words) and re.fullmatch(r"\d+(\.\d+)?", value):
        value += "ms" if float(value) >= _LEAST_MILLISECONDS else "s"
    if _TIME.fullmatch(value):
        return re.sub(r"\d+(ms|s)\b", value.replace(" ", ""), words, count=1)
    number = re.fullmatch(r"\$?(\d+(?:\.\d+)?)(?: ?d| ?days?)?", in_unit_of(words, value))
    is_whole = number and number[1].isdigit()
    if not number or (not is_whole and not re.match(r"--(price|rate)", words)):
        return words
    return re.sub(r"(?<=[= ])\d+(?:\.\d+)?(?=$| --|,)", number[1], words, count=1)


def _lengths(value: str) -> str | None:
    """The options for lengths in place of a distribution's name; None for a name.

    >>> _lengths("1000:200"), _lengths("random"), _lengths("sharegpt")
    ('--prompt-tokens 1000 --output-tokens 200', '', None)
    """
    if value.lower() in ("random", "synthetic"):
        return ""  # the lengths are options of their own
    both = re.fullmatch(r"(\d+k?)[:,/x](\d+k?)", value)
    return f"--prompt-tokens {both[1]} --output-tokens {both[2]}" if both else None


def time_here(option: str, value: str) -> str:
    """A time with a unit, taken from the option's name if the value has none; other values unchanged.

    >>> time_here("--max-hours", "2"), time_here("--minutes", "30"), time_here("--walltime", "01:30:00")
    ('2h', '30min', '90min')
    >>> time_here("--duration", "5m"), time_here("--time-limit", "2 hours"), time_here("--days", "1.5")
    ('5min', '2h', '36h')
    """
    if clock := re.fullmatch(r"(\d+):(\d\d)(?::\d\d)?", value):
        return f"{60 * int(clock[1]) + int(clock[2])}min"
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", value.lower())
    if match is None:
        return value
    named = next((unit for unit in ("day", "hour", "min", "sec") if unit in option), "")
    unit = (match[2] or named)[:1]
    if unit == "d":
        return f"{24 * float(match[1]):g}h"
    return f"{match[1]}{_UNITS_OF_TIME.get(unit, '')}" if match[2] != "ms" else value


def per_period(given: str, value: str) -> str:
    """The value of an option with the period in its name: 50k of --monthly-budget is 50k/month.

    >>> per_period("--monthly-budget", "50k"), per_period("--daily-cost", "9/h")
    ('50k/month', '9/h')
    """
    period = next((each for word, each in _PERIODS_OF_NAMES.items() if word in given), "")
    return f"{value}/{period}" if period and re.fullmatch(r"\$?[\d.]+[kKmM]?", value) else value


def in_unit_of(option: str, value: str) -> str:
    """A price a day, week or month as a price an hour, a rate as one a second; other values unchanged.

    >>> in_unit_of("--max-price-per-hour", "$1200/day"), in_unit_of("--rate", "1200/min")
    ('50', '20')
    >>> in_unit_of("--max-price-per-hour", "73k/month")
    '100'
    """
    from meshwright.units import SECONDS_OF  # not loaded for the list of commands

    number = re.fullmatch(r"\$?(\d+(?:\.\d+)?)([kKmM]?)/(month|week|day|min)", value)
    if not number or not re.match(r"--(\S*per-hour|rate)\b", option):
        return value
    amount = float(number[1]) * {"": 1, "k": 1e3, "m": 1e6}[number[2].lower()]
    return f"{amount * (3600 if 'per-hour' in option else 1) / SECONDS_OF[number[3]]:.4g}"


def _special(words: str, value: str) -> str:
    """`with_value` for sizes, addresses and targets, which are not numbers; empty for other words."""
    example = words.split()[1] if " " in words else ""
    if words == PERCENTILES and _TIME.fullmatch(value):
        return f"--ttft-p95 {value}, of the first token, with --tpot-p95 for each further one,"
    if words.count(" --") and (pairs := _PAIRS.findall(value)):
        for name, each in pairs:
            words = re.sub(rf"(?<=--){name.lower()}(\S*) \S+", rf"{name.lower()}\1 {each}", words)
        return words
    if in_units := _in_units(words, value):
        return in_units
    if re.fullmatch(r"[A-Z]=\d+(,[A-Z]=\d+)*", example) and "=" in value:
        return words.replace(example, value, 1)
    if words.startswith("--url ") and value.isdigit():
        return words.replace("8000", value)
    if words.startswith("--target "):
        return f"--target {_TARGETS.get(value, value)}"
    if words.startswith("--host ") and re.fullmatch(r"[\w.-]+", value):
        return f"--host {value}"
    if words.startswith("--host ") and (address := re.fullmatch(r"(?:https?://)?([\w.-]+):(\d+)", value)):
        return f"--host {address[1]} --port {address[2]}"
    return ""


def _of_counts(words: str, value: str) -> str:
    """`with_value` for epochs, chunks of a stage and rates; empty for other words and values."""
    if words.startswith("--epochs ") and re.fullmatch(r"\d+(\.\d+)?", value):
        return f"--epochs {value}"
    if words.endswith("schedule=interleaved,interleave=2") and value.isdecimal():
        return words.replace("interleave=2", f"interleave={value}")
    if re.fullmatch(r"--rate 20/\w+", words):
        return words.replace("20", value.partition("/")[0])
    if words == LOAD:
        return f"--rate {value}{'/day' if value[-1:].isdigit() or value[-1:] in 'kKM' else ''}"
    return ""


def _in_units(words: str, value: str) -> str:
    """`with_value` for bytes, days and shares; empty for other words and values."""
    if "memory<=70GB" in words and re.fullmatch(r"\d+(\.\d+)? ?[GMT]i?B", value, re.I):
        return words.replace("70GB", value.replace(" ", ""))
    if words.endswith("--days 30"):
        from meshwright.units import parse_days  # not loaded for the list of commands

        with suppress(MeshwrightError):
            return words.replace("30", f"{parse_days(value):.4g}")
    if words.startswith("--prefix-hit ") and (share := re.fullmatch(r"(\d*\.?\d+)(%?)", value)):
        return words.replace("0.5", f"{float(share[1]) / (100 if share[2] else 1):g}")
    return ""


def _rest(share: str) -> str:
    """The share that another leaves: `0.85` leaves 15%. Other text leaves the example's 10%."""
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", share)
    used = Fraction(match[1]) * (1 if match[2] else 100) if match else Fraction(90)
    return f"{float(100 - used):g}%" if 0 < used < 100 else "10%"


def _program(option: str, value: str) -> str:
    """The serving engine or training program of a name; all names for an unknown one."""
    from meshwright.engines.serving_engine import ENGINES
    from meshwright.programs.launcher import LAUNCHERS

    plain = value.lower().replace("_", "-")
    known = ENGINES if option == "--engine" else LAUNCHERS
    return plain if plain in known else f"NAME, one of {', '.join(known.names)},"


def _machine(words: str, value: str) -> str:
    """The words for a machine with the given chip, count, hosts or topology; unchanged if unreadable."""
    from meshwright.errors import HardwareError
    from meshwright.hardware.catalog import load, usual

    if words == SLICES:
        return words.replace("2*", f"{value}*", 1) if value.isdecimal() else words
    if value.lower().partition(":")[0] in KINDS_OF_CHIPS and not value.lower().startswith("gpu:"):
        return words
    text = value.lower().removeprefix("gpu:").removeprefix("nvidia.com/gpu:").removeprefix("nvidia-")
    if words == HOSTS_OF_8:
        return words.replace("4", text) if text.isdigit() else words
    if re.fullmatch(r"\d+(x\d+)+", text) and usual(text) == text:  # 2x4090 is a machine
        return f"--hardware {'v5p' if text.count('x') == 2 else 'v5e'}:{text}"
    if text.isdigit():
        return f"--hardware {text if is_chip(text) else f'h100:{text}'}"
    spec = usual(text)
    try:
        load(spec if ":" in spec else f"{spec}:1")
    except HardwareError as error:
        hint = re.search(r"did you mean (\S+?)\?", str(error))
        number = re.search(r"\d+", spec)
        if hint is None:
            return f"--hardware {shlex.quote(value)}"
        # A hint with another number, such as the 4090 for a 4060, is another chip.
        is_same = number is None or number[0] in re.findall(r"\d+", hint[1])
        return f"--hardware {hint[1] if is_same else spec}"
    return f"--hardware {spec}"


def is_chip(text: str) -> bool:
    """Whether it names a chip of the catalog.

    >>> is_chip("4090"), is_chip("v5"), is_chip("a\\0")
    (True, False, False)
    """
    from meshwright.errors import HardwareError
    from meshwright.hardware.catalog import chip

    try:
        chip(text)
    except (HardwareError, OSError, ValueError):  # the last two: not a file name
        return False
    return True


# Number types by names of other programs, without punctuation; the first pattern that begins a name counts.
_DTYPES = (
    (r"q?4|int4|awq|gptq|w4|iq4|i4|u4|4bit", "int4"), (r"nf4|bnb|bitsandbytes", "nf4"),
    (r"q?8|int8|i8|w8a16|smoothquant|8bit", "int8"), (r"f(loat)?8|fp8|w8a8|e4m3|e5m2|mxfp8", "fp8"),
    (r"half|f(p|loat)?16|b(rain)?float(16)?|bf16|16", "bf16"), (r"full|single|f(p|loat)?32|32|tf32", "f32"),
)  # fmt: skip


def dtype_here(name: str) -> str:
    """The number type of a name in other programs, or of a word in it; empty if it is unknown.

    >>> dtype_here("Q4_K_M"), dtype_here("fp8_e5m2"), dtype_here("half"), dtype_here("other")
    ('int4', 'fp8', 'bf16', '')
    >>> dtype_here("aqt_int8"), dtype_here("modelopt-fp8"), dtype_here("rtx-4090")
    ('int8', 'fp8', '')
    """
    words = (word for word in re.split(r"[\W_]+", name.lower()) if word[:1].isalpha())
    names = (plain_name(name), *words)
    return next((ours for each in names for pattern, ours in _DTYPES if re.match(pattern, each)), "")


LISTS = "--given", "--layout", "--set", "--dims", "--mesh"  # options whose values are words joined by commas
# Options whose values are lists of words, which scripts also write as JSON.
_LISTS = {"--hardware", "--weights-dtype", "--kv-dtype", *LISTS}


# Characters that editors and chats put in the place of dashes, quotes and times signs.
_DASHES = re.compile("^(?:[\u2013\u2014\u2212]-?|-[\u2013\u2014\u2212])(?=[A-Za-z])")
# An option in the form of Windows programs: /hardware:rtx4090.
_SLASH = re.compile(r"^/([a-z][a-z-]+)[:=](?=[^/\\])")
_TYPOGRAPHIC = str.maketrans("\u00d7", "x", "\u201c\u201d\u2018\u2019")


HELP = {"/?", "-?", "?", "/h", "/help", "-help", "--h"}  # how programs of Windows are asked for help


def in_words(names: Sequence[str], most: int = 0) -> str:
    """Names as the end of a sentence; most: how many to name before a count of the others, 0 for all.

    >>> in_words(["a", "b", "c"]), in_words(["a", "b", "c", "d"], most=2)
    ('a, b and c', 'a, b and 2 more')
    """
    shown = [*names[:most], f"{len(names) - most} more"] if 0 < most < len(names) else [*names]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def plain_words(args: Sequence[str]) -> list[str]:
    """The arguments with JSON as words joined by commas, and without dashes and quotes of word processors.

    >>> plain_words(["--hardware", '["h100:8", "v5p:8"]', "--layout", '{"data": 8}'])
    ['--hardware', 'h100:8,v5p:8', '--layout', 'data=8']
    >>> plain_words(["\u2013-model", "\u201cllama-3-8b\u201d", "--hardware", "8\u00d7h100"])
    ['--model', 'llama-3-8b', '--hardware', '8xh100']
    """
    words = ["--help" if word in HELP else _SLASH.sub(r"--\1=", _DASHES.sub("--", word)) for word in args]
    for at, (option, value) in enumerate(pairwise(words), 1):
        if option == "--model" or option in _LISTS:
            words[at] = value.translate(_TYPOGRAPHIC)
        if option in _LISTS and value[:1] in ("[", "{"):
            words[at] = _joined(value, option)
    return words


def _joined(text: str, option: str) -> str:
    """JSON of plain values as words joined by commas; any other text is returned unchanged.

    >>> _joined('{"gpu": "h100", "nodes": 4, "gpus_per_node": 8}', "--hardware")
    'h100:4x8'
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and option == "--hardware":
        names = [each for each in value.values() if isinstance(each, str)]
        name = next(filter(is_chip, names), (*names, "")[0])
        sizes = "x".join(str(each) for each in value.values() if isinstance(each, int))
        return f"{name}:{sizes}" if sizes else name
    items = [f"{key}={_word(each)}" for key, each in value.items()] if isinstance(value, dict) else value
    return ",".join(map(_word, items))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
