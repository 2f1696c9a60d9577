"""Compile the training step of a plan in another process, and read the program that it writes.

Another process is needed since JAX fixes the number of virtual devices when it starts, and since a compiler
that takes too much time or memory has to be ended. Arrays are abstract, so none is allocated.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.audit.compile.cache import content_key, fetch, libtpu_lock, store
from meshwright.audit.compile.child import error_line
from meshwright.audit.compile.planned_program import planned_training_step, traced_step
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import target_mesh
from meshwright.audit.hlo.link import Sent, StageCall
from meshwright.errors import AuditError, OutOfMemoryError
from meshwright.hardware.description import host_memory_bytes
from meshwright.nn.start.devices import flags_with_devices
from meshwright.plan_file import Plan, load_plan, save_plan
from meshwright.platforms import Compiler
from meshwright.units import format_bytes

if TYPE_CHECKING:
    import jax

# Seconds in which the compiler runs, and does not wait for a busy processor or another process's libtpu.
_TIMEOUT_SECONDS = 900
# Running and waiting together may take this many times as long.
_WAITING_FACTOR = 4
# A compiler that takes more of the host than this is ended before the host swaps or kills others.
MEMORY_SHARE = 0.8
_POLL_SECONDS = 0.1
# Separates the texts of the programs of stages.
STAGES_APART = "\n\f\n"
_PROGRAM, _FIGURES, _TARGET, _PLAN, _LOG = "program.hlo", "figures.json", "target.json", "plan.toml", "log"

# Warnings and errors as XLA logs them, of the files that shard a program and fit it into memory.
_LINE = re.compile(r"^[WE]\d{4} \S+ +\d+ (\w*(?:spmd|shard|remat|collective)\w*)\.cc:\d+\] (.*)")
REPLICATED = re.compile(r"nvoluntary full rematerialization")
_UNSHARDED = re.compile(r" parameter\((\d+)\)(?!, sharding=)")
LOGGED_OPERATION = re.compile(r"%([\w.\-]+) = (\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class CompiledProgram:
    """The optimised HLO, and the compiler's figures for one device; None if it has none.

    memory_bytes: of the largest stage in a pipeline. program_bytes: of the compiled code; in a pipeline, of
    all programs of the stage with the most. stages: of a pipeline whose stages run programs of their own.
    compiler_log: warnings about partitioning. cached: an earlier process compiled it.
    """

    hlo: str
    compile_seconds: float
    memory_bytes: dict[str, int] | None
    program_bytes: int | None = None
    stages: "StagePrograms | None" = None
    compiler_log: tuple[str, ...] = ()
    cached: bool = False


@dataclass(frozen=True)
class StagePrograms:
    """The programs of a pipeline's stages, each a part of the text, as a loop calls them.

    calls: in the order of their first runs. results: the new state of each stage, as in `StageCall.given`.
    memory_bytes: the peak of each stage in a step; `arguments` exist when it begins. sent: arrays between
    stages, with their number.
    """

    calls: tuple[StageCall, ...]
    results: tuple[tuple[str, ...], ...]
    memory_bytes: tuple[dict[str, int], ...]
    sent: tuple[tuple[Sent, int], ...]

    @classmethod
    def read(cls, document: dict) -> "StagePrograms":
        """The programs that `figures.json` lists."""
        return cls(
            tuple(StageCall(*one) for one in document["calls"]),
            tuple(map(tuple, document["results"])),
            tuple(document["memory_bytes"]),
            tuple((Sent(*one), count) for one, count in document["sent"]),
        )


def compile_plan(
    plan: Plan, target: Target, progress: Callable[[str], None] = lambda _: None, *, use_cache: bool = True
) -> CompiledProgram:
    """The training step of `plan`, compiled by `target` for its devices.

    progress: called with a description of the next work. Raises AuditError with the compiler's message and
    the layout if it does not compile, or takes too long or too much memory.
    """
    key = content_key(plan, target)
    if use_cache and (stored := fetch(key)):
        progress(f"read the program of {plan.layout} that {target.title} made before")
        return _read(stored, cached=True)
    lock = libtpu_lock(lambda: progress("waiting for another audit: libtpu runs one at a time"))
    with (
        tempfile.TemporaryDirectory(prefix="meshwright-audit-") as name,
        lock if target.compiler.exclusive else nullcontext(),
    ):
        folder = Path(name)
        save_plan(plan, folder / _PLAN)
        (folder / _TARGET).write_text(json.dumps(asdict(target)))
        progress(f"compiling {plan.layout} with {target.title}")
        _run(folder, plan, target)
        if use_cache:
            store(
                key,
                {file: (folder / file).read_text(errors="replace") for file in (_PROGRAM, _FIGURES, _LOG)},
            )
        return _read(folder, cached=False)


def _read(folder: Path, *, cached: bool) -> CompiledProgram:
    figures = json.loads((folder / _FIGURES).read_text())
    figures["stages"] = StagePrograms.read(stages) if (stages := figures.get("stages")) else None
    log = tuple(warning_lines((folder / _LOG).read_text(errors="replace")))
    return CompiledProgram((folder / _PROGRAM).read_text(), **figures, compiler_log=log, cached=cached)


def _run(folder: Path, plan: Plan, target: Target) -> None:
    """Compile in another process, watched until it ends."""
    environment = {**os.environ, **target.environment}
    if not target.topology:
        environment["XLA_FLAGS"] = flags_with_devices(plan.layout.mesh.num_devices)
    command = [sys.executable, "-m", "meshwright.audit.compile.compile", str(folder)]
    with (folder / _LOG).open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            excess = _watch(process)
        finally:
            process.kill()
            process.wait()
    if excess:
        raise AuditError(f"{plan.layout}: compiling took over {excess}")
    if process.returncode:
        log = (folder / _LOG).read_text(errors="replace")
        raise compile_error(str(plan.layout), log, process.returncode)


def _watch(process: subprocess.Popen) -> str:
    """Wait for the process to end. Returns the limit that it exceeded, or ""."""
    start = now = time.monotonic()
    cpu_seconds, run_seconds = 0.0, 0.0
    limit = round(host_memory_bytes() * MEMORY_SHARE)
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return ""
        except subprocess.TimeoutExpired:
            before, now = now, time.monotonic()
            cpu_before, cpu_now = cpu_seconds, _cpu_seconds(process.pid)
            # Threads that run at once count as one.
            run_seconds += now - before if cpu_now is None else min(now - before, cpu_now - cpu_before)
            cpu_seconds = cpu_now or 0.0
            if run_seconds > _TIMEOUT_SECONDS:
                return f"{_TIMEOUT_SECONDS} s"
            if now - start > _WAITING_FACTOR * _TIMEOUT_SECONDS:
                return f"{_WAITING_FACTOR * _TIMEOUT_SECONDS} s ({run_seconds:.0f} s of them running)"
            if _resident_bytes(process.pid) > limit:
                return f"{format_bytes(limit)} of this host's memory"


def _cpu_seconds(pid: int) -> float | None:
    """CPU seconds that a process has used; None if the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = fields[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    """Memory that a process uses; 0 if the system has no /proc.

    The address space is larger: libtpu maps far more than it uses.
    """
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


# Memory in libtpu's errors: of the whole program, or of its temporaries if they exceed a chip's.
_USED = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT])")
# For each of the largest buffers: "Size: 4.00G", then its operator, shape and instruction, each on a line.
_LARGEST = re.compile(r"^\s*Size: ([\d.]+)([KMGT])\s*$(.*?)(?=^\s*=====|\Z)", re.M | re.S)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_error(layout: str, log: str, code: int) -> AuditError:
    """The error of a compile that failed; an OutOfMemoryError if the program is too large for a chip."""
    line = error_line(log, code)
    message = f"{layout} does not compile: {callback_words(line) or line}"
    used = _USED.search(line)
    if "RESOURCE_EXHAUSTED" not in line and not used:
        return AuditError(message)
    buffers = tuple(
        (_bytes(size, unit), "; ".join(part.strip() for part in lines.splitlines() if part.strip()))
        for size, unit, lines in _LARGEST.findall(log)
    )
    return OutOfMemoryError(message, _bytes(*used.groups()) if used else None, buffers)


