"""Lines for chips that the catalog lacks, by the nearest chip and by a file of figures."""

from collections.abc import Sequence

from meshwright.hardware.catalog import unlisted_machine
from meshwright.hardware.unlisted import Unlisted

_MOST_WORDS = 5  # of a machine's name
_FORMS = ("--hardware=", "--gpu=")
# Options, also of other programs, whose value is a machine.
_MACHINES = {
    "--hardware",
    "--gpu",
    "--gpus",
    "--gpu-type",
    "--accelerator",
    "--device",
    "--chip",
    "--machine",
}


def with_nearest(words: Sequence[str]) -> tuple[list[str], Unlisted | None]:
    """The words with the nearest chip in place of one that the catalog lacks, and the replaced machine.

    >>> with_nearest("fit llama-3-8b 2x rtx 3080".split())[0]
    ['fit', 'llama-3-8b', 'rtx3090:2']
    """
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(_FORMS) else [word])]
    for at in range(1, len(words)):
        before = words[at - 1]
        if words[at].startswith("-") or (before.startswith("-") and before not in _MACHINES):
            continue
        for count in range(min(_MOST_WORDS, len(words) - at), 0, -1):
            part = words[at : at + count]
            if any(word.startswith("-") for word in part):
                continue
            if machine := unlisted_machine(" ".join(part)):
                spec = f"{machine.nearest}:{machine.count}"
                return [*words[:at], spec, *words[at + count :]], machine
    return list(words), None


def with_its_file(line: str, machine: Unlisted) -> str:
    """The command that writes the machine's file, and the line for the nearest chip with this file.

    "" if the line does not name the nearest chip.
    """
    spec = f"{machine.nearest}:{machine.count}"
    before, option, after = line.partition(f"--hardware {spec}")
    if not option or after[:1] not in ("", " "):
        return ""
    hardware = f"--hardware {machine.file}:{machine.count}"
    return f"{machine.template}, edit its figures, then type {before}{hardware}{after}"
