"""docs/images/*.svg: the pictures of the documents, from what meshwright computes and from recorded results.

    python -m docs.generate.pictures

writes them to the repository, so that pages show them there; the site draws them when it is built.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory

from markupsafe import Markup

import meshwright as mw
from meshwright.cli.main import main
from meshwright.files import write_whole
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.plan import curves
from meshwright.report.draw.chart import Chart, ChartAxis, padded_ends
from meshwright.report.draw.figure import Figure, Panel
from meshwright.report.draw.marks import arrow, bar, disc, label, line
from meshwright.report.pictures.bars import Bar, memory_pieces, stacked
from meshwright.report.pictures.curve_plots import curves_figure
from meshwright.units import format_bytes, format_count, format_seconds

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
# The four cases of "Sharded Matrices".
CASES = {
    1: "A[I_X, J] . B[J, K_Y] -> C[I_X, K_Y]",
    2: "A[I, J_X] . B[J, K] -> C[I, K]",
    3: "A[I, J_X] . B[J_X, K] -> C[I, K]",
    4: "A[I_X, J] . B[J, K_X] -> C[I_X, K]",
}
# The product of how-to/shard-a-product.md.
_EXCHANGED = "A[I_X, J] . B[J_X, K] -> C[I_X, K]"


def pictures() -> dict[str, str]:
    """The text of each picture by its file name."""
    drawn = {f"matmul-case-{number}.svg": case(text) for number, text in CASES.items()}
    drawn["shard.svg"] = blocks(_EXCHANGED, "X=4,Y=2", "I=1024,J=4096,K=4096", "v5e:4x2")
    figures = (loop(), narrow_loop(), torus(), zero(), scatter(), *plots())
    return drawn | {figure.file_name: figure.standalone() for figure in figures}


def plots() -> Iterator[Figure]:
    """The curves of the book's pages, as `mw plot` draws them there."""
    llama = load_model("llama-2-13b")
    batches = [1, 8, 16, 32, 64, 240]
    drawn = (
        curves.bandwidth_plot(catalog.load("v5e:16x16")),
        curves.ring_latency("h100", 1024),
        curves.attention_share(load_model("llama-3-8b")),
        curves.fsdp_degree(llama, catalog.load("v5p:16x16x16"), 3_000_000),
        curves.strategies_over_batch(replace(llama, d_ff=30_000), catalog.load("v5p:4x4x4")),
        curves.decode_batch(
            replace(llama, max_seq_len=8192), catalog.load("v5e:8"), 8192, Layout.of(tensor=8), batches
        ),
        curves.look_ahead([0.6, 0.8, 0.9], 0.06),
    )
    return (curves_figure(plot).first_frame() for plot in drawn)


def case(text: str) -> str:
    """The cheapest way of a case of "Sharded Matrices" on four chips."""
    return blocks(text, "X=2,Y=2" if "_Y" in text else "X=4", "I=1024,J=1024,K=1024", "v5e:2x2")


def blocks(text: str, mesh: str, dims: str, hardware: str) -> str:
    """The blocks of each device before and after every step, as `mw shard --svg` draws them."""
    words = ["--mesh", mesh, "--dims", dims, "--hardware", hardware]
    with TemporaryDirectory() as name:
        path = Path(name) / "blocks.svg"
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            main(["shard", text, *words, "--svg", str(path)])
        return path.read_text(encoding="utf-8")


# The stages of the loop: name, command, effect and colour; and what each hands to the next.
_STAGES = (
    ("plan", "mw plan", "ranks layouts", "compute"),
    ("run", "mw train, mw serve", "runs that layout in JAX", "fsdp"),
    ("audit", "mw audit", "compiles the same step", "fsdp_tp"),
    ("measure", "mw calibrate, mw bench", "times it on the machine", "tp"),
)
_HANDED = ("plan.toml", "plan.toml", "differences")


def _stage(number: int, x: float, y: float, width: float, height: float) -> list[Markup]:
    """The box of a stage of the loop."""
    name, command, what, colour = _STAGES[number]
    return [
        bar(x, y, width, height, "band"),
        bar(x, y, 4, height, colour),
        label(name, x + 16, y + 25, size=16, weight=600),
        label(command, x + 16, y + 45, "muted"),
        label(what, x + 16, y + 63, "muted"),
    ]


