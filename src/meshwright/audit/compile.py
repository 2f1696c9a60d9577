"""Compiles the training step of a plan in a process of its own and brings back the program.

A fresh process, because the number of virtual devices is fixed when JAX starts; the arrays are
abstract, so nothing of the model's size is allocated.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import AuditError
from meshwright.plan_file import Plan, load_plan, save_plan

# Virtual devices beyond this make XLA:CPU's compile slow; larger meshes need the target's compiler.
MAX_CPU_DEVICES = 256
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class CompiledProgram:
    """The optimised HLO, and the compiler's figures for one device; None where it gives none."""

    hlo: str
    compile_seconds: float
    memory_bytes: dict[str, int] | None


def compile_plan(plan: Plan) -> CompiledProgram:
    """The training step of `plan`, compiled for virtual CPU devices.

    Raises AuditError with the compiler's message and the layout if it does not compile.
    """
    num_devices = plan.layout.mesh.num_devices
    if num_devices > MAX_CPU_DEVICES:
        raise AuditError(
            f"the layout {plan.layout} has {num_devices} devices and the cpu target compiles for at most "
            f"{MAX_CPU_DEVICES}; audit a smaller mesh of the same axes"
        )
    with tempfile.TemporaryDirectory(prefix="meshwright-audit-") as folder:
        save_plan(plan, Path(folder) / "plan.toml")
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
        command = [sys.executable, "-m", "meshwright.audit.compile", folder]
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise AuditError(f"{plan.layout}: compiling took over {TIMEOUT_SECONDS} s") from error
        if ran.returncode:
            lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
            raise AuditError(f"{plan.layout} does not compile: {lines[-1]}")
        figures = json.loads((Path(folder) / "figures.json").read_text())
        return CompiledProgram((Path(folder) / "program.hlo").read_text(), **figures)


def _compile_here(folder: Path) -> None:
    """What the process does: plan.toml in, program.hlo and figures.json out."""
    import jax

    from meshwright.train.optimizer import OptimizerConfig
    from meshwright.train.step import CompiledStep

    plan = load_plan(folder / "plan.toml")
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
    step = CompiledStep(plan.model, plan.layout, plan.workload, optimizer, chip_flops_per_second=1.0)
    with jax.set_mesh(step.mesh):
        lowered = step.jitted.trace(step.abstract_state(), step.abstract_tokens()).lower()
        started = time.perf_counter()
        compiled = lowered.compile()
    seconds = time.perf_counter() - started
    (folder / "program.hlo").write_text(compiled.as_text())
    figures = {"compile_seconds": seconds, "memory_bytes": _memory(compiled)}
    (folder / "figures.json").write_text(json.dumps(figures))


def _memory(compiled: object) -> dict[str, int] | None:
    """Bytes of one device by cause; outputs that reuse a donated argument are not counted again."""
    analysis = compiled.memory_analysis()  # pyright: ignore[reportAttributeAccessIssue]
    if analysis is None:
        return None
    fresh_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": fresh_outputs,
        "temporaries": analysis.temp_size_in_bytes,
        "total": analysis.argument_size_in_bytes + fresh_outputs + analysis.temp_size_in_bytes,
    }


if __name__ == "__main__":
    _compile_here(Path(sys.argv[1]))
