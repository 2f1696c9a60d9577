"""Finds hardware by name: `v5p:16x20x28`, `h100:8x8`, `2*v5p:16x16x16`, `cpu:8`, or a TOML file."""

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from itertools import product
from math import log, prod
from pathlib import Path
from typing import Any

from meshwright.errors import HardwareError, nearest, plain_name
from meshwright.files import read_text
from meshwright.hardware.chip import Chip, SharedMemory, Switch, Torus
from meshwright.hardware.description import Description, read_chip, share_cores
from meshwright.hardware.network import NETWORKS
from meshwright.hardware.topology import Hardware
from meshwright.hardware.unlisted import Unlisted, unlisted
from meshwright.platforms import PLATFORMS
from meshwright.programs.program import DEFAULT as XLA
from meshwright.units import divisors, format_bytes

_FORMS = (
    "v5p:16x20x28, v5e:4x4, h100:64, h100:8x8 (domains x GPUs), 2*v5p:16x16x16 (slices), cpu:8 or a .toml"
)

# Other ways to write a chip and a number, which counts chips, or cores in the names of Google's TPUs.
_USUAL = (
    (r"(?P<number>\d+) ?x? ?(?P<name>[a-z][\w-]*)", "chips"),
    (r"(?P<number>\d+) ?x ?(?P<name>\d[\w-]*)", "chips"),
    (r"(?P<name>[a-z\d][\w-]*?) ?[x*] ?(?P<number>\d+)", "chips"),
    (r"(?:tpu-?)?(?P<name>v\w+)-(?P<number>\d+)", "cores"),
)

# Hosts of several chips each: 8 nodes of 8 H100, 4 x 8 x A100, 8xh100x8.
_HOSTS = tuple(
    re.compile(form, re.I)
    for form in (
        r"(?P<hosts>\d+) ?x? ?(?:nodes|hosts|machines|servers) (?:of|x|with) (?P<each>\d+) ?x? ?"
        r"(?P<name>[a-z][\w-]*)",
        r"(?P<hosts>\d+) ?[x*] ?(?P<each>\d+) ?[x* ] ?(?P<name>[a-z][\w-]*)",
        r"(?P<hosts>\d+) ?x ?(?P<name>[a-z][\w-]*?) ?x ?(?P<each>\d+)",
        r"(?P<hosts>\d+)[ -](?:node|host|server)s?[ -](?:of |with )?(?P<name>[a-z]+\d+)s?",
    )
)

# Numbers in words, as in `two RTX 4090`.
NUMBER_WORDS = {
    "two": "2", "three": "3", "four": "4", "eight": "8", "sixteen": "16", "dual": "2", "quad": "4",
}  # fmt: skip

GPUS_OF_A_HOST = 8  # if a text does not give it

# Ten times the largest machine that trains one model.
_MOST_CHIPS = 2**20


def load(spec: str) -> Hardware:
    """The hardware that `spec` names: `[slices*]chip:topology`, or the path of a machine.toml.

    A torus takes one size for each of its dimensions, GPUs domains x GPUs, a host a number of devices.
    A plain number of chips takes the torus nearest to a cube, or the smallest number of NVLink domains.
    A machine.toml names its own topology; `machine.toml:8` gives another. A file without `[step]` takes
    the nearest chip's of the catalog (`nearest_chip`), with a warning (`step_warning`).
    Raises HardwareError for an unknown chip, a topology that does not exist, or a faulty file.
    """
    spec = usual(spec.strip())
    slices, name, sizes = _parse(spec)
    description = _file(name) if name.endswith(".toml") else _description(name)
    if sizes is None and description.devices is not None:
        slices, sizes = _own_topology(name, description.devices)
    if sizes is None and not description.has_links:
        sizes = (1,)
    if sizes is None:
        raise HardwareError(f"hardware {spec!r} has no topology; write {_example(name, description.chip)}")
    dims = _dims(name, description.chip, spec, slices, sizes)
    if not description.has_links and (number := slices * prod(dims)) > 1:
        raise HardwareError(
            f"hardware {spec!r} joins {number} chips, and {name} has no [network]; fits: {name}:1"
        )
    chip = share_cores(description.chip, dims[0]) if description.per_core else description.chip
    return Hardware(spec, chip, dims, slices).running(XLA)


