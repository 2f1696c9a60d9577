"""mw audit: what is asked of the audit, and what its verdict exits with."""

import json
from pathlib import Path

import pytest
from tests.report.sample_run import audit_document

from meshwright.audit import plan_audit as audit_module
from meshwright.cli.main import main
from meshwright.hardware.catalog import dump_toml, load
from meshwright.plan_file import load_plan

PLAN = [
    "--model",
    "tiny",
    "--hardware",
    "v5e:2x4",
    "--batch-tokens",
    "1Ki",
    "--seq-len",
    "64",
    "--layout",
    "fsdp=8",
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the last audit was asked; its verdict is that of asked["verdict"]."""
    last: dict = {"verdict": "match"}

    def audit_plan(plan, target, progress, *, use_cache, numerics):
        last.update(plan=plan, target=target, use_cache=use_cache, numerics=numerics)
        return audit_document() | {"verdict": last["verdict"]}

    monkeypatch.setattr(audit_module, "audit_plan", audit_plan)
    return last


def test_the_target_and_the_cache_are_passed_on(asked: dict):
    assert main(["audit", *PLAN]) == 0
    assert (asked["target"], asked["use_cache"], asked["numerics"]) == (None, True, True)
    assert main(["audit", *PLAN, "--target", "tpu", "--no-cache", "--no-numerics"]) == 0
    assert (asked["target"], asked["use_cache"], asked["numerics"]) == ("tpu", False, False)
    assert (asked["plan"].hardware, str(asked["plan"].layout)) == ("v5e:2x4", "fsdp=8,remat=none")


def test_only_a_host_trains_in_float32_by_default(asked: dict, tmp_path: Path):
    layouts = {}
    for spec in ("v5e:2x4", "cpu:8"):
        file = tmp_path / "machine.toml"
        file.write_text(dump_toml(load(spec)))
        at = PLAN.index("--hardware") + 1
        assert main(["audit", *PLAN[:at], str(file), *PLAN[at + 1 :]]) == 0
        layouts[spec] = asked["plan"].layout
    assert (layouts["v5e:2x4"].precision.compute_dtype, layouts["cpu:8"].precision.compute_dtype) == (
        "bf16",
        "f32",
    )


def test_a_difference_exits_1_and_is_written_all_the_same(
    asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture
):
    asked["verdict"] = "differs"
    assert main(["audit", *PLAN, "--json", "-o", str(tmp_path / "audit.json")]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "differs"
    assert json.loads((tmp_path / "audit.json").read_text()) == printed


def test_a_target_that_is_none_is_refused(capsys: pytest.CaptureFixture):
    assert main(["audit", *PLAN, "--target", "gpv"]) == 2
    assert "--target 'gpv' is not supported; did you mean gpu?" in capsys.readouterr().err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture):
    assert main(["audit", "--model", "tiny"]) == 2
    assert "give --hardware, --batch-tokens, --seq-len, --layout" in capsys.readouterr().err


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The text of a program in which a weight is gathered for two rows, and something unknown is done."""
    file = tmp_path / "program.txt"
    file.write_text(
        "HloModule jit_f, num_partitions=4\n"
        "ENTRY %main {\n"
        '  %w = bf16[256,512]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="w"}\n'
        '  %x = bf16[2,1024]{1,0} parameter(1), sharding={replicated}, metadata={op_name="x"}\n'
        "  %a = bf16[1024,512]{1,0} all-gather(%w), dimensions={0}, replica_groups={{0,1,2,3}}\n"
        "  %y = bf16[2,512]{1,0} dot(%x, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %z = bf16[2,512]{1,0} teleport(%y)\n"
        "}\n"
    )
    return file


def test_a_program_is_audited_in_place_of_a_plan(program: Path, capsys: pytest.CaptureFixture):
    assert main(["audit", "--hlo", str(program), "--hardware", "v5e", "--mesh", "fsdp=4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["op"], one["axes"], one["bytes"]) for one in found["emitted"]] == [
        ("all_gather", ["fsdp"], 1024 * 512 * 2)
    ]
    kinds = [one["kind"] for one in found["warnings"]]
    assert kinds == ["weight_gathered_for_few_tokens"]
    assert found["verdict"] == "differs"


def test_a_programs_table_says_costs_and_cures(program: Path, capsys: pytest.CaptureFixture):
    assert main(["audit", "--hlo", str(program)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "w forward all_gather groups of 4 1.05 MB 1 unavailable" in out
    assert (
        "weight_gathered_for_few_tokens: `w` (1,048,576 B) is gathered over groups of 4 devices for a" in out
    )
    assert (
        "change: keep the weight sharded and move the activations: tensor parallelism in place of FSDP" in out
    )
    assert "not understood: z: opcode teleport is unknown; its FLOPs and bytes are not counted" in out
    assert out.startswith("verdict: differs (1 collective, 2 warnings, 1 not understood)")


def test_a_program_without_accidents_exits_0(program: Path, capsys: pytest.CaptureFixture):
    program.write_text("HloModule jit_f\nENTRY %main {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n")
    assert main(["audit", "--hlo", str(program), "--hardware", "v5e"]) == 0
    assert "verdict: match (0 collectives, 0 warnings, 0 not understood)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "fsdp=8"], "--hlo audits a program in place of a plan; leave out --layout"),
        (
            ["plan.toml", "--target", "tpu"],
            "--hlo audits a program in place of a plan; leave out PLAN, --target",
        ),
        (["--batch-tokens", "4Ki"], "--hlo audits a program in place of a plan; leave out --batch-tokens"),
        (["--mesh", "data=3"], "the mesh data=3 has 3 devices and the program 4"),
        (["--mesh", "data"], "data"),
        (["--hardware", "v5e:2x4"], "v5e:2x4 has 8 chips and the program 4 devices; fits: v5e:4"),
    ],
)
def test_what_a_program_does_not_go_with_is_refused(
    program: Path, options: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert main(["audit", "--hlo", str(program), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_mesh_without_a_program_is_refused(capsys: pytest.CaptureFixture):
    assert main(["audit", *PLAN, "--mesh", "data=8"]) == 2
    assert "--mesh needs --hlo; the mesh of a plan is in its layout" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--phase", "--step"])
def test_the_phase_is_that_of_the_plan_or_the_option(asked: dict, option: str):
    assert main(["audit", *PLAN]) == 0
    assert asked["plan"].workload.phase == "train"
    assert main(["audit", *PLAN, option, "generate"]) == 0
    assert asked["plan"].workload.phase == "generate"


def test_weights_that_no_step_trains_are_audited_in_another_phase(asked: dict, capsys: pytest.CaptureFixture):
    quantised = [*PLAN[:-1], "data=2,tensor=4,weights_dtype=fp8,matmul_dtype=fp8"]
    assert main(["audit", *quantised]) == 2
    assert "weights_dtype = 'fp8'; fits: f32, bf16 in training" in capsys.readouterr().err
    assert main(["audit", *quantised, "--phase", "generate"]) == 0
    assert (asked["plan"].workload.phase, asked["plan"].layout.precision.matmul_dtype) == ("generate", "fp8")


@pytest.mark.slow
def test_both_phases_of_a_servers_plan_are_compiled(tmp_path: Path, capsys: pytest.CaptureFixture):
    plan = tmp_path / "serve.toml"
    asked = ["--model", "tiny", "--hardware", "cpu:2", "--prompt-tokens", "48", "--output-tokens", "16"]
    assert main(["plan", "serve", *asked, "--layout", "tensor=2", "--tpot", "0.1", "-o", str(plan)]) == 0
    before = tmp_path / "before.json"
    assert main(["audit", str(plan), "--no-numerics", "-o", str(before)]) == 0
    out = capsys.readouterr().out
    assert "verdict: match (generate: 4 match; prefill: 4 match), compiled by XLA for CPU" in out
    document = json.loads(before.read_text())
    assert (document["verdict"], document["prefill"]["verdict"]) == ("match", "match")
    rows = {
        name: one["emitted"][0]["bytes"]
        for name, one in (("generate", document), ("prefill", document["prefill"]))
    }
    assert rows["prefill"] == 64 * 64 * 4, "a prompt and its answer, of float32 of D = 64"
    assert rows["generate"] == load_plan(plan).workload.num_sequences * 64 * 4
    assert main(["audit", str(plan), "--no-numerics", "--against", str(before)]) == 0
    assert capsys.readouterr().out.startswith("nothing changed: the same collectives")
    assert main(["audit", str(plan), "--phase", "prefill", "--no-numerics", "--json"]) == 0
    assert "prefill" not in json.loads(capsys.readouterr().out)


def test_a_phase_that_is_none_is_refused(asked: dict, capsys: pytest.CaptureFixture):
    assert main(["audit", *PLAN, "--phase", "generation"]) == 2
    assert capsys.readouterr().err.startswith("mw: workload: phase = 'generation'; ")


def test_what_changed_since_another_audit(asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture):
    before = tmp_path / "before.json"
    assert main(["audit", *PLAN, "-o", str(before)]) == 0
    capsys.readouterr()
    assert main(["audit", *PLAN, "--against", str(before)]) == 0
    assert capsys.readouterr().out.startswith("nothing changed: the same collectives")
    asked["verdict"] = "differs"
    assert main(["audit", *PLAN, "--against", str(before), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["changes"] == ["- verdict: match", "+ verdict: differs"]
    before.write_text("{}")
    assert main(["audit", *PLAN, "--against", str(before)]) == 2
    assert "before.json: is not an audit written by mw audit -o" in capsys.readouterr().err
