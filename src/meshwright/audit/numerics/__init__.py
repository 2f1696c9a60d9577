"""Comparison of a plan's arithmetic with the formulas, on a tiny twin of the plan.

The twin has the features of the planned model (norms, positions, heads per KV head, windows, biases, experts,
latents) in small dimensions, and the options of the layout on up to 32 devices (twin.py). Its own code
runs on virtual CPU devices in float32. The formulas are plain JAX (reference.py) and plain NumPy
(reference_update.py):

    training     the loss, every gradient, the weights and metrics of three clipped updates, and large logits
    inference    prompts of several lengths and ten tokens each, through the engine and its pages
    positions    rotary positions up to the end of the context, in 16 bits
    kernels      training or inference again with the chips' attention kernel, if it takes the plan: in
                 Pallas's interpreter, or for cuDNN jax.nn.dot_product_attention with XLA's implementation

It runs in a separate process, since the number of devices is fixed when JAX starts.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.audit.compile.cache import fetch, source_key, store
from meshwright.audit.compile.child import report_of
from meshwright.audit.numerics.twin import in_narrow_types, kernel_plan, tiny_model, tiny_plan
from meshwright.errors import AuditError, LayoutError, MeshwrightError
from meshwright.nn.start.devices import flags_with_devices, num_virtual_devices
from meshwright.plan_file import PLAN_FILE, Plan, save_plan

__all__ = ["cached_numerics", "check_numerics", "tiny_model", "tiny_plan"]

NARROW_FILE, KERNEL_FILE, _REPORT = "narrow.toml", "kernel.toml", "numerics.json"
_MOST_SECONDS = 300
# Most of the time would go to LLVM, and small programs do not need its optimisations. Without fusion emitters
# DualPipe's twin takes 14 CPU seconds in place of 76 (jaxlib 0.10.2); later releases do not know the flag.
_QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(("--xla_cpu_use_fusion_emitters=false",) if version("jaxlib").startswith("0.10.") else ()),
)


def cached_numerics(plan: Plan, *, use_cache: bool = True) -> dict[str, Any]:
    """The report of `check_numerics`, from the cache if this source made it before.

    If the twin does not run, `agrees` is None and `why` has the reason.
    """
    key = source_key({"numerics": asdict(replace(plan, planned={}, tuned=()))})
    if use_cache and (stored := fetch(key)):
        return json.loads((stored / _REPORT).read_text())
    try:
        report = check_numerics(plan)
    except MeshwrightError as error:
        return {"agrees": None, "why": str(error), "checks": []}
    if use_cache:
        store(key, {_REPORT: json.dumps(report)})
    return report


def check_numerics(plan: Plan) -> dict[str, Any]:
    """The twin's numbers against the formulas': `agrees`, and checks[] with `difference` and `tolerance`.

    Also loss, gradients[] and updates[] of a training step, or requests[] of inference. not_run: why Pallas's
    interpreter refuses the kernel, if it does. difference: relative to the tensor's largest entry, or in
    nats; None if a number is not finite. Raises AuditError if the twin does not run under the layout.
    """
    if plan.model.streams:
        raise AuditError(
            f"{plan.model.name}: the formulas of tiny models lack streams of the residual and compressed "
            "keys; leave numerics out"
        )
    try:
        small = tiny_plan(plan)
    except LayoutError as error:
        raise AuditError(f"{plan.layout}: no tiny model has this layout: {error}") from None
    narrow, of_kernel = in_narrow_types(plan, small), kernel_plan(plan)
    if _has_devices(small.layout.mesh.num_devices):
        from meshwright.audit.numerics.comparison import compared

        try:
            return compared(small, narrow, of_kernel)
        except MeshwrightError as error:
            raise AuditError(f"{small.layout}: the tiny model does not run: {error}") from error
    flags = " ".join((flags_with_devices(small.layout.mesh.num_devices), *_QUICK_TO_COMPILE))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory(prefix="meshwright-numerics-") as folder:
        save_plan(small, Path(folder) / PLAN_FILE)
        for more, name in ((narrow, NARROW_FILE), (of_kernel, KERNEL_FILE)):
            if more:
                save_plan(more, Path(folder) / name)
        return report_of(
            "meshwright.audit.numerics",
            [folder],
            environment=environment,
            seconds=_MOST_SECONDS,
            slow=f"{small.layout}: the tiny model ran for",
            failed=f"{small.layout}: the tiny model does not run",
        )


def _has_devices(count: int) -> bool:
    """Whether this process runs JAX on enough virtual CPU devices, as tests do."""
    is_cpu = "jax" in sys.modules and os.environ.get("JAX_PLATFORMS") == "cpu"
    return is_cpu and num_virtual_devices() >= count
