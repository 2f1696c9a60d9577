"""mw train, generate, serve and report on one small run, and what each says when it is damaged."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest

from meshwright.cli import service
from meshwright.cli.generate import Answer, best
from meshwright.cli.main import main
from meshwright.cli.service import open_service
from meshwright.errors import PlanError
from meshwright.models.config import ModelConfig
from meshwright.models.model_files import read_model
from meshwright.models.presets import load_model
from meshwright.nn.files.checkpoint_files import validation_losses
from meshwright.plan_file import load_plan
from meshwright.serve.http.server import bind
from meshwright.serve.settings import EngineSettings

LINE_KEYS = {"step", "loss", "tokens_per_second", "mfu", "step_seconds", "planned_step_seconds"}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty small files, since one long document is cut by lines."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        text = "\n".join(f"def f{number}_{line}(x):\n    return x + {line}\n" for line in range(40))
        (folder / f"{number}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset with room for a byte-level vocabulary, on the eight devices of the tests."""
    folder = tmp_path_factory.mktemp("plan")
    config = replace(load_model("tiny"), vocab_size=512)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None]
    (folder / "small.toml").write_text("".join(lines))
    options = ["--model", str(folder / "small.toml"), "--hardware", "cpu:8"]
    options += ["--batch-tokens", "512", "--seq-len", "32", "--layout", "fsdp=4,tensor=2"]
    assert main(["plan", "train", *options, "-o", str(folder / "plan.toml")]) == 0
    return folder / "plan.toml"


@pytest.fixture(scope="module")
def trained(corpus: Path, plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "small"
    assert train(plan, corpus, run) == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "small"))


def train(plan: Path, corpus: Path, run: Path, *more: str) -> int:
    return main(["train", str(plan), "--data", str(corpus), "--run", str(run), "--steps", str(STEPS), *more])


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    ours = [line for line in error.splitlines() if line.startswith("mw: ")]
    assert len(ours) == 1 and "Traceback" not in error, error
    return ours[0]


def test_a_run_holds_what_serving_and_reports_read(trained: Path):
    names = {path.name for path in trained.iterdir()}
    documents = {"plan.toml", "plan.json", "settings.json", "config.json", "tokenizer.json", "metrics.jsonl"}
    assert names == documents | {"checkpoints", "data"}
    model = read_model(trained)
    assert isinstance(model, ModelConfig) and model.vocab_size == 512
    assert json.loads((trained / "config.json").read_text())["eos_token_id"] == 0


def test_train_prints_the_last_line_of_the_metrics(corpus: Path, plan: Path, tmp_path: Path, capsys):
    assert train(plan, corpus, tmp_path / "run", "--json") == 0
    printed = capsys.readouterr()
    [printed_line] = printed.out.splitlines()
    line = json.loads(printed_line)
    assert line.keys() >= LINE_KEYS | {"validation_loss"}
    assert line["step"] == STEPS and line["planned_step_seconds"] > 0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]) == line
    assert "compiling the step" in printed.err