def usual(spec: str) -> str:
    """The spec of a machine named as clouds and schedulers do; any other text is returned unchanged.

    Google counts the TensorCores of TPU v2 to v4 and v5p, two a chip, and the chips of others.

    >>> usual("64xh100"), usual("h100x8"), usual("v5p-256"), usual("v5litepod-16"), usual("h100:8")
    ('h100:64', 'h100:8', 'v5p:128', 'v5e:16', 'h100:8')
    >>> usual("tpu-v4-32"), usual("v4-32")
    ('v4p:16', 'v4p:16')
    >>> usual("RTX 4090"), usual("2x4090")
    ('rtx4090', 'rtx4090:2')
    >>> usual("2 x RTX 3090"), usual("v5e 16x16"), usual("4090x2")
    ('rtx3090:2', 'v5e:16x16', 'rtx4090:2')
    >>> usual("h100:8*8"), usual("h100:64gpus"), usual("64 H100 GPUs"), usual("h100*64")
    ('h100:8x8', 'h100:64', 'h100:64', 'h100:64')
    >>> usual("64 x H100 80GB SXM"), usual("A100-SXM4-40GB:8")
    ('h100:64', 'a100-40gb:8')
    >>> usual("v5p:8*8*8"), usual("v5p (8x8x8)"), usual("2*v5p:4x4x4"), usual("Google TPU v5p 4x4x4")
    ('v5p:8x8x8', 'v5p:8x8x8', '2*v5p:4x4x4', 'v5p:4x4x4')
    >>> usual("two RTX 4090"), usual("dual-4090"), usual("rtx4090,rtx4090"), usual("v5e-pod")
    ('rtx4090:2', 'rtx4090:2', 'rtx4090:2', 'v5e:16x16')
    >>> usual("2x8 H100"), usual("2*8*h100"), usual("2*v5e-256")
    ('h100:2x8', 'h100:2x8', '2*v5e:256')
    >>> usual("32-node-h100"), usual("4 nodes of H100s")
    ('h100:32x8', 'h100:4x8')
    >>> usual("8 nodes of 8 H100"), usual("4 x 8 x A100-80GB"), usual("a100-80gb:128x8")
    ('h100:8x8', 'a100-80gb:4x8', 'a100-80gb:128x8')
    """
    spec = _as_sizes(re.sub(r"^(google |cloud |aws |amd |nvidia )*(tpu )?(?=\S)", "", spec, flags=re.I))
    spec = re.sub(r"^([a-z]+)[ -](?=\S)", _in_figures, spec, flags=re.I)
    if of_parts := _pod(spec) or _hosts(spec):
        return of_parts
    if match := re.fullmatch(r"(\d+) ((?!x )[a-z].*)", spec, re.I):  # 64 H100
        spec = f"{match[1]}x{match[2]}"
    for joined in (spec.replace(" ", ""), spec.replace(" ", "-")):
        name, colon, sizes = joined.partition(":")
        if " " in spec and name.lower() in _aliases():
            return f"{_aliases()[name.lower()]}{colon}{sizes}"
    if match := re.fullmatch(r"(.*\S) +(\d+(?:x\d+)+)", spec):
        return f"{usual(match[1])}:{match[2]}"
    if match := re.fullmatch(r"(\d+)(?:x([a-z][\w-]*:\d+(?:x\d+)+)|\*([a-z]\S*-\d+))", spec, re.I):
        return f"{match[1]}*{match[2] or usual(match[3])}"
    joined = spec.replace(" ", "")
    for pattern, form in _USUAL:
        if (match := re.fullmatch(pattern, joined, re.I)) and match["name"].lower() in _aliases():
            known = chip(match["name"])
            number = int(match["number"])
            if form == "cores":
                if not isinstance(known.network, Torus):
                    continue
                number //= known.cores_in_cloud_names or 1
            return f"{known.name}:{number}"
    return _by_words(spec) or spec


def specs(text: str) -> list[str]:
    """The specs in a value of --hardware, which commas join.

    One machine may have commas too: a chip that is named several times, or its number in words.

    >>> specs("h100:8, v5p:4x4x4"), specs("4090, 2 cards"), specs("4090,4090"), specs("4090,3090")
    (['h100:8', 'v5p:4x4x4'], ['4090, 2 cards'], ['4090,4090'], ['4090', '3090'])
    """
    parts = [part.strip() for part in text.split(",")]
    are_names = all(part.partition(":")[0].lower() in _aliases() for part in parts)
    are_several = are_names and len({*parts}) > 1
    is_one = not are_several and "," not in usual(text)  # `usual` reads one machine
    return [text.strip()] if is_one else parts


def _in_figures(match: re.Match[str]) -> str:
    """The first word of a machine's name, in figures if it is a number in words: `two ` is `2 `."""
    number = NUMBER_WORDS.get(match[1].lower())
    return f"{number} " if number else match[0]


