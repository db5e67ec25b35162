"""The objects of a run on Kubernetes: a job of one learner, a job of actors that may be any number, and their settings.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
"""

import re
from typing import Any

import yaml

from common.config import Config, dump_config
from common.config_error import ConfigError
from common.connection import PASSWORD_FILE_VARIABLE
from common.shutdown import EXIT_PREEMPTED, LEAVE_S
from tools.child import EXIT_BAD_INPUT

SETTINGS = "/etc/slipstream"
SECRET = "slipstream-redis"  # of the user's making, with the key `password`; pods start without it as well
SECRETS = "/run/secrets/slipstream"
LEARNER_GRACE_S = 60  # it writes a checkpoint
RETRIES = 20  # ends that are no preemption; a learner goes on from its newest checkpoint


def manifest(config: Config) -> str:
    """All of it, as YAML. Raises ConfigError for what every cluster lacks a default of."""
    launch = config.launch
    if not launch.image:
        raise ConfigError("`launch.image` is empty; name a container image with Slipstream in it")
    if not launch.volume or not config.run.root.startswith("/"):
        raise ConfigError("Kubernetes needs `launch.volume`, a claim that many pods may mount, and `run.root` as the "
                          "absolute path to mount it at: the model and the run's directory lie there")  # fmt: skip
    settings: dict[str, Any] = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(config, "settings"),
        "data": {"config.yaml": dump_config(config)},
    }  # fmt: skip
    learner = _job(config, "learner", parallelism=1, gpus=launch.learner_gpus, grace_s=LEARNER_GRACE_S)
    learner["spec"]["completions"] = 1
    # Without completions: when the run is over, the first to end well ends the job.
    grace_s = round(config.actors.drain_s + LEAVE_S) + 5
    actors = _job(config, "actors", parallelism=launch.actor_hosts, gpus=launch.actor_gpus, grace_s=grace_s)
    return yaml.safe_dump_all([settings, learner, actors], sort_keys=False)


def resource_name(config: Config, part: str) -> str:
    """What Kubernetes takes for a name."""
    run = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:40].strip("-")
    return f"slipstream-{run}-{part}"


def _metadata(config: Config, part: str) -> dict[str, Any]:
    return {"name": resource_name(config, part), "labels": {"app": "slipstream", "part": part}}


def _job(config: Config, verb: str, *, parallelism: int, gpus: int, grace_s: int) -> dict[str, Any]:
    leaves: dict[str, Any] = {"containerName": verb, "operator": "In", "values": [EXIT_PREEMPTED]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(config, verb),
        "spec": {
            "parallelism": parallelism,
            "backoffLimit": RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": leaves},
                    {"action": "FailJob", "onExitCodes": leaves | {"values": [EXIT_BAD_INPUT]}},
                ]
            },
            "template": {
                "metadata": {"labels": {"app": "slipstream", "part": verb}},
                "spec": _pod(config, verb, gpus=gpus, grace_s=grace_s),
            },
        },
    }


def _pod(config: Config, verb: str, *, gpus: int, grace_s: int) -> dict[str, Any]:
    launch = config.launch
    requests = {"cpu": str(launch.cpus), "memory": f"{launch.memory_gib}Gi"}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    password = {"name": PASSWORD_FILE_VARIABLE, "value": f"{SECRETS}/password"}
    return {
        "restartPolicy": "Never",  # the job makes another pod, on another node if need be
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": verb,
                "image": launch.image,
                # Not through a shell: it is this process that must get the signal.
                "command": ["slipstream", verb, f"{SETTINGS}/config.yaml", "weights.host=$(POD_IP)"],
                "env": [address, password],
                "resources": {"requests": requests | limits, "limits": limits},
                "volumeMounts": [
                    {"name": "settings", "mountPath": SETTINGS},
                    {"name": "secret", "mountPath": SECRETS, "readOnly": True},
                    {"name": "shared", "mountPath": config.run.root},
                    {"name": "memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "settings", "configMap": {"name": resource_name(config, "settings")}},
            {"name": "secret", "secret": {"secretName": SECRET}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": launch.volume}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
