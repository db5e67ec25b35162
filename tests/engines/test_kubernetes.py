"""What is written for Kubernetes, as kubectl merges it, by Kubernetes' own schemas: `make test-engines` runs it."""

import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from slipstream.tools.launch.launch import run_files
from tests.tools.launch.test_launch import GPUS, configured, objects


def test_kubernetes_own_schemas_take_every_object() -> None:
    for each in objects(configured(*GPUS)).values():
        kubernetes_validate.validate(each, "1.31", strict=True)
    wrong = objects(configured(*GPUS))["Job", "slipstream-demo-1-x-25db0e8f-actors"]
    wrong["spec"]["paralelism"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_kubectl_merges_what_differs_on_a_cluster(tmp_path: Path) -> None:
    for name, text in run_files(configured(*GPUS), "kubernetes", tmp_path, 3).items():
        (tmp_path / name).write_text(text)
    merged = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, check=True).stdout
    before, jobs = objects(configured(*GPUS)), 0
    for each in yaml.safe_load_all(merged):
        kubernetes_validate.validate(each, "1.31", strict=True)
        old = before.pop((each["kind"], each["metadata"]["name"]))
        if each["kind"] != "Job":
            continue
        jobs += 1
        assert each["metadata"]["labels"] == old["metadata"]["labels"] | {"kueue.x-k8s.io/queue-name": "default"}
        pod, was = each["spec"]["template"]["spec"], old["spec"]["template"]["spec"]
        own = {"serviceAccountName", "nodeSelector", "tolerations"}
        assert pod.keys() - was.keys() == own and pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
        assert "nvidia.com/gpu" in [each["key"] for each in pod["tolerations"]]
        (container,), (plain,) = pod["containers"], was["containers"]
        assert container == plain | {"image": "registry.example/slipstream:1"}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes == {volume["name"]: volume for volume in was["volumes"]}
    assert not before and jobs == 2