def _pod(text: str) -> str:
    """The spec of all chips of a pod, such as `v5e-pod`; "" for other texts."""
    match = re.fullmatch(r"(?:a )?(?:full |whole )?(v\w+?)[- ](?:full[- ])?pod", text, re.I)
    name = _aliases().get(match[1].lower()) if match else None
    network = chip(name).network if name else None
    return f"{name}:{'x'.join(map(str, network.pod))}" if isinstance(network, Torus) else ""


def _hosts(text: str) -> str:
    """The spec of hosts of several chips each, such as `8 nodes of 8 H100`; "" for other texts."""
    for form in _HOSTS:
        if (hosts := form.fullmatch(text)) and (name := _aliases().get(hosts["name"].lower())):
            return f"{name}:{hosts['hosts']}x{hosts.groupdict().get('each', GPUS_OF_A_HOST)}"
    return ""


# Words next to a chip's name that do not tell it from others.
_BESIDE_CHIPS = re.compile(
    r"sxm\d?|pcie|hbm\de?|gddr\d\w?|nvidia|geforce|tesla|instinct|google|cloud|amd|intel|tpu|gpus?|chips?|"
    r"cards?|devices?|nodes?|hosts?|servers?|machines?|of|with|each|and|x"
)
_MOST_PARTS = 3  # of a chip's name: rtx6000-ada, gb200-nvl72
_MOST_NUMBERS = 2  # hosts, and chips of each


def _by_words(text: str) -> str:
    """The spec of a machine by a text's words: a chip, up to two numbers, and _BESIDE_CHIPS; else "".

    >>> _by_words("H100 SXM5-80gb:256"), _by_words("8x NVIDIA H100"), _by_words("4090+4090")
    ('h100:256', 'h100:8', 'rtx4090:2')
    >>> _by_words("4090 4090"), _by_words("Tesla T4 x4")
    ('rtx4090:2', 't4:4')
    >>> _by_words("v5e-256 x2"), _by_words("h100 32 nodes 8 gpus"), _by_words("h100-big"), _by_words("h100:8")
    ('2*v5e:256', 'h100:32x8', '', '')
    """
    if re.fullmatch(r"[\w.*-]*:[\dx]+|[\w-]+", text) and not re.search(r"gb\b|hbm|\ds\b", text, re.I):
        return ""  # a chip with its number, or one word
    same = re.split(r"[+,\s]+", text.lower().strip())
    if len(same) > 1 and len({*same}) == 1:
        return _by_words(f"{len(same)} {same[0]}")
    if slices := re.fullmatch(r"(.*-\d+) *[x*] *(\d+)", text):
        single = usual(slices[1])
        return f"{slices[2]}*{single}" if ":" in single else ""
    plain = re.sub(r"\bx(?=\d+\b)|(?<=\d)x(?![\da-z]*x\d)(?=[a-z\W])", " ", text.lower())
    parts = re.findall(r"[a-z0-9.]+", plain)
    for length in range(_MOST_PARTS, 0, -1):
        for at in range(len(parts) - length + 1):
            others = [*parts[:at], *parts[at + length :]]
            names = "-".join(parts[at : at + length]), "".join(parts[at : at + length])
            if others and (spec := _of_parts(names, others)):
                return spec
    return ""


def _of_parts(names: Iterable[str], others: Collection[str]) -> str:
    """The spec of a chip with one of the names, by the numbers in the others; "" if a word is unknown."""
    sizes = [word for word in others if re.fullmatch(r"\d+gb", word)]
    aliases = [f"{name}-{size}" for name in names for size in sizes]
    aliases += [each for name in names for each in (name, name.removesuffix("s"))]
    known = next((_aliases()[name] for name in aliases if name in _aliases()), "")
    numbers = [word for word in others if word.isdecimal()]
    beside = [word for word in others if word not in (*sizes, *numbers)]
    if not known or not all(_has_memory(known, int(size[:-2])) for size in sizes):
        return ""
    if len(numbers) > _MOST_NUMBERS or not all(map(_BESIDE_CHIPS.fullmatch, beside)):
        return ""
    return f"{known}:{'x'.join(numbers)}" if numbers else known


