"""The Kubernetes objects of a run: a job with one learner and its settings, and a job with any number of actor pods.

Only the learner mounts a volume. A pod of actors has its settings in its command, and pulls the model.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
"""

import re
from typing import Any

import xxhash
import yaml

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.shutdown import EXIT_PREEMPTED, LEAVE_S
from slipstream.common.transfer.curve import KEY_VARIABLE
from slipstream.tools.launch.launch_options import LaunchOptions
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.run.host_command import host_settings

SETTINGS = "/etc/slipstream"
SECRET = "slipstream-redis"  # the user may create it, with these keys; pods start without it as well
SECRET_KEYS = {PASSWORD_VARIABLE: "password", KEY_VARIABLE: "weights-key"}
LEARNER_GRACE_S = 60  # it writes a checkpoint
MAX_RUN_CHARS = 40  # of a resource's name, which may have 63
RETRIES = 20  # failures other than preemptions; a learner resumes from its newest checkpoint


def manifest(config: Config, options: LaunchOptions) -> str:
    """All objects as YAML. Raises ConfigError for settings that have no default for any cluster."""
    if not options.image:
        raise ConfigError("`--image` is empty; name a container image with Slipstream in it")
    if not options.volume or not config.run.root.startswith("/"):
        raise ConfigError(
            f"got `--volume` {options.volume!r} and `run.root` {config.run.root!r}; the learner needs a claim of a "
            "volume, and the absolute path to mount it at: the run and its checkpoints are there"
        )
    settings: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(config, "settings"),
        "data": {"config.yaml": dump_config(config)},
    }
    learner = _job(config, options, "learner", parallelism=1, gpus=options.learner_gpus, grace_s=LEARNER_GRACE_S)
    learner["spec"]["completions"] = 1
    _mount(learner, "settings", SETTINGS, {"configMap": {"name": resource_name(config, "settings")}})
    _mount(learner, "run", config.run.root, {"persistentVolumeClaim": {"claimName": options.volume}})
    # Without `completions`: when the run is over, the first pod that succeeds ends the job.
    grace_s = round(config.actors.drain_s + LEAVE_S) + 5
    actors = _job(config, options, "actors", parallelism=options.actor_hosts, gpus=options.actor_gpus, grace_s=grace_s)
    return yaml.safe_dump_all([settings, learner, actors], sort_keys=False)


def resource_name(config: Config, part: str) -> str:
    """The run's name and `part` as a valid Kubernetes name, of this run alone."""
    run = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:MAX_RUN_CHARS].strip("-")
    if run != config.run.name:  # other names may give the same
        digest = xxhash.xxh32_hexdigest(config.run.name.encode())
        run = f"{run[: MAX_RUN_CHARS - len(digest) - 1].strip('-')}-{digest}".strip("-")
    return f"slipstream-{run}-{part}"


def _metadata(config: Config, part: str) -> dict[str, Any]:
    return {"name": resource_name(config, part), "labels": {"app": "slipstream", "part": part}}


def _job(
    config: Config, options: LaunchOptions, verb: str, *, parallelism: int, gpus: int, grace_s: int
) -> dict[str, Any]:
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
                "spec": _pod(config, options, verb, gpus=gpus, grace_s=grace_s),
            },
        },
    }


def _pod(config: Config, options: LaunchOptions, verb: str, *, gpus: int, grace_s: int) -> dict[str, Any]:
    requests = {"cpu": str(options.cpus), "memory": f"{options.memory_gib}Gi"}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    secrets = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key, "optional": True}}}
        for variable, key in SECRET_KEYS.items()
    ]
    transport, url = config.actors.transport, config.redis.url
    own = host_settings(config, transport=transport, redis_url=url) if verb == "actors" else [f"{SETTINGS}/config.yaml"]
    return {
        "restartPolicy": "Never",  # the job creates another pod, which may run on another node
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": verb,
                "image": options.image,
                # Without a shell: the signal must reach this process.
                "command": ["slipstream", verb, *own, "weights.host=$(POD_IP)"],
                "env": [address, *secrets],
                "resources": {"requests": requests | limits, "limits": limits},
                "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
    }


def _mount(job: dict[str, Any], name: str, path: str, source: dict[str, Any]) -> None:
    pod = job["spec"]["template"]["spec"]
    pod["volumes"].append({"name": name} | source)
    pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path})
