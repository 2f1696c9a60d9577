"""What `mw launch slurm` and `k8s` write: run by a SLURM that two scripts play, checked by schemas."""

import importlib.util
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.main import main
from meshwright.errors import PlanError
from meshwright.launch.cluster_job import ClusterJob, cluster_job
from meshwright.launch.k8s import jobset
from meshwright.launch.ray_service import ray_service
from meshwright.launch.slurm import slurm_script
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan, save_plan

# The fields of a JobSet that are used here, with their types; anything else is an error, as under
# `kubectl apply --validate=strict`. Source: jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and the Job and
# PodSpec of kubernetes.io/docs/reference/kubernetes-api. A list holds the schema of its items.
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {"*": str},
    "containers": [
        {
            "name": str,
            "image": str,
            "command": [str],
            "env": [{"name": str, "value": str}],
            "resources": {"limits": {"*": int}},
            "ports": [{"containerPort": int}],
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "template": {"spec": POD},
}
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}

# Likewise of a RayService. Source: ray-project.github.io/kuberay, "ray.io/v1" of the API reference.
RAY_POD = POD | {"containers": [POD["containers"][0] | {"ports": [{"name": str, "containerPort": int}]}]}
RAYSERVICE = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "serveConfigV2": str,
        "rayClusterConfig": {
            "enableInTreeAutoscaling": bool,
            "headGroupSpec": {"rayStartParams": {"*": str}, "template": {"spec": RAY_POD}},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": {"*": str},
                    "template": {"spec": RAY_POD},
                }
            ],
        },
    },
}


def check(value: Any, schema: Any, where: str = "") -> None:
    if isinstance(schema, list):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check(item, schema[0], f"{where}[{number}]")
    elif isinstance(schema, dict):
        assert isinstance(value, dict), where
        for key, item in value.items():
            assert key in schema or "*" in schema, f"{where}.{key} is unknown"
            check(item, schema.get(key, schema.get("*")), f"{where}.{key}")
    else:
        assert type(value) is schema, where


def job(tmp_path: Path, hardware: str, chips: int, layout: Layout | None = None) -> ClusterJob:
    layout = layout or Layout.of(fsdp=chips)
    plan = Plan(load_model("llama-3-8b"), hardware, Workload(chips, 4096), layout)
    save_plan(plan, tmp_path / "plan.toml")
    return cluster_job(["mw", "train", str(tmp_path / "plan.toml"), "--run", "a run"], None, restarts=3)


