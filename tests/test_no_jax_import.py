"""The planning half and the command line's front door answer without importing JAX.

Each check runs in a fresh interpreter, since this one may have JAX loaded by another test.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

SOURCE = Path(meshwright.__file__).parent
JAX_FREE_ROOMS = (
    "errors",
    "units",
    "notation",
    "hardware",
    "models",
    "optimizers",
    "programs",
    "layout",
    "cost",
    "plan",
)
HEAVY = ("jax", "jaxlib", "optax", "orbax", "grain", "torch", "transformers", "starlette")


def modules_of(room: str) -> list[str]:
    """Dotted names of `room` (a module or a package) and all modules inside."""
    module = SOURCE / f"{room}.py"
    files = [module] if module.exists() else sorted((SOURCE / room).rglob("*.py"))
    parts = [file.relative_to(SOURCE.parent).with_suffix("").parts for file in files]
    return [".".join(part).removesuffix(".__init__") for part in parts]


def heavy_modules_after(code: str) -> list[str]:
    """Which of HEAVY stand in `sys.modules` once `code` has run in a new interpreter."""
    report = f"import sys; print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    last_line = done.stdout.splitlines()[-1]
    assert last_line.startswith("loaded:")
    return last_line.split()[1:]


def test_the_check_sees_jax():
    assert "jax" in heavy_modules_after("import jax")


@pytest.mark.parametrize("room", JAX_FREE_ROOMS)
def test_room_imports_no_jax(room: str):
    modules = modules_of(room)
    assert modules, f"room {room} has no modules"
    assert heavy_modules_after("\n".join(f"import {module}" for module in modules)) == []


def test_package_imports_no_jax():
    assert heavy_modules_after("import meshwright") == []


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "train", "--help"]])
def test_help_imports_no_jax(arguments: list[str]):
    code = f"""
import sys
from meshwright.cli.main import run
sys.argv = ["mw", *{arguments!r}]
try:
    run()
except SystemExit as exit:
    assert not exit.code, exit.code
"""
    assert heavy_modules_after(code) == []


def test_the_list_of_commands_imports_no_rooms():
    code = """
import sys
from meshwright.cli.main import main
assert main(["--help"]) == 0
print(*(name for name in sys.modules if name.startswith("meshwright.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.removeprefix("meshwright.") for name in done.stdout.splitlines()[-1].split()}
    # Packages with the names of functions are loaded with the library; they are only docstrings.
    others = modules - {"audit", "hardware", "plan", "errors"}
    assert {name.split(".")[0] for name in others} == {"cli"}