def callback_words(error: str) -> str | None:
    """An error of JAX in plain words if a callback needs a device that is not attached, otherwise None."""
    if not _NO_BACKEND.search(error):
        return None
    return (
        "it calls Python on the host (a callback, such as jax.debug.print), which compilers without their "
        "chips refuse; leave the call out, or compile for CPUs"
    )


_NO_BACKEND = re.compile(r"Unknown backend:? '?\w+'? requested")


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _compile_here(folder: Path) -> None:
    """The work of the process: read plan.toml and target.json, write program.hlo and figures.json."""
    plan, target = load_plan(folder / _PLAN), Target(**json.loads((folder / _TARGET).read_text()))
    with target.kernels():
        if plan.layout.stage_programs:
            text, figures = _compiled_stages(plan, target)
        else:
            traced = traced_step(plan, target_mesh(target, plan.layout))
            compiled, seconds = _compiled(traced, target)
            text = program_text(compiled)
            figures = {
                "compile_seconds": seconds,
                "memory_bytes": memory_by_cause(compiled, target.compiler),
                "program_bytes": program_bytes(compiled),
            }
    (folder / _PROGRAM).write_text(text)
    (folder / _FIGURES).write_text(json.dumps(figures))


def _compiled(traced: Any, target: Target) -> tuple["jax.stages.Compiled", float]:
    """(a program, seconds of the compiler)."""
    lowered = traced.lower(lowering_platforms=(target.compiler.lowering,))
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options=dict(target.compiler.options) or None)
    return compiled, time.perf_counter() - started