def _as_sizes(spec: str) -> str:
    """A spec without words for a card's form, and with sizes joined by x: `H100 SXM GPUs`, `h100:8*8`."""
    spec = re.sub(r"(?<=\d)[ -](\d+) ?gb\b", r"-\1gb", spec, flags=re.I)  # A100 80 GB
    spec = re.sub(r"\s*(gpus?|chips?|cards?|devices?)$", "", spec, flags=re.I) or spec
    if match := re.fullmatch(r"(.*?)( SXM\d?| PCIe| HBM\d?e?)+(:.*)?", spec, re.I):  # H100 SXM
        spec = match[1] + (match[3] or "")
    if (match := re.fullmatch(r"(.*?)-(\d+)gb(:.*)?", spec, re.I)) and _is_of_size(match[1], int(match[2])):
        spec = match[1] + (match[3] or "")
    spec = re.sub(r"[\s:]*\((\d+(?:[x*]\d+)*)\)$", r":\1", spec)  # v5p (8x8x8)
    if match := re.fullmatch(r"(.*:)(\d+(?:[x*]\d+)+)", spec):  # h100:8*8
        spec = match[1] + match[2].replace("*", "x")
    if match := re.fullmatch(r"([\w-]+)-(\d+(?:x\d+)+)", spec):  # v5e-4x4
        spec = f"{match[1]}:{match[2]}"
    return spec


def _is_of_size(text: str, gigabytes: int) -> bool:
    """Whether a text ends with a chip that has about that memory, and no chip is named with it."""
    name = re.sub(r"^\d+x", "", (text.lower().split() or [""])[-1])
    if f"{name}-{gigabytes}gb" in _aliases():  # a100-80gb
        return False
    return name in _aliases() and _has_memory(name, gigabytes)


def _has_memory(name: str, gigabytes: int) -> bool:
    """Whether a chip has that memory, to 10%, since names of products round it."""
    return abs(chip(name).hbm_bytes / 1e9 - gigabytes) < 0.1 * gigabytes


def chip_of(name: str) -> Chip:
    """The chip of a catalog name or of the path of a TOML, for any topology."""
    return (_file(name) if name.endswith(".toml") else _description(name)).chip


def template(name: str) -> str:
    """The catalog's TOML of a chip, as a start for a user's own file."""
    chip_of(name)  # raises for a name that the catalog does not have
    file = _folder() / f"{_aliases()[name.lower()]}.toml"
    return file.read_text(encoding="utf-8")


def with_file(spec: str, move: Callable[[str], str]) -> str:
    """`spec` with `move` applied to the path of its file; the name of a catalog chip is returned unchanged.

    >>> with_file("2*my/chip.toml:8x8", lambda path: f"/home/{path}"), with_file("v5e:4x4", str.upper)
    ('2*/home/my/chip.toml:8x8', 'v5e:4x4')
    """
    match = re.fullmatch(r"(\d+\*)?(.+\.toml)(:[\dx]+)?", spec)
    return f"{match[1] or ''}{move(match[2])}{match[3] or ''}" if match else spec


def _own_topology(path: str, devices: str) -> tuple[int, tuple[int, ...] | None]:
    """The number of slices and the sizes under `devices` in a machine.toml."""
    try:
        slices, _, sizes = _parse(devices)
    except HardwareError as error:
        raise HardwareError(f"{path}: devices: {error}") from error
    return slices, sizes


def _parse(spec: str) -> tuple[int, str, tuple[int, ...] | None]:
    """A spec taken apart: (slices, chip or path, sizes of the topology or None)."""
    match = re.fullmatch(r"(?:(\d+)\*)?([^:*]+|.+\.toml)(?::(\d+(?:x\d+)*))?", spec)
    if not match:
        several = ", several by repeating --hardware" if "," in spec else ""
        raise HardwareError(f"hardware {spec!r} does not parse; write {_FORMS}{several}")
    sizes = tuple(int(size) for size in match[3].split("x")) if match[3] else None
    return int(match[1] or 1), match[2], sizes


