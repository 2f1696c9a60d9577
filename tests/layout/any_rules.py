"""Rules drawn at random: layouts that nobody named, over two or three mesh axes of two devices each."""

from collections.abc import Mapping

from hypothesis import strategies as st

from meshwright.layout import AxisTable, Layout, Precision, Rules, Schedule
from meshwright.notation.mesh import Mesh

AXES = ("x", "y", "z")
# What an axis may split of activations: letters that go together, since attention needs q and k alike.
SPLITS = ("B", "T", "NKFV", "NK", "F", "V", "")
# Letters of weights over which storage may be split besides; each divides by 8 in the models drawn for.
STORED = ("D", "F", "V", "H")

Entries = dict[str, list[str]]


@st.composite
def any_layouts(draw: st.DrawFn, max_axes: int = 3) -> Layout:
    """A layout of up to 8 devices whose every table is drawn letter by letter."""
    axes = AXES[: draw(st.integers(1, max_axes))]
    activations, used = _activations(draw, axes)
    stored = _more(draw, used, axes)
    updated = draw(st.sampled_from([stored, _more(draw, stored, axes)]))
    gradients = draw(st.sampled_from([stored, updated]))
    for axis in axes:
        if not any(axis in names for table in (activations, updated) for names in table.values()):
            activations.setdefault("B", []).append(axis)  # an axis that splits nothing is refused
    return Layout(
        Mesh(dict.fromkeys(axes, 2)),
        Rules(_table(stored), _table(used), _table(gradients), _table(updated), _table(activations)),
        Schedule(microbatches=draw(st.sampled_from([1, 2])), remat=draw(st.sampled_from(["none", "full"]))),
        Precision(weights_dtype="f32", compute_dtype="f32"),
    )


def _activations(draw: st.DrawFn, axes: tuple[str, ...]) -> tuple[Entries, Entries]:
    """Tables of activations and of weights in use: every axis splits one group of letters, or nothing."""
    activations: Entries = {}
    used: Entries = {}
    for axis in axes:
        # The models drawn for have 4 KV heads, which two axes split.
        fit = [letters for letters in SPLITS if "K" not in letters or len(used.get("K", ())) < 2]
        for letter in draw(st.sampled_from(fit)):
            activations.setdefault(letter, []).append(axis)
            if letter not in "BT":
                used.setdefault(letter, []).append(axis)
    return activations, used


def _more(draw: st.DrawFn, entries: Entries, axes: tuple[str, ...]) -> Entries:
    """`entries` and, for some of the axes that split no weight, a letter that they split."""
    more = {letter: list(names) for letter, names in entries.items()}
    for axis in axes:
        if not any(axis in names for names in more.values()) and draw(st.booleans()):
            more.setdefault(draw(st.sampled_from(STORED)), []).append(axis)
    return more


def _table(entries: Mapping[str, list[str]]) -> AxisTable:
    return AxisTable(tuple((letter, tuple(axes)) for letter, axes in entries.items()))
