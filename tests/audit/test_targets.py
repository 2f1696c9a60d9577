"""Which compiler is asked, what it is told, and what is kept of its answer."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.audit import plan_audit as audit_module
from meshwright.audit.compile import cache, compile, targets
from meshwright.audit.compile.cache import content_key, fetch, libtpu_lock, store
from meshwright.audit.compile.compile import CompiledProgram, compile_plan
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.plan_audit import audit_plan
from meshwright.errors import AuditError, DeviceError, LayoutError, OutOfMemoryError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

PLAN = Plan(load_model("tiny"), "cpu:2", Workload(2, 16), Layout.of(data=2))
CPU = Target("cpu")


def _slice(topology: str, hosts: tuple[int, ...]) -> Target:
    return Target("tpu", topology, hosts, title=f"XLA for {topology} (libtpu)")


TWO_SLICES = Target("tpu", "v5e:2x4", (2, 2, 1), slices=2, title="XLA for 2*v5e:2x4 (libtpu)")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_installed", lambda name: True)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_installed", lambda name: False)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("hardware", "layout", "target"),
    [
        (
            "v5p:4x4x4",
            Layout.of(fsdp=64),
            _slice("v5p:4x4x4", (2, 2, 1)),
        ),
        ("v6e:1x1", Layout.of(), _slice("v6e:1x1", (1, 1, 1))),
        ("2*v5e:2x4", Layout.of(data=2, fsdp=8), TWO_SLICES),
        ("2*v5e:2x4", Layout.of(tensor=16), TWO_SLICES),
        (
            "v4p:2x2x1",
            Layout.of(fsdp=4),
            _slice("v4:2x2x1", (2, 2, 1)),
        ),
        (
            "tpu7x:2x2x1",
            Layout.of(fsdp=4),
            _slice("tpu7x:2x2x1", (2, 2, 1)),
        ),
        ("mi300x:8", Layout.of(fsdp=8), CPU),
        ("cpu:8", Layout.of(fsdp=8), CPU),
    ],
)
def test_a_plan_is_compiled_by_its_hardwares_compiler(hardware: str, layout: Layout, target: Target) -> None:
    assert choose_target(hardware, layout) == target


@pytest.mark.usefixtures("installed")
def test_a_compiler_of_gpus_has_their_figures() -> None:
    found = choose_target("h100:8", Layout.of(fsdp=8))
    assert (found.name, found.topology, found.gpu, found.capability) == ("gpu", "1x1x8", "h100", 9.0)
    assert found.title == "XLA for h100:1x8 (CUDA)"
    for line in (
        "cuda_compute_capability { major: 9 }",
        "core_count: 132",
        "clock_rate_ghz: 1.98",
        "memory_bandwidth: 3352320000000",
        "shared_memory_per_block_optin: 232448",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert line in found.config
    assert choose_target("b200:4x8", Layout.of(fsdp=32)).topology == "1x4x8"


@pytest.mark.usefixtures("not_installed")
def test_without_its_compiler_the_cpu_stands_in() -> None:
    assert choose_target("v5e:2x4", Layout.of(fsdp=8)) == CPU
    with pytest.raises(AuditError, match=r"at most 256.*TPU's compiler: pip install \"meshwright\[tpu\]\""):
        choose_target("v5p:8x8x8", Layout.of(fsdp=512))
    with pytest.raises(DeviceError, match=r'not installed: pip install "meshwright\[tpu\]"'):
        choose_target("v5e:2x4", Layout.of(fsdp=8), "tpu")
    with pytest.raises(AuditError, match=r"install the GPU's compiler: pip install \"meshwright\[cuda12\]\""):
        choose_target("h100:64x8", Layout.of(fsdp=512))
    with pytest.raises(DeviceError, match=r'not installed: pip install "meshwright\[cuda12\]"'):
        choose_target("h100:8", Layout.of(fsdp=8), "gpu")


@pytest.mark.usefixtures("installed")
def test_what_a_target_cannot_compile_is_refused() -> None:
    with pytest.raises(AuditError, match="--target 'tpv' is not supported; did you mean tpu"):
        choose_target("v5e:2x4", Layout.of(fsdp=8), "tpv")
    with pytest.raises(AuditError, match="tpu compiles for v5e, v4p, v5p, v6e, tpu7x, not for h100:8"):
        choose_target("h100:8", Layout.of(fsdp=8), "tpu")
    with pytest.raises(AuditError, match=r"--target gpu compiles for a100-40gb, .*, not for v5e:2x4"):
        choose_target("v5e:2x4", Layout.of(fsdp=8), "gpu")
    with pytest.raises(AuditError, match=r"3\*v5e:2x4: .* cross between slices; .* a multiple of 3"):
        choose_target("3*v5e:2x4", Layout.of(data=2, fsdp=12), "tpu")
    with pytest.raises(LayoutError, match="must multiply to 8"):
        choose_target("v5e:2x4", Layout.of(fsdp=4), "tpu")


def test_the_key_holds_what_decides_the_program() -> None:
    key = content_key(PLAN, CPU, {})
    assert content_key(replace(PLAN, planned={"step_seconds": 1.0}), CPU, {}) == key
    others = [
        content_key(replace(PLAN, layout=Layout.of(tensor=2)), CPU, {}),
        content_key(PLAN, Target("cpu", slices=2), {}),
        content_key(PLAN, CPU, {"XLA_FLAGS": "--xla_x"}),
        content_key(PLAN, CPU, {"LIBTPU_INIT_ARGS": "--xla_x"}),
    ]
    assert len({key, *others}) == 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "meshwright" / "programs"


def test_what_is_stored_is_found_and_the_least_used_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_KEPT", 2)
    assert fetch("a") is None
    for key in ("a", "b", "b"):
        store(key, {"x": key})
    assert fetch("a") == folder / "a"  # used again, so that b is the oldest
    store("c", {"x": "c"})
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]
    assert (folder / "a" / "x").read_text() == "a"


def test_a_cache_that_cannot_be_written_says_what_to_do(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    with pytest.raises(AuditError, match="cannot be written: Not a directory; set XDG_CACHE_HOME, or pass"):
        store("a", {"x": ""})


def test_a_second_audit_waits_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    held = (
        "from meshwright.audit.compile.cache import libtpu_lock\n"
        "with libtpu_lock(lambda: None): print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin and other.stdout and other.stdout.readline() == "held\n"
    waited: list[str] = []

    def release() -> None:
        waited.append("waited")
        other.communicate("\n")

    with libtpu_lock(release):
        assert waited == ["waited"] and other.returncode == 0


def _compile(script: str, monkeypatch: pytest.MonkeyPatch) -> CompiledProgram:
    """A compile whose process runs `script` in place of the compiler."""
    popen = subprocess.Popen

    def started(command: list[str], **options: object) -> subprocess.Popen:
        return popen([sys.executable, "-c", script, command[-1]], **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(compile.subprocess, "Popen", started)
    return compile_plan(PLAN, CPU)


WRITES = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "program.hlo").write_text("HloModule m")
(folder / "figures.json").write_text('{"compile_seconds": 2.0, "memory_bytes": null}')
"""