def _compiled_stages(plan: Plan, target: Target) -> tuple[str, dict]:
    """(the texts of the stages' programs, the figures)."""
    from meshwright.audit.compile.stage_compile import Compiling

    step = planned_training_step(plan, target_mesh(target, plan.layout))
    seconds = 0.0

    def compiled(traced: object) -> "jax.stages.Compiled":
        nonlocal seconds
        program, more = _compiled(traced, target)
        seconds += more
        return program

    on = Compiling(
        [stage.mesh for stage in step.stages],
        compiled,
        lambda executable: memory_by_cause(executable, target.compiler),
        program_bytes,
    )
    after = on.step(step)
    memory = [on.memory_bytes(stage) for stage in range(plan.layout.pipe)]
    stages = StagePrograms(tuple(on.calls.values()), after, tuple(memory), tuple(on.sent.items()))
    figures = {
        "compile_seconds": seconds,
        "memory_bytes": max(memory, key=lambda memory: memory["total"]),
        "program_bytes": max(map(on.program_bytes, range(plan.layout.pipe))) or None,
        "stages": asdict(stages),
    }
    return STAGES_APART.join(map(program_text, on.compiled.values())), figures


def memory_by_cause(compiled: object, compiler: Compiler) -> dict[str, int] | None:
    """Bytes of one device by cause; outputs that reuse a donated argument are not counted again.

    `host` has the temporaries in the host's memory, if there are any.
    """
    analysis = compiled.memory_analysis()  # pyright: ignore[reportAttributeAccessIssue]
    if analysis is None:
        return None
    arguments = analysis.argument_size_in_bytes
    fresh_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    if compiler.peak_only:
        temporaries = max(0, analysis.peak_memory_in_bytes - arguments - fresh_outputs)
    return {
        "arguments": arguments,
        "outputs": fresh_outputs,
        "temporaries": temporaries,
        "total": arguments + fresh_outputs + temporaries,
        **({"host": host} if (host := analysis.host_temp_size_in_bytes) else {}),
    }


def program_bytes(compiled: "jax.stages.Compiled") -> int | None:
    """Bytes of the machine code of one device, which a loaded program occupies; None if it is unknown.

    XLA for TPUs reports it. XLA for GPUs and CPUs reports 0 (jax 0.10 to 0.12), and compresses the code in a
    serialized program.
    """
    analysis = compiled.memory_analysis()
    return (analysis and analysis.generated_code_size_in_bytes) or None


def program_text(compiled: "jax.stages.Compiled") -> str:
    """The optimised HLO of `compiled`, as in `as_text()`, but with constants in full.

    Inputs have their shardings, which XLA of JAX 0.12 drops from the text after partitioning.
    """
    from jaxlib import _hlo as hlo  # pyright: ignore[reportAttributeAccessIssue]  # no public name for these options

    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    executable = compiled.runtime_executable()
    assert executable is not None, "a compiled program has an executable"
    texts = []
    for module in executable.hlo_modules():
        shardings = module.spmd_parameters_shardings or ()
        written = [str(hlo.HloSharding.from_proto(sharding)) for sharding in shardings]
        texts.append(with_shardings(module.to_string(options), written))
    return "\n\n".join(texts)


def with_shardings(text: str, shardings: Sequence[str]) -> str:
    """The text of a program with the shardings of its inputs.

    >>> with_shardings("ENTRY %main {\\n  %x = f32[2] parameter(0)", ["{devices=[4]<=[4]}"]).splitlines()[1]
    '  %x = f32[2] parameter(0), sharding={devices=[4]<=[4]}'
    """
    begin = text.index("ENTRY ")
    end = text.find("\n}", begin) % (len(text) + 1)
    entry = _UNSHARDED.sub(
        lambda match: f"{match[0]}, sharding={shardings[int(match[1])]}" if shardings else match[0],
        text[begin:end],
    )
    return text[:begin] + entry + text[end:]


def warning_lines(log: str) -> list[str]:
    """The lines of a compiler's log that warn of a tensor's partitioning or of memory, each once.

    Lines that a pass prints about itself in every program are left out.
    """
    matches = filter(None, map(_LINE.match, log.splitlines()))
    return list(dict.fromkeys(f"{one[1]}: {one[2]}" for one in matches if _is_of_program(one[1], one[2])))


def _is_of_program(file: str, what: str) -> bool:
    return bool(REPLICATED.search(what) or LOGGED_OPERATION.search(what)) or "remat" in file


@contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Capture the process's stderr, also what C++ writes, and pass it on at the end."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            os.write(2, file.read())


if __name__ == "__main__":
    _compile_here(Path(sys.argv[1]))
