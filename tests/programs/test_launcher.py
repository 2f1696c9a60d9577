"""Launchers of training software: which layouts they run, and settings that the software has."""

import json
from math import prod

import pytest
import yaml

import meshwright as mw
from meshwright.api.inputs import Conditions
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.layout import DEGREES, REMATS, Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.short import WORDS
from meshwright.models.presets import load_model
from meshwright.plan.launcher_limits import launcher_lacks
from meshwright.programs.launcher import LAUNCHERS
from meshwright.programs.program import PROGRAMS

# Names of settings, read off the sources that `version` of each record names.
KNOWN = {
    # deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py, tensor_parallel/config.py
    "deepspeed": (
        "0.19.8",
        """
        bf16.enabled gradient_accumulation_steps tensor_parallel.autotp_size train_batch_size
        train_micro_batch_size_per_gpu zero_optimization.contiguous_gradients
        zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.pin_memory
        zero_optimization.overlap_comm zero_optimization.reduce_scatter zero_optimization.stage
        """,
    ),
    # src/maxtext/configs/base.yml
    "maxtext": (
        "e591f30cb",
        """
        base_config context_parallel_strategy dcn_context_parallelism dcn_data_parallelism
        dcn_expert_parallelism dcn_fsdp_parallelism dcn_tensor_parallelism dtype
        gradient_accumulation_steps ici_context_parallelism ici_data_parallelism ici_expert_parallelism
        ici_fsdp_parallelism ici_tensor_parallelism max_target_length mu_dtype
        optimizer_memory_host_offload per_device_batch_size quantization remat_policy
        shard_optimizer_over_data weight_dtype
        """,
    ),
    # megatron/training/arguments.py and the configurations that it makes arguments of
    "megatron": (
        "0.20.0",
        """
        --bf16 --ckpt-format --context-parallel-size --cp-comm-type --data-parallel-sharding-strategy
        --disable-bias-linear --exp-avg-dtype --exp-avg-sq-dtype --expert-model-parallel-size
        --expert-tensor-parallel-size --ffn-hidden-size --fp8-format --global-batch-size
        --group-query-attention --hidden-size --kv-channels --max-position-embeddings --micro-batch-size
        --moe-ffn-hidden-size --moe-router-topk --moe-token-dispatcher-type
        --no-gradient-accumulation-fusion --normalization --num-attention-heads --num-experts
        --num-layers --num-query-groups --num-virtual-stages-per-pipeline-rank --optimizer-cpu-offload
        --overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-size
        --position-embedding-type --recompute-granularity --recompute-method --recompute-modules
        --recompute-num-layers --rotary-base --seq-length --sequence-parallel --swiglu
        --tensor-model-parallel-size --untie-embeddings-and-output-weights --use-distributed-optimizer
        --use-megatron-fsdp --use-precision-aware-optimizer
        """,
    ),
    # src/megatron/bridge/recipes, training/config.py
    "nemo": (
        "0.7.0",
        """
        cfg.dataset.seq_length cfg.ddp.data_parallel_sharding_strategy cfg.ddp.overlap_grad_reduce
        cfg.ddp.overlap_param_gather cfg.ddp.use_distributed_optimizer cfg.ddp.use_megatron_fsdp
        cfg.dist.use_megatron_fsdp cfg.mixed_precision cfg.model.context_parallel_size
        cfg.model.cp_comm_type cfg.model.expert_model_parallel_size cfg.model.expert_tensor_parallel_size
        cfg.model.pipeline_model_parallel_size cfg.model.recompute_granularity cfg.model.recompute_method
        cfg.model.recompute_modules cfg.model.recompute_num_layers cfg.model.seq_length
        cfg.model.sequence_parallel cfg.model.tensor_model_parallel_size
        cfg.model.virtual_pipeline_model_parallel_size cfg.optimizer.optimizer_cpu_offload
        cfg.optimizer.use_distributed_optimizer cfg.train.global_batch_size cfg.train.micro_batch_size
        """,
    ),
    # torchtitan/config/configs.py; activation-checkpoint:MODE is a subcommand and no option
    "torchtitan": (
        "0.3.0",
        """
        --compile.enable --parallelism.context-parallel-degree
        --parallelism.data-parallel-replicate-degree --parallelism.data-parallel-shard-degree
        --parallelism.expert-parallel-degree --parallelism.fsdp-reshard-after-forward
        --parallelism.pipeline-parallel-degree --parallelism.pipeline-parallel-first-stage-less-layers
        --parallelism.pipeline-parallel-last-stage-less-layers
        --parallelism.pipeline-parallel-layers-per-stage
        --parallelism.pipeline-parallel-microbatch-size --parallelism.pipeline-parallel-schedule
        --parallelism.tensor-parallel-degree --training.global-batch-size --training.local-batch-size
        --training.mixed-precision-param --training.mixed-precision-reduce --training.seq-len
        """,
    ),
}


def lines_of(name):
    settings = LAUNCHERS[name].settings
    return [
        line for key, text in settings.items() if not key.startswith("note.") for line in text.splitlines()
    ]


