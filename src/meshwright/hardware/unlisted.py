"""Chips that the catalog lacks, each with the nearest one, whose file can be copied and edited."""

import re
from collections.abc import Collection
from dataclasses import dataclass

# Patterns of cards' names without punctuation, each with the catalog's chip of the nearest architecture.
_NEAREST = (
    (r"(rtx|gtx)?50[5-9]0(ti)?(super)?d?", "rtx5090"),
    (r"(rtx|gtx)?40[5-9]0(ti)?(super)?d?", "rtx4090"),
    (r"(rtx|gtx)?30[5-9]0(ti)?(super)?", "rtx3090"),
    (r"rtx[4-6][05]00ada", "rtx6000-ada"),
    (r"(rtx|gtx)?(20[5-9]0|16[5-9]0)(ti)?(super)?|(quadro)?rtx[4568]000|titanrtx", "t4"),
    (r"(rtx)?a(2|16|30|40|2000|4000|4500|5000|5500|6000)(\d\dgb)?", "a10"),
    (r"(gtx)?10[5-8]0(ti)?|(tesla)?(k80|m40|m60|p4|p40|p100)(\d\dgb)?|titan(x|xp|v)", "v100"),
    (r"(instinct)?mi(50|60|100|210)", "mi250x-gcd"),
    (r"a10g", "a10"),
    (r"(tesla)?v100(sxm\d|pcie)?16gb", "v100"),
    (r"m[1-5]ultra", "m2-ultra"),
    (r"m[1-5]max", "m4-max"),
    (r"m[1-5]pro", "m4-pro"),
    (r"h20(\d\dgb)?|h100nvl", "h100"),
    (r"b100", "b200"),
)  # fmt: skip
_VENDORS = re.compile(r"\b(nvidia|geforce|amd|radeon|gpus?|cards?)\b", re.I)
_COUNT = re.compile(
    r"(?:(?P<before>\d+) ?x ?)?(?P<name>.*?)(?:(?::| x ?|(?<=\d)x)(?P<after>\d+(?:x\d+)?))?", re.I
)


@dataclass(frozen=True)
class Unlisted:
    """A machine of a chip that the catalog lacks.

    name: the chip, with hyphens. nearest: the catalog's chip. count: devices, or hosts x devices.
    """

    name: str
    nearest: str
    count: str

    @property
    def file(self) -> str:
        """The name of a file for the chip's figures."""
        return f"{self.name}.toml"

    @property
    def template(self) -> str:
        """The command that writes the file, with the figures of the nearest chip."""
        return f"mw hardware --template {self.nearest} > {self.file}"

    @property
    def hint(self) -> str:
        return (
            f"{self.template} writes the figures of the nearest chip; edit them, then use --hardware "
            f"{self.file}:{self.count}"
        )


def unlisted(text: str, known: Collection[str]) -> Unlisted | None:
    """The machine that a text names, if its chip is not `known` and a similar one is.

    >>> unlisted("NVIDIA GeForce RTX 4070 Ti", ["rtx4090"])
    Unlisted(name='rtx-4070-ti', nearest='rtx4090', count='1')
    >>> unlisted("RTX 4060 Ti 16GB", []).name, unlisted("m2 max", []).nearest
    ('rtx-4060-ti', 'm4-max')
    >>> unlisted("4xA6000", [])
    Unlisted(name='a6000', nearest='a10', count='4')
    >>> unlisted("a6000:2x4", []).count, unlisted("h100:8", []), unlisted("llama-3-8b", [])
    ('2x4', None, None)
    """
    plain = re.sub(r"(?<=\w) \d+ ?gi?b$", "", " ".join(_VENDORS.sub(" ", text).split()), flags=re.I)
    match = _COUNT.fullmatch(plain)
    if match is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", match["name"].lower()).strip("-")
    letters = name.replace("-", "")
    nearest = next((chip for form, chip in _NEAREST if re.fullmatch(form, letters)), "")
    if not nearest or {name, letters} & set(known):
        return None
    return Unlisted(name, nearest, match["before"] or match["after"] or "1")
