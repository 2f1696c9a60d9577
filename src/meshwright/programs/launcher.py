"""Training software as a user starts it: the layouts that it runs, and its settings for them; one TOML each.

A setting's key says when it is written:

    always.WORD    for every layout
    WORD           if the word of the layout is above 1, or true
    WORD.VALUE     if the word has this value

Its text is a line of the program's settings with {WORD} for values (plan/launch_settings.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.records import Folder, Record

FORMS = ("arguments", "yaml", "json", "python")


@dataclass(frozen=True)
class Launcher(Record):
    """A training program, the layouts that it runs, and its settings.

    prices: the program (`PROGRAMS`) whose steps these are. version: the release that the settings are of.
    form: how settings are written. command: the line that starts a run. needs: further conditions of a run.
    chips: the kinds of chips that it runs on.
    axes: the axes that it has. apart: pairs of axes that it does not combine. schedules: of pipelines; ()
    without stages. remats: by rising recomputation. zero_data, zero_sharded: stages of ZeRO over `data`, and
    over `fsdp`. context_methods: of attention over context. sequence_parallel: whether norms are split over
    tensor, "always", "never" or "any". offloads: whether it can keep optimizer state in the host's memory.
    equal_stages: whether chunks of layers must be equal.
    base: fields of a layout that differ from a search's defaults. settings: see above.
    """

    prices: str = ""
    version: str = ""
    form: str = field(default="arguments", metadata={"words": FORMS})
    command: str = ""
    needs: tuple[str, ...] = ()
    chips: tuple[str, ...] = ("gpu",)
    axes: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    remats: tuple[str, ...] = ("none", "full")
    zero_data: tuple[str, ...] = ("0",)
    zero_sharded: tuple[str, ...] = ("3",)
    context_methods: tuple[str, ...] = ("allgather",)
    sequence_parallel: str = field(default="any", metadata={"words": ("always", "never", "any")})
    offloads: bool = False
    equal_stages: bool = False
    base: Mapping[str, str] = field(default_factory=dict, hash=False)
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)


LAUNCHERS = Folder(Launcher, "programs.launchers", "training program")
