"""Audits of a script's function: its arguments, seconds by line, the page, and a patch for its findings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.audit.script import is_script, load_step, patch
from meshwright.cli.main import main
from meshwright.errors import AuditError
from meshwright.report.pages.script_audit import script_html

SCRIPT = """import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

def loss(w, x):
    h = jax.nn.relu(x @ w["w1"])
    return jnp.mean((h @ w["w2"]) ** 2)

def step(w, x):
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))

def array(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

def step_args():
    weights = {"w1": array((1024, 4096), "data", "tensor"), "w2": array((4096, 1024), "tensor", "data")}
    return weights, array((256, 1024), "data")

broken = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    return path


def audited(script: Path, output: Path) -> dict:
    """The document of a process: tests trace without source lines."""
    command = [sys.executable, "-m", "meshwright", "audit", f"{script}:step", "--hardware", "h100:8"]
    env = {name: value for name, value in os.environ.items() if name != "JAX_TRACEBACK_IN_LOCATIONS_LIMIT"}
    subprocess.run([*command, "-o", str(output)], env=env, capture_output=True, check=False)
    return json.loads(output.read_text())


@pytest.mark.slow
def test_a_patch_removes_the_finding(script: Path, tmp_path: Path):
    before = audited(script, tmp_path / "before.json")
    assert [found["kind"] for found in before["warnings"]] == ["activations_not_constrained"]
    assert {Path(line["where"].rpartition(":")[0]).name for line in before["lines"]} == {"own.py"}
    page = script_html(before)
    assert "own.py:8" in page and "+def split_by_batch(x):" in page
    (tmp_path / "own.patch").write_text(before["patch"])
    subprocess.run(["patch", "-p1", "-i", "own.patch"], cwd=tmp_path, check=True, capture_output=True)
    assert "jnp.mean((split_by_batch(h @ w[" in script.read_text()
    assert audited(script, tmp_path / "after.json")["warnings"] == []


def test_a_script_has_a_page(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "own.html"
    assert main(["audit", f"{script}:step", "--hardware", "h100:8", "-o", str(output)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Compiled for CPUs, priced on h100" in printed and "--target gpu" in printed
    page = output.read_text()
    assert "Without the findings" in page and "activations not constrained: " in page
    assert main(["audit", f"{script}:step", "--model", "tiny"]) == 2


def test_an_abstract_mesh_is_compiled_for_cpus_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    concrete = 'jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)'
    output = tmp_path / "own.json"
    options = ["--hardware", "v5e:2x4", "--target", "cpu", "-o", str(output)]
    for mesh, answer in (("(4, 2)", 1), ("(4, 4)", 2)):
        script = tmp_path / f"answered_by_{answer}.py"
        script.write_text(SCRIPT.replace(concrete, f'jax.sharding.AbstractMesh({mesh}, ("data", "tensor"))'))
        assert main(["audit", f"{script}:step", *options]) == answer
    assert "the mesh has 16 devices and this process 8" in " ".join(capsys.readouterr().err.split())
    document = json.loads(output.read_text())
    assert [finding["kind"] for finding in document["warnings"]] == ["activations_not_constrained"]
    assert "libtpu" not in document["versions"]


@pytest.mark.parametrize(
    ("hardware", "answer"),
    [
        ([], "give --hardware"),
        (["--hardware", "h100:8"], "h100:8 has a gpu"),
        (["--hardware", "h100"], "a gpu"),
    ],
)
def test_a_target_is_the_kind_of_the_hardware(
    hardware: list[str], answer: str, script: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["audit", f"{script}:step", "--target", "tpu", *hardware]) == 2
    assert answer in capsys.readouterr().err


def test_a_patch_cuts_lines_by_characters_and_names_the_mesh_only_in_its_script(tmp_path: Path):
    product = 'y = f("é·é", x @ w)\n'
    paths = [tmp_path / name for name in ("own.py", "other.py")]
    for path in paths:
        path.write_text(f"mesh = 1\n{product}")
    findings = [
        {"kind": "batch_not_sharded", "change": "", "where": f"{path}:2", "instruction": "i"}
        for path in paths
    ]
    document = {"warnings": findings, "emitted": [{"instruction": "i", "axes": ["data"]}]}
    own, other = patch(document, paths[0], "mesh").split("--- a/other.py")
    for diff in (own, other):
        assert '+y = f("é·é", split_by_batch(x @ w))' in diff
    assert "NamedSharding(mesh, " in own and "NamedSharding" not in other


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no function 'missing'; it has loss, step, array"),
        ("broken", "has no function 'broken'"),
        ("loss", r"write loss_args = \(params, batch\)"),
    ],
)
def test_what_a_script_lacks_is_named(name: str, message: str, script: Path):
    with pytest.raises(AuditError, match=message):
        load_step(f"{script}:{name}")


def test_a_script_that_fails_is_one_line(tmp_path: Path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(AuditError, match=r"bad.py does not run as a module: ZeroDivisionError"):
        load_step(f"{tmp_path / 'bad.py'}:step")
    assert is_script("a/b.py:step") and not is_script("plan.toml")
