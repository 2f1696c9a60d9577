"""mw mcp: the planner and the audit as tools of the Model Context Protocol, for agents and editors.

A tool runs one command with --json in a process of its own, so that a bad argument cannot end the server, and
JAX starts only for an audit. Answers are cut to fit a context: the best layouts, the largest findings.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import typer

from meshwright import __version__
from meshwright.cli.command_options import command
from meshwright.cli.console import WITHOUT_LINES
from meshwright.cli.extras import require
from meshwright.options import option

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_TIMEOUT_SECONDS = 600
# Items of a list in an answer, and characters of a text.
_MOST_ITEMS, _MOST_CHARACTERS = 8, 2000
# Keys of a plan's document in a brief answer; details=True gives all.
_BRIEF_KEYS = (
    "error", "notes", "notices", "verdict", "best", "candidates", "frontier", "faster", "rejected", "ranges",
    "smallest", "explanation",
)  # fmt: skip
# Keys of a layout, of a part of its step, and of a rejected layout in a brief answer.
_FIGURES = (
    "name", "hardware", "chips", "layout", "weights_dtype", "kv_dtype", "batch", "max_batch",
    "step_seconds", "mfu", "ttft_seconds", "tpot_seconds", "tokens_per_second",
    "tokens_per_second_per_chip", "share", "bound", "bytes_per_chip", "fits", "breakdown",
    "price_per_million_tokens", "why_not_run", "why_not", "text",
)  # fmt: skip
_MOST_LAYOUTS = 5  # layouts of a list, and parts of a step, in a brief answer
_DIGITS = 4  # significant digits of its figures
_KEYS_OF_LAYOUTS = {"best", "candidates", "frontier", "faster", "rejected"}
# The heading of an explanation's last section. `rejected` has the same reasons.
_WHY_NOT = "\n\nWhy not another"

SKILL = """\
meshwright plans how to shard a Transformer over TPUs or GPUs and checks compiled programs, without the chips.
- "Which layout for training MODEL on MACHINE?": plan_training.
- "What does this layout cost?": plan_training with layout.
- "Does it fit my card?": fit.
- "Which chips serve it at this time per token?": plan_serving.
- "Why is my JAX step slow? Which collectives does it have?": compile it, write compiled.as_text() to a file,
  and call audit_hlo. Each finding names a source line and the change to make; edit, compile, call it again.
- "What does moving weights between two layouts cost?": reshard.
Models are presets (llama-3-70b), Hugging Face names or paths of a config.json. Machines are v5p:16x20x28,
v5e:4x4, h100:8x8, rtx4090:1 or a .toml; list_hardware names the chips. An error says what would fit.
"""


@command(app)
def mcp(
    transport: Literal["stdio", "http"] = option("stdio", help="stdio, or http on this machine's loopback."),
    port: int = option(8765, least=1, most=65535, help="With --transport http: the port."),
) -> None:
    """Serve plans, prices, audits and hardware as tools of the Model Context Protocol.

    \b
    mw mcp
    mw mcp --transport http --port 8765
    """
    require("mcp")
    tools = server()
    if transport == "stdio":
        tools.run("stdio")
    else:
        tools.run("streamable-http", host="127.0.0.1", port=port)


# A number, or one with a suffix: 4096, "4k", "4Ki".
Count = int | str


def server() -> Any:
    """The server with its tools."""
    from mcp.server.mcpserver import MCPServer

    tools = MCPServer("meshwright", version=__version__, instructions=SKILL)
    for function in (plan_training, plan_serving, fit, audit_hlo, reshard, model, list_hardware, hardware):
        tools.tool()(function)
    return tools


def plan_training(
    model: str,
    hardware: str,
    batch_tokens: Count,
    seq_len: Count,
    layout: str | None = None,
    given: str | None = None,
    software: str | None = None,
    details: bool = False,
) -> dict[str, Any]:
    """Rank layouts for training by predicted step time, with MFU, memory and why; or price one layout.

    batch_tokens: 4M or 4Mi. seq_len: 8k. layout: fsdp=64,tensor=8. given: conditions, tensor=8,pipe<=4.
    software: the training program to price, such as megatron-core or torchtitan. details: also the mesh,
    assumptions, thresholds and shardings.
    """
    options = {"--layout": layout, "--given": given, "--software": software}
    work = ["--batch-tokens", str(batch_tokens), "--seq-len", str(seq_len)]
    return _answer(
        ["plan", "train", "--model", model, "--hardware", hardware, *work], options, brief=not details
    )


def plan_serving(
    model: str,
    hardware: str,
    prompt_tokens: Count,
    output_tokens: Count,
    tpot: float | None = None,
    ttft: float | None = None,
    weights_dtype: str | None = None,
    details: bool = False,
) -> dict[str, Any]:
    """Rank chips, slice sizes, layouts and batches for serving; tpot, ttft: targets in seconds.

    hardware: chips or machines, v5e,h100:8. weights_dtype: bf16, fp8, int8, int4. details: also the frontier
    of each chip and other ways to prefill.
    """
    options = {"--tpot": tpot, "--ttft": ttft, "--weights-dtype": weights_dtype}
    work = ["--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens)]
    return _answer(
        ["plan", "serve", "--model", model, "--hardware", hardware, *work], options, brief=not details
    )


def fit(model: str, hardware: str | None = None, seq_len: Count | None = None) -> dict[str, Any]:
    """Ways to train and serve a model that fit a machine, with batch, context and speed of each."""
    return _answer(["fit", model], {"--hardware": hardware, "--seq-len": seq_len})


def audit_hlo(path: str, hardware: str | None = None, mesh: str | None = None) -> dict[str, Any]:
    """Findings in the optimised HLO text of any XLA program: accidental collectives, lines, remedies.

    mesh: the axes of the devices, data=16,tensor=4.
    """
    return _answer(["audit", "--hlo", path], {"--hardware": hardware, "--mesh": mesh})


def reshard(before: str, after: str, model: str, hardware: str) -> dict[str, Any]:
    """Collectives, bytes and seconds of moving a model's weights from one layout to another."""
    return _answer(["reshard", before, after, "--model", model, "--hardware", hardware], {})


