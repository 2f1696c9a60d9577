"""Fine-tuning a Hugging Face checkpoint on conversations: adapters or all weights, sharded, and back."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn import hf_models
from tests.nn.files.loaded import f32, logits

from meshwright.cli.main import main
from meshwright.errors import CheckpointError, MeshwrightError, ModelError, PlanError
from meshwright.layout.workload import Workload
from meshwright.models.chat import ChatTemplate
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.models.count import train_flops_per_token
from meshwright.models.model_files import read_model
from meshwright.models.parameters import dimensions, is_adapter, parameters
from meshwright.models.presets import load_model
from meshwright.nn.adapters import merged_adapters
from meshwright.nn.files.weights import load_hf
from meshwright.nn.params import flatten
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import load_plan
from meshwright.serve.device.loading import load_model_folder
from meshwright.train.bpe import train_tokenizer
from meshwright.train.conversations import training_text
from meshwright.train.corpus import Batches, Corpus, prepare_corpus
from meshwright.train.documents import read_documents
from meshwright.train.job import RunOptions, prepare_job
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.row_codes import BEGINS, ID_BITS, UNCOUNTED
from meshwright.train.stage_step import training_step
from meshwright.train.step import CompiledStep

pytestmark = pytest.mark.sampled(5)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEQ_LEN = 60
MODEL = replace(load_model("tiny"), lora_rank=4, lora_alpha=8.0)


def conversation(number: int) -> dict[str, Any]:
    turns = [("user", f"add {number} and 1"), ("assistant", str(number + 1))]
    more = [("user", "ty"), ("assistant", "np")] if number % 3 == 0 else []
    return {"messages": [{"role": role, "content": content} for role, content in turns + more]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random LLaMA as transformers writes it, with a tokenizer that knows ChatML."""
    folder = tmp_path_factory.mktemp("hf") / "base"
    hf_models.torch.manual_seed(3)
    shape = hf_models.SHAPE | {"vocab_size": 272, "num_hidden_layers": 4}
    config = hf_models.transformers.LlamaConfig(**shape)
    hf_models.transformers.LlamaForCausalLM(config).save_pretrained(folder)
    bpe = train_tokenizer(["add one and two"], 257)
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(conversation(number)) + "\n" for number in range(60)))
    return path