def test_train_says_where_the_time_of_traced_steps_went(run: Path, capsys):
    assert main(["train", "--run", str(run), "--steps", "7", "--resume", "--profile", "6:7", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["operations"]
    found = {(row["name"], row["direction"], row["kind"]): row for row in rows}
    for key in (
        ("wq", "forward", "compute"),
        ("w_in", "backward", "compute"),
        ("attention", "forward", "compute"),
    ):
        assert found[key]["measured_seconds"] > 0 and found[key]["planned_seconds"] > 0
    gathered = [row for (name, _, kind), row in found.items() if (name, kind) == ("w_in", "collective")]
    assert any(row["measured_seconds"] > 0 and row["planned_seconds"] > 0 for row in gathered)
    named = sum(row["measured_seconds"] for row in rows if row["name"] != "other")
    assert named > 0.5 * sum(row["measured_seconds"] for row in rows)
    assert list((run / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_a_trace_of_a_pipeline_counts_the_programs_of_all_stages(
    corpus: Path, plan: Path, tmp_path: Path, capsys
) -> None:
    layout = "pipe=2,fsdp=2,microbatches=2,schedule=zb-h1"
    options = ["--model", str(plan.parent / "small.toml"), "--hardware", "cpu:4", "--layout", layout]
    made = tmp_path / "plan.toml"
    assert main(["plan", "train", *options, "--batch-tokens", "256", "--seq-len", "32", "-o", str(made)]) == 0
    capsys.readouterr()
    command = ["train", str(made), "--data", str(corpus), "--run", str(tmp_path / "run"), "--steps", "3"]
    assert main([*command, "--profile", "2:3", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    found = {(row["name"], row["direction"], row["kind"]): row for row in line["operations"]}
    for key in (
        ("wq", "forward", "compute"),
        ("w_in", "backward", "compute"),
        ("unembed", "forward", "compute"),
        ("optimizer", "update", "compute"),
        ("w_in", "forward", "collective"),
    ):
        assert found[key]["measured_seconds"] > 0 and found[key]["planned_seconds"] > 0
    assert not any("stages" in name for name, _, _ in found), "no program sends them"
    # A device is busy for no longer than a step takes.
    busy = sum(row["measured_seconds"] for row in line["operations"])
    assert 0 < busy < line["step_seconds"]


@pytest.mark.parametrize("steps", ["ten", "0:3", "5:4"])
def test_steps_to_trace_are_checked_first(steps: str, run: Path, capsys):
    assert main(["train", "--run", str(run), "--resume", "--profile", steps]) == 2
    assert "write FIRST:LAST, the steps to trace" in one_line(capsys)


def test_train_resumes_with_the_plan_data_and_settings_of_its_run(run: Path, capsys):
    before = {name: (run / name).read_bytes() for name in ("plan.toml", "data/train.npy", "tokenizer.json")}
    assert main(["train", "--run", str(run), "--steps", str(STEPS + 2), "--resume"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"step {STEPS + 2}: training loss ")
    assert "unigram entropy" in printed.out and "measured / planned" in printed.out
    assert f"mw: --steps: {STEPS} until now, {STEPS + 2} from here on" in printed.err
    assert before == {name: (run / name).read_bytes() for name in before}
    settings = json.loads((run / "settings.json").read_text())
    assert (settings["steps"], settings["schedule_steps"]) == (STEPS + 2, STEPS)


def test_train_leaves_an_earlier_run_alone(run: Path, corpus: Path, plan: Path, capsys):
    before = (run / "plan.toml").read_text()
    assert train(plan, corpus, run) == 2
    assert f"already holds step {STEPS}; go on from there with --resume" in one_line(capsys)
    assert (run / "plan.toml").read_text() == before


def test_train_does_not_resume_another_model(run: Path, corpus: Path, plan: Path, tmp_path: Path, capsys):
    other = tmp_path / "other.toml"
    other.write_text(plan.read_text().replace("d_ff = 128", "d_ff = 256"))
    before = (run / "plan.toml").read_text()
    assert train(other, corpus, run, "--resume") == 2
    assert "its model has d_ff = 128 and the plan's has 256" in one_line(capsys)
    assert (run / "plan.toml").read_text() == before


def test_train_without_a_plan(corpus: Path, tmp_path: Path, capsys):
    assert main(["train", "--data", str(corpus), "--run", str(tmp_path)]) == 2
    assert "no plan: name a PLAN.toml" in one_line(capsys)


def test_train_on_an_empty_folder_writes_nothing(plan: Path, tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    assert train(plan, tmp_path / "empty", tmp_path / "run") == 2
    assert "the folder is empty" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_train_a_plan_for_other_hardware(plan: Path, corpus: Path, tmp_path: Path, capsys):
    elsewhere = tmp_path / "plan.toml"
    elsewhere.write_text(plan.read_text().replace('hardware = "cpu:8"', 'hardware = "v5p:2x2x2"'))
    assert train(elsewhere, corpus, tmp_path / "run") == 2
    assert "v5p:2x2x2 needs tpu devices and JAX sees 8 cpu devices" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_train_a_plan_that_does_not_divide(plan: Path, corpus: Path, tmp_path: Path, capsys):
    wrong = tmp_path / "plan.toml"
    wrong.write_text(plan.read_text().replace("num_sequences = 16", "num_sequences = 15"))
    assert train(wrong, corpus, tmp_path / "run") == 2
    assert "15 sequences (B) do not divide" in one_line(capsys)


def test_generate(trained: Path, capsys):
    arguments = ["generate", "def ", "--checkpoint", str(trained), "--max-tokens", "3"]
    assert main([*arguments, "--tensor", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"text", "tokens", "ttft_seconds", "tpot_seconds"}
    assert found["tokens"] <= 3 and found["ttft_seconds"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "1"], "the prompt has 2 tokens, but the context holds 1"),
        (["--context", "4Ki"], "a context of 4096 tokens is longer than the model's 128"),
        (["--tensor", "3"], "do not divide over tensor = 3"),
        (["--stop", ""], "--stop is empty; give it a value"),
    ],
)
def test_generate_refuses(options: list[str], message: str, trained: Path, capsys):
    assert main(["generate", "def ", "--checkpoint", str(trained), *options]) == 2
    assert message in one_line(capsys)


@pytest.mark.slow
def test_an_exported_run_says_what_the_run_says(trained: Path, tmp_path: Path, capsys):
    assert main(["export", str(trained), "-o", str(tmp_path / "hf"), "--best", "--json"]) == 0
    losses = validation_losses(trained / "checkpoints")
    best = min(losses, key=lambda step: losses[step])
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "hf"), "step": best}
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert main(["export", str(trained), "-o", str(tmp_path / "last")]) == 0
    said = []
    for folder in (trained, tmp_path / "last"):
        capsys.readouterr()
        assert main(["generate", "def ", "--checkpoint", str(folder), "--max-tokens", "8"]) == 0
        printed = capsys.readouterr()
        assert "\ndef " in f"\n{printed.out}" and "the first after" in printed.err
        said.append(printed.out.splitlines()[-1])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "99"], "holds no step 99; there: "),
        (["--step", "4", "--best"], "--best and --step name two checkpoints"),
    ],
)
def test_export_refuses(options: list[str], message: str, trained: Path, tmp_path: Path, capsys):
    assert main(["export", str(trained), "-o", str(tmp_path / "hf"), *options]) == 2
    assert message in one_line(capsys)


