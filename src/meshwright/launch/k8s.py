"""A job as a JobSet for Kubernetes, with GKE's names of TPUs and GPUs.

Sources: jobset.sigs.k8s.io (v1alpha2); cloud.google.com/kubernetes-engine/docs, "TPUs in GKE" and "GPUs".
"""

from typing import Any

import yaml

from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.launch.cluster_job import GRACE_SECONDS, PORT, ClusterJob
from meshwright.nn.start.processes import COORDINATOR, JOIN_SECONDS, NUM_PROCESSES

_WORKERS = "workers"


def jobset(job: ClusterJob, *, image: str, volume: str | None, join_seconds: float) -> dict[str, Any]:
    """The manifest, with one pod a node. If a pod fails, all start again, up to `restarts` times.

    volume: a PersistentVolumeClaim that all pods may write, mounted at /runs. Raises PlanError for chips
    that GKE does not name.
    """
    pods = job.num_nodes // job.hardware.num_slices
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": job.restarts},
            "replicatedJobs": [
                {
                    "name": _WORKERS,
                    "replicas": job.hardware.num_slices,
                    "template": {
                        "spec": {
                            "parallelism": pods,
                            "completions": pods,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "template": {"spec": _pod(job, image, volume, join_seconds)},
                        }
                    },
                }
            ],
        },
    }


def as_yaml(manifest: dict[str, Any]) -> str:
    """A manifest for kubectl apply."""
    return yaml.safe_dump(manifest, sort_keys=False)


def _pod(job: ClusterJob, image: str, volume: str | None, join_seconds: float) -> dict[str, Any]:
    selector, resource = node(job)
    container: dict[str, Any] = {
        "name": "meshwright",
        "image": image,
        "command": list(job.command),
        "env": _environment(job, join_seconds),
        "resources": {"limits": {resource: job.chips_per_node}},
        "ports": [{"containerPort": PORT}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": selector,
        "containers": [container],
    }
    return with_volume(pod, volume)


def with_volume(pod: dict[str, Any], volume: str | None) -> dict[str, Any]:
    """The pod with a PersistentVolumeClaim mounted at /runs, if one is given."""
    if volume is None:
        return pod
    mounted = [{"name": "runs", "mountPath": "/runs"}]
    return pod | {
        "containers": [container | {"volumeMounts": mounted} for container in pod["containers"]],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": volume}}],
    }


def _environment(job: ClusterJob, join_seconds: float) -> list[dict[str, str]]:
    """Environment variables with which the pods find each other."""
    if job.hardware.chip.platform.self_joining:
        return []
    values = {
        COORDINATOR: f"{job.name}-{_WORKERS}-0-0.{job.name}:{PORT}",
        NUM_PROCESSES: str(job.num_nodes),  # its own number is in JOB_COMPLETION_INDEX
        JOIN_SECONDS: f"{join_seconds:g}",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def node(job: ClusterJob) -> tuple[dict[str, str], str]:
    """The labels of the nodes to run on, and the name of their chips as a resource of Kubernetes."""
    chip, hardware = job.hardware.chip, job.hardware
    if chip.gke_accelerator is None:
        known = ", ".join(name for name in catalog.names() if catalog.chip(name).gke_accelerator)
        raise PlanError(f"{hardware.spec}: GKE has no node of {chip.name} that is known here; known: {known}")
    values = chip.gke_accelerator, "x".join(map(str, hardware.dims))
    return dict(zip(chip.platform.node_labels, values, strict=False)), chip.platform.node_resource