@pytest.fixture(scope="module")
def plan(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    options = ["--model", str(base), "--hardware", "cpu:8", "--batch-tokens", str(8 * SEQ_LEN)]
    options += ["--seq-len", str(SEQ_LEN), "--layout", "fsdp=4,tensor=2", "--weights-dtype", "f32"]
    assert main(["plan", "train", *options, "-o", str(path)]) == 0
    path.write_text(path.read_text().replace('compute_dtype = "bf16"', 'compute_dtype = "f32"'))
    return path


@pytest.fixture(scope="module")
def tuned(base: Path, plan: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters of 8 steps."""
    run = tmp_path_factory.mktemp("runs") / "tuned"
    assert main([*_command(base, plan, chats, run), "--steps", "8"]) == 0
    return run


def _command(base: Path, plan: Path, chats: Path, run: Path) -> list[str]:
    options = ["--from", str(base), "--lora", "4", "--data", str(chats), "--learning-rate", "0.1"]
    return ["train", str(plan), "--run", str(run), "--schedule-steps", "8", *options]


@pytest.mark.slow
def test_a_run_of_adapters_goes_on_as_if_it_had_not_stopped(
    tuned: Path, base: Path, plan: Path, chats: Path, tmp_path: Path
) -> None:
    run = tmp_path / "stopped"
    assert main([*_command(base, plan, chats, run), "--steps", "4"]) == 0
    assert main(["train", "--run", str(run), "--resume", "--steps", "8"]) == 0
    whole, stopped = (json.loads((r / "metrics.jsonl").read_text().splitlines()[-1]) for r in (tuned, run))
    assert [whole[key] for key in ("step", "loss", "validation_loss")] == [
        stopped[key] for key in ("step", "loss", "validation_loss")
    ]


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]


@pytest.mark.slow
def test_adapters_learn_the_answers(tuned: Path) -> None:
    losses = _losses(tuned)
    assert losses[-1][0] == 8 and losses[-1][1] < 0.8 * losses[0][1]


@pytest.mark.slow
def test_adapters_on_shards_are_those_of_one_device(tuned: Path, base: Path) -> None:
    """The whole validation split after 8 steps: float32 sums in another order."""
    corpus, settings = Corpus.load(tuned / "data"), json.loads((tuned / "settings.json").read_text())
    step = CompiledStep(
        load_plan(tuned / "plan.toml").model,
        f32(),
        Workload(8, SEQ_LEN),
        OptimizerConfig(settings["learning_rate"], 0, settings["schedule_steps"]),
        chip_flops_per_second=1e11,
        start_from=base,
        masked=corpus.masked,
    )
    state, batches = step.init(0), Batches(corpus, batch_sequences=8, seed=0)
    first = step.init(0).params
    for number in range(8):
        state, metrics = step.step(state, batches.at(8 * number))
    line = json.loads((tuned / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(metrics["loss"]) == pytest.approx(line["loss"], rel=1e-4)
    moved = {path for path, leaf in flatten(state.params).items() if np.any(leaf != flatten(first)[path])}
    assert moved == {path for path, param in parameters(step.config).items() if param.trained}
    # Moments are those of adapters alone.
    assert {leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} <= {
        leaf.size for path, leaf in flatten(state.params).items() if "lora" in path
    }


@pytest.mark.slow
def test_an_exported_model_answers_as_the_run_does(tuned: Path, base: Path, tmp_path: Path, capsys) -> None:
    assert main(["export", str(tuned), "-o", str(tmp_path / "hf")]) == 0
    config = read_model(tmp_path / "hf")
    assert replace(config, name="base") == replace(read_model(base), name="base")
    tokens = np.random.default_rng(3).integers(0, 64, (2, 48)).tolist()
    theirs = hf_models.logits(hf_models.load(tmp_path / "hf"), tokens)
    ours = logits(load_model_folder(tuned).load_params(f32(), device_mesh(f32())), config, f32())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    before = load_hf(base, config, f32(), device_mesh(f32()))
    assert np.abs(logits(before, config, f32()) - theirs).max() > 0.1, "nothing was learnt"
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == CHATML
    assert hf_models.transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "<|im_end|>"


@pytest.mark.slow
def test_adapters_on_weights_in_nf4_learn_and_go_on_in_another_layout(
    base: Path, plan: Path, chats: Path, tmp_path: Path
) -> None:
    """QLoRA: half of the steps in one layout, half in another; the export has the widened weights."""
    run = tmp_path / "run"
    command = [*_command(base, plan, chats, run), "--base-dtype", "nf4"]
    assert main([*command, "--steps", "4"]) == 0
    stored = load_plan(run / "plan.toml")
    assert (stored.layout.precision.weights_dtype, stored.planned) == ("nf4", {})
    other = tmp_path / "other.toml"
    other.write_text(
        (run / "plan.toml").read_text().replace("fsdp = 4", "fsdp = 8").replace("tensor = 2", "tensor = 1")
    )
    assert load_plan(other).layout.fsdp == 8
    assert main(["train", str(other), "--run", str(run), "--resume", "--steps", "8"]) == 0
    losses = _losses(run)
    assert losses[-1][0] == 8 and losses[-1][1] < 0.8 * losses[0][1]
    assert main(["export", str(run), "-o", str(tmp_path / "hf")]) == 0
    config = read_model(tmp_path / "hf")
    exported = logits(load_hf(tmp_path / "hf", config, f32(), device_mesh(f32())), config, f32())
    served = logits(load_model_folder(run).load_params(f32(), device_mesh(f32())), config, f32())
    np.testing.assert_allclose(served, exported, rtol=0, atol=1e-4)


def test_a_checkpoint_is_tuned_without_a_plan(base: Path, chats: Path, tmp_path: Path, capfd) -> None:
    run = tmp_path / "run"
    options = ["--from", str(base), "--lora", "4", "--base-dtype", "int8", "--data", str(chats)]
    assert main(["train", *options, "--run", str(run), "--steps", "2"]) == 0
    assert "sequences of 64 tokens a step" in capfd.readouterr().err
    plan = load_plan(run / "plan.toml")
    assert (plan.model.lora_rank, plan.layout.precision.weights_dtype) == (4, "int8")


def test_conversations_are_packed_whole_and_count_their_answers(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    corpus = prepare_corpus(
        str(chats), tmp_path / "data", vocab_size=272, seq_len=SEQ_LEN, tokenizer=base / "tokenizer.json"
    )
    bpe = hf_models.transformers.AutoTokenizer.from_pretrained(base)
    assert corpus.masked and bpe.convert_ids_to_tokens(corpus.end_of_text_id) == "<|im_end|>"
    found = []
    for row in np.concatenate([corpus.rows("train"), corpus.rows("validation")]):
        begins = np.flatnonzero(row & BEGINS)
        assert begins[0] == 0
        for part in np.split(row, begins[1:]):
            counted = part[(part & UNCOUNTED) == 0] & ID_BITS
            if len(counted):  # else padding
                found.append((bpe.decode(part & ID_BITS), bpe.decode(counted)))
    expected = []
    for number in range(60):
        messages = conversation(number)["messages"]
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        whole = bpe.apply_chat_template(messages, tokenize=False)
        expected.append((whole, "".join(f"{answer}<|im_end|>\n" for answer in answers)))
    assert sorted(found) == sorted(expected)


ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
WITH_TOOLS = ChatTemplate(
    "{% if tools %}{{ tools | tojson(separators=(',', ':')) }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "|{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("record", "text", "learnt"),
    [
        (
            {"messages": [ASKED, {**ANSWERED, "weight": 0}, ASKED, {"role": "assistant", "content": "2"}]},
            "user: hi|assistant: ho|user: hi|assistant: 2|",
            ["2|"],
        ),
        (
            {"messages": [ASKED, ANSWERED], "tools": [{"type": "function"}]},
            '[{"type":"function"}]\nuser: hi|assistant: ho|',
            ["ho|"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWERED]},
            "user: hi|assistant: ho|",
            ["ho|"],
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}, ANSWERED]},
            "user: hi|assistant: [{}]|assistant: ho|",
            ["[{}]|", "ho|"],
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            "user: hi|assistant: ho|",
            ["ho|"],
        ),
        (
            {"instruction": "Add.", "input": "1 + 1", "output": "2"},
            "user: Add.\n\n1 + 1|assistant: 2|",
            ["2|"],
        ),
        (
            {"instruction": "Add.", "context": "1 + 1", "response": "2"},
            "user: Add.\n\n1 + 1|assistant: 2|",
            ["2|"],
        ),
        ({"question": "1 + 1", "answer": "2"}, "user: 1 + 1|assistant: 2|", ["2|"]),
        (
            {"instruction": "Add.", "output": "2", "history": [["hi", "ho"]]},
            "user: hi|assistant: ho|user: Add.|assistant: 2|",
            ["ho|", "2|"],
        ),
        (
            {"messages": [ASKED, {**ANSWERED, "train": False}, ASKED, {**ANSWERED, "loss": True}]},
            "user: hi|assistant: ho|user: hi|assistant: ho|",
            ["ho|"],
        ),
        ({"prompt": "1 + 1 = ", "completion": "2"}, "1 + 1 = 2", ["2"]),
        (
            {"prompt": [ASKED, ANSWERED, ASKED], "completion": [{"role": "assistant", "content": "2"}]},
            "user: hi|assistant: ho|user: hi|assistant: 2|",
            ["2|"],
        ),
    ],
)
def test_the_fields_formats_are_read(record: dict[str, Any], text: str, learnt: list[str]) -> None:
    written, spans = training_text(record, "line 1", WITH_TOOLS)
    assert written == text and [written[begin:end] for begin, end in spans] == learnt


def test_keys_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": 1, "label": 3}\n')
    with pytest.warns(UserWarning, match=r"a.jsonl: keys that are not read: label$"):
        list(read_documents(str(path)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "hi"}, "'messages' must be a list of objects with a 'role' and a 'content' string"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "has no message of the role 'assistant'"),
        ({"text": 3}, "give an object with a 'text' or 'messages' field"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, r"a message has weight = 0.5; fits: 0, 1"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "'assistant' with a weight of 1 to learn from"),
        ({"messages": [ASKED, ANSWERED], "tools": [{"type": "function"}]}, "the chat template does not read"),
        ({"messages": [ASKED, ANSWERED], "functions": []}, "has 'functions', which is not read"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "message 2 has a 'content' of null"),
        ({"messages": [ASKED, {**ANSWERED, "loss": 0.5}]}, r"a message has loss = 0.5; fits: 0, 1"),
        ({"messages": [ASKED, {**ANSWERED, "thinking": "hm"}]}, "'thinking', which the chat template does"),
        ({"messages": [ASKED, ANSWERED], "weight": 0.5}, "has 'weight', which is not read"),
        ({"prompt": "a", "response": "b"}, "rename 'response' to 'completion'"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "a 'function_call' is not JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is 'image'; fits: text"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "'from' is 'alien'; fits: human, user"),
        ({"instruction": "a"}, "'instruction' needs an 'output'"),
        ({"question": "a"}, "'question' needs an 'answer'"),
        ({"prompt": "a", "completion": 3}, "'prompt' needs a 'completion'"),
        ({"text": "a \ud800"}, r"U\+D800 at character 2 is half a surrogate pair"),
        ({"messages": [ASKED, {"role": "assistant", "content": "\udc00"}]}, "half a surrogate pair"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(record: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(MeshwrightError, match=f"line 1: .*{message}"):
        prepare_corpus(str(tmp_path / "chats.jsonl"), tmp_path / "data", vocab_size=300, seq_len=16)


def test_a_template_that_writes_no_answers_is_refused() -> None:
    chat = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(MeshwrightError, match="the chat template writes nothing of message 2, an answer"):
        training_text({"messages": [ASKED, ANSWERED]}, "line 1", chat)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"lora": 4}, MeshwrightError, "name their directory with --from DIR"),
        ({"lora_alpha": 4.0}, MeshwrightError, "name their rank with --lora"),
        (
            {"base_dtype": "nf4"},
            MeshwrightError,
            "only weights next to adapters can be stored so; add --lora",
        ),
        ({"from_": "nowhere"}, CheckpointError, r"--from nowhere: there are no \*\.safetensors"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused(
    given: dict[str, Any], kind: type[Exception], message: str, plan: Path, tmp_path: Path
) -> None:
    names = ("lora", "lora_alpha", "base_dtype")
    options = RunOptions(**{name: given.pop(name, None) for name in names}, run=tmp_path / "run")
    with pytest.raises(kind, match=message):
        prepare_job(load_plan(plan), None, options, {"data": "stdlib", **given})


def test_weights_of_another_model_are_refused(base: Path, plan: Path, tmp_path: Path) -> None:
    other = replace(load_plan(plan), model=replace(load_plan(plan).model, d_ff=64))
    options = RunOptions(run=tmp_path / "run")
    with pytest.raises(PlanError, match="its model has d_ff = 48 and the plan's has 64"):
        prepare_job(other, None, options, {"data": "stdlib", "from_": str(base)})


def test_latent_attention_takes_no_adapters() -> None:
    with pytest.raises(ModelError, match="whose weights take no adapters"):
        replace(load_model("deepseek-v3"), lora_rank=4)


def test_frozen_weights_have_no_gradient_to_price() -> None:
    """Forward, and backward of what is trained alone: 4 FLOPs a frozen weight instead of 6."""
    full, frozen = (train_flops_per_token(config, 64) for config in (MODEL.base, MODEL))
    sizes = dimensions(MODEL)
    size = {path: int(np.prod(param.shape(sizes))) for path, param in parameters(MODEL).items()}
    adapters = sum(count for path, count in size.items() if is_adapter(path))
    products = [p for p, param in parameters(MODEL.base).items() if param.init == "normal" and p != "embed"]
    assert frozen == full - 2 * sum(size[path] for path in products) + 6 * adapters


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "text",
    ["data=2,fsdp=2,tensor=2", "fsdp=4,context=2,microbatches=2", "data=4,tensor=2,zero=1,microbatches=2"],
)
def test_three_updates_of_adapters_equal_one_device(text: str, masked: bool) -> None:
    found, expected = (_three_updates(layout, masked) for layout in (text, "data=1"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def _three_updates(text: str, masked: bool) -> list[float]:
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (16, 65)).astype(np.int32)
    if masked:
        rows[:, 0] |= BEGINS
        rows[::2, 40] |= BEGINS
        rows[1::4, 22:] |= UNCOUNTED
    schedule = OptimizerConfig(1e-2, 1, 100)
    layout = f32(text)
    step = CompiledStep(MODEL, layout, Workload(16, 64), schedule, chip_flops_per_second=1e11, masked=masked)
    state, figures = step.init(0), []
    for _ in range(3):
        state, metrics = step.step(state, rows)
        figures += [float(metrics["loss"]), float(metrics["grad_norm"])]
    # Added to the weights beside them, adapters compute the same.
    base = CompiledStep(
        MODEL.base, layout, Workload(16, 64), schedule, chip_flops_per_second=1e11, masked=masked
    )
    with jax.set_mesh(step.mesh):
        alone = float(jax.jit(base.loss)(merged_adapters(MODEL, state.params), rows))
    assert alone == pytest.approx(float(step.evaluate(state, rows)), rel=1e-5)
    return figures


SMALL = replace(MODEL, num_layers=4, d_model=32, d_ff=48, vocab_size=96)
ROWS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (8, 17)).astype(np.int32)


@cache
def _updated(config: ModelConfig, text: str, masked: bool = False) -> tuple[list[float], dict[str, Any]]:
    """Loss, norm and validation loss over three updates, and by how much these move the parameters.

    eps is so large that an update is nearly linear in the gradient: rounding is not divided by itself.
    """
    rows = ROWS.copy()
    if masked:
        rows[:, 0] |= BEGINS
        rows[::2, 9] |= BEGINS
        rows[1::4, 6:] |= UNCOUNTED
    optimizer = OptimizerConfig(1e-2, 1, 100, eps=1e-2)
    options: dict[str, Any] = {"chip_flops_per_second": 1e11, "masked": masked}
    step = training_step(config, f32(text), Workload(8, 16), optimizer, **options)
    state, figures = step.init(0), []
    first = {path: np.array(one) for path, one in flatten(step.saved(state).params).items()}
    for _ in range(3):
        state, metrics = step.step(state, rows)
        figures += [float(metrics["loss"]), float(metrics["grad_norm"])]
    figures.append(float(step.evaluate(state, rows)))
    assert step.num_compiled == 1
    return figures, {path: one - first[path] for path, one in flatten(step.saved(state).params).items()}


def _assert_adapters_agree(config: ModelConfig, text: str, *, masked: bool = False) -> None:
    """float32 sums in another order."""
    (expected, moves), (found, moved) = (_updated(config, t, masked) for t in ("data=1", text))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path, move in moves.items():
        most = np.abs(move).max()
        assert (most > 0) == is_adapter(path), path
        np.testing.assert_allclose(moved[path], move, rtol=0, atol=1e-3 * most, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "pipe=2,fsdp=2,microbatches=2,schedule=zb-h1",
        "pipe=2,data=2,tensor=2,microbatches=2,schedule=lanes",
        "pipe=4,fsdp=2,microbatches=2,schedule=lanes,remat=full",
        "pipe=2,data=4,zero=2,microbatches=2,schedule=lanes",
        "pipe=2,data=2,context=2,microbatches=2,schedule=lanes",
        "pipe=2,data=2,zero=1,microbatches=4,schedule=1f1b,remat=matmuls",
        "pipe=2,tensor=2,microbatches=4,schedule=dualpipe,sequence_parallel=true",
        "pipe=2,data=2,microbatches=4,schedule=interleaved,interleave=2",
    ],
)
def test_adapters_in_a_pipeline_equal_one_device(text: str) -> None:
    _assert_adapters_agree(SMALL, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text"),
    [
        # Of four chunks the first and the last have no layer, so nothing that is trained.
        (replace(SMALL, num_layers=2), "pipe=2,data=2,microbatches=2,schedule=zb-v"),
        (replace(SMALL, tied_embeddings=True), "pipe=2,fsdp=2,microbatches=4,schedule=dualpipe"),
        (replace(SMALL, tied_embeddings=True), "pipe=2,data=2,zero=2,microbatches=2,schedule=lanes"),
        (
            replace(SMALL, moe=MoE(num_experts=4, experts_per_token=2, d_ff=16)),
            "pipe=2,fsdp=2,expert=2,microbatches=2,schedule=lanes",
        ),
        (
            replace(SMALL, moe=MoE(num_experts=4, experts_per_token=2, d_ff=16)),
            "pipe=2,fsdp=2,expert=2,microbatches=2,schedule=zb-h1",
        ),
    ],
)
def test_adapters_of_other_models_in_a_pipeline(config: ModelConfig, text: str) -> None:
    _assert_adapters_agree(config, text)


@pytest.mark.slow
def test_adapters_in_a_pipeline_learn_from_masked_rows() -> None:
    _assert_adapters_agree(SMALL, "pipe=2,data=2,microbatches=2,schedule=zb-h1", masked=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "lanes"])
def test_a_pipeline_starts_from_a_checkpoint_and_goes_on(schedule: str, base: Path, tmp_path: Path) -> None:
    """Stopped after one step, a run of adapters has the same loss after two as one that was not."""
    (tmp_path / "text.txt").write_text("add one and two " * 400)
    made = tmp_path / "plan.toml"
    layout = f"pipe=2,fsdp=2,microbatches=2,schedule={schedule}"
    options = ["--model", str(base), "--hardware", "cpu:4", "--batch-tokens", str(8 * SEQ_LEN)]
    options += ["--seq-len", str(SEQ_LEN), "--layout", layout, "--weights-dtype", "f32"]
    assert main(["plan", "train", *options, "-o", str(made)]) == 0
    runs = [tmp_path / "whole", tmp_path / "stopped"]
    command = _command(base, made, tmp_path / "text.txt", runs[0])
    assert main([*command, "--steps", "2"]) == 0
    assert main([*_command(base, made, tmp_path / "text.txt", runs[1]), "--steps", "1"]) == 0
    assert main(["train", "--run", str(runs[1]), "--resume", "--steps", "2"]) == 0
    lines = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in runs]
    assert [line["step"] for line in lines] == [2, 2]
    assert lines[0]["loss"] == lines[1]["loss"]


@pytest.mark.slow
def test_all_weights_of_a_checkpoint_are_tuned(base: Path, plan: Path, chats: Path, tmp_path: Path) -> None:
    run = tmp_path / "full"
    options = ["--from", str(base), "--data", str(chats), "--learning-rate", "0.01", "--steps", "8"]
    assert main(["train", str(plan), "--run", str(run), *options]) == 0
    losses = _losses(run)
    assert losses[-1][1] < 0.8 * losses[0][1]
    assert main(["export", str(run), "-o", str(tmp_path / "hf")]) == 0
    tokens = np.random.default_rng(3).integers(0, 64, (2, 48)).tolist()
    theirs = hf_models.logits(hf_models.load(tmp_path / "hf"), tokens)
    config = read_model(tmp_path / "hf")
    ours = logits(load_model_folder(run).load_params(f32(), device_mesh(f32())), config, f32())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