@cache
def names() -> list[str]:
    """The names of the catalog: TPUs, GPUs, then the host; within each, by bf16 peak."""
    known = [path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml")]
    kinds = list(PLATFORMS)
    return sorted(known, key=lambda name: (kinds.index(chip(name).kind), chip(name).flops("bf16"), name))


@cache
def chip(name: str) -> Chip:
    """The catalog's chip called `name` or one of its aliases; for `cpu` one core of this host.

    Raises HardwareError naming the nearest known chip.
    """
    return _description(name).chip


@cache
def _description(name: str) -> Description:
    file = _folder() / f"{name.lower()}.toml"
    if not re.fullmatch(r"[\w-]+", name) or not file.is_file():
        known = _aliases()
        if name.lower() not in known:
            other = unlisted_machine(name)
            hint = other.hint if other else _like(name.lower())
            raise HardwareError(f"hardware {name!r} is unknown; {hint}")
        return _description(known[name.lower()])
    return _with_step(read_chip(file.read_text(encoding="utf-8"), f"catalog/{file.name}"))


# Chips to offer for a name with a vendor or a kind of machine in it; the first word counts.
_OF_VENDORS = {
    **dict.fromkeys(("nvidia", "cuda", "dgx", "hgx"), ("h100", "b200")),
    **dict.fromkeys(("amd", "rocm"), ("mi300x", "mi325x")),
    **dict.fromkeys(("tpu", "google"), ("v5p", "v6e")),
    "studio": ("m3-ultra", "m2-ultra"),
    "mini": ("m4-pro",),
    **dict.fromkeys(("apple", "mps"), ("m4-max", "m3-ultra")),
    **dict.fromkeys(("macbook", "mac", "imac"), ("m4-max", "m4-pro")),
    **dict.fromkeys(("local", "localhost", "here", "this", "laptop", "pc", "self", "computer"), ("cpu:8",)),
    "aws": ("trainium2", "inferentia2"),
    "colab": ("t4", "l4"), "kaggle": ("t4",), "gpu": ("h100", "rtx4090"), "ampere": ("a100-80gb",),
    "hopper": ("h100", "h200"), "blackwell": ("b200", "gb200-nvl72"), "ada": ("l40s", "rtx4090"),
    "trainium": ("trainium2",), "inferentia": ("inferentia2",), "gaudi": ("gaudi3", "gaudi2"),
}  # fmt: skip


# Words in a computer's name that do not say which chip it has.
_OF_COMPUTERS = ("pro", "air", "silicon", "machine", "card", "chip")
_MEMORY = re.compile(r"(?:(?P<count>\d+) ?x ?)?(?P<size>\d+) ?gi?b?")  # 24GB, 2x24GB


# Names of machines that clouds rent: p5.48xlarge, Standard_ND96isr_H100_v5, a3-megagpu-8g, BM.GPU.H100.8.
_OF_CLOUDS = re.compile(
    r"(ml\.)?[a-z]+\d\w*\.(\d*x?large|metal)|standard_n[\w-]+|(a|g|n)\d-\w+-\d+\w*|bm\.gpu[\w.-]*|gpu_\d+x_\w+"
)


@cache
def _like(name: str) -> str:
    """A hint for an unknown name of a chip.

    The hint is the chips of a cloud's machine, a chip whose words are all in the name, chips of a vendor that
    the name mentions, or the names with the nearest spelling.
    """
    known = _aliases()
    machine = (
        name.removeprefix("standard_").removeprefix("ml.").replace("dgx_", "dgx-").replace("hgx_", "hgx-")
    )
    if spec := _rented(machine):
        return f"write {spec}"
    if sized := next((each for each in _machines() if each.startswith(f"{machine}.")), ""):
        return f"write {_machines()[sized]} for a {sized}"
    if size := _MEMORY.fullmatch(name):
        return f"name a chip; these have {size['size']} GB: {', '.join(with_memory(int(size['size'])))}"
    if _OF_CLOUDS.fullmatch(name):
        return "the catalog lacks this cloud machine; write its chips, such as a10:4 (mw hardware lists them)"
    counted = re.fullmatch(r"(.+?)[ _-](\d+)", name)
    if counted and counted[1] in known and not any(chip.startswith(name) for chip in known):
        spec = usual(name)
        return f"write {spec if spec != name else f'{_aliases()[counted[1]]}:{counted[2]}'}"
    words = set(re.split(r"[^a-z0-9]+", name.replace("litepod", "e").replace("lite", "e")))
    joined = plain_name(name)
    if name.isdigit():
        return f"name the chip too: h100:{name}"
    if name in _OF_VENDORS:
        return f"did you mean {' or '.join(_OF_VENDORS[name])}?"
    begun = sorted((chip for chip in names() if len(name) > 1 and chip.startswith(name)), key=len)
    if begun:
        return f"did you mean {' or '.join(begun[:3])}?"
    within = [chip for chip in known if words >= set(chip.split("-")) or joined == chip.replace("-", "")]
    if within:
        return f"did you mean {max(within, key=len)}?"
    for word, chips in _OF_VENDORS.items():
        if word in words:
            return f"did you mean {' or '.join(chips)}?"
    return nearest(name, list(known))


def _rented(name: str) -> str:
    """The spec of a cloud's machine by its name, perhaps with another chip: colab-l4; "" for other names."""
    words = set(re.split(r"[^a-z0-9]+", name))
    machine = name if name in _machines() else min(words & _machines().keys(), default="")
    if not machine:
        return ""
    usual_chip, _, count = _machines()[machine].partition(":")
    others = words - {machine}
    named = (chip for alias, chip in _aliases().items() if others == set(alias.split("-")))
    return f"{next(named, usual_chip)}:{count}"


def unlisted_machine(text: str) -> Unlisted | None:
    """The machine that a text names, if the catalog lacks its chip and has a similar one."""
    return unlisted(text, _aliases())


@cache
def _aliases() -> dict[str, str]:
    """The catalog's file for every name and alias."""
    by_name: dict[str, str] = {}
    for file in sorted(_folder().iterdir(), key=lambda path: path.name):
        if file.name.endswith(".toml"):
            read = read_chip(file.read_text(encoding="utf-8"), f"catalog/{file.name}").chip
            by_name |= dict.fromkeys((read.name, *read.aliases), read.name)
    return by_name


def everyday(name: str) -> tuple[str, ...]:
    """Chips for the name of a vendor, a kind of computer or a size of memory; () for other names.

    A number before the size counts the chips.

    >>> everyday("MacBook Pro"), everyday("48GB"), everyday("h100")
    (('m4-max', 'm4-pro'), ('l40', 'l40s', 'rtx6000-ada'), ())
    >>> everyday("2x24GB")[0]
    'a10:2'
    """
    words = re.split(r"[ _-]", name.lower().strip())
    if size := _MEMORY.fullmatch(name.lower()):
        number = f":{size['count']}" if size["count"] else ""
        return tuple(f"{each}{number}" for each in with_memory(int(size["size"])))
    are_known = all(word in (*_OF_VENDORS, *_OF_COMPUTERS) for word in words)
    return next((chips for word, chips in _OF_VENDORS.items() if are_known and word in words), ())


def with_memory(gigabytes: int) -> list[str]:
    """The chips whose memory is nearest to this size."""
    off = {name: abs(chip(name).hbm_bytes - gigabytes * 1e9) for name in names()}
    return sorted(name for name, each in off.items() if each == min(off.values()))


@cache
def _machines() -> dict[str, str]:
    """The spec of every machine that clouds rent and vendors sell, by its name."""
    return {machine: f"{name}:{count}" for name in names() for machine, count in chip(name).machines.items()}


def _folder() -> Any:
    return resources.files("meshwright.hardware") / "chips"


def _file(path: str) -> Description:
    description = read_chip(read_text(Path(path), HardwareError), path)
    return _with_step(replace(description, chip=_with_known_names(description.chip)))


def _with_known_names(given: Chip) -> Chip:
    """`given` with the names that compilers and clusters have for the catalog's chip of that name."""
    if given.name not in names() or (known := chip(given.name)).kind != given.kind:
        return given
    keys = "num_matrix_units", "compiler", "gke_accelerator", "machines"
    return replace(given, **{key: getattr(given, key) or getattr(known, key) for key in keys})


def nearest_chip(given: Chip) -> Chip:
    """The catalog's chip with a [step], of the same kind, with the nearest memory bandwidth, as a ratio.

    Memory identifies the generation of a chip. Peak FLOPs do not: an H20 has the memory of an H100 and a
    seventh of its FLOPs. Among chips with equal memory: the nearest links, then the first name.
    """

    def distance(known: Chip) -> tuple[float, float, str]:
        memory = abs(log(known.hbm_bytes_per_second / given.hbm_bytes_per_second))
        return memory, abs(log(known.link_bytes_per_second / given.link_bytes_per_second)), known.name

    measured = (known.chip for known in map(_description, names()) if known.has_step)
    return min((known for known in measured if known.kind == given.kind), key=distance)


def step_warning(given: Chip) -> str | None:
    """A sentence on the figures that a file without `[step]` takes from the catalog; None if it has one."""
    if given.step.taken_from is None:
        return None
    known, step = chip(given.step.taken_from), given.step
    if given.name in names() and chip(given.name).step.taken_from:
        why = f"no step of {given.name} is published"
        which = known.name
    else:
        why = f"the file of {given.name} has no [step]"
        which = (
            f"{known.name}, the {given.kind} of the catalog nearest in memory bandwidth "
            f"({format_bytes(known.hbm_bytes_per_second)}/s; {given.name}: "
            f"{format_bytes(given.hbm_bytes_per_second)}/s)"
        )
    return (
        f"{why}, so a training step is priced with the shares of the ratings reached by {which}: "
        f"{step.matmul_share('bf16'):.0%} of the bf16 peak in matmuls, {step.attention:.0%} in attention, "
        f"{step.memory:.0%} of the memory bandwidth; give a [step], or measure one with mw calibrate"
    )


def slice_warning(machine: Hardware) -> str | None:
    """The reason that no cloud offers a TPU slice of this shape; None if clouds do, and for other machines.

    3D: sides are multiples of the cube's 4, or parts of one cube. 2D: powers of two, the longer side at
    most twice the shorter. Source: cloud.google.com/tpu/docs, the topologies of each version.
    """
    network, dims = machine.chip.network, sorted(machine.dims)
    if not isinstance(network, Torus):
        return None
    if step := network.wraparound_multiple_of:
        offered = all(side % step == 0 for side in dims) or all(side in (1, 2, step) for side in dims)
        sides = f"sides are multiples of {step}, or 1, 2 and {step} within one cube"
    else:
        offered = all(side & (side - 1) == 0 for side in dims) and dims[-1] <= 2 * dims[0]
        sides = "sides are powers of two, the longer at most twice the shorter"
    return (
        None if offered else f"{machine.spec} is not a slice that clouds offer: {sides}; it is planned anyway"
    )


def _with_step(description: Description) -> Description:
    """The description; without a [step] of its own, it takes another chip's of the catalog."""
    if description.has_step:
        return description
    given = description.chip
    known = chip(description.step_from) if description.step_from else nearest_chip(given)
    sources = {key: f"from {known.name}: {source}" for key, source in known.step.sources.items()}
    step = replace(known.step, sources=sources, taken_from=known.name)
    if isinstance(given.network, Switch) and given.network.between:
        step = NETWORKS[given.network.between].applied(step)
    complete = replace(given, step=step, inference=given.inference or known.inference)
    return replace(description, chip=complete)


def _dims(name: str, chip: Chip, spec: str, slices: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a machine from the sizes in its spec, checked against the network of its chip."""
    if slices < 1 or 0 in sizes:
        raise HardwareError(f"hardware {spec!r}: every size is at least 1")
    if (num_chips := slices * prod(sizes)) > _MOST_CHIPS:
        raise HardwareError(f"hardware {spec!r} has {num_chips:,} chips; plans reach {_MOST_CHIPS:,}")
    if isinstance(chip.network, Torus):
        return _torus_dims(name, chip.network, spec, sizes)
    if slices > 1:
        raise HardwareError(f"hardware {spec!r}: only TPUs come in slices; write {_example(name, chip)}")
    if isinstance(chip.network, Switch):
        return _switch_dims(name, chip, chip.network.domain_size, spec, sizes)
    if len(sizes) != 1:
        raise HardwareError(f"hardware {spec!r}: a host has one number of devices: {name}:{prod(sizes)}")
    return sizes


def _torus_dims(name: str, torus: Torus, spec: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    rank, largest = len(torus.pod), "x".join(map(str, torus.pod))
    if len(sizes) != rank:
        fit = _squarest(prod(sizes), torus.pod)
        if fit and len(sizes) == 1:
            return fit
        hint = f"write {name}:{'x'.join(map(str, fit))}" if fit else f"up to {name}:{largest}"
        raise HardwareError(f"hardware {spec!r}: {name} is a {rank}D torus, not {len(sizes)}D; {hint}")
    if any(size > most for size, most in zip(sorted(sizes), sorted(torus.pod), strict=True)):
        raise HardwareError(
            f"hardware {spec!r} is larger than a {name} pod, {largest}; join slices: 2*{name}:{largest}"
        )
    return sizes


def _squarest(num_chips: int, pod: tuple[int, ...]) -> tuple[int, ...] | None:
    """The topology of `num_chips` nearest to a cube, its largest dimension last, or None."""
    fits = [
        sizes
        for sizes in product(divisors(num_chips), repeat=len(pod))
        if prod(sizes) == num_chips
        and list(sizes) == sorted(sizes)
        and all(size <= most for size, most in zip(sizes, sorted(pod), strict=True))
    ]
    return min(fits, key=sum, default=None)


def _switch_dims(name: str, chip: Chip, domain: int, spec: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) == 1:
        filled = _domains(sizes[0], domain, min(chip.chips_per_host, domain))
        if filled is None:
            near = max(sizes[0] // domain, 1) * domain
            raise HardwareError(
                f"hardware {spec!r}: {sizes[0]} GPUs do not fill NVLink domains of {domain}; "
                f"write {name}:{near} or {name}:{near + domain}, or domains x GPUs"
            )
        return filled
    if len(sizes) != 2:
        raise HardwareError(f"hardware {spec!r}: write domains x GPUs, such as {name}:8x{domain}")
    if sizes[1] > domain:
        fits = f"{name}:{-(-prod(sizes) // domain)}x{domain}"
        raise HardwareError(
            f"hardware {spec!r}: an NVLink domain of {name} holds {domain}, not {sizes[1]}; write {fits}"
        )
    return sizes


def _domains(num_gpus: int, domain: int, host: int) -> tuple[int, int] | None:
    """(domains, GPUs of each): the fewest domains of equal size and whole hosts, at least half full.

    >>> _domains(256, 72, 4), _domains(12, 8, 8), _domains(4, 8, 8)
    ((4, 64), None, (1, 4))
    """
    if num_gpus <= domain:
        return 1, num_gpus
    fewest, most = -(-num_gpus // domain), 2 * num_gpus // domain
    alike = (n for n in range(fewest, most + 1) if num_gpus % n == 0 and num_gpus // n % host == 0)
    return next(((n, num_gpus // n) for n in alike), None)


def _example(name: str, chip: Chip) -> str:
    if isinstance(chip.network, Torus):
        return f"{name}:{'x'.join('4' for _ in chip.network.pod)}"
    return f"{name}:8" if chip.platform.virtual else f"{name}:8, or {name}:1 for a single chip"


def dump_toml(hardware: Hardware) -> str:
    """The machine.toml that `load` reads back as this hardware, with figures per device.

    bench/calibration.py writes measured figures in this form, with their sources.
    """
    chip, network = hardware.chip, hardware.chip.network
    slices = f"{hardware.num_slices}*" if hardware.num_slices > 1 else ""
    head = _present({key: getattr(chip, key) for key in _HEAD}) | {
        "aliases": list(chip.aliases),
        "devices": f"{slices}{chip.name}:{'x'.join(map(str, hardware.dims))}",
    }
    if chip.price_per_chip_hour:
        head["currency"] = chip.currency
    tables: dict[str, dict[str, Any]] = {"": head, "flops_per_second": dict(chip.flops_per_second)}
    tables |= {key: dict(vars(chip)[key]) for key in ("matmul_rates", "memory_rates") if vars(chip)[key]}
    # The file has a [step], so `taken_from` is not written; its sources still name the chip.
    for name in ("step", "inference"):
        if efficiency := vars(chip)[name]:
            stated = [one.name for one in fields(efficiency) if not one.metadata.get("unread")]
            tables |= _nested(name, _present({key: vars(efficiency)[key] for key in stated}))
    if isinstance(network, SharedMemory):
        tables |= {f"network.{op}": _present(vars(cost)) for op, cost in network.costs.items()}
    else:
        tables["network"] = _present(
            {key: value for key, value in vars(network).items() if key not in _NOT_FIGURES}
        )
        tables |= {f"network.efficiency.{link}": dict(by_op) for link, by_op in network.efficiency.items()}
        if isinstance(network, Switch) and network.by_nodes:
            tables["network.by_nodes"] = dict(network.by_nodes)
    if chip.compiler:
        tables["compiler"] = {key: value for key, value in vars(chip.compiler).items() if value}
    tables["sources"] = dict(chip.sources)
    return "\n".join(_table(name, values) for name, values in tables.items())


def _nested(name: str, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`values` as TOML tables by heading; a table among them gets its own heading."""
    inner = {f"{name}.{key}": value for key, value in values.items() if isinstance(value, dict)}
    return {name: {key: value for key, value in values.items() if not isinstance(value, dict)}, **inner}


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without the keys whose value is None or empty."""
    return {key: value for key, value in values.items() if value not in (None, (), {})}


# Keys of a network with tables of their own, figures of [step] and of programs, and names of records.
_NOT_FIGURES = (
    "efficiency", "by_nodes", "scatter_passes", "falloff", "within", "between", "direct_seconds",
    "exchange_bytes_per_second",
)  # fmt: skip
_HEAD = (
    "name", "kind", "chips_per_host", "hbm_bytes", "hbm_usable_bytes", "hbm_bytes_per_second", "host_bytes",
    "host_link_bytes_per_second", "matrix_unit", "num_matrix_units", "compute_capability", "gke_accelerator",
    "cores_in_cloud_names",
    "power_watts", "power_limit_watts",
    "price_per_chip_hour", "no_price",
)  # fmt: skip


def _table(name: str, values: dict[str, Any]) -> str:
    title = [f"[{name}]"] if name else []
    return "\n".join([*title, *(f"{key} = {_value(value)}" for key, value in values.items())]) + "\n"


def _value(value: object) -> str:
    # JSON writes strings, integers, lists and finite floats as TOML does.
    return json.dumps(list(value) if isinstance(value, tuple) else value)
