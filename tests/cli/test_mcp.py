"""mw mcp as a process, asked by a client of the protocol."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.mcp import brief_plan, command_document, shortened

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters

SERVER = StdioServerParameters(command=sys.executable, args=["-m", "meshwright", "mcp"], env={**os.environ})


def asked(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of one server to several calls of tools."""

    async def ask() -> list[dict[str, Any]]:
        async with Client(SERVER) as client:
            results = [await client.call_tool(name, arguments) for name, arguments in calls]
            return [result.structured_content for result in results]

    return asyncio.run(ask())


def tools() -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with Client(SERVER) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    return asyncio.run(ask())


def test_tools_have_words_and_typed_arguments() -> None:
    found = tools()
    assert {"plan_training", "plan_serving", "fit", "audit_hlo", "reshard", "list_hardware"} <= set(found)
    assert all(tool.description for tool in found.values())
    schema = found["plan_training"].input_schema
    assert set(schema["required"]) == {"model", "hardware", "batch_tokens", "seq_len"}


def test_answers_are_short_documents_or_one_line() -> None:
    work = {"model": "llama-3-8b", "hardware": "h100:1x8", "batch_tokens": "64Ki", "seq_len": "4k"}
    plan, in_numbers, wrong, fits, chips = asked(
        ("plan_training", work | {"layout": "fsdp=8,remat=full"}),
        ("plan_training", work | {"batch_tokens": 65536, "seq_len": 4096, "layout": "fsdp=8,remat=full"}),
        ("plan_training", work | {"layout": "tp=8"}),
        ("fit", {"model": "llama-3-8b", "hardware": "rtx4090"}),
        ("list_hardware", {}),
    )
    assert plan["best"]["step_seconds"] == in_numbers["best"]["step_seconds"] > 0
    assert wrong == {"error": "layout: tp is tensor here; write tensor=8"}
    assert any(way["fits"] for way in fits["ways"])
    assert "h100" in {chip["name"] for chip in chips["hardware"]}


SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
def step(x, w_in, w_out):
    h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w_in), P())
    return h @ w_out
shapes, specs = [(4096, 256), (256, 1024), (1024, 256)], [P("data"), P(), P()]
shardings = [NamedSharding(mesh, spec) for spec in specs]
arrays = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=p) for s, p in zip(shapes, shardings)]
with jax.set_mesh(mesh):
    print(jax.jit(step).lower(*arrays).compile().as_text())
"""


def compiled(script: str, path: Path) -> Path:
    """What the script prints, in a process of its own on 8 virtual devices."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=True,
    )
    path.write_text(done.stdout)
    return path


@pytest.mark.slow
def test_a_script_is_mended_by_its_findings(tmp_path: Path) -> None:
    """An agent's turn: audit, read the finding, edit the constraint that it names, audit again."""

    def audited(script: str) -> dict[str, Any]:
        path = str(compiled(script, tmp_path / "step.txt"))
        return asked(("audit_hlo", {"path": path, "hardware": "v5e:8", "mesh": "data=8"}))[0]

    before = audited(SCRIPT)
    assert before["verdict"] == "differs"
    assert "with_sharding_constraint" in before["warnings"][0]["change"]
    after = audited(SCRIPT.replace("P())\n", 'P("data"))\n'))
    assert after["verdict"] == "match" and not after["warnings"]


def test_long_documents_are_cut() -> None:
    short = shortened({"environment": 1, "rows": list(range(100)), "text": "x" * 5000})
    assert short["rows"][-1] == "and 92 more" and len(short["text"]) < 2100 and "environment" not in short


def test_a_plan_is_answered_in_a_page() -> None:
    """A plan's answer has verdict, best layout with its parts, runners-up and reasons, within 7 kB."""
    work = ("--model", "llama-3-70b", "--hardware", "h100:8x8", "--batch-tokens", "4M", "--seq-len", "8k")
    document = command_document(["plan", "train", *work])
    brief = shortened(brief_plan(document))
    assert len(json.dumps(brief)) < 7000 < 18000 < len(json.dumps(shortened(document)))
    assert brief["verdict"] == document["verdict"]
    best, parts = brief["best"], brief["best"]["breakdown"]
    assert best["layout"] == document["best"]["layout"]
    assert best["step_seconds"] == pytest.approx(document["best"]["step_seconds"], rel=1e-3)
    assert best["bytes_per_chip"] == document["best"]["bytes_per_chip"]
    assert set(parts[0]) == {"name", "share", "bound"} and parts[-1].endswith("more")
    assert {"name", "text"} <= set(brief["rejected"][0])
    assert len(brief["candidates"]) == 6


def test_a_command_that_fails_is_one_line() -> None:
    assert command_document(["model", "nothing"])["error"].startswith("model 'nothing' is neither")
