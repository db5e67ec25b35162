"""What is written for Kubernetes, by its own schemas: `make test-engines` installs them and runs it."""

import kubernetes_validate
import pytest

from tests.tools.launch.test_launch import GPUS, configured, objects


def test_kubernetes_own_schemas_take_every_object() -> None:
    for each in objects(configured(*GPUS)).values():
        kubernetes_validate.validate(each, "1.31", strict=True)
    wrong = objects(configured(*GPUS))["Job", "slipstream-demo-1-x-25db0e8f-actors"]
    wrong["spec"]["paralelism"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)