@pytest.mark.parametrize("name", LAUNCHERS.names)
def test_every_setting_is_one_of_the_program(name):
    version, known = KNOWN[name]
    assert version in LAUNCHERS[name].version
    if LAUNCHERS[name].form == "arguments":
        used = {word for line in lines_of(name) for word in line.split() if word.startswith("--")}
    else:
        used = {line.split(":" if LAUNCHERS[name].form == "yaml" else " = ")[0] for line in lines_of(name)}
    assert used == set(known.split())


@pytest.mark.parametrize("name", LAUNCHERS.names)
def test_a_record_names_what_layouts_have(name):
    launcher = LAUNCHERS[name]
    assert launcher.prices in PROGRAMS.names and set(launcher.axes) <= set(DEGREES)
    assert set(launcher.schedules) <= set(SCHEDULES) and set(launcher.remats) <= set(REMATS)
    assert set(launcher.base) <= set(WORDS)
    assert {axis for pair in launcher.apart for axis in pair.split()} <= set(launcher.axes)
    assert {"settings", "axes", "remats", "base"} <= set(launcher.sources)


def planned(name, model="llama-3-8b", hardware="h100:2x8", given=""):
    return mw.plan(model, hardware, mw.Train("512k", "8k"), launcher=name, given=given)


@pytest.mark.parametrize("name", LAUNCHERS.names)
def test_ranked_layouts_run_and_have_settings(name):
    plans = planned(name)
    launcher = LAUNCHERS[name]
    assert plans.hardware.software.name == launcher.prices and plans.best.fits
    assert all(launcher_lacks(launcher, plans.model, one.layout) is None for one in plans.search.candidates)
    launch = plans.document(None)["launch"]
    assert launch["for"] == name and "{" not in launch["command"]
    if launcher.form == "json":
        assert json.loads(launch["settings"])["train_batch_size"] == plans.workload.num_sequences
    elif launcher.form == "yaml":
        read = yaml.safe_load(launch["settings"])
        each = read["per_device_batch_size"] * read["gradient_accumulation_steps"]
        assert each * plans.hardware.num_chips == plans.workload.num_sequences
        degrees = [value for key, value in read.items() if key.endswith("_parallelism")]
        assert prod(degrees) == plans.hardware.num_chips


def test_settings_of_a_pipeline_with_experts_on_several_hosts():
    """Pipelines on two hosts, which `mw train` does not run."""
    plans = planned("megatron", "mixtral-8x7b", given="pipe=2,tensor=1,expert=8")
    launch = plans.document(None)["launch"]
    for words in (
        "--pipeline-model-parallel-size 2",
        "--expert-model-parallel-size 8",
        "--num-experts 8 --moe-router-topk 2",
        "--micro-batch-size",
        "--bf16",
    ):
        assert words in launch["settings"]
    assert launch["command"].startswith("torchrun --nnodes 2 --nproc-per-node 8")
    assert plans.best.layout.precision.master_weights


@pytest.mark.parametrize(
    ("name", "layout", "lack"),
    [
        ("deepspeed", "pipe=2,data=4", "has no axis for pipe=2"),
        ("deepspeed", "fsdp=4,tensor=2", None),
        (
            "torchtitan",
            "fsdp=4,context=2,zero_context=true,context_method=ring",
            "has no context_method=ring",
        ),
        ("megatron", "data=2,fsdp=4", "does not combine data and fsdp"),
        ("megatron", "pipe=4,data=2,schedule=zb-v,microbatches=8", "has no schedule=zb-v"),
        ("megatron", "fsdp=8,remat=matmuls", "has no remat=matmuls"),
        ("torchtitan", "data=8,zero=1", "has no zero=1 here"),
        ("torchtitan", "fsdp=4,tensor=2", "has no sequence_parallel=false"),
        ("maxtext", "fsdp=4,tensor=2,sequence_parallel=true", "has no sequence_parallel=true"),
        ("megatron", "pipe=5,microbatches=5", "has equal stages, and 32 layers make no 5"),
        ("torchtitan", "pipe=2,fsdp=4,schedule=zb-v,microbatches=4", None),
        ("megatron", "data=4,tensor=2,zero=1,sequence_parallel=true,remat=full", None),
    ],
)
def test_layouts_that_a_program_lacks(name, layout, lack):
    found = launcher_lacks(LAUNCHERS[name], load_model("llama-3-8b"), Layout.parse(layout))
    assert found == (lack and f"{name} {lack}")


def test_refusals():
    with pytest.raises(PlanError, match="--for megatron runs on GPUs, and v5e:4x4 has TPUs"):
        mw.plan("llama-3-8b", "v5e:4x4", mw.Train("512k", "8k"), launcher="megatron")
    with pytest.raises(PlanError, match=r"--for megatorn is unknown; did you mean"):
        Conditions(launcher="megatorn").of(catalog.load("h100:1x8"))
    with pytest.raises(PlanError, match="leave out --software deepspeed"):
        Conditions(software="deepspeed", launcher="megatron").of(catalog.load("h100:1x8"))
    with pytest.raises(PlanError, match=r"is run by deepspeed .*leave out --for, or a part of --given"):
        planned("deepspeed", given="pipe=2")
