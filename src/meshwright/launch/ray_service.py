"""A server of several replicas as a RayService for Kubernetes, run by KubeRay.

Sources: docs.ray.io, "RayService" (ray.io/v1) and "Serve Config Files".
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from meshwright.errors import PlanError
from meshwright.launch.cluster_job import GRACE_SECONDS, ClusterJob
from meshwright.launch.k8s import node, with_volume

# A RayService imports this, with the arguments of `mw serve`.
_APPLICATION = "meshwright.cli.replicas:application"
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def ray_service(
    job: ClusterJob, *, image: str, volume: str | None, replicas: int, most: int, port: int
) -> dict[str, Any]:
    """The manifest: a pod for each replica, and one that answers clients.

    replicas, most: minimum and maximum number of pods. volume: a PersistentVolumeClaim that all pods may
    read, mounted at /runs. Raises PlanError for a plan of several hosts, and for chips without a name on GKE.
    """
    if job.num_nodes > 1:
        raise PlanError(
            f"the plan is for {job.hardware.spec}, {job.num_nodes} hosts, and a replica runs on one; "
            f"fits: a plan for up to {job.chips_per_node} chips"
        )
    selector, resource = node(job)
    worker = {"name": "meshwright", "image": image, "resources": {"limits": {resource: job.chips_per_node}}}
    ports = _HEAD_PORTS | {"serve": port}
    opened = [{"name": name, "containerPort": number} for name, number in ports.items()]
    head = {"name": "head", "image": image, "ports": opened}
    workers = {
        "groupName": "replicas",
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": most,
        "rayStartParams": {},
        "template": {"spec": with_volume(_pod(worker) | {"nodeSelector": selector}, volume)},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": job.name},
        "spec": {
            "serveConfigV2": yaml.safe_dump(_serve_config(job.command, port), sort_keys=False),
            "rayClusterConfig": {
                "enableInTreeAutoscaling": most > replicas,
                "headGroupSpec": {
                    # No replica runs on the head.
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": {"spec": with_volume(_pod(head), volume)},
                },
                "workerGroupSpecs": [workers],
            },
        },
    }


def _pod(container: Mapping[str, Any]) -> dict[str, Any]:
    return {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [dict(container)]}


def _serve_config(command: Sequence[str], port: int) -> dict[str, Any]:
    return {
        "http_options": {"host": "0.0.0.0", "port": port},
        "applications": [
            {
                "name": "meshwright",
                "route_prefix": "/",
                "import_path": _APPLICATION,
                "args": {"command": list(command[2:])},
            }
        ],
    }