def test_a_checkpoint_cut_short(run: Path, capsys):
    for checkpoint in (run / "checkpoints").iterdir():
        largest = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
        largest.write_bytes(largest.read_bytes()[:-7])
    assert main(["generate", "def ", "--checkpoint", str(run)]) == 2
    assert "does not match its checksum; there is no sound one, so train again" in one_line(capsys)


def test_no_checkpoint_at_all(tmp_path: Path, capsys):
    assert main(["serve", "--checkpoint", str(tmp_path), "--port", "0"]) == 2
    assert "has no config.json" in one_line(capsys)


class Made(Exception):
    """What a runner was asked for."""


def test_the_runner_is_made_as_the_server_was_asked(trained: Path, monkeypatch):
    def make(*_, **options):
        raise Made(options)

    monkeypatch.setattr(service, "JaxRunner", make)
    asked = EngineSettings(chunk=128, mode="disaggregated", host_cache_bytes=10**6)
    with pytest.raises(Made) as made, open_service(trained, asked, silent):
        pass
    [options] = made.value.args
    assert options["chunk"] == 128 and options["shares_pages"] and not options["keeps_windows"]
    assert options["host_bytes"] == 500_000  # the other half is of the other engine


def test_matmuls_that_the_machine_has_not_are_said(trained: Path, plan: Path, monkeypatch):
    def make(folder, config, layout, *_, **options):
        raise Made(layout.precision.matmul_dtype)

    monkeypatch.setattr(service, "JaxRunner", make)
    found = load_plan(plan)
    layout = found.layout.replace(weights_dtype="fp8", matmul_dtype="fp8")
    found = replace(found, layout=layout, workload=replace(found.workload, phase="generate"))
    with (
        pytest.raises(Made) as made,
        pytest.warns(UserWarning, match="CPUs have no products of fp8: operands are rounded to it"),
        open_service(trained, EngineSettings(plan=found), silent),
    ):
        pass
    assert made.value.args == ("fp8",)


