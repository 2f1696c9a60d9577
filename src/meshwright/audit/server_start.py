"""Whether a server starts: its programs, weights, cache and temporaries against a chip's memory."""

from collections.abc import Mapping
from typing import Any

from meshwright.hardware.catalog import load
from meshwright.layout.server_programs import server_programs
from meshwright.plan_file import Plan


def server_memory(plan: Plan, generate: Mapping[str, Any], prefill: Mapping[str, Any]) -> dict[str, Any]:
    """The key `server` of `mw audit` of a serving plan, from the audits of both phases.

    program_bytes: code of all programs, each step as large as the compiled step of its phase, and programs
    that choose tokens as planned; the planned bytes of all programs if the compiler does not report its code.
    bytes: weights and cache, the largest temporaries, and `program_bytes` if it is known. None for unknown
    sizes.
    """
    hardware = load(plan.hardware)
    counts = server_programs(
        plan.model, plan.layout, hardware.chip.platform, plan.workload.num_sequences, plan.workload.seq_len
    )
    usable = hardware.chip.program_bytes
    code = [audit["program"]["bytes"] for audit in (generate, prefill)]
    memory = [audit["memory"]["compiled_by_cause"] for audit in (generate, prefill)]
    compiler = hardware.chip.platform.compiler
    program_bytes = counts.code_bytes(compiler, plan.model.num_layers)
    if None not in code:
        program_bytes = counts.bytes_of(code[0], code[1], compiler.sampler_code_bytes or 0)
    total = None
    if None not in memory:
        temporaries = max(one["temporaries"] + one["outputs"] for one in memory)
        total = memory[0]["arguments"] + temporaries + (program_bytes or 0)
    return {
        "programs": counts._asdict(),
        "program_bytes": program_bytes,
        "bytes": total,
        "usable_bytes": usable,
        "boots": None if total is None else total <= usable,
    }