@pytest.mark.usefixtures("folder")
def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compile(WRITES, monkeypatch) == CompiledProgram("HloModule m", 2.0, None)
    assert _compile("raise SystemExit(1)", monkeypatch) == CompiledProgram(
        "HloModule m", 2.0, None, cached=True
    )


@pytest.mark.usefixtures("folder")
def test_a_failure_gives_the_compilers_message_and_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: hbm\\n  allocations"
    script = f"import sys; print('{message}', file=sys.stderr); sys.exit(1)"
    with pytest.raises(AuditError, match=r"^data=2,remat=none does not compile: RESOURCE_EXHAUSTED: hbm$"):
        _compile(script, monkeypatch)


@pytest.mark.parametrize(("code", "excess"), [("time.sleep(0.3)", ""), ("while True: pass", "0.1 s")])
def test_time_in_which_the_compiler_waits_does_not_count(
    monkeypatch: pytest.MonkeyPatch, code: str, excess: str
) -> None:
    monkeypatch.setattr(compile, "_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(compile, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(compile, "_WAITING_FACTOR", 100)
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", f"import time\n{code}"])
    try:
        assert compile._watch(process) == excess
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("folder")
def test_a_compile_that_takes_too_long_or_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_TIMEOUT_SECONDS", 0)
    with pytest.raises(AuditError, match="compiling took over 0 s"):
        _compile("import time; time.sleep(60)", monkeypatch)
    monkeypatch.setattr(compile, "_TIMEOUT_SECONDS", 60)
    monkeypatch.setattr(compile, "MEMORY_SHARE", 1e-9)
    with pytest.raises(AuditError, match=r"compiling took over .* of this host's memory"):
        _compile("import time; time.sleep(60)", monkeypatch)


LIBTPU_REFUSES = """
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G of 15.75G.
Largest program allocations in hbm:

  Size: 4.00G
  Operator: op_name="jit(_step)/jvp(unembed)/dot_general"
  Shape: bf16[32,4096,16384]{2,1,0}
  ==========================

  Size: 512.0M
  Shape: bf16[256]{0}
  ==========================
"""


def test_out_of_memory_is_a_result_with_the_plans_memory_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = compile.compile_error("fsdp=16", LIBTPU_REFUSES, 1)
    assert isinstance(error, OutOfMemoryError)
    assert error.num_bytes == round(21.5 * 2**30)
    assert [size for size, _ in error.buffers] == [4 * 2**30, 512 * 2**20]
    assert "unembed" in error.buffers[0][1]

    def compile_plan(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(audit_module, "compile_plan", compile_plan)
    plan = Plan(load_model("tiny"), "cpu:8", Workload(16, 64), Layout.of(fsdp=8))
    document = audit_plan(plan, "cpu")
    assert document["verdict"] == "differs" and document["findings"][0]["kind"] == "memory"
    memory = document["memory"]
    assert (
        memory["compiled"] == error.num_bytes
        and sum(memory["planned_by_cause"].values()) == memory["planned"]
    )
    temporaries = "the total memory required for HLO temporaries (19.86G) exceeds available HBM (15.75G)."
    found = compile.compile_error("fsdp=16", f"JaxRuntimeError: {temporaries}", 1)
    assert isinstance(found, OutOfMemoryError) and found.num_bytes == round(19.86 * 2**30)
    assert not isinstance(
        compile.compile_error("fsdp=16", "ValueError: another message", 1), OutOfMemoryError
    )


def test_a_callback_that_needs_a_device_is_named() -> None:
    log = "RuntimeError: Unknown backend: 'gpu' requested, but no platforms are present."
    assert "it calls Python on the host (a callback, such as jax.debug.print)" in str(
        compile.compile_error("data=8", log, 1)
    )