@pytest.mark.parametrize("slots", [None, 4])
def test_slots_that_are_asked_for_override_the_plan(
    slots: int | None, trained: Path, plan: Path, monkeypatch
):
    def make(*_, **options):
        raise Made(options)

    monkeypatch.setattr(service, "JaxRunner", make)
    settings = EngineSettings(plan=load_plan(plan), num_slots=slots)
    with pytest.raises(Made) as made, open_service(trained, settings, silent):
        pass
    [options] = made.value.args
    assert options["num_slots"] == (slots or load_plan(plan).workload.num_sequences)


def test_a_plan_and_tensor_both_give_a_layout(trained: Path, plan: Path, capsys):
    assert main(["serve", "--checkpoint", str(trained), str(plan), "--tensor", "2"]) == 2
    assert "--tensor 2 and" in (said := one_line(capsys)) and "both give a layout" in said


@pytest.mark.parametrize(
    ("model", "multiplies", "extension", "dtypes"),
    [
        ("llama-3-8b", True, "no compiler", ("bf16", "bf16")),
        ("llama-3-8b", False, None, ("bf16", "f32")),
        ("llama-3-8b", False, "no compiler", ("f32", "f32")),
        ("mixtral-8x7b", False, None, ("f32", "f32")),
    ],
)
def test_dtypes_are_those_that_the_processor_multiplies_fast(
    model: str, multiplies: bool, extension: str | None, dtypes: tuple[str, str], monkeypatch
):
    monkeypatch.setattr(service, "multiplies_bf16", lambda: multiplies)
    monkeypatch.setattr(service.kernels, "why_not_built", lambda: extension)
    assert service.served_dtypes(load_model(model)) == dtypes


def test_a_host_cache_needs_the_prefixes_that_it_keeps(trained: Path):
    asked = EngineSettings(prefix_cache=False, host_cache_bytes=10**6)
    message = "keeps evicted pages, which --no-prefix-cache forgets"
    with pytest.raises(PlanError, match=message), open_service(trained, asked, silent):
        pass


def test_what_cannot_be_disaggregated_is_refused(trained: Path, plan: Path):
    for asked, message in (
        (EngineSettings(prefix_cache=False), "hands over pages, which --no-prefix-cache forgets"),
        (
            EngineSettings(plan=load_plan(plan)),
            "splits its sequences over 4; fits: a layout without data, fsdp, context and cache=batch",
        ),
    ):
        asked = replace(asked, mode="disaggregated")
        with pytest.raises(PlanError, match=message), open_service(trained, asked, silent):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--prefill-replicas", "1", "--no-prefix-cache"],
            "hands over pages, which --no-prefix-cache forgets",
        ),
        (["--prefill-replicas", "1", "--mode", "batched"], "--mode batched exclude one another"),
        (["--prefill-autoscaling", "max_replicas=2"], "scales nothing without --prefill-replicas"),
        (["--prefill-replicas", "1", "--prefill-autoscaling", "two"], "--prefill-autoscaling 'two': each is"),
    ],
)
def test_pools_that_make_no_sense_are_refused(options: list[str], message: str, trained: Path, capsys):
    assert main(["serve", "--checkpoint", str(trained), *options]) == 2
    assert message in one_line(capsys)


def silent(what: str, share: float | None) -> None:
    pass


def test_serve_on_a_port_in_use_does_not_load_the_model(tmp_path: Path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--checkpoint", str(tmp_path), "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in one_line(capsys)


def test_report(trained: Path, tmp_path: Path, capsys):
    assert main(["report", str(trained), "-o", str(tmp_path / "report.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "report.html")}
    assert "small" in (tmp_path / "report.html").read_text()


def test_report_of_nothing(tmp_path: Path, capsys):
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 2
    assert "holds neither plan.toml, plan.json nor metrics.jsonl" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_likeliest_answer_that_repeats_little_is_best() -> None:
    loop = Answer({"text": "a b a b"}, [1, 2] * 20, -0.1)
    likely, rare = (Answer({"text": str(logprob)}, range(40), logprob) for logprob in (-1.0, -2.0))
    assert best([rare, loop, likely]) is likely
    assert best([loop]) is loop
    brief = Answer({}, [1, 2], -0.1)
    assert best([rare, brief]) is rare