def narrow_loop() -> Figure:
    """The loop from top to bottom, for phones, whose text is as large as the page's."""
    width, height, gap, top = 250, 78, 36, 8
    parts: list[Markup] = []
    for number in range(len(_STAGES)):
        y = top + number * (height + gap)
        parts += _stage(number, 0, y, width, height)
        if number:
            parts += [
                arrow((width / 2, y - gap + 5), (width / 2, y - 5)),
                label(_HANDED[number - 1], width / 2 + 14, y - gap / 2 + 4, "muted", size=12),
            ]
    end, back = top + len(_STAGES) * (height + gap) - gap, width + 26
    first, last = top + height / 2, end - height / 2
    line_back = [(width, last), (back, last), (back, first), (width + 6, first)]
    head = [(width + 8, first - 4), (width + 2, first), (width + 8, first + 4)]
    parts += [line(line_back, "muted", width=1.4), line(head, "muted", width=1.4)]
    caption = "What was measured prices the next plan."
    return Figure.of(
        "loop-narrow", "Plan, run, audit, measure", caption, Panel(back + 4, end + 8, Markup().join(parts))
    )


def loop() -> Figure:
    """Plan, run, audit, measure, and what each hands to the next."""
    width, height, gap, top = 172, 78, 74, 8
    parts: list[Markup] = []
    for number in range(len(_STAGES)):
        x = number * (width + gap)
        parts += _stage(number, x, top, width, height)
        if number:
            parts += [
                arrow((x - gap + 6, top + height / 2), (x - 6, top + height / 2)),
                label(_HANDED[number - 1], x - gap / 2, top + 30, "muted", anchor="middle", size=11),
            ]
    end = len(_STAGES) * (width + gap) - gap
    low = top + height + 34
    back = [
        (end - width / 2, top + height),
        (end - width / 2, low),
        (width / 2, low),
        (width / 2, top + height + 6),
    ]
    tip = width / 2, top + height + 2
    head = [(tip[0] - 4, tip[1] + 6), tip, (tip[0] + 4, tip[1] + 6)]
    parts += [line(back, "muted", width=1.4), line(head, "muted", width=1.4)]
    parts.append(
        label(
            "machine.toml, metrics.jsonl: what was measured prices the next plan",
            end / 2,
            low - 7,
            "muted",
            anchor="middle",
        )
    )
    caption = "One layout, in one file, passes between the four. Plan and audit need no accelerator."
    return Figure.of("loop", "Plan, run, audit, measure", caption, Panel(end, low + 10, Markup().join(parts)))


def torus() -> Figure:
    """Two mesh axes on a plane of 16 chips: rings on one kind of chip, lines on another."""
    panels = [
        _plane("v5p:4x4x4", "v5p:4x4x4, one plane: every dimension of 4 is a ring"),
        _plane("v5e:4x4", "v5e:4x4: only a dimension of 16 would be a ring"),
    ]
    caption = (
        "Each square is a chip. A ring gathers in both directions at once. A line lacks the link that "
        "closes it, and the same gather takes longer."
    )
    return Figure.of("torus", "Mesh axes on a torus", caption, *panels)