def model(name: str, seq_len: Count | None = None) -> dict[str, Any]:
    """Parameters, FLOPs per token and cache of a model."""
    return _answer(["model", name], {"--seq-len": seq_len})


def list_hardware() -> dict[str, Any]:
    """The names of the known chips, with peak FLOP/s, memory and bandwidth."""
    machines = command_document(["hardware"])
    if "error" in machines:
        return machines
    figures = ("name", "kind", "hbm_bytes", "hbm_bytes_per_second")
    chips = [
        {key: chip[key] for key in figures} | {"bf16_flops": chip["flops_per_second"].get("bf16")}
        for chip in machines["hardware"]
    ]
    return {"hardware": chips}


def hardware(name: str) -> dict[str, Any]:
    """Every figure of one chip with its source."""
    return command_document(["hardware", name])


def _answer(
    arguments: Sequence[str], options: Mapping[str, object], *, brief: bool = False
) -> dict[str, Any]:
    given = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
    document = command_document([*arguments, *given])
    return shortened(brief_plan(document) if brief else document)


def brief_plan(document: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's verdict, layouts and reasons, without its other keys. Figures have four significant digits.

    >>> brief_plan({"best": {"mfu": 0.453981, "mesh": {"data": 8}}, "model": {"name": "llama-3-8b"}})
    {'best': {'mfu': 0.454}}
    """
    made = {key: document[key] for key in _BRIEF_KEYS if document.get(key)}
    if "rejected" in made and "explanation" in made:
        made["explanation"] = made["explanation"].partition(_WHY_NOT)[0]
    return {
        key: _figures(value) if key in _KEYS_OF_LAYOUTS else _rounded(value) for key, value in made.items()
    }


def _figures(value: object) -> Any:
    """The figures of a layout; for a list, of its first layouts, and the number that is left out."""
    if isinstance(value, list):
        kept = [_with_total(_figures(each)) for each in value[:_MOST_LAYOUTS]]
        return [*kept, f"and {len(value) - len(kept)} more"] if len(value) > len(kept) else kept
    if not isinstance(value, dict):
        return value
    made = {key: value[key] for key in _FIGURES if value.get(key) not in (None, [], {})}
    if "breakdown" in made:
        made["breakdown"] = _figures(made["breakdown"])
    return _rounded(made)


def _with_total(row: Any) -> Any:
    """A layout of a list with only the sum of its bytes, since `best` has their parts."""
    if not isinstance(row, dict) or "bytes_per_chip" not in row:
        return row
    return row | {"bytes_per_chip": {"total": row["bytes_per_chip"]["total"]}}


def _rounded(value: object) -> Any:
    """A document with its floats rounded to four significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def command_document(arguments: Sequence[str]) -> dict[str, Any]:
    """The document of a command, with its notes; or {"error": its line}."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_LINES, *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"mw {arguments[0]} took over {_TIMEOUT_SECONDS} s"}
    notes = [line.removeprefix("mw: ") for line in done.stderr.splitlines() if line.startswith("mw: ")]
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": notes[-1] if notes else f"mw {arguments[0]} ended with code {done.returncode}"}
    return document | ({"notes": notes} if notes else {})


def shortened(value: object) -> Any:
    """A document with the first items of each list, and the number that is left out."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items() if key not in ("environment", "search")}
    if isinstance(value, list):
        kept = [shortened(_without_parts(inner)) for inner in value[:_MOST_ITEMS]]
        more = len(value) - len(kept)
        return [*kept, f"and {more} more"] if more else kept
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return value[:_MOST_CHARACTERS] + " ..."
    return value


def _without_parts(item: object) -> Any:
    """An item of a list without the parts of its step, which `best` has."""
    if not isinstance(item, dict):
        return item
    return {key: inner for key, inner in item.items() if key not in ("breakdown", "evidence")}