@pytest.mark.parametrize(
    ("hardware", "chips", "slices", "pods", "selector", "limits"),
    [
        (
            "h100:2x8",
            16,
            1,
            2,
            {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
            {"nvidia.com/gpu": 8},
        ),
        (
            "v5e:4x4",
            16,
            1,
            4,
            {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
                "cloud.google.com/gke-tpu-topology": "4x4",
            },
            {"google.com/tpu": 4},
        ),
        (
            "2*v5p:2x2x4",
            32,
            2,
            4,
            {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
                "cloud.google.com/gke-tpu-topology": "2x2x4",
            },
            {"google.com/tpu": 4},
        ),
    ],
)
def test_a_jobset_has_a_pod_for_each_node(tmp_path, hardware, chips, slices, pods, selector, limits):
    made = job(tmp_path, hardware, chips)
    manifest = jobset(made, image="registry/mw:1", volume="runs", join_seconds=600)
    check(manifest, JOBSET)
    (workers,) = manifest["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert (workers["replicas"], spec["parallelism"], spec["completions"]) == (slices, pods, pods)
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == selector
    assert pod["containers"][0]["resources"]["limits"] == limits
    environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    expected = {
        "MESHWRIGHT_COORDINATOR": "llama-3-8b-workers-0-0.llama-3-8b:8476",
        "MESHWRIGHT_NUM_PROCESSES": "2",
        "MESHWRIGHT_JOIN_SECONDS": "600",
    }
    assert environment == (expected if hardware.startswith("h100") else {})


def test_the_pod_is_one_that_kubernetes_takes(tmp_path):
    validate = pytest.importorskip("kubernetes_validate")
    manifest = jobset(job(tmp_path, "h100:2x8", 16), image="registry/mw:1", volume="runs", join_seconds=600)
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    validate.validate(document, "1.31", strict=True)


def test_the_command_line_writes_yaml_that_reads_back(tmp_path, capsys):
    made = job(tmp_path, "v5e:4x4", 16)
    arguments = [
        "launch",
        "k8s",
        "--image",
        "registry/mw:1",
        "--name",
        "first",
        "-o",
        str(tmp_path / "job.yaml"),
    ]
    assert main([*arguments, "--", *made.command]) == 0
    manifest = yaml.safe_load((tmp_path / "job.yaml").read_text())
    check(manifest, JOBSET)
    assert manifest["metadata"]["name"] == "first"
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["mw", "train", str(tmp_path / "plan.toml"), "--run", "a run", "--resume"]


def served(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The RayService that the command line writes for replicas of four v5e chips."""
    plan = Plan(load_model("llama-3-8b"), "v5e:2x2", Workload(8, 4096), Layout.of(tensor=4))
    save_plan(plan, tmp_path / "plan.toml")
    arguments = ["launch", "k8s", "--serve", "--image", "registry/mw:1", "--volume", "runs", "-o"]
    command = ["mw", "serve", "--checkpoint", "/runs/a", str(tmp_path / "plan.toml"), *options]
    assert main([*arguments, str(tmp_path / "serve.yaml"), "--", *command]) == 0
    return yaml.safe_load((tmp_path / "serve.yaml").read_text())


def test_a_ray_service_has_a_pod_for_each_replica(tmp_path):
    manifest = served(tmp_path, "--replicas", "3", "--port", "9000")
    check(manifest, RAYSERVICE)
    cluster = manifest["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    assert not cluster["enableInTreeAutoscaling"]
    pod = workers["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2"
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["containers"][0]["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert config["http_options"] == {"host": "0.0.0.0", "port": 9000}
    (application,) = config["applications"]
    words = ["--checkpoint", "/runs/a", str(tmp_path / "plan.toml"), "--replicas", "3", "--port", "9000"]
    assert application["args"] == {"command": words}
    module, name = application["import_path"].split(":")
    source = importlib.util.find_spec(module)
    assert source is not None and source.origin is not None
    assert f"def {name}(" in Path(source.origin).read_text()


def test_a_ray_service_scales_as_ray_serve_is_told(tmp_path):
    manifest = served(tmp_path, "--replicas", "2", "--autoscaling", "max_replicas=6")
    cluster = manifest["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["maxReplicas"], cluster["enableInTreeAutoscaling"]) == (2, 6, True)


def test_a_ray_service_has_pods_for_those_that_prefill(tmp_path):
    manifest = served(
        tmp_path, "--replicas", "2", "--prefill-replicas", "3", "--prefill-autoscaling", "max_replicas=5"
    )
    (workers,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["maxReplicas"]) == (5, 7)


def test_ray_reads_the_configuration_of_a_ray_service(tmp_path):
    schema = pytest.importorskip("ray.serve.schema", reason="the extra [ray] is not installed")
    manifest = served(tmp_path)
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    assert config.applications[0].route_prefix == "/"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["mw", "train", "plan.toml"], "--serve is for mw serve, not for 'mw train'"),
        (["mw", "serve", "--checkpoint", "x"], r"names no PLAN\.toml"),
        (["mw", "serve", "--checkpoint", "x", "--autoscaling", "max_replicas"], "is NAME=VALUE, once"),
        (["mw", "serve", "--checkpoint", "x", "--autoscaling", "max_replicas=a"], "not a number of replicas"),
    ],
)
def test_what_is_no_server_of_a_plan_makes_no_ray_service(tmp_path, capsys, command, message):
    output = tmp_path / "serve.yaml"
    assert main(["launch", "k8s", "--serve", "--image", "x", "-o", str(output), "--", *command]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not output.exists()


def test_a_replica_runs_on_one_host(tmp_path):
    several = r"4 hosts, and a replica runs on one; fits: a plan for up to 4 chips"
    with pytest.raises(PlanError, match=several):
        ray_service(job(tmp_path, "v5e:4x4", 16), image="x", volume=None, replicas=1, most=1, port=8000)


SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
echo "$@" > "$PLAYED/command"
for number in 0 1; do SLURM_PROCID=$number SLURM_NTASKS=2 "$@" || exit $?; done
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> "$PLAYED/requeued"; fi
"""
TRAIN = """#!/bin/bash
echo "$MESHWRIGHT_COORDINATOR $SLURM_PROCID" >> "$PLAYED/started"
exit $CODE
"""


@pytest.mark.parametrize(
    ("code", "restarted", "requeued"), [(0, 0, False), (2, 0, False), (130, 0, True), (1, 3, False)]
)
def test_slurm_starts_all_and_queues_again_what_is_not_done(tmp_path, code, restarted, requeued):
    script = slurm_script(
        job(tmp_path, "h100:2x8", 16), time_limit="1:00:00", partition="big", join_seconds=60
    )
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("mw", TRAIN), ("job.sh", script)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PLAYED": str(tmp_path),
        "CODE": str(code),
        "SLURM_JOB_ID": "99",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_RESTART_COUNT": str(restarted),
    }
    done = subprocess.run([tmp_path / "job.sh"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "started").read_text().splitlines()[0] == "node7:8476 0"
    assert (tmp_path / "command").read_text().endswith("--run a run --resume\n")
    assert (tmp_path / "requeued").exists() == requeued
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    expected = {"nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "signal=TERM@120", "partition=big"}
    assert expected <= {line.removeprefix("#SBATCH --") for line in directives}


def test_stages_with_programs_of_their_own_have_one_process(tmp_path):
    """It dispatches the programs of all GPUs of a node; several nodes are refused before any is asked for."""
    of_node = job(tmp_path, "h100:1x8", 8, Layout.of(pipe=4, data=2, microbatches=4, schedule="zb-h1"))
    script = slurm_script(of_node, time_limit="1:00:00", partition=None, join_seconds=60)
    assert "#SBATCH --ntasks-per-node=1\n" in script and "#SBATCH --gpus-per-node=8\n" in script
    with pytest.raises(PlanError, match="schedule=zb-h1 on 2 hosts does not run yet; fits: schedule=lanes"):
        job(tmp_path, "h100:2x8", 16, Layout.of(pipe=4, data=4, microbatches=4, schedule="zb-h1"))


def test_what_a_cluster_cannot_start_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"names no PLAN\.toml that is here"):
        cluster_job(["mw", "train", "absent.toml"], None, 0)
    with pytest.raises(PlanError, match="SLURM starts GPU jobs"):
        slurm_script(job(tmp_path, "v5e:4x4", 16), time_limit="1:00:00", partition=None, join_seconds=60)
    with pytest.raises(PlanError, match="is for cpu:8, which is this machine: see mw launch local"):
        job(tmp_path, "cpu:8", 8)
    with pytest.raises(PlanError, match="GKE has no node of mi300x"):
        jobset(job(tmp_path, "mi300x:1x8", 8), image="x", volume=None, join_seconds=60)
