"""Prefill and generation as planned are what the compiler emits: collectives and FLOPs, to the unit."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.audit.test_families import TWO_PERIODS
from tests.nn.small_models import GPT, LATENT, SHARED, SHARED_BY_FOUR, TIED

from meshwright.audit.against_plan import _logits_bytes
from meshwright.audit.compare.flops import wider_products
from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.facts.matmuls import products
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.plan_audit import _in_whole_pages, audit_plan
from meshwright.cost.serving_step import inference_cost
from meshwright.errors import PlanError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import InferencePhase, Workload
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model
from meshwright.plan.serve.serving_plan import prefill_of
from meshwright.plan.train import price
from meshwright.plan_file import Plan, load_plan, save_plan
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

pytestmark = pytest.mark.sampled(4)

TINY = load_model("tiny")
FEW = replace(TINY, num_kv_heads=2)
# Windows of a page, and no page more.
WINDOWS = replace(TWO_PERIODS, sliding_window=8)


@pytest.mark.parametrize(
    ("config", "text", "phase"),
    [
        (TINY, "data=2,tensor=4", "generate"),
        pytest.param(FEW, "data=2,tensor=2,kv_replicas=2,cache=batch", "generate", marks=pytest.mark.slow),
        pytest.param(FEW, "tensor=2,kv_replicas=4,cache=batch", "generate", marks=pytest.mark.slow),
        pytest.param(FEW, "data=2,tensor=2,kv_replicas=2,cache=batch", "prefill", marks=pytest.mark.slow),
        pytest.param(TINY, "data=2,tensor=4", "prefill", marks=pytest.mark.slow),
        pytest.param(TINY, "data=8", "generate", marks=pytest.mark.slow),
        pytest.param(TINY, "tensor=2,tensor2=2", "generate", marks=pytest.mark.slow),
        pytest.param(TINY, "tensor=2,tensor2=2", "prefill", marks=pytest.mark.slow),
        pytest.param(TINY, "tensor=4", "prefill", marks=pytest.mark.slow),
        pytest.param(TIED, "data=2,fsdp=2,tensor=2", "prefill", marks=pytest.mark.slow),
        pytest.param(WINDOWS, "data=2,fsdp=2,tensor=2", "prefill", marks=pytest.mark.slow),
        pytest.param(WINDOWS, "data=2,fsdp=2,tensor=2", "generate", marks=pytest.mark.slow),
        pytest.param(GPT, "data=2,tensor=4", "prefill", marks=pytest.mark.slow),
        pytest.param(GPT, "data=2,tensor=4", "generate", marks=pytest.mark.slow),
        (TINY, "context=2,tensor=2", "prefill"),
        *(
            pytest.param(config, text, phase, marks=pytest.mark.slow)
            for config, text, phase in (
                (TINY, "context=2,tensor=2", "generate"),
                (TINY, "context=4", "prefill"),
                (TINY, "context=2,tensor=2,context_method=ring", "prefill"),
                (TINY, "data=2,context=2,tensor=2,context_method=ring", "prefill"),
                (TINY, "context=2,tensor=2,context_method=ulysses", "prefill"),
                (LATENT, "context=2,tensor=2", "prefill"),
                (SHARED, "data=2,tensor=4", "generate"),
                (SHARED, "data=2,tensor=4", "prefill"),
                (SHARED_BY_FOUR, "context=2,tensor=2", "prefill"),
                (SHARED, "context=2,tensor=2,context_method=ulysses", "prefill"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_compiled_step_is_the_planned_one(config: ModelConfig, text: str, phase: str) -> None:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    hardware = f"cpu:{layout.mesh.num_devices}"
    audit = audit_plan(Plan(config, hardware, Workload(16, 64, phase), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match", [row for row in audit["rows"] if row["status"] == "differs"]
    assert (audit["unplanned"], audit["missing"], audit["not_understood"]) == ([], [], [])
    assert audit["bytes"]["compiled"] == audit["bytes"]["planned"]
    assert audit["flops"]["compiled"] == audit["flops"]["planned"]


def test_the_prefill_of_a_server_is_a_chunk_on_each_replica_or_a_prompt_in_parts() -> None:
    def prefill(layout: str, context: int = 1100) -> Workload:
        one = Layout.parse(layout)
        planned = {"step_seconds": 0.01, "ttft_seconds": 0.1}
        config = replace(TINY, max_seq_len=2048)
        return prefill_of(Plan(config, "cpu:8", Workload(16, context, "generate"), one, planned)).workload

    assert prefill("data=4,tensor=2") == Workload(4, 512, "prefill")
    assert prefill("data=4,tensor=2", 96) == Workload(4, 96, "prefill")
    assert prefill("context=4,tensor=2") == Workload(1, 1096, "prefill")
    assert prefill("context=4,tensor=2", 1024) == Workload(1, 1024, "prefill")


@pytest.mark.parametrize("phase", ["generate", pytest.param("prefill", marks=pytest.mark.slow)])
def test_pages_of_16_bits_are_as_planned_on_cpus(phase: InferencePhase) -> None:
    plan = Plan(TINY, "cpu:8", Workload(16, 64, phase), Layout.parse("data=2,tensor=4"))
    audit = audit_plan(plan, "cpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    _, memory = inference_cost(TINY, plan.layout, load("cpu:8"), phase, 16, 64)
    planned, compiled = (audit["memory"][f"{side}_by_cause"] for side in ("planned", "compiled"))
    assert planned["cache"] == memory.cache
    num_tokens = 8 * (64 if phase == "prefill" else 1)  # of a device, with 8 of the 16 sequences
    inputs = 4 * 3 * num_tokens  # i32: each token, its position and its slot
    held = planned["weights"] + planned["cache"] + inputs
    assert held == pytest.approx(compiled["arguments"], rel=0.003)


@pytest.mark.parametrize(
    "dtype", ["int4", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int8", "fp8"))]
)
def test_rows_of_a_quantised_table_travel_as_they_are_stored_beside_their_scales(dtype: str) -> None:
    layout = Layout.parse("data=2,tensor=4", weights_dtype=dtype)
    audit = audit_plan(Plan(TINY, "cpu:8", Workload(16, 64, "generate"), layout), "cpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    rows = [one["bytes"] for one in audit["planned"] if one["tensor"] == "embed"]
    assert rows == [8 * TINY.d_model, 8 * 4]
    planned, compiled = (audit["memory"][f"{side}_by_cause"] for side in ("planned", "compiled"))
    assert planned["weights"] + planned["cache"] == pytest.approx(compiled["arguments"], rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "text", "compute_dtype"),
    [
        pytest.param("fp8", "tensor=4", "f32", marks=pytest.mark.slow),
        pytest.param("fp8", "fsdp=2,tensor=2", "bf16", marks=pytest.mark.slow),
        pytest.param("int8", "data=2,tensor=2", "f32", marks=pytest.mark.slow),
    ],
)
def test_activations_are_multiplied_in_the_type_of_the_weights(
    dtype: str, text: str, compute_dtype: str
) -> None:
    """Also where a sum is split; and what is multiplied wider is found, although CPUs emulate fp8."""
    words = {"weights_dtype": dtype, "matmul_dtype": dtype, "compute_dtype": compute_dtype}
    plan = Plan(TINY, "cpu:4", Workload(16, 64, "generate"), Layout.parse(text, **words))
    audit = audit_plan(plan, "cpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    target = choose_target(plan.hardware, plan.layout, "cpu")
    for matmul_dtype, count in ((dtype, 0), (None, 7 * TINY.num_layers + 1)):
        one = replace(plan, layout=plan.layout.replace(matmul_dtype=matmul_dtype))
        program = parse_hlo(compile_plan(one, target, lambda _: None).hlo)
        asked = products(program), program, dtype, compute_dtype
        assert len(wider_products(*asked, widened=True, differentiated=False)) == count


@pytest.mark.slow
def test_xla_for_cpus_gathers_the_weights_of_all_layers_at_once() -> None:
    """Where layers are unrolled; the plan counts two at a time, and the audit says which are there."""
    layout = Layout.of(fsdp=8, weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(TINY, "cpu:8", Workload(16, 64, "generate"), layout), "cpu", use_cache=False)
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["bytes"]["compiled"] == audit["bytes"]["planned"]
    assert [(one["kind"], one["tensor"]) for one in audit["findings"]] == [("memory", "temporaries")]
    gathered = [one["tensor"] for one in audit["memory"]["peak"]["buffers"]]
    assert gathered.count("layers/wq") == TINY.num_layers


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason='no libtpu; pip install "meshwright[tpu]"')
@pytest.mark.parametrize(
    ("text", "phase"), [("data=8,tensor=8", "generate"), ("data=16,tensor=4", "prefill")]
)
def test_the_tpus_compiler_sends_what_is_planned(text: str, phase: str) -> None:
    plan = Plan(load_model("llama-3-8b"), "v5p:4x4x4", Workload(128, 4096, phase), Layout.parse(text))
    audit = audit_plan(plan, "tpu", use_cache=False)
    assert (audit["verdict"], audit["unplanned"], audit["missing"]) == ("match", [], [])
    assert audit["bytes"]["compiled"] == pytest.approx(audit["bytes"]["planned"], rel=0.001)
    if phase == "generate":
        assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=0.001)
        assert audit["memory"]["compiled"] == pytest.approx(audit["memory"]["planned"], rel=0.1)


def test_generation_reads_the_weights_and_the_cache_once() -> None:
    """LLaMA-3-8B in bf16 on one v5p: 15 GB of weights but for the table, 64 caches of 4,096 positions."""
    config, chip = load_model("llama-3-8b"), load("v5p:1x1x1").ideal()
    cost, memory = inference_cost(config, Layout.of(), chip, "generate", 64, 4096)
    cache = 2 * 2 * config.num_layers * 64 * 4096 * config.num_kv_heads * config.d_head
    assert memory.cache == cache
    matrices = 2 * (
        config.num_layers * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    )
    assert memory.weights == pytest.approx(matrices + 2 * 4096 * 128256, rel=1e-3)
    # Activations of 64 tokens add 2%; nothing travels.
    read = (matrices + cache) / chip.chip.hbm_bytes_per_second
    assert cost.seconds == pytest.approx(read, rel=0.03)
    assert cost.collectives == ()


def test_replicas_of_a_decode_step_exchange_nothing() -> None:
    hardware = load("v5p:4x4x4")
    config = load_model("llama-3-8b")
    cost, _ = inference_cost(config, Layout.of(data=8, tensor=8), hardware, "generate", 512, 4096)
    assert {one.axes for one in cost.collectives} == {("tensor",)}
    weights, _ = inference_cost(config, Layout.of(fsdp=64), hardware, "generate", 512, 4096)
    assert weights.seconds > cost.seconds  # every weight is gathered for one token


def test_a_plan_keeps_its_phase(tmp_path: Path) -> None:
    plan = Plan(TINY, "cpu:8", Workload(16, 64, "generate"), Layout.of(data=2, tensor=4))
    save_plan(plan, tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml").workload == plan.workload
    save_plan(Plan(TINY, "cpu:8", Workload(16, 64), Layout.of(data=2, tensor=4)), tmp_path / "plan.toml")
    assert "phase" not in (tmp_path / "plan.toml").read_text()


def test_logits_are_split_as_the_phase_splits_its_batch() -> None:
    """Generation with a table of its own, which splits no batch where prefill splits it in two."""
    tables = Layout.of(data=2, tensor=4).to_dict()
    letters = {letter: axes for letter, axes in tables["rules"]["activations"].items() if letter != "B"}
    tables["rules"]["generate"] = letters
    layout = Layout.from_dict(tables)
    sizes = [
        _logits_bytes(Plan(TINY, "cpu:8", Workload(16, 64, one), layout)) for one in ("prefill", "generate")
    ]
    assert sizes == [4 * 8 * TINY.vocab_size, 4 * 16 * TINY.vocab_size]


def test_rows_of_16_pages_are_read_eight_pages_at_a_time_and_none_alone() -> None:
    """1,024 positions of 64 a page: the loop over what eight do not divide makes no trip, and so no FLOP."""
    layout = Layout.of(tensor=2, weights_dtype="f32", compute_dtype="f32")
    config = replace(TINY, max_seq_len=1024)
    audit = audit_plan(Plan(config, "cpu:2", Workload(2, 1024, "generate"), layout), "cpu", use_cache=False)
    assert audit["flops"]["compiled"] == audit["flops"]["planned"]
    assert audit["verdict"] == "match"


@pytest.mark.slow
def test_a_plan_over_two_slices_is_the_compiled_one() -> None:
    """`data` lies over the data-centre network: gradients cross it once a step, as shards."""
    layout = Layout.of(data=2, fsdp=2, tensor=2, microbatches=2, weights_dtype="f32", compute_dtype="f32")
    plan = Plan(TINY, "2*v5p:2x2x1", Workload(16, 64), layout)
    assert audit_plan(plan, "cpu", use_cache=False)["verdict"] == "match"
    crossing = [
        one
        for one in price(TINY, load(plan.hardware), plan.workload, layout).cost.collectives
        if one.bound == "dcn" and one.direction == "backward"
    ]
    assert {one.op for one in crossing} == {"all_reduce"}
    assert {one.count for one in crossing} == {1, TINY.num_layers}


def test_another_phase_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        Workload(16, 64, "decode")
    assert str(error.value).startswith("workload: phase = 'decode'; ")
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
    with pytest.raises(PlanError) as error:
        CompiledStep(TINY, Layout.of(), Workload(16, 64, "prefill"), optimizer, chip_flops_per_second=1.0)
    assert str(error.value) == "tiny: the plan is of phase 'prefill'; training takes 'train'"


@pytest.mark.parametrize("phase", ["generate", pytest.param("prefill", marks=pytest.mark.slow)])
def test_sequences_that_fill_no_page_are_audited_in_whole_ones(phase: InferencePhase):
    """Pages and rows of blocks have room for more than 75 positions, which the plan does not count."""
    config = replace(TINY, max_seq_len=512)
    layout = Layout.of(tensor=2, weights_dtype="f32", compute_dtype="f32")
    plan, said = Plan(config, "cpu:2", Workload(2, 75, phase), layout), []
    audit = audit_plan(plan, "cpu", said.append, use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    assert any("128 positions a sequence, whole pages of 64, for 75" in line for line in said)
    alone = replace(plan, model=replace(config, max_seq_len=100))  # there is no room for a second page
    assert _in_whole_pages(alone, said.append) == alone