def _plane(spec: str, words: str) -> Panel:
    machine = catalog.load(spec)
    size, step, top, left = 20, 62, 56, 34
    parts = [label(words, 0, 14, size=12, weight=600)]
    rings = machine.wraparound[:2]
    for axis, colour in ((0, "fsdp"), (1, "tp")):
        for track in range(4):
            places = [
                (left + n * step, top + track * step) if axis else (left + track * step, top + n * step)
                for n in range(4)
            ]
            middles = [(x + size / 2, y + size / 2) for x, y in places]
            parts.append(line(middles, colour, width=2.2))
            if rings[axis]:
                parts.append(_wrap(middles[0], middles[-1], colour, axis))
    for n in range(16):
        parts.append(bar(left + n % 4 * step, top + n // 4 * step, size, size, "compute"))
    low = top + 3 * step + size + 40
    parts += [
        label("fsdp: along the columns", left, low, "fsdp"),
        label("tensor: along the rows", left, low + 18, "tp"),
    ]
    return Panel(360, low + 26, Markup().join(parts))


def _wrap(start: tuple[float, float], end: tuple[float, float], colour: str, axis: int) -> Markup:
    """The link that closes a ring, beside the line."""
    off = 17
    if axis:
        points = [
            start,
            (start[0] - 16, start[1]),
            (start[0] - 16, start[1] - off),
            (end[0] + 16, end[1] - off),
            (end[0] + 16, end[1]),
            end,
        ]
    else:
        points = [
            start,
            (start[0], start[1] - 16),
            (start[0] - off, start[1] - 16),
            (end[0] - off, end[1] + 16),
            (end[0], end[1] + 16),
            end,
        ]
    return line(points, colour, width=1.3, dashes="3 3")


def zero() -> Figure:
    """Memory of a chip by ZeRO stage, as the planner counts it."""
    work = mw.Train("256Ki", "4k")
    rows = {
        "none": "data=64",
        "ZeRO-1": "data=64,zero=1",
        "ZeRO-2": "data=64,zero=2",
        "ZeRO-3 (FSDP)": "fsdp=64",
    }
    priced = {
        name: mw.price("llama-3-8b", "h100:8x8", work, f"{text},remat=full").to_dict()
        for name, text in rows.items()
    }
    bars = [
        Bar(name, "", memory_pieces(one["bytes_per_chip"]), format_bytes(one["bytes_per_chip"]["total"]))
        for name, one in priced.items()
    ]
    usable = catalog.load("h100:8x8").chip.program_bytes
    most = 1.02 * max(usable, *(one["bytes_per_chip"]["total"] for one in priced.values()))
    panel = stacked(bars, most=most, marks=[(usable, f"{format_bytes(usable)} of an H100")])
    caption = (
        "llama-3-8b on 64 H100s, bf16 weights, float32 moments, remat=full, one sequence of 4,096 tokens a "
        "GPU, as mw plan train counts it."
    )
    return Figure.of("zero", "Memory of one GPU by ZeRO stage", caption, panel)


def scatter() -> Figure:
    """Predicted against published, one dot a row, each row's source left out of the fit."""
    with (ROOT / "benchmarks" / "results" / "fit_published.json").open(encoding="utf-8") as file:
        errors = json.load(file)["leave_one_source_out"]["log_errors"]
    with (ROOT / "benchmarks" / "published" / "training.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["id"] in errors]
    steps = [_point(row, errors[row["id"]]) for row in rows if row["metric"] == "step_seconds"]
    rates = [_point(row, -errors[row["id"]]) for row in rows if row["metric"] == "tokens_per_s_per_chip"]
    panels = (
        _dots(steps, "step time", format_seconds),
        _dots(rates, "tokens per second and chip", lambda value: format_count(round(value))),
    )
    caption = (
        f"{len(steps)} step times and {len(rates)} throughputs that others published. Out of sample: the "
        "constants were fitted without the row's source. Solid: exact. Dashed: 20% off."
    )
    return Figure.of("scatter", "Predicted against measured", caption, *panels)


def _point(row: dict[str, str], log_error: float) -> tuple[dict[str, str], float, float]:
    """(row, published, predicted) in the row's unit."""
    published = float(row["value"])
    return row, published, published * exp(log_error)


def _dots(rows: Sequence[tuple[dict, float, float]], what: str, text: Callable[[float], str]) -> Panel:
    low, high = padded_ends([value for _, *pair in rows for value in pair], 0.05)
    published_axis, predicted_axis = (
        ChartAxis(f"{kind} {what}", text, (low, high), logarithmic=True)
        for kind in ("published", "predicted")
    )
    chart = Chart(published_axis, predicted_axis, 420, 400, left=64, top=30)
    parts = []
    for factor, dashes in ((1.0, ""), (1.2, "4 3"), (1 / 1.2, "4 3")):
        ends = [
            (max(low, low / factor), max(low, low * factor)),
            (min(high, high / factor), min(high, high * factor)),
        ]
        parts.append(line([chart.place(*end) for end in ends], "muted", dashes=dashes))
    for row, published, predicted in rows:
        gpu = row["hardware"].partition(":")[0][:1] in "abghlm"
        title = (
            f"{row['model']} on {row['hardware']}: {text(predicted)} predicted, {text(published)} published"
        )
        parts.append(disc(*chart.place(published, predicted), 3, "tp" if gpu else "fsdp", title=title))
    for number, (name, colour) in enumerate((("GPUs", "tp"), ("TPUs", "fsdp"))):
        parts += [disc(84 + number * 66, 40, 4, colour), label(name, 94 + number * 66, 44)]
    return chart.panel("", *parts)


if __name__ == "__main__":
    for name, text in pictures().items():
        write_whole(IMAGES / name, text)
