"""The colours of every picture and page, each for a light and for a dark screen.

Work is blue, waiting is red to orange, hidden or idle time is pale. Each mesh axis has a colour of its own.
"""

COLOURS = {
    "ink": ("#141824", "#e7eaf1"),
    "muted": ("#5b6475", "#97a1b5"),
    "line": ("#dfe3ea", "#262e3d"),
    "card": ("#ffffff", "#151a24"),
    "band": ("#eef1f6", "#1c2330"),
    "compute": ("#3f63a3", "#5f86cc"),
    "gradients": ("#6b8cc4", "#86a6dc"),
    "memory": ("#a9c0e2", "#a9c0e2"),
    "buffers": ("#9cc9c6", "#9cc9c6"),
    "waiting": ("#c4512d", "#e8825f"),
    "exposed": ("#e9a15b", "#e9a15b"),
    "bubble": ("#8b93a3", "#8b93a3"),
    "rest": ("#5b6475", "#7d8698"),
    "hidden": ("#c9cfda", "#4a5364"),
    "dp": ("#96670b", "#d9a13f"),
    "fsdp": ("#0f7f8c", "#3db4bf"),
    "tp": ("#b13a72", "#e07aa9"),
    "fsdp_tp": ("#4b52c9", "#8f95ff"),
    "best_band": ("#dcdff0", "#2b3145"),
    "axis-0": ("#c2410c", "#ff9a62"),
    "axis-1": ("#4338ca", "#a5a6ff"),
    "axis-2": ("#0f766e", "#5fd4c4"),
    "axis-3": ("#be185d", "#ff8fc0"),
    "axis-4": ("#7c5e10", "#e2c26a"),
    "axis-5": ("#475569", "#a8b3c7"),
}
# For curves and for parts without their own colours. The colours of curves are dark enough for words.
CURVES = ("compute", "waiting", "fsdp", "tp", "dp", "fsdp_tp")
SERIES = ("compute", "fsdp", "exposed", "memory", "tp", "buffers", "gradients", "bubble")


def variables(dark: bool) -> str:
    """The colours as CSS variables."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())


def rules() -> str:
    """CSS that gives the variables to marks in a page."""
    marks = [
        f".f-{name} {{ fill: var(--{name}); }} .s-{name} {{ stroke: var(--{name}); }}" for name in COLOURS
    ]
    words = [f".{name} {{ color: var(--{name}); }}" for name in COLOURS if name.startswith("axis")]
    return "\n".join(marks + words)
